"""LoRA in MLX: the adapted projection, and where it is put.

Owns no adapter's arrays; a stage lends them for each trace.

Shapes: B sequences, T positions, F input features, R rank, O output features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

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

Adapter = dict[str, mx.array]


@dataclass(slots=True, kw_only=True)
class Slot:
    """What all projections of a stage read while a function over them is traced."""

    dtype: mx.Dtype  # the base computes in it
    adapter: Adapter = field(default_factory=dict)
    dropout: Dropout | None = None
    is_off: bool = False  # the base alone

    def put(self, adapter: Adapter) -> None:
        self.adapter = adapter


class LoraLinear(nn.Module):  # type: ignore[misc]
    """A frozen projection plus `scale * (dropout(x) A) B`, computed in float32.

    With DoRA the sum's rows are given the lengths `dora_m` (Liu et al. 2024, arXiv:2402.09353);
    as in its section 4.3 the lengths they have count as constant.
    """

    def __init__(
        self, base: nn.Module, placement: Placement, slot: Slot, *, base_squares_O: mx.array | None
    ) -> None:
        super().__init__()
        self.base = base
        self.prefix, self.scale = placement.prefix, placement.scale
        self.layer, self.target = placement.layer, placement.target
        self.slot = slot
        self.base_squares_O = base_squares_O  # with DoRA

    def __call__(self, x_BTF: mx.array) -> mx.array:
        y_BTO: mx.array
        if self.slot.is_off:
            y_BTO = self.base(x_BTF)
            return y_BTO
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
        if self.base_squares_O is not None:
            return self._lengthened(x_BTF, self.scale * (low_BTR @ b_RO), a_FR, b_RO)
        y_BTO = self.base(x_BTF)
        return y_BTO + (self.scale * (low_BTR @ b_RO)).astype(y_BTO.dtype)

    def _lengthened(
        self, x_BTF: mx.array, delta_BTO: mx.array, a_FR: mx.array, b_RO: mx.array
    ) -> mx.array:
        y_BTO = self._without_bias(x_BTF)
        sum_BTO = y_BTO + delta_BTO.astype(y_BTO.dtype)
        gain_O = self.slot.adapter[f"{self.prefix}.dora_m"] / self._lengths(a_FR, b_RO)
        out_BTO = (sum_BTO.astype(mx.float32) * gain_O).astype(y_BTO.dtype)
        return out_BTO + self.base.bias if "bias" in self.base else out_BTO

    def _without_bias(self, x: mx.array) -> mx.array:
        y: mx.array = self.base(x)
        return y - self.base.bias if "bias" in self.base else y

    def _lengths(self, a_FR: mx.array, b_RO: mx.array) -> mx.array:
        """Give |W + scale (A B)ᵀ| of each row (O), as `torch_lora` does; a constant."""
        assert self.base_squares_O is not None
        a_FR, b_RO = mx.stop_gradient(a_FR), mx.stop_gradient(b_RO)
        base_RO = self._without_bias(a_FR.T[None].astype(self.slot.dtype))[0].astype(mx.float32)
        squares_O = (
            self.base_squares_O
            + 2 * self.scale * (base_RO * b_RO).sum(axis=0)
            + self.scale**2 * (b_RO * ((a_FR.T @ a_FR) @ b_RO)).sum(axis=0)
        )
        return mx.sqrt(mx.maximum(squares_O, SMALLEST_SQUARE))


def attach(
    model: Any,
    stage: StageSpec,
    placements: Sequence[Placement],
    arrays: Mapping[str, np.ndarray],
    slot: Slot,
) -> None:
    """Put adapters around the stage's projections; `arrays` are what they start from."""
    for placement in placements:
        parent = _parent_of(model, stage, placement)
        lengths_O = arrays.get(f"{placement.prefix}.dora_m")
        squares_O = None if lengths_O is None else mx.square(mx.array(lengths_O))
        if squares_O is not None:
            mx.eval(squares_O)  # what stays lazy belongs to this thread, and another may train
        adapted = LoraLinear(parent[placement.target], placement, slot, base_squares_O=squares_O)
        setattr(parent, placement.target, adapted)


def magnitudes(model: Any, stage: StageSpec, placements: Sequence[Placement]) -> Arrays:
    """Give the lengths of the base's rows, which `dora_m` starts from; before `attach`."""
    arrays: Arrays = {}
    for placement in placements:
        weight = dense_weight(_parent_of(model, stage, placement)[placement.target])
        lengths_O = mx.linalg.norm(weight.astype(mx.float32), axis=1)
        arrays[f"{placement.prefix}.dora_m"] = np.array(lengths_O)
    return arrays


def dense_weight(base: nn.Module) -> mx.array:
    """Give a frozen projection's weight (out, in); a packed one unpacks it with its `dense`."""
    if isinstance(base, nn.Linear):
        weight: mx.array = base.weight
        return weight
    dense = getattr(base, "dense", None)
    if dense is None:
        raise ConfigError(no_dense_weight(type(base).__name__))
    unpacked: mx.array = dense()
    return unpacked


def _parent_of(model: Any, stage: StageSpec, placement: Placement) -> Any:
    return model.model.layers[placement.layer - stage.start][placement.block]


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
