"""LoRA in PyTorch: the adapted projection and its gradient. Owns no weights' loading or updates.

Shapes: B sequences, T positions, F input features, R rank, O output features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from exo_train.backends.lora import INDEX_STRIDE, MIX_1, MIX_2, THRESHOLD_BITS, Dropout


@dataclass(slots=True, kw_only=True)
class DropoutSlot:
    """What all projections of a stage read during one forward or recompute."""

    dropout: Dropout | None = None


class LoraLinear(torch.nn.Module):
    """A frozen projection plus `scale * (dropout(x) A) B`, computed in float32."""

    def __init__(
        self,
        base: torch.nn.Linear,
        lora_a: torch.nn.Parameter,
        lora_b: torch.nn.Parameter,
        *,
        scale: float,
        layer: int,
        target: str,
        slot: DropoutSlot,
    ) -> None:
        super().__init__()
        self.base, self.lora_a, self.lora_b = base, lora_a, lora_b
        self.scale, self.layer, self.target, self.slot = scale, layer, target, slot

    def forward(self, x_BTF: torch.Tensor) -> torch.Tensor:
        dropout = self.slot.dropout
        words_BT = None
        if dropout is not None:
            words_BT = dropout.position_words(
                self.layer, self.target, shape=tuple(x_BTF.shape[:2]), features=x_BTF.shape[2]
            )
        delta_BTO = _LowRank.apply(  # type: ignore[no-untyped-call]
            x_BTF, self.lora_a, self.lora_b, self.scale, dropout, words_BT
        )
        return self.base(x_BTF) + delta_BTO  # type: ignore[no-any-return]


class _LowRank(torch.autograd.Function):
    """Keeps only its input for backward: no float32 copy of it, no mask (both are made again)."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BTF: torch.Tensor,
        a_FR: torch.Tensor,
        b_RO: torch.Tensor,
        scale: float,
        dropout: Dropout | None,
        words_BT: np.ndarray | None,
    ) -> torch.Tensor:
        low_BTR = _drop(x_BTF.float(), dropout, words_BT) @ a_FR
        ctx.save_for_backward(x_BTF, a_FR, b_RO, low_BTR)
        ctx.scale, ctx.dropout, ctx.words_BT = scale, dropout, words_BT
        return ((low_BTR @ b_RO) * scale).to(x_BTF.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_BTF, a_FR, b_RO, low_BTR = ctx.saved_tensors
        grad_BTO = grads[0].float() * ctx.scale
        grad_low_BTR = grad_BTO @ b_RO.T
        x32_BTF = _drop(x_BTF.float(), ctx.dropout, ctx.words_BT)
        grad_a_FR = x32_BTF.flatten(0, 1).T @ grad_low_BTR.flatten(0, 1)
        grad_b_RO = low_BTR.flatten(0, 1).T @ grad_BTO.flatten(0, 1)
        grad_x_BTF = None
        if ctx.needs_input_grad[0]:
            grad_x_BTF = _drop(grad_low_BTR @ a_FR.T, ctx.dropout, ctx.words_BT).to(x_BTF.dtype)
        return grad_x_BTF, grad_a_FR, grad_b_RO, None, None, None


def _drop(
    x_BTF: torch.Tensor, dropout: Dropout | None, words_BT: np.ndarray | None
) -> torch.Tensor:
    if dropout is None or words_BT is None:
        return x_BTF
    mask_BTF = keep_mask(
        words_BT,
        features=x_BTF.shape[2],
        threshold=dropout.threshold,
        device=x_BTF.device,
    )
    return x_BTF * dropout.scale * mask_BTF


def keep_mask(
    words_BT: np.ndarray, *, features: int, threshold: int, device: torch.device
) -> torch.Tensor:
    """Give the mask of `lora.keep_mask`."""
    return feature_hashes(words_BT, features=features, device=device) < threshold


def feature_hashes(words_BT: np.ndarray, *, features: int, device: torch.device) -> torch.Tensor:
    """Give those of `lora.feature_hashes`; int32 wraps like uint32, shifts need their mask."""
    index = torch.arange(features, dtype=torch.int32, device=device)
    words = torch.from_numpy(words_BT.view(np.int32)).to(device)
    h = words[..., None] + index * _signed(INDEX_STRIDE)
    h ^= (h >> 16) & 0xFFFF
    h *= _signed(MIX_1)
    h ^= (h >> 13) & 0x7FFFF
    h *= _signed(MIX_2)
    h ^= (h >> 16) & 0xFFFF
    return (h >> (32 - THRESHOLD_BITS)) & ((1 << THRESHOLD_BITS) - 1)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
