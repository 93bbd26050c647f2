"""LoRA in PyTorch: the adapted projection, its gradient, and where it is put.

Owns no weights' loading or updates.

Shapes: B sequences, T positions, F input features, R rank, O output features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from exo_train.backends.base import Arrays
from exo_train.backends.lora import (
    INDEX_STRIDE,
    MIX_1,
    MIX_2,
    SMALLEST_SQUARE,
    THRESHOLD_BITS,
    Dropout,
    no_dense_weight,
)
from exo_train.errors import ConfigError
from exo_train.lora_config import Placement
from exo_train.plan.stages import StageSpec


@dataclass(slots=True, kw_only=True)
class DropoutSlot:
    """What all projections of a stage read during one forward or recompute."""

    dtype: torch.dtype  # the base computes in it
    dropout: Dropout | None = None
    is_off: bool = False  # the base alone


class LoraLinear(torch.nn.Module):
    """A frozen projection plus `scale * (dropout(x) A) B`, computed in float32.

    With DoRA the sum's rows are given the lengths `dora_m` (Liu et al. 2024, arXiv:2402.09353);
    as in its section 4.3 the lengths they have count as constant. Dropout is on the low-rank path
    alone, as in mlx-lm; PEFT drops the base's input too.
    """

    def __init__(
        self,
        base: torch.nn.Module,
        placement: Placement,
        adapter: Mapping[str, torch.nn.Parameter],
        slot: DropoutSlot,
    ) -> None:
        super().__init__()
        prefix = placement.prefix
        self.base, self.slot = base, slot
        self.lora_a, self.lora_b = adapter[f"{prefix}.lora_a"], adapter[f"{prefix}.lora_b"]
        self.scale, self.layer, self.target = placement.scale, placement.layer, placement.target
        self.dora_m = adapter.get(f"{prefix}.dora_m")
        # An adapter is attached with the lengths of its base's rows.
        self.base_squares_O = None if self.dora_m is None else self.dora_m.detach().square()

    def forward(self, x_BTF: torch.Tensor) -> torch.Tensor:
        y_BTO: torch.Tensor
        if self.slot.is_off:
            y_BTO = self.base(x_BTF)
            return y_BTO
        dropout = self.slot.dropout
        words_BT = None
        if dropout is not None:
            words_BT = dropout.position_words(
                self.layer, self.target, shape=tuple(x_BTF.shape[:2]), features=x_BTF.shape[2]
            )
        delta_BTO: torch.Tensor = _LowRank.apply(  # type: ignore[no-untyped-call]
            x_BTF, self.lora_a, self.lora_b, self.scale, dropout, words_BT
        )
        if self.dora_m is None:
            y_BTO = self.base(x_BTF)
            return y_BTO + delta_BTO
        bias = getattr(self.base, "bias", None)
        sum_BTO = self._without_bias(x_BTF) + delta_BTO
        gain_O = self.dora_m / self._lengths()
        long_BTO: torch.Tensor = _Lengthened.apply(sum_BTO, gain_O)  # type: ignore[no-untyped-call]
        return long_BTO if bias is None else long_BTO + bias

    def _without_bias(self, x: torch.Tensor) -> torch.Tensor:
        bias = getattr(self.base, "bias", None)
        y: torch.Tensor = self.base(x)
        return y if bias is None else y - bias

    @torch.no_grad()
    def _lengths(self) -> torch.Tensor:
        """Give |W + scale (A B)ᵀ| of each row (O), from products alone: no dense sum is made.

        Per row |w|² + 2 scale w·d + scale² |d|², where d is a row of (A B)ᵀ.
        """
        assert self.base_squares_O is not None
        a_FR, b_RO = self.lora_a, self.lora_b
        base_RO = self._without_bias(a_FR.T[None].to(self.slot.dtype))[0].float()
        squares_O = (
            self.base_squares_O
            + 2 * self.scale * (base_RO * b_RO).sum(0)
            + self.scale**2 * (b_RO * ((a_FR.T @ a_FR) @ b_RO)).sum(0)
        )
        return squares_O.clamp_min(SMALLEST_SQUARE).sqrt()


class _Lengthened(torch.autograd.Function):
    """Multiplies outputs by float32 factors; keeps them in their own dtype for backward."""

    @staticmethod
    def forward(ctx: Any, sum_BTO: torch.Tensor, gain_O: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(sum_BTO, gain_O)
        return (sum_BTO.float() * gain_O).to(sum_BTO.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sum_BTO, gain_O = ctx.saved_tensors
        grad_BTO = grads[0].float()
        grad_gain_O = (grad_BTO * sum_BTO.float()).flatten(0, 1).sum(0)
        return (grad_BTO * gain_O).to(sum_BTO.dtype), grad_gain_O


def attach(
    model: Any,
    stage: StageSpec,
    placements: Sequence[Placement],
    adapter: Mapping[str, torch.nn.Parameter],
    slot: DropoutSlot,
) -> None:
    """Put adapters around the stage's projections; `adapter` holds their arrays by name."""
    for placement in placements:
        parent = _parent_of(model, stage, placement)
        base = getattr(parent, placement.target)
        setattr(parent, placement.target, LoraLinear(base, placement, adapter, slot))


def magnitudes(model: Any, stage: StageSpec, placements: Sequence[Placement]) -> Arrays:
    """Give the lengths of the base's rows, which `dora_m` starts from; before `attach`."""
    arrays: Arrays = {}
    for placement in placements:
        base = getattr(_parent_of(model, stage, placement), placement.target)
        lengths_O = torch.linalg.vector_norm(dense_weight(base), dim=1, dtype=torch.float32)
        arrays[f"{placement.prefix}.dora_m"] = lengths_O.cpu().numpy()
    return arrays


def dense_weight(base: torch.nn.Module) -> torch.Tensor:
    """Give a frozen projection's weight (out, in); a packed one unpacks it with its `dense`."""
    if isinstance(base, torch.nn.Linear):
        return base.weight
    dense = getattr(base, "dense", None)
    if dense is None:
        raise ConfigError(no_dense_weight(type(base).__name__))
    weight: torch.Tensor = dense()
    return weight


def _parent_of(model: Any, stage: StageSpec, placement: Placement) -> torch.nn.Module:
    block = model.model.layers[placement.layer - stage.start]
    parent: torch.nn.Module = block.get_submodule(placement.block)
    return parent


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
