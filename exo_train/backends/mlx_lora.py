"""LoRA in MLX: the adapted projection. Owns no arrays; a stage lends them for each trace.

Shapes: B sequences, T positions, F input features, R rank, O output features.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from exo_train.backends.lora import INDEX_STRIDE, MIX_1, MIX_2, THRESHOLD_BITS, Dropout

Adapter = dict[str, mx.array]


@dataclass(slots=True, kw_only=True)
class Slot:
    """What all projections of a stage read while a function over them is traced."""

    adapter: Adapter = field(default_factory=dict)
    dropout: Dropout | None = None


class LoraLinear(nn.Module):  # type: ignore[misc]
    """A frozen projection plus `scale * (dropout(x) A) B`, computed in float32."""

    def __init__(
        self, base: nn.Module, *, prefix: str, scale: float, layer: int, target: str, slot: Slot
    ) -> None:
        super().__init__()
        self.base = base
        self.prefix, self.scale, self.layer, self.target = prefix, scale, layer, target
        self.slot = slot

    def __call__(self, x_BTF: mx.array) -> mx.array:
        a_FR = self.slot.adapter[f"{self.prefix}.lora_a"]
        b_RO = self.slot.adapter[f"{self.prefix}.lora_b"]
        x32_BTF = x_BTF.astype(mx.float32)
        dropout = self.slot.dropout
        if dropout is not None:
            mask_BTF = keep_mask(
                dropout.position_words(
                    self.layer, self.target, shape=x_BTF.shape[:2], features=x_BTF.shape[2]
                ),
                features=x_BTF.shape[2],
                threshold=dropout.threshold,
            )
            x32_BTF = x32_BTF * dropout.scale * mask_BTF
        low_BTR = x32_BTF @ a_FR
        y_BTO: mx.array = self.base(x_BTF)
        return y_BTO + (self.scale * (low_BTR @ b_RO)).astype(y_BTO.dtype)


def keep_mask(words_BT: np.ndarray, *, features: int, threshold: int) -> mx.array:
    """Give the mask of `lora.keep_mask`."""
    return feature_hashes(words_BT, features=features) < threshold


def feature_hashes(words_BT: np.ndarray, *, features: int) -> mx.array:
    """Give those of `lora.feature_hashes`."""
    index = mx.arange(features, dtype=mx.uint32) * mx.array(INDEX_STRIDE, mx.uint32)
    h = mx.array(words_BT)[..., None] + index
    h = (h ^ (h >> 16)) * mx.array(MIX_1, mx.uint32)
    h = (h ^ (h >> 13)) * mx.array(MIX_2, mx.uint32)
    h = h ^ (h >> 16)
    return h >> (32 - THRESHOLD_BITS)
