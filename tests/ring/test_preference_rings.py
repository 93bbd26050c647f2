"""Preference tuning on rings: what one device computes, whatever the split and the microbatches."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exo_train.config import TrainConfig
from exo_train.errors import InterruptedRunError
from exo_train.train.checkpoint import newest_checkpoint
from exo_train.train.rundir import RunDir
from exo_train.train.watcher import Watcher
from tests.ring.local_household import household_of, only_memory, run_in
from tests.ring.rings import CONFIG, Trained, largest_difference, train_ring
from tests.ring.test_trainer import StopAfter, losses_of, trained

DPO = replace(CONFIG, objective="dpo", batch_size=4, beta=0.5)
ORPO = replace(DPO, objective="orpo")
OBJECTIVES = {"dpo": DPO, "orpo": ORPO}
T, M = "torch", "mlx"
STEPS = 4


def assert_equal_runs(ring: Trained, one: Trained) -> None:
    assert ring.losses == pytest.approx(one.losses, rel=1e-5)
    assert ring.grad_norms == pytest.approx(one.grad_norms, rel=1e-4)
    assert largest_difference(ring.adapter, one.adapter) < 1e-4


@pytest.fixture(scope="module")
def one_device(tiny_model: Path) -> dict[str, Trained]:
    return {
        name: train_ring(tiny_model, [T], config=config, num_steps=STEPS)
        for name, config in OBJECTIVES.items()
    }


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("backends", [[M], [T, T], [M, M], [T, M, T], [M, T, M]], ids="-".join)
def test_a_ring_equals_one_device(
    backends: list[str], name: str, tiny_model: Path, one_device: dict[str, Trained]
) -> None:
    ring = train_ring(tiny_model, backends, config=OBJECTIVES[name], num_steps=STEPS)
    assert_equal_runs(ring, one_device[name])
    assert min(ring.losses[1:]) < ring.losses[0]


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize(
    "changes",
    [
        {"microbatch_size": 1},
        {"microbatch_size": 4},
        {"microbatch_size": 3, "pipeline_schedule": "gpipe"},
        {"microbatch_size": 1, "checkpoint_activations": True},
    ],
    ids=str,
)
def test_how_a_step_is_cut_does_not_change_it(
    changes: dict[str, Any], name: str, tiny_model: Path, one_device: dict[str, Trained]
) -> None:
    """Pairs stay together, and all of a step's count alike; widths of microbatches differ, too."""
    config = replace(OBJECTIVES[name], **changes)
    assert_equal_runs(
        train_ring(tiny_model, [T, M, T], config=config, num_steps=STEPS), one_device[name]
    )
