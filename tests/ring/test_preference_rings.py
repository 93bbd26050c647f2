"""Preference tuning on rings: what one device computes, whatever the split and the microbatches."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exo_train.agent.planning import make_plan
from exo_train.train.batches import split_microbatches
from exo_train.train.metrics import PairMetrics
from exo_train.train.rundir import RunDir
from exo_train.train.watcher import Watcher
from tests.ring.local_household import household_of, only_memory, run_in
from tests.ring.rings import (
    CONFIG,
    Trained,
    candidates,
    manifest_of,
    open_local_ring,
    train_ring,
)
from tests.ring.test_trainer import assert_resumed_exactly, trained
from tests.ring.trainers import random_data

DPO = replace(CONFIG, objective="dpo", batch_size=4, beta=0.5)
ORPO = replace(DPO, objective="orpo")
OBJECTIVES = {"dpo": DPO, "orpo": ORPO}
T, M = "torch", "mlx"
STEPS = 4


def assert_equal_runs(ring: Trained, one: Trained) -> None:
    assert ring.losses == pytest.approx(one.losses, rel=1e-5)
    assert ring.grad_norms == pytest.approx(one.grad_norms, rel=1e-4)
    assert ring.adapter.keys() == one.adapter.keys()
    for name, array in one.adapter.items():
        # AdamW moves a value by about the rate however small its gradient: where that is no more
        # than rounding, backends may differ in its sign. Such values are rare.
        off = np.abs(ring.adapter[name] - array) >= 1e-4
        assert off.mean() < 0.005, name


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


@pytest.mark.parametrize("fault", ["forward:1.001", "backward:1.01"])
def test_negative_control_a_wrong_stage_is_caught(
    fault: str, tiny_model: Path, one_device: dict[str, Trained]
) -> None:
    ring = train_ring(tiny_model, [T, T, T], config=DPO, num_steps=STEPS, faults={1: fault})
    with pytest.raises(AssertionError):
        assert_equal_runs(ring, one_device["dpo"])


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize(
    "changes",
    [
        {"dropout": 0.2},
        {"group_by_length": True},
        {"quantize": 4, "dora": True},
        {"dtype": "fp16"},
    ],
    ids=str,
)
def test_with_other_options_too(changes: dict[str, Any], name: str, tiny_model: Path) -> None:
    config = replace(OBJECTIVES[name], **changes)
    one = train_ring(tiny_model, [T], config=config, num_steps=3)
    ring = train_ring(tiny_model, [M, T], config=replace(config, microbatch_size=1), num_steps=3)
    if "dtype" in changes:
        assert ring.losses == pytest.approx(one.losses, rel=3e-2)
    else:
        assert_equal_runs(ring, one)


def test_conservative_dpo_is_the_same_on_a_ring(tiny_model: Path) -> None:
    config = replace(DPO, label_smoothing=0.2)
    one = train_ring(tiny_model, [T], config=config, num_steps=3)
    assert_equal_runs(train_ring(tiny_model, [M, T], config=config, num_steps=3), one)
    plain = train_ring(tiny_model, [T], config=DPO, num_steps=3)
    assert abs(one.losses[-1] - plain.losses[-1]) > 1e-4


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_resumed_run_goes_on_to_the_last_digit(
    name: str, tiny_model: Path, tmp_path: Path
) -> None:
    config = replace(OBJECTIVES[name], dropout=0.1)
    assert_resumed_exactly(tiny_model, tmp_path, config, [T, M])


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_device_that_is_lost_costs_nothing(phase: str, tiny_model: Path, tmp_path: Path) -> None:
    config = only_memory(replace(DPO, learning_rate=1e-2), steps=4, save_every=0)
    undisturbed = run_in(household_of(tiny_model, [T] * 3), tmp_path / "quiet", config)
    fault = f"kill@step=3,phase={phase},once={tmp_path}"
    household = household_of(tiny_model, [T] * 3, faults={"device1": fault})
    disturbed = run_in(household, tmp_path / "run", config)
    assert disturbed.losses == pytest.approx(undisturbed.losses, rel=1e-5)
    assert disturbed.plan.generation == 2


@pytest.mark.parametrize("name", OBJECTIVES)
def test_metrics_and_held_out_pairs(name: str, tiny_model: Path, tmp_path: Path) -> None:
    """What is reported is a mean over pairs, whatever the ring; the loop learns what it should."""
    seen: list[tuple[int, float, PairMetrics | None]] = []
    config = replace(OBJECTIVES[name], learning_rate=3e-2, batch_size=10)
    lines: dict[str, list[dict[str, Any]]] = {}
    for ring, size in ((T, 5), (f"{M}-{T}", 2)):
        progress = trained(
            tiny_model,
            tmp_path / ring,
            backends=ring.split("-"),
            config=replace(config, microbatch_size=size),
            watcher=Watcher(on_evaluation=lambda *given: seen.append(given)),
        )
        lines[ring] = RunDir(tmp_path / ring).read_metrics()
    ours, theirs = lines.values()
    names = {"rewards_chosen", "rewards_rejected", "reward_margin", "reward_accuracy"}
    names |= {"nll_loss", "log_odds_chosen"} if name == "orpo" else set()
    for one, other in zip(ours, theirs, strict=True):
        assert names <= one.keys()
        assert one["reward_margin"] == pytest.approx(
            one["rewards_chosen"] - one["rewards_rejected"]
        )
        for key in names:
            # With the wide steps of this run rounding grows.
            assert other[key] == pytest.approx(one[key], rel=1e-2, abs=1e-3), key
    assert ours[-1]["loss"] < 0.8 * ours[0]["loss"]
    assert ours[-1]["reward_accuracy"] == 1.0
    assert ours[-1]["reward_margin"] > ours[0]["reward_margin"]
    assert [step for step, *_ in seen] == [0, 6, 0, 6]
    assert seen[0][1] == progress.held_out_losses[0][1] or name == "orpo"
    if name == "dpo":
        assert ours[0]["loss"] == pytest.approx(math.log(2), rel=1e-15)
        assert [ours[0][key] for key in sorted(names)] == [0.0] * 4
        assert seen[0][1] == pytest.approx(math.log(2), rel=1e-15)
    else:
        assert "nll_loss" in seen[0][2].to_dict()  # type: ignore[union-attr]


def test_the_loop_s_gradients_are_of_the_mean_over_pairs(tiny_model: Path, tmp_path: Path) -> None:
    """An optimizer hardly sees a gradient's scale, so a curve would not show a wrong one."""
    config = replace(DPO, batch_size=10)
    trained(tiny_model, tmp_path, config=config)
    manifest = manifest_of(tiny_model)
    data = random_data(manifest.spec.vocab_size, config, num_rows=20)
    plan = make_plan(candidates([T]), config, manifest, cluster="test")
    ring, access = open_local_ring(tiny_model, plan)
    with ring:
        ring.prepare()
        ring.load(access, step_timeout_s=60.0)
        batch = data.batches.batch_for_step(0)
        cut = split_microbatches(batch, microbatch_size=2, max_seq_length=config.max_seq_length)
        (report,) = ring.run_step(1, cut, loss_scale=1 / 10, timeout_s=60.0)
    (first, *_) = RunDir(tmp_path).read_metrics()
    assert first["grad_norm"] == pytest.approx(math.sqrt(report.grad_square_sum), rel=1e-6)


def test_sft_says_nothing_of_pairs(tiny_model: Path, tmp_path: Path) -> None:
    trained(tiny_model, tmp_path, config=CONFIG)
    assert not any("reward" in key for key in RunDir(tmp_path).read_metrics()[0])
