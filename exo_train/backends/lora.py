"""LoRA's numbers that no framework may decide: names, first values, dropout masks, checks.

Owns adapter naming and initialisation, the dropout hash and its NumPy reference. Must not import
a framework: both backends follow the arithmetic here, so a run has the same numbers on any
backend, for any split, microbatch size and padding.

Shapes: B sequences, T positions, F input features of a projection.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from exo_train.backends.base import Arrays, MicrobatchInput
from exo_train.backends.packed_rows import row_places
from exo_train.config import ALL_TARGETS, LoraConfig
from exo_train.errors import ConfigError
from exo_train.models.spec import ModelSpec
from exo_train.plan.stages import StageSpec

RANDOM_B_BOUND = 0.02

# Odd, near 2**32 / golden ratio: spreads consecutive indices over all bits before they are mixed.
INDEX_STRIDE = 0x9E3779B1
# MurmurHash3's 32-bit finaliser (Appleby, public domain): fmix32.
MIX_1, MIX_2 = 0x85EBCA6B, 0xC2B2AE35
# The upper 24 bits of the hash decide, so that the comparison fits signed 32-bit integers too.
THRESHOLD_BITS = 24
_WORD = 0xFFFFFFFF


def module_path(target: str) -> str:
    """Give the path of a projection inside its decoder layer."""
    return f"self_attn.{target}" if target in ALL_TARGETS[:4] else f"mlp.{target}"


def adapter_prefix(layer: int, target: str) -> str:
    return f"model.layers.{layer}.{module_path(target)}"


def initial_adapter(
    spec: ModelSpec, stage: StageSpec, lora: LoraConfig, *, seed: int, init: str
) -> Arrays:
    """Draw `lora_a` (in, rank) from U(±1/sqrt(in)); `lora_b` (rank, out) is zero or small.

    A value depends on (seed, layer, target) alone, so a stage draws what the whole model would.
    """
    shapes = spec.tensor_shapes(start=stage.start, end=stage.end, embedding=False, head=False)
    arrays: Arrays = {}
    for layer in stage.layers:
        for target in lora.targets:
            prefix = adapter_prefix(layer, target)
            out_features, in_features = shapes[f"{prefix}.weight"]
            sequence = np.random.SeedSequence([seed, layer, ALL_TARGETS.index(target)])
            rng = np.random.Generator(np.random.PCG64(sequence))
            bound = 1 / math.sqrt(in_features)
            lora_a = rng.uniform(-bound, bound, (in_features, lora.rank))
            lora_b = np.zeros((lora.rank, out_features))
            if init == "random":
                lora_b = rng.uniform(-RANDOM_B_BOUND, RANDOM_B_BOUND, lora_b.shape)
            arrays[f"{prefix}.lora_a"] = lora_a.astype(np.float32)
            arrays[f"{prefix}.lora_b"] = lora_b.astype(np.float32)
    return arrays


def select_arrays(
    given: Mapping[str, np.ndarray], expected: Mapping[str, tuple[int, ...]], *, layers: range
) -> Arrays:
    """Take this stage's float32 arrays out of `given`, which may hold the whole model's.

    Raises ConfigError when one is missing, has another shape, or is not known in these layers.
    """
    for name, shape in expected.items():
        if name not in given:
            raise ConfigError(
                f"the saved adapter has no '{name}'; use the rank and targets it was trained with"
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
