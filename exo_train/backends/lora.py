"""LoRA's numbers that no framework may decide: names, first values, dropout masks, checks.

Owns the arrays' names and shapes, their initialisation, the dropout hash and its NumPy reference.
Must not import a framework: both backends follow the arithmetic here, so a run has the same
numbers on any backend, for any split, microbatch size and padding.

Shapes: B sequences, T positions, F input features of a projection.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from exo_train.backends.base import Arrays, MicrobatchInput
from exo_train.backends.full import weight_shapes
from exo_train.backends.packed_rows import row_places
from exo_train.errors import ConfigError
from exo_train.lora_config import (
    ALL_TARGETS,
    LoraConfig,
    Placement,
    chosen_layers,
    densest_layer,
    layer_words,
    placements,
    trains_ends,
)
from exo_train.models.spec import ModelSpec
from exo_train.plan.stages import StageSpec

RANDOM_B_BOUND = 0.02
# Keeps a row of zeros from being divided by its length.
SMALLEST_SQUARE = 1e-30
TRAINED_PARTS = (".lora_a", ".lora_b", ".dora_m", ".weight", ".bias")

# Odd, near 2**32 / golden ratio: spreads consecutive indices over all bits before they are mixed.
INDEX_STRIDE = 0x9E3779B1
# MurmurHash3's 32-bit finaliser (Appleby, public domain): fmix32.
MIX_1, MIX_2 = 0x85EBCA6B, 0xC2B2AE35
# The upper 24 bits of the hash decide, so that the comparison fits signed 32-bit integers too.
THRESHOLD_BITS = 24
_WORD = 0xFFFFFFFF


def stage_placements(spec: ModelSpec, stage: StageSpec, lora: LoraConfig) -> tuple[Placement, ...]:
    """Give the adapters of this stage's layers; there may be none.

    Raises ConfigError for a choice that the whole model has no place for.
    """
    return tuple(p for p in placements(lora, spec.num_layers) if p.layer in stage.layers)


def adapter_shapes(
    spec: ModelSpec, stage: StageSpec, lora: LoraConfig
) -> dict[str, tuple[int, ...]]:
    """Give the arrays trained on a stage, in the order of computing.

    `lora_a` (in, rank) and `lora_b` (rank, out); with DoRA also `dora_m` (out). Where no adapter
    is trained, the weights themselves.
    """
    if lora.full:
        return weight_shapes(spec, stage, lora)
    bases = spec.tensor_shapes(start=stage.start, end=stage.end, embedding=False, head=False)
    shapes: dict[str, tuple[int, ...]] = {}
    for placement in stage_placements(spec, stage, lora):
        out_features, in_features = bases[f"{placement.prefix}.weight"]
        shapes[f"{placement.prefix}.lora_a"] = in_features, placement.rank
        shapes[f"{placement.prefix}.lora_b"] = placement.rank, out_features
        if lora.dora:
            shapes[f"{placement.prefix}.dora_m"] = (out_features,)
    return shapes


def no_dense_weight(kind: str) -> str:
    """Say that a base has no rows to be measured."""
    return (
        f"DoRA needs the lengths of the base's rows, and {kind} does not give its weights: leave "
        f"out --dora, or use a model that is not quantised"
    )


def is_adapter(name: str) -> bool:
    """Tell a trained array, of an adapter or a weight, from the optimizer's arrays."""
    return name.endswith(TRAINED_PARTS)


def initial_adapter(
    spec: ModelSpec, stage: StageSpec, lora: LoraConfig, *, seed: int, init: str
) -> Arrays:
    """Draw `lora_a` from U(±1/sqrt(in)); `lora_b` is zero or small.

    A value depends on (seed, layer, target, rank) alone, so a stage draws what the whole model
    would. `dora_m` is not drawn: a stage takes it from its base (`magnitudes` of a backend).
    """
    shapes = adapter_shapes(spec, stage, lora)
    arrays: Arrays = {}
    for placement in stage_placements(spec, stage, lora):
        words = [seed, placement.layer, ALL_TARGETS.index(placement.target)]
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))
        in_features, rank = shapes[f"{placement.prefix}.lora_a"]
        bound = 1 / math.sqrt(in_features)
        lora_a = rng.uniform(-bound, bound, (in_features, rank))
        lora_b = np.zeros(shapes[f"{placement.prefix}.lora_b"])
        if init == "random":
            lora_b = rng.uniform(-RANDOM_B_BOUND, RANDOM_B_BOUND, lora_b.shape)
        arrays[f"{placement.prefix}.lora_a"] = lora_a.astype(np.float32)
        arrays[f"{placement.prefix}.lora_b"] = lora_b.astype(np.float32)
    return arrays


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainable:
    """What of a model is trained."""

    num_values: int
    num_model_values: int
    layers: tuple[int, ...]
    targets: tuple[str, ...]

    @property
    def percent(self) -> float:
        return 100 * self.num_values / self.num_model_values


def count_trainable(spec: ModelSpec, lora: LoraConfig) -> Trainable:
    """Count the whole model's trained values; raises ConfigError as `placements` does."""
    whole = StageSpec(start=0, end=spec.num_layers, embedding=True, head=True)
    chosen = placements(lora, spec.num_layers)
    layers = {placement.layer for placement in chosen}
    return Trainable(
        num_values=sum(map(math.prod, adapter_shapes(spec, whole, lora).values())),
        num_model_values=sum(map(math.prod, spec.all_tensor_shapes().values())),
        layers=tuple(chosen_layers(lora.layers, spec.num_layers) if lora.full else sorted(layers)),
        targets=tuple(densest_layer(lora, spec.num_layers)),
    )


