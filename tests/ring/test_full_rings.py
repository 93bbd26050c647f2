"""All weights trained on rings: equal to one device, tied or not; resumed; recovered; refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from exo_train.errors import InterruptedRunError
from exo_train.models.spec import EMBEDDING, LM_HEAD
from exo_train.train.checkpoint import newest_checkpoint
from exo_train.train.watcher import Watcher
from tests.ring.local_household import household_of, only_memory, run_in
from tests.ring.rings import CONFIG, Trained, largest_difference, train_ring
from tests.ring.test_trainer import StopAfter, adapter_of, losses_of, trained
from tests.tiny_models import make_tiny_model

FULL = replace(CONFIG, full=True, weight_decay=0.1, adam_epsilon=1e-6)
STEPS = 5
T, M = "torch", "mlx"
RINGS = {"torch 2": [T, T], "mixed 2": [M, T], "mixed 3": [T, M, T], "mlx 3": [M, M, M]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "tied": make_tiny_model(folder / "tied", num_layers=5),
        "untied": make_tiny_model(folder / "untied", num_layers=5, tied=False),
    }


@pytest.fixture(scope="module")
def alone(models: dict[str, Path]) -> dict[str, Trained]:
    return {
        name: train_ring(path, [T], config=FULL, num_steps=STEPS) for name, path in models.items()
    }


def assert_equal_runs(ring: Trained, one: Trained) -> None:
    assert ring.losses == pytest.approx(one.losses, rel=1e-5)
    assert ring.grad_norms == pytest.approx(one.grad_norms, rel=1e-4)
    assert largest_difference(ring.adapter, one.adapter) < 1e-4


@pytest.mark.parametrize("model", ["tied", "untied"])
@pytest.mark.parametrize("name", RINGS)
def test_ring_equals_one_device(
    name: str, model: str, models: dict[str, Path], alone: dict[str, Trained]
) -> None:
    ring = train_ring(models[model], RINGS[name], config=FULL, num_steps=STEPS)
    assert_equal_runs(ring, alone[model])
    assert ring.losses[-1] < ring.losses[0]
    assert (LM_HEAD in ring.adapter) == (model == "untied")


def test_negative_control_gradients_of_a_tied_matrix_are_not_added(
    models: dict[str, Path], alone: dict[str, Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exo_train.train.stage_runner.tied_matrix", lambda *given: None)
    ring = train_ring(models["tied"], [T, T], config=FULL, num_steps=STEPS)
    with pytest.raises(AssertionError):
        assert_equal_runs(ring, alone["tied"])


def test_a_tied_matrix_that_takes_many_chunks_is_the_same_on_both_ends(
    models: dict[str, Path], alone: dict[str, Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More chunks than all queues on the way hold together."""
    monkeypatch.setattr("exo_train.train.tied.CHUNK_BYTES", 1024)
    ring = train_ring(models["tied"], [T, M, T], config=FULL, num_steps=STEPS)
    assert_equal_runs(ring, alone["tied"])


@pytest.mark.parametrize(
    "changes",
    [
        {"adapter_layers": ("last:2",)},
        {"optimizer": "adafactor", "adam_epsilon": 1e-8},
        {"optimizer": "sgd", "adam_epsilon": 1e-8, "learning_rate": 0.1, "max_grad_norm": 0.05},
        {"label_smoothing": 0.2, "neftune_alpha": 0.5, "packing": True},
        {"checkpoint_activations": True, "microbatch_size": 3},
    ],
    ids=str,
)
def test_options_are_the_same_on_any_ring(
    changes: dict[str, object], models: dict[str, Path], alone: dict[str, Trained]
) -> None:
    config = replace(FULL, **changes)
    one = train_ring(models["tied"], [T], config=config, num_steps=4)
    assert_equal_runs(train_ring(models["tied"], [M, T, M], config=config, num_steps=4), one)
    if "checkpoint_activations" in changes:
        assert one.losses == pytest.approx(alone["tied"].losses[:4], rel=1e-5)
    else:
        assert one.losses[-1] != pytest.approx(alone["tied"].losses[3], rel=1e-4)


def test_last_layers_leave_all_else_as_it_is(models: dict[str, Path]) -> None:
    ring = train_ring(
        models["tied"], [T, T], config=replace(FULL, adapter_layers=("last:2",)), num_steps=1
    )
    assert {name.split(".")[2] for name in ring.adapter} == {"3", "4"}
    assert EMBEDDING not in ring.adapter


@pytest.mark.parametrize("again", [[T, M], [T]], ids=["same ring", "another"])
def test_resumed_equals_never_interrupted(
    again: list[str], models: dict[str, Path], tmp_path: Path
) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    trained(models["tied"], whole, backends=[T, M], config=FULL)
    stop = Watcher(wants_stop=StopAfter(5))
    with pytest.raises(InterruptedRunError, match="after step 3 of 6"):
        trained(models["tied"], halves, backends=[T, M], config=FULL, watcher=stop)
    checkpoint = newest_checkpoint(halves)
    assert checkpoint is not None
    trained(models["tied"], halves, backends=again, config=FULL, resumed=checkpoint)
    if len(again) == 2:
        assert losses_of(halves) == losses_of(whole)
        assert largest_difference(adapter_of(halves), adapter_of(whole)) == 0.0
    assert losses_of(halves) == pytest.approx(losses_of(whole), rel=1e-4)


@pytest.mark.parametrize("shadow", ["auto", "1"])
def test_a_device_that_is_lost(shadow: str, models: dict[str, Path], tmp_path: Path) -> None:
    """Without copies the run goes back to its checkpoint, with them it loses what is not done."""
    config = only_memory(FULL, steps=5, save_every=2, shadow=shadow)
    undisturbed = run_in(household_of(models["tied"], [T] * 3), tmp_path / "quiet", config)
    fault = f"kill@step=4,phase=forward,once={tmp_path}"
    household = household_of(models["tied"], [T] * 3, faults={"device2": fault})
    disturbed = run_in(household, tmp_path / "run", config)
    assert disturbed.losses == pytest.approx(undisturbed.losses, rel=1e-5)
    (interruption,) = disturbed.progress.interruptions
    assert interruption.steps_lost == (1 if shadow == "auto" else 0)
    assert np.isfinite(disturbed.losses).all()
