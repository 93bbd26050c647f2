"""Runs that are planned by measured speed: real agents, real profiles, real links."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exo_train.agent.resuming import resumed_options
from exo_train.config import TrainConfig
from exo_train.errors import ConfigError, DoesNotFitError, InterruptedRunError, PeerError
from exo_train.train.watcher import Watcher
from tests.ring.household import Household
from tests.ring.household_runs import assert_same_training, losses, run_training

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("household"), pytest.mark.timeout(300)]

SLEEP_MS = 25  # a layer of the tiny model takes a tenth of that


@pytest.fixture(scope="module")
def snail(household: Household) -> Iterator[str]:
    """A member that computes many times as slowly as attic and hall."""
    household.add("snail", "torch", fault=f"sleep_ms:{SLEEP_MS}")
    household.wait_met(["attic", "hall", "snail"])
    yield "snail"
    household.stop("snail")


@pytest.fixture(scope="module")
def measured(config: TrainConfig) -> TrainConfig:
    return replace(config, profile_s=0.5)


def layers(run_dir: Path) -> dict[str, int]:
    plan = json.loads((run_dir / "plan.json").read_text("utf-8"))
    return {
        rank["name"]: rank["stage"]["layers"][1] - rank["stage"]["layers"][0]
        for rank in plan["ranks"]
    }


def summary(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "summary.json").read_text("utf-8")))


def test_a_slow_device_gets_few_layers_and_the_numbers_stay_right(
    household: Household, measured: TrainConfig, snail: str, one_device_run: Path, tmp_path: Path
) -> None:
    notes: list[str] = []
    run_training(
        household.homes["attic"],
        measured,
        tmp_path / "run",
        devices=("attic", "hall", snail),
        watcher=Watcher(on_note=notes.append),
    )
    assert_same_training(tmp_path / "run", one_device_run)
    found = layers(tmp_path / "run")
    assert found.keys() == {"attic", "hall", snail}
    assert found[snail] == 1, f"memory is equal, its speed is not: {found}"
    prediction = summary(tmp_path / "run")["prediction"]
    # Three microbatches, each sleeping in forward and backward. Rows are of different lengths, and
    # a prediction takes time to grow with length, which sleeping does not.
    slowest_s = 0.8 * 3 * 2 * SLEEP_MS / 1000
    assert prediction["step_s"]["predicted"] >= slowest_s
    assert prediction["step_s"]["achieved"] >= slowest_s
    assert {device["name"] for device in prediction["devices"]} == found.keys()
    for device in prediction["devices"]:
        assert device["sent_bytes"]["error"] == pytest.approx(0.0, abs=0.02), device
    assert any(note.startswith("predicted ") and "achieved" in note for note in notes), notes


def test_nobody_who_only_slows_the_ring_takes_part_unasked(
    household: Household, measured: TrainConfig, snail: str, tmp_path: Path
) -> None:
    run_training(household.homes[snail], measured, tmp_path / "run")
    assert snail not in layers(tmp_path / "run"), "the coordinator need not compute"


def test_a_resumed_run_keeps_its_split_and_its_numbers_to_the_last_digit(
    household: Household, measured: TrainConfig, tmp_path: Path
) -> None:
    """Also when another split would be planned now: the user's own was given at the start."""
    attic, whole, run_dir = household.homes["attic"], tmp_path / "whole", tmp_path / "run"
    given = replace(measured, devices=("attic", "hall"), layers=("hall:4", "attic:1"))
    run_training(attic, given, whole)
    done: list[int] = []
    stopped = Watcher(
        on_step=lambda metrics, left_s: done.append(metrics.step),
        wants_stop=lambda: len(done) >= 2,
    )
    with pytest.raises(InterruptedRunError):
        run_training(attic, given, run_dir, watcher=stopped)
    kept = layers(run_dir)
    assert list(kept.items()) == [("hall", 4), ("attic", 1)], "in the order that was given"
    resumed = replace(resumed_options(run_dir, {}), layers=())
    run_training(attic, resumed, run_dir, resume=run_dir)
    assert list(layers(run_dir).items()) == list(kept.items())
    assert losses(run_dir) == losses(whole)


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        (("attic:3", "hall:3"), "gives out 6 layers, but the model has 5"),
        (("attic:3", "hall:1"), "gives out 4 layers, but the model has 5"),
        (("attic:4", "attic:1"), "names attic twice"),
        (("attic:5", "hall:0"), "count of at least 1"),
        (("attic", "hall:1"), "NAME:COUNT|called ''"),
    ],
)
def test_a_split_that_cannot_be_is_refused_in_a_sentence(
    household: Household,
    config: TrainConfig,
    tmp_path: Path,
    layers: tuple[str, ...],
    sentence: str,
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run_training(household.homes["attic"], config, tmp_path / "run", layers=layers)
    assert not (tmp_path / "run").exists()


def test_a_split_waits_for_the_devices_that_it_names(
    household: Household, config: TrainConfig, tmp_path: Path
) -> None:
    given = replace(config, layers=("attic:4", "nobody:1"), device_wait_s=1.0)
    with pytest.raises(PeerError, match="nobody wanted, but after 1 s only these are here"):
        run_training(household.homes["attic"], given, tmp_path / "run")


def test_plan_says_before_what_train_does_then(
    household: Household, measured: TrainConfig, tmp_path: Path
) -> None:
    """On the command line, for the members that are here; nothing else is needed than the model."""
    options = [
        "--data", measured.data, "--batch-size", "6", "--microbatch-size", "2",
        "--max-seq-length", "96", "--min-devices", "2",
    ]  # fmt: skip
    done = household.run("attic", "plan", measured.model, *options, "--profile-s", "0.5", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    starts = [stage["layers"][0] for stage in report["stages"]]
    ends = [stage["layers"][1] for stage in report["stages"]]
    assert starts == [0, *ends[:-1]]
    assert ends[-1] == 5
    assert len(report["stages"]) >= 2, "asked for"
    for stage in report["stages"]:
        assert 0 < stage["memory_bytes"] <= stage["usable_memory_bytes"]
        kinds = stage["memory_by_kind"]
        assert sum(kinds.values()) == stage["memory_bytes"]
        assert kinds["process_bytes"] > 50e6, "an interpreter with a framework takes room"
    assert report["epoch_s"] > 0
    assert report["inputs"]["links"], "measured"
    run_training(household.homes["attic"], measured, tmp_path / "run", min_devices=2, profile_s=0.5)
    planned = {s["device"]: s["layers"][1] - s["layers"][0] for s in report["stages"]}
    assert layers(tmp_path / "run") == planned


def test_a_model_that_fits_nowhere_is_refused_with_what_would_fit(
    household: Household, measured: TrainConfig, tmp_path: Path
) -> None:
    household.add("matchbox", "torch", memory="40MB")
    household.wait_met(["attic", "matchbox"])
    try:
        with pytest.raises(DoesNotFitError, match=r"more than the 40\.0 MB of matchbox"):
            run_training(
                household.homes["attic"], measured, tmp_path / "run", devices=("matchbox",)
            )
    finally:
        household.stop("matchbox")
