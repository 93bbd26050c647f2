"""DPO and ORPO on stages: an independent oracle's numbers, whatever the split and the padding."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from exo_train.backends.base import Stage
from exo_train.backends.preference import PairSums, pair_loss
from exo_train.backends.torch_stage import TorchStage
from exo_train.objective_config import ObjectiveConfig
from exo_train.wire.tensor import DType
from tests.backends.hand_ring import LORA, NUM_LAYERS, OPTIONS, load_ring, merged, relative_error
from tests.backends.pairs import (
    LENGTHS,
    LONG,
    accumulate_pairs,
    evaluate_pairs,
    oracle_loss,
    pair_microbatches,
    pairs,
)
from tests.backends.test_oracles import model_directory, peft_model, peft_parameter

OBJECTIVES = {
    "dpo": ObjectiveConfig(name="dpo", beta=0.3),
    "smoothed dpo": ObjectiveConfig(name="dpo", beta=0.3, label_smoothing=0.2),
    "orpo": ObjectiveConfig(name="orpo", beta=0.7),
}
MODEL = "llama3-rope"
RINGS = {
    "torch": (["torch"], (0, NUM_LAYERS)),
    "mlx": (["mlx"], (0, NUM_LAYERS)),
    "mixed 3": (["mlx", "torch", "mlx"], (0, 1, 3, NUM_LAYERS)),
    "mixed 3 other way": (["torch", "mlx", "torch"], (0, 2, 3, NUM_LAYERS)),
}
BACKENDS = ["torch", "mlx"]


def ring_for(objective: ObjectiveConfig, ring: str, **changes: Any) -> list[Stage]:
    backends, bounds = RINGS[ring]
    options = replace(OPTIONS, objective=objective, **changes)
    return load_ring(MODEL, backends, bounds, options=options)


# PEFT asks transformers in its old words.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("ring", RINGS)
def test_loss_and_gradients_are_the_oracle_s(ring: str, name: str, tmp_path: Path) -> None:
    objective = OBJECTIVES[name]
    stages = ring_for(objective, ring)
    adapter = merged(stage.adapter() for stage in stages)
    oracle = peft_model(model_directory(tmp_path, MODEL), adapter)
    for lengths, sizes in ((LENGTHS, (1, 2, 4)), (LONG, (2,))):
        chosen = pairs(lengths)
        oracle.zero_grad()
        expected = oracle_loss(oracle, chosen, objective)
        expected.backward()
        gradients = {name: peft_parameter(oracle, name).grad.numpy().T for name in adapter}
        for size in sizes:
            got = accumulate_pairs(stages, chosen, objective, size=size)
            assert got.loss == pytest.approx(expected.item(), rel=1e-5)
            found = merged(stage.gradients() for stage in stages)
            assert relative_error(found, gradients) < 3e-5
    plain = oracle_loss(oracle, chosen, replace(objective, label_smoothing=0.0)).item()
    measured = evaluate_pairs(stages, chosen, objective)
    assert measured.loss == pytest.approx(plain, rel=1e-5)
    assert measured.sums.num_pairs == len(chosen)


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
@pytest.mark.parametrize("ring", RINGS)
def test_the_first_loss_of_dpo_is_ln_2(ring: str, dtype: DType) -> None:
    """As an adapter starts it changes nothing, so base and policy agree to the last bit."""
    objective = OBJECTIVES["dpo"]
    stages = ring_for(objective, ring, adapter_init="zero", compute_dtype=dtype, wire_dtype=dtype)
    got = accumulate_pairs(stages, pairs(), objective)
    assert got.loss == math.log(2)
    assert got.sums == PairSums(num_pairs=len(LENGTHS))
    assert evaluate_pairs(stages, pairs(), objective).loss == math.log(2)


def test_negative_control_a_reference_with_its_adapter_on_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    objective = OBJECTIVES["dpo"]
    right = accumulate_pairs(ring_for(objective, "torch"), pairs(), objective)
    run = TorchStage._run

    def with_adapter(self: TorchStage, *arguments: Any, adapter_on: bool = True) -> torch.Tensor:
        return run(self, *arguments)

    monkeypatch.setattr(TorchStage, "_run", with_adapter)
    wrong = accumulate_pairs(ring_for(objective, "torch"), pairs(), objective)
    assert abs(right.loss - math.log(2)) > 1e-3
    assert wrong.loss == pytest.approx(math.log(2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_reference_has_neither_dropout_nor_noise(backend: str) -> None:
    objective = OBJECTIVES["dpo"]
    losses = []
    for rate in (0.0, 0.5):
        options = replace(OPTIONS, objective=objective, neftune_alpha=20 * rate)
        stages = load_ring(MODEL, [backend], lora=replace(LORA, dropout=rate), options=options)
        losses.append(evaluate_pairs(stages, pairs(), objective).loss)
        trained = accumulate_pairs(stages, pairs(), objective).loss
        assert (trained == pytest.approx(losses[0], rel=1e-6)) == (not rate)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_reference_of_dora_is_the_base(backend: str) -> None:
    objective, dora = OBJECTIVES["dpo"], replace(LORA, dora=True)
    options = replace(OPTIONS, objective=objective)
    stages = load_ring(MODEL, [backend], lora=dora, options=options)
    assert abs(accumulate_pairs(stages, pairs(), objective).loss - math.log(2)) > 1e-3
    stages = load_ring(MODEL, [backend], lora=dora, options=replace(options, adapter_init="zero"))
    got = accumulate_pairs(stages, pairs(), objective).loss
    assert got == pytest.approx(math.log(2), abs=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["dpo", "orpo"])
def test_training_prefers_the_chosen_answers(name: str, backend: str) -> None:
    objective = OBJECTIVES[name]
    options = replace(OPTIONS, objective=objective, adapter_init="zero")
    stages = load_ring(MODEL, [backend], options=options)
    seen = []
    for step in range(30):
        seen.append(accumulate_pairs(stages, pairs(), objective, size=4, step=step))
        stages[0].apply(learning_rate=1e-2, grad_scale=1.0)
    assert seen[-1].loss < 0.3 * seen[0].loss
    assert seen[-1].sums.num_right == len(LENGTHS)
    assert seen[-1].sums.chosen > seen[-1].sums.rejected


@pytest.mark.parametrize("name", OBJECTIVES)
def test_slopes_are_those_of_the_loss(name: str) -> None:
    """By differences, far from where the loss is steep, too."""
    objective = OBJECTIVES[name]
    rng = np.random.default_rng(1)
    mask_BT = np.arange(9) < np.array([2, 9, 5, 7])[:, None]
    for spread in (0.1, 5.0, 60.0):
        logs_B, bases_B = -spread * rng.random((2, 4)) * mask_BT.sum(axis=1)
        slopes_B = pair_loss(objective, logs_B, mask_BT, bases_B).slopes_B
        for row in range(4):
            step_B = 1e-5 * (np.arange(4) == row)
            high, low = (
                pair_loss(objective, logs_B + sign * step_B, mask_BT, bases_B).loss_sum
                for sign in (1, -1)
            )
            assert slopes_B[row] == pytest.approx((high - low) / 2e-5, rel=1e-4, abs=1e-6)


def test_an_answer_that_is_certain_has_a_finite_loss() -> None:
    mask_BT = np.ones((2, 3), bool)
    loss = pair_loss(OBJECTIVES["orpo"], np.array([0.0, -900.0]), mask_BT, None)
    assert np.isfinite([loss.loss_sum, *loss.slopes_B]).all()
    assert loss.loss_sum == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_bad_number_shows_in_the_loss(name: str, bad: float) -> None:
    """In the loss, not as a warning or an error: the step is dropped on all devices then."""
    mask_BT = np.ones((2, 3), bool)
    bases_B = np.array([-3.0, -4.0])
    loss = pair_loss(OBJECTIVES[name], np.array([bad, -4.0]), mask_BT, bases_B)
    assert not np.isfinite(loss.loss_sum)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backward_has_its_adapter_on_whatever_was_asked_before(backend: str) -> None:
    """A checkpointed backward runs its layers again."""
    objective = OBJECTIVES["dpo"]
    options = replace(OPTIONS, objective=objective, checkpoint_activations=True)
    stages = load_ring(MODEL, [backend], options=options)
    accumulate_pairs(stages, pairs(), objective, size=4)
    expected = stages[0].gradients()
    (batch,) = pair_microbatches(pairs(), 4)
    stages[0].begin_step(step=0, loss_scale=1 / len(LENGTHS))
    stages[0].refer(batch)
    stages[0].forward(batch)
    stages[0].refer(batch)
    stages[0].backward(0, None)
    assert relative_error(stages[0].gradients(), expected) < 1e-6