def adapter_sentence(spec: ModelSpec, lora: LoraConfig) -> str:
    """Say what is trained: kind, projections, layers, values and their share of the model."""
    found = count_trainable(spec, lora)
    layers = f"all {spec.num_layers} layers"
    if len(found.layers) < spec.num_layers:
        layers = f"layers {','.join(layer_words(found.layers))} of {spec.num_layers}"
    values = (
        f"{found.num_values:,} of {found.num_model_values:,} values are trained "
        f"({found.percent:.3g} %)"
    )
    if lora.full:
        ends = ", embedding and head" if trains_ends(lora, spec.num_layers) else ""
        return f"all weights of {layers}{ends}: {values}"
    kind = "DoRA" if lora.dora else "rank-stabilised LoRA" if lora.rslora else "LoRA"
    ranks = sorted({placement.rank for placement in placements(lora, spec.num_layers)})
    return (
        f"{kind} of rank {'/'.join(map(str, ranks))} on {', '.join(found.targets)} in {layers}: "
        f"{values}"
    )


def select_arrays(
    given: Mapping[str, np.ndarray], expected: Mapping[str, tuple[int, ...]], *, layers: range
) -> Arrays:
    """Take this stage's float32 arrays out of `given`, which may hold the whole model's.

    Raises ConfigError when one is missing, has another shape, or is not known in these layers.
    """
    for name, shape in expected.items():
        if name not in given:
            raise ConfigError(
                f"the saved state has no '{name}'; use the rank and targets it was trained with"
            )
        if tuple(given[name].shape) != shape:
            raise ConfigError(
                f"the saved '{name}' has shape {list(given[name].shape)}, this run needs "
                f"{list(shape)}; use the model and rank it was trained with"
            )
    here = tuple(f"model.layers.{layer}." for layer in layers)
    for name in given:
        if name.startswith(here) and name not in expected:
            raise ConfigError(
                f"the saved '{name}' has no place in this run; add its projection to 'targets'"
            )
    return {name: np.array(given[name], np.float32) for name in expected}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropout:
    """Decides for one microbatch of one step which inputs of each adapter are dropped.

    `row_keys` and `row_starts` are the microbatch's.
    """

    rate: float
    seed: int
    step: int
    row_keys: tuple[int, ...]
    row_starts: tuple[int, ...] = ()

    @property
    def threshold(self) -> int:
        """A feature is kept when the upper 24 bits of its hash are below this."""
        return keep_threshold(self.rate)

    @property
    def scale(self) -> float:
        return 1 / (1 - self.rate)

    def position_words(
        self, layer: int, target: str, *, shape: tuple[int, ...], features: int
    ) -> np.ndarray:
        """Give what each position's features are hashed from, uint32 (B, T).

        A row's hash and the position's place in the row: the same wherever the row lies.
        """
        words = (self.seed, self.step, layer, ALL_TARGETS.index(target))
        hashes = row_hashes(words, self.row_keys)
        return position_words(hashes, self.row_starts, shape=shape, features=features)


def row_hashes(words: Sequence[int], row_keys: Sequence[int]) -> np.ndarray:
    """Hash each row's key after the `words` that say what for; uint32."""
    return np.array([_hash_words((*words, row)) for row in row_keys], np.uint32)


def position_words(
    hashes: np.ndarray, row_starts: tuple[int, ...], *, shape: tuple[int, ...], features: int
) -> np.ndarray:
    """Add to a row's hash the position's place in the row; uint32 (B, T)."""
    row_BT, place_BT = row_places(row_starts, shape)
    stride = np.uint32(features * INDEX_STRIDE & _WORD)
    return np.asarray(hashes[row_BT] + place_BT.astype(np.uint32) * stride)


def dropout_of(microbatch: MicrobatchInput, rate: float, *, seed: int, step: int) -> Dropout | None:
    """Give a microbatch's dropout; None where nothing is dropped."""
    if not rate:
        return None
    return Dropout(
        rate=rate,
        seed=seed,
        step=step,
        row_keys=microbatch.row_keys,
        row_starts=microbatch.row_starts,
    )


def keep_threshold(rate: float) -> int:
    return round((1 - rate) * (1 << THRESHOLD_BITS))


def keep_mask(words_BT: np.ndarray, *, features: int, rate: float) -> np.ndarray:
    """Give the reference mask (True: kept) that both backends must equal bit for bit."""
    return feature_hashes(words_BT, features=features) < keep_threshold(rate)


def feature_hashes(words_BT: np.ndarray, *, features: int) -> np.ndarray:
    """Give the upper 24 bits of each feature's hash, uint32 (B, T, features)."""
    h = words_BT[..., None] + np.arange(features, dtype=np.uint32) * np.uint32(INDEX_STRIDE)
    h ^= h >> np.uint32(16)
    h *= np.uint32(MIX_1)
    h ^= h >> np.uint32(13)
    h *= np.uint32(MIX_2)
    h ^= h >> np.uint32(16)
    return np.asarray(h >> np.uint32(32 - THRESHOLD_BITS))


def _hash_words(words: Sequence[int]) -> int:
    """Mix non-negative integers of any size into 32 bits, in order."""
    h = 0
    for word in words:
        while True:
            h = _fmix32((h + INDEX_STRIDE + word) & _WORD)
            word >>= 32
            if not word:
                break
    return h


def _fmix32(h: int) -> int:
    h = ((h ^ (h >> 16)) * MIX_1) & _WORD
    h = ((h ^ (h >> 13)) * MIX_2) & _WORD
    return h ^ (h >> 16)
