"""When going on is no use, or one device cannot: the run ends saved, or goes on without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from exo_train.agent.local_ring import LocalSurroundings
from exo_train.config import TrainConfig
from exo_train.errors import ConfigError, DoesNotFitError, ExoTrainError
from exo_train.plan.plan import Plan
from exo_train.train.checkpoint import newest_checkpoint
from exo_train.train.stage_runner import StageRunner
from tests.ring.local_household import household_of, only_memory, run_in

CONFIG = only_memory(
    TrainConfig(batch_size=6, microbatch_size=2, max_seq_length=32, dtype="fp32", shadow="1"),
    steps=5,
    save_every=0,
)


def test_a_run_whose_only_device_dies_again_and_again_ends_saved(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Nobody is left who could come back: waiting would look like progress."""
    household = household_of(tiny_model, ["torch"], faults={"device0": "kill@phase=forward,step=3"})
    with pytest.raises(ExoTrainError, match="device0: it was lost 3 times within 10 minutes"):
        run_in(household, tmp_path / "run", CONFIG)
    saved = newest_checkpoint(tmp_path / "run")
    assert saved is not None
    assert saved.step == 2
    assert not any("goes on by itself" in note for note in household.notes)


def test_a_device_that_cannot_load_its_part_is_set_aside_with_its_words(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk under one device's cache must not end the others' night."""
    undisturbed = run_in(
        household_of(tiny_model, ["torch", "torch", "torch"]), tmp_path / "whole", CONFIG
    )
    load = LocalSurroundings.load_stage

    def refuse(self: Any, plan: Plan, rank: int, *rest: Any) -> Any:
        if plan.generation > 1 and plan.ranks[rank].name == "device1":
            raise ConfigError("the disk of device1 is full")
        return load(self, plan, rank, *rest)

    monkeypatch.setattr(LocalSurroundings, "load_stage", refuse)
    fault = f"kill@phase=backward,step=3,once={tmp_path}"
    household = household_of(tiny_model, ["torch", "torch", "torch"], faults={"device1": fault})
    disturbed = run_in(household, tmp_path / "run", CONFIG)
    assert disturbed.losses == pytest.approx(undisturbed.losses, rel=1e-5)
    assert "device1" not in [rank.name for rank in disturbed.plan.ranks]
    assert any("device1 is set aside" in n and "disk of device1" in n for n in household.notes)


def test_a_device_that_had_less_memory_twice_is_not_blamed_for_ever(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs took it, perhaps for a moment: the run goes on with who has room."""
    load = LocalSurroundings.load_stage

    refused = []

    def refuse(self: Any, plan: Plan, rank: int, *rest: Any) -> Any:
        if plan.generation > 1 and plan.ranks[rank].name == "device1":
            refused.append(plan.generation)
            raise DoesNotFitError("device1 has 0.1 GB free now")
        return load(self, plan, rank, *rest)

    monkeypatch.setattr(LocalSurroundings, "load_stage", refuse)
    # As where its layers change: else it would keep its stage, and load nothing.
    monkeypatch.setattr(StageRunner, "_spared", lambda self, plan, load: None)
    faults = {
        "device0": ";".join(
            f"kill@phase=backward,step={step},once={tmp_path / str(step)}" for step in (2, 4)
        )
    }
    for step in (2, 4):
        (tmp_path / str(step)).mkdir()
    household = household_of(tiny_model, ["torch", "torch"], faults=faults)
    disturbed = run_in(household, tmp_path / "run", CONFIG)
    assert disturbed.progress.step == CONFIG.steps
    assert refused
    assert not any("set aside" in note for note in household.notes)
