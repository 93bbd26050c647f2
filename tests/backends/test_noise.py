"""NEFTune's noise: the same bits in both backends, of the paper's size, in training alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch

from exo_train.backends import mlx_noise, torch_noise
from exo_train.backends.base import MicrobatchInput
from exo_train.backends.noise import Noise, noise_of
from exo_train.errors import ProtocolError
from tests.backends.hand_ring import OPTIONS, accumulate, load_ring, microbatches, rows

FEATURES, WIDTH = 48, 24
PADDED = MicrobatchInput(index=0, row_keys=(7, 2**40), row_lengths=(24, 10))
PACKED = MicrobatchInput(
    index=0, row_keys=(5, 2**40, 7), row_lengths=(9, 10, 24), row_starts=(0, 9, 24)
)


def noise(microbatch: MicrobatchInput, **changes: Any) -> Noise:
    return Noise(**{"alpha": 5.0, "seed": 3, "step": 11, "microbatch": microbatch, **changes})


def values(given: Noise) -> np.ndarray:
    return given.values((2, WIDTH), features=FEATURES)


def embedded() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((2, WIDTH, FEATURES), np.float32)


@pytest.mark.parametrize("microbatch", [PADDED, PACKED], ids=["padded", "packed"])
def test_both_backends_add_the_reference_bit_for_bit(microbatch: MicrobatchInput) -> None:
    given = noise(microbatch)
    expected = embedded() + values(given)
    in_torch = torch_noise.with_noise(torch.from_numpy(embedded()), given)
    in_mlx = mlx_noise.with_noise(mx.array(embedded()), given)
    np.testing.assert_array_equal(in_torch.numpy(), expected)
    np.testing.assert_array_equal(np.array(in_mlx), expected)
    half = torch_noise.with_noise(torch.from_numpy(embedded()).bfloat16(), given)
    mlx_half = mlx_noise.with_noise(mx.array(embedded()).astype(mx.bfloat16), given)
    np.testing.assert_array_equal(half.float().numpy(), np.array(mlx_half.astype(mx.float32)))


def test_it_is_uniform_up_to_alpha_over_the_root_of_length_times_width() -> None:
    found = values(noise(PADDED))
    for row, length in enumerate(PADDED.row_lengths):
        unit = found[row] * math.sqrt(length * FEATURES) / 5.0
        assert np.abs(unit).max() <= 1.0
        assert np.abs(unit).max() > 0.99
        assert np.mean(unit) == pytest.approx(0.0, abs=0.05)
        assert np.mean(unit**2) == pytest.approx(1 / 3, abs=0.03)


def test_a_row_has_its_noise_wherever_it_lies_and_other_steps_and_seeds_have_others() -> None:
    padded, packed = values(noise(PADDED)), values(noise(PACKED))
    np.testing.assert_array_equal(packed[1], padded[0])
    np.testing.assert_array_equal(packed[0, 9:19], padded[1, :10])
    for changes in ({"step": 12}, {"seed": 4}):
        assert np.mean(values(noise(PADDED, **changes)) == padded) < 0.01


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_training_is_noisy_and_evaluation_is_not(backend: str) -> None:
    quiet = load_ring("llama", [backend])
    noisy = load_ring("llama", [backend], options=replace(OPTIONS, neftune_alpha=20.0))
    losses = [accumulate(stages, rows()) for stages in (quiet, noisy)]
    assert abs(losses[0] - losses[1]) > 1e-4
    assert accumulate(noisy, rows(), step=1) != losses[1]
    assert accumulate(noisy, rows(), microbatch_size=1) == pytest.approx(losses[1], rel=1e-6)
    (batch,) = microbatches(rows(), 4)
    assert noisy[0].evaluate(batch) == quiet[0].evaluate(batch)


def test_lengths_that_did_not_come_are_missed_by_name() -> None:
    with pytest.raises(ProtocolError, match="microbatch 0 does not say how long its rows are"):
        values(noise(replace(PADDED, row_lengths=())))


def test_without_alpha_there_is_none() -> None:
    assert noise_of(PADDED, 0.0, seed=0, step=0) is None
