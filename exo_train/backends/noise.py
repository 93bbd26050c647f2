"""NEFTune's noise on the embeddings in training (Jain et al. 2023, arXiv:2310.05914).

Owns its size and which hash makes it, and the NumPy reference. Must not import a framework: both
backends follow the arithmetic here, so a row has the same noise on any backend, for any split,
microbatch size, padding and packing.

Shapes: B sequences, T positions, D hidden size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from exo_train.backends.base import MicrobatchInput
from exo_train.backends.lora import THRESHOLD_BITS, feature_hashes, position_words, row_hashes
from exo_train.backends.packed_rows import row_places
from exo_train.errors import ProtocolError

# In the place of a layer and a projection among the words of a hash: no layer has this number.
_NOISE_WORDS = (0xFFFFFFFF, 0)
# 24 bits times this are in [0, 2), and exact in float32 also when 1 is taken off.
UNIT = 2.0 ** (1 - THRESHOLD_BITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """What one microbatch of one step is given: alpha / sqrt(L D) times uniform(-1, 1).

    L is the number of positions of the value's own row, without pads.
    """

    alpha: float
    seed: int
    step: int
    microbatch: MicrobatchInput

    def position_words(self, shape: tuple[int, ...], *, features: int) -> np.ndarray:
        """Give what each position's values are hashed from, uint32 (B, T)."""
        hashes = row_hashes((self.seed, self.step, *_NOISE_WORDS), self.microbatch.row_keys)
        starts = self.microbatch.row_starts
        return position_words(hashes, starts, shape=shape, features=features)

    def scales(self, shape: tuple[int, ...], *, features: int) -> np.ndarray:
        """Give each position's largest value, float32 (B, T)."""
        lengths = self.microbatch.row_lengths
        if len(lengths) != len(self.microbatch.row_keys):  # it came from the network
            raise ProtocolError(f"{self.microbatch} does not say how long its rows are")
        sizes = [self.alpha / math.sqrt(length * features) for length in lengths]
        row_BT, _ = row_places(self.microbatch.row_starts, shape)
        return np.asarray(np.array(sizes, np.float32)[row_BT])

    def values(self, shape: tuple[int, ...], *, features: int) -> np.ndarray:
        """Give the reference, float32 (B, T, D), that both backends must equal bit for bit."""
        words_BT = self.position_words(shape, features=features)
        hashes_BTD = feature_hashes(words_BT, features=features).astype(np.float32)
        uniform_BTD = hashes_BTD * np.float32(UNIT) - np.float32(1)
        return np.asarray(uniform_BTD * self.scales(shape, features=features)[..., None])


def noise_of(microbatch: MicrobatchInput, alpha: float, *, seed: int, step: int) -> Noise | None:
    """Give a microbatch's noise; None where there is none."""
    return Noise(alpha=alpha, seed=seed, step=step, microbatch=microbatch) if alpha else None
