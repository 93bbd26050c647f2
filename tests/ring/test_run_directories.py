"""Run directories over real processes: stops, resume, and who may write where."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from exo_train.agent.resuming import resumed_options
from exo_train.config import TrainConfig
from exo_train.errors import ConfigError, InterruptedRunError
from exo_train.train.metrics import StepMetrics
from exo_train.train.rundir import RunDir
from exo_train.train.watcher import Watcher
from tests.ring.household import Household
from tests.ring.household_runs import STEPS, StopAfter, assert_same_training, losses, run_training

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("household"), pytest.mark.timeout(300)]


def test_ctrl_c_saves_and_says_how_to_go_on(
    household: Household, config: TrainConfig, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    command = [
        sys.executable, "-m", "exo_train", "train", config.model, "--data", config.data,
        "--steps", "2000", "--max-seq-length", "96", "--devices", "attic",
        "--run-dir", str(run_dir), "--json",
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        env=household.environment("attic"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line)["event"] == "step":
            process.send_signal(signal.SIGINT)
            break
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert f"exo-train train --resume {run_dir}" in stderr
    done = len(losses(run_dir))
    assert 0 < done < 2000
    summary = json.loads((run_dir / "summary.json").read_text("utf-8"))
    assert (summary["status"], summary["saved_step"]) == ("interrupted", done)
    assert summary["devices"][0]["bubble_fraction"] == pytest.approx(
        max(0.0, 1 - summary["devices"][0]["busy_share"])
    )
    assert 0 < summary["prediction"]["steps"] <= done, "a stopped run is held to its promise too"


def test_interrupted_and_resumed_on_another_ring_equals_never_interrupted(
    household: Household, config: TrainConfig, one_device_run: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    seen: list[StepMetrics] = []
    stop_after_two = Watcher(
        on_step=lambda metrics, remaining_s: seen.append(metrics),
        wants_stop=lambda: len(seen) == 2,
    )
    with pytest.raises(InterruptedRunError, match="after step 2 of 4"):
        run_training(
            household.homes["attic"],
            config,
            run_dir,
            devices=("attic", "hall"),
            watcher=stop_after_two,
        )
    options = resumed_options(run_dir, {"devices": "hall"})
    run_training(household.homes["hall"], options, run_dir, resume=run_dir)
    assert len(losses(run_dir)) == STEPS
    assert_same_training(run_dir, one_device_run)


def test_resume_refuses_other_data_and_options(
    household: Household, config: TrainConfig, one_device_run: Path, tmp_path: Path
) -> None:
    done = household.run("attic", "train", "--resume", str(one_device_run), "--learning-rate", "1")
    assert done.returncode == 2
    assert "--learning-rate cannot change on --resume" in done.stderr


def test_a_start_that_fails_can_be_taken_up_again(
    household: Household, config: TrainConfig, one_device_run: Path, tmp_path: Path
) -> None:
    """Before the first checkpoint too, `--resume` is the way on, and it ends alike."""
    run_dir = tmp_path / "run"
    stopped = Watcher(wants_stop=StopAfter(3))
    with pytest.raises(InterruptedRunError):
        run_training(household.homes["attic"], config, run_dir, devices=("attic",), watcher=stopped)
    assert not list(run_dir.glob("checkpoints/step-*"))
    options = resumed_options(run_dir, {})
    run_training(household.homes["attic"], options, run_dir, resume=run_dir)
    assert_same_training(run_dir, one_device_run)


def test_ctrl_c_while_starting_leaves_nothing_behind(config: TrainConfig, tmp_path: Path) -> None:
    """`train` starts an agent when none runs; it must not outlive `train`, even killed."""
    lonely = Household(tmp_path)
    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        process = subprocess.Popen(
            [
                sys.executable, "-m", "exo_train", "train", config.model, "--data", config.data,
                "--devices", "nowhere", "--json",
            ],
            env=lonely.environment("alone"),
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if "waiting up to" in line:
                break
        (agent,) = psutil.Process(process.pid).children()
        process.send_signal(number)
        process.communicate(timeout=20)
        assert process.returncode == code
        _, alive = psutil.wait_procs([agent], timeout=15)
        assert not alive, "the agent outlived its command"


def test_one_run_directory_is_for_one_process(
    household: Household, config: TrainConfig, one_device_run: Path
) -> None:
    options = resumed_options(one_device_run, {})
    with (
        RunDir(one_device_run).in_use(),
        pytest.raises(ConfigError, match="another process trains in"),
    ):
        run_training(household.homes["attic"], options, one_device_run, resume=one_device_run)


def test_a_run_whose_options_were_edited_is_not_resumed(
    household: Household, config: TrainConfig, one_device_run: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(one_device_run, tmp_path / "copy")
    with pytest.raises(ConfigError, match="is finished: all its 4 steps are done"):
        run_training(household.homes["attic"], resumed_options(copy, {}), copy, resume=copy)
    (copy / "summary.json").unlink()
    text = (copy / "config.yaml").read_text("utf-8")
    (copy / "config.yaml").write_text(text.replace("rank: 8", "rank: 4"), "utf-8")
    with pytest.raises(ConfigError, match=r"says rank: 4, but .* was trained with 8"):
        run_training(household.homes["attic"], resumed_options(copy, {}), copy, resume=copy)


def test_a_run_directory_in_use_is_not_overwritten(
    household: Household, config: TrainConfig, one_device_run: Path
) -> None:
    before = sorted(path.name for path in one_device_run.iterdir())
    with pytest.raises(ConfigError, match="not empty"):
        run_training(household.homes["attic"], config, one_device_run)
    assert sorted(path.name for path in one_device_run.iterdir()) == before


def test_a_reader_that_goes_away_does_not_end_the_run(
    household: Household, config: TrainConfig, tmp_path: Path
) -> None:
    """`exo-train train … | head -1`, plain and as JSON."""
    for as_json in ([], ["--json"]):
        run_dir = tmp_path / f"run{len(as_json)}"
        process = subprocess.Popen(
            [
                sys.executable, "-m", "exo_train", "train", config.model, "--data", config.data,
                "--steps", "3", "--max-seq-length", "96", "--devices", "attic",
                "--run-dir", str(run_dir), *as_json,
            ],
            env=household.environment("attic"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        stderr = process.stderr.read()
        process.stderr.close()
        assert process.wait(timeout=60) == 0, stderr
        summary = json.loads((run_dir / "summary.json").read_text("utf-8"))
        assert summary["status"] == "done"
