"""A ring in one process loses devices and goes on; its losses are those of the undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from exo_train.agent.recovery import Recovery
from exo_train.config import TrainConfig
from tests.ring.local_household import Disturbed, household_of, only_memory, run_in

STEPS = 5
BACKENDS = ["torch", "torch", "torch"]


@pytest.fixture(scope="module")
def short() -> TrainConfig:
    config = TrainConfig(
        batch_size=6, microbatch_size=2, max_seq_length=32, learning_rate=1e-2, dtype="fp32"
    )
    return only_memory(config, steps=STEPS, save_every=0)


@pytest.fixture(scope="module")
def undisturbed(
    tiny_model: Path, short: TrainConfig, tmp_path_factory: pytest.TempPathFactory
) -> Disturbed:
    household = household_of(tiny_model, BACKENDS)
    return run_in(household, tmp_path_factory.mktemp("undisturbed"), short)


def test_undisturbed_run_makes_every_step_once(undisturbed: Disturbed) -> None:
    assert undisturbed.progress.step == STEPS
    assert len(undisturbed.losses) == STEPS
    assert undisturbed.progress.interruptions == []
    assert undisturbed.losses[-1] < undisturbed.losses[0]


@pytest.mark.parametrize("phase", ["forward", "backward", "commit", "committed", "snapshot"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_killed_device_costs_at_most_one_step(
    tiny_model: Path,
    short: TrainConfig,
    undisturbed: Disturbed,
    tmp_path: Path,
    phase: str,
    victim: int,
) -> None:
    fault = f"kill@step=3,phase={phase},once={tmp_path}"
    household = household_of(tiny_model, BACKENDS, faults={f"device{victim}": fault})
    disturbed = run_in(household, tmp_path / "run", short)
    assert disturbed.losses == pytest.approx(undisturbed.losses, rel=1e-5)
    (interruption,) = disturbed.progress.interruptions
    assert interruption.steps_lost <= 1
    assert disturbed.plan.generation == 2


def test_nobody_is_taken_in_between_a_loss_and_the_next_step(
    tiny_model: Path,
    short: TrainConfig,
    undisturbed: Disturbed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ring would be formed twice, and all wait for it, before anything is trained."""
    fault = f"kill@step=3,phase=forward,once={tmp_path}"
    household = household_of(tiny_model, BACKENDS, faults={"device1": fault})
    offers = ["device1 can take part"]

    def wanted(self: Recovery, **now: float) -> str:
        return offers.pop() if offers and self.chosen.plan.generation > 1 else ""

    monkeypatch.setattr(Recovery, "wanted", wanted)
    disturbed = run_in(household, tmp_path / "run", short)
    assert disturbed.losses == pytest.approx(undisturbed.losses, rel=1e-5)
    loss, taken_in = disturbed.progress.interruptions
    assert (loss.step, taken_in.step) == (2, 3)
    assert taken_in.reason == "device1 can take part"
