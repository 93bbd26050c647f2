"""The ring over real processes and real gRPC: agents, workers, links, weights, files."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from exo_train.agent.driver import Narrator, Outcome, resumed_options, train
from exo_train.cluster.home import Home
from exo_train.config import TrainConfig
from exo_train.errors import ConfigError, InterruptedRunError, PeerError, PeerLostError
from exo_train.export.adapters import read_adapter
from exo_train.train.loop import Watcher
from exo_train.train.metrics import StepMetrics
from exo_train.train.rundir import RunDir
from tests.ring.household import Household

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("household"), pytest.mark.timeout(300)]

STEPS = 4
METRICS_KEYS = {
    "step", "epoch", "loss", "lr", "grad_norm", "tokens", "supervised_tokens", "tokens_per_s",
    "step_s", "generation", "ranks",
}  # fmt: skip
RANK_KEYS = {"rank", "name", "busy_s", "bubble_fraction", "sent_bytes", "peak_memory_bytes"}


@pytest.fixture(scope="module")
def household(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Household]:
    """Three members, one of them MLX."""
    household = Household(tmp_path_factory.mktemp("household"))
    try:
        for name, backend in (("attic", "torch"), ("desk", "mlx"), ("hall", "torch")):
            household.add(name, backend)
        household.wait_met(["attic", "desk", "hall"])
        yield household
    finally:
        household.close()


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rows = [
        {
            "messages": [
                {"role": "user", "content": "what is " + "x " * (number % 5) + str(number)},
                {"role": "assistant", "content": "it is " + "the " * (number % 7) + str(number)},
            ]
        }
        for number in range(16)
    ]
    for name, part in (("train", rows[:12]), ("valid", rows[12:])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def config(tiny_model: Path, chats: Path) -> TrainConfig:
    return TrainConfig(
        model=str(tiny_model),
        data=str(chats),
        steps=STEPS,
        batch_size=6,
        microbatch_size=2,
        max_seq_length=96,
        learning_rate=1e-3,
        save_every=2,
    )


def run_training(home: Home, config: TrainConfig, run_dir: Path, **changes: Any) -> Outcome:
    """Train from `home`, in this process as driver."""
    watcher = changes.pop("watcher", Watcher())
    resume = changes.pop("resume", None)
    options = replace(config, run_dir=str(run_dir), **changes)
    return train(home, options, watcher=watcher, narrator=Narrator(), resume=resume)


class StopAfter:
    """Wants a stop from the `num_calls`-th question on."""

    def __init__(self, num_calls: int) -> None:
        self.left = num_calls

    def __call__(self) -> bool:
        self.left -= 1
        return self.left <= 0


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in metrics(run_dir)]


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def one_device(
    household: Household, config: TrainConfig, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The oracle: the same run on one device."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    run_training(household.homes["attic"], config, run_dir, devices=("attic",))
    return run_dir


def assert_same_training(run_dir: Path, oracle: Path) -> None:
    assert losses(run_dir) == pytest.approx(losses(oracle), rel=1e-5)
    ours, theirs = (read_adapter(path / "adapters" / "peft").arrays for path in (run_dir, oracle))
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert np.abs(ours[name] - array).max() < 1e-4, name


def test_three_ranks_mixed_from_a_members_command_line(
    household: Household, config: TrainConfig, one_device: Path, tmp_path: Path
) -> None:
    """`train` typed on the MLX member equals one PyTorch device, and documents itself."""
    run_dir = tmp_path / "a run"
    done = household.run(
        "desk", "train", config.model, "--data", config.data, "--steps", str(STEPS),
        "--batch-size", "6", "--microbatch-size", "2", "--max-seq-length", "96",
        "--learning-rate", "1e-3", "--min-devices", "3", "--run-dir", str(run_dir), "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert_same_training(run_dir, one_device)

    events = [json.loads(line) for line in done.stdout.splitlines()]
    notes = " ".join(event["text"] for event in events if event["event"] == "note")
    assert "attic fetched" in notes, "the model lies with desk alone, so it must have travelled"
    assert "hall fetched" in notes
    plan = json.loads((run_dir / "plan.json").read_text("utf-8"))
    assert plan["ranks"][0]["name"] == "desk"
    bounds = [tuple(rank["stage"]["layers"]) for rank in plan["ranks"]]
    assert [layer for start, end in bounds for layer in range(start, end)] == list(range(5))
    summary = json.loads((run_dir / "summary.json").read_text("utf-8"))
    assert summary["status"] == "done"
    assert summary["steps"] == STEPS
    assert {device["backend"] for device in summary["devices"]} == {"mlx", "torch"}
    assert summary["eval_loss_after"] < summary["eval_loss_before"]
    for row in metrics(run_dir):
        assert set(row) == METRICS_KEYS
        assert all(set(rank) == RANK_KEYS for rank in row["ranks"])
        assert len(row["ranks"]) == 3
        assert all(rank["sent_bytes"] > 0 for rank in row["ranks"])
    assert (run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not household.workers(), "a worker outlived its run"


def test_two_ranks(
    household: Household, config: TrainConfig, one_device: Path, tmp_path: Path
) -> None:
    outcome = run_training(
        household.homes["attic"], config, tmp_path / "run", devices=("attic", "hall")
    )
    assert len(outcome.summary.devices) == 2
    assert_same_training(tmp_path / "run", one_device)


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


def test_interrupted_and_resumed_on_another_ring_equals_never_interrupted(
    household: Household, config: TrainConfig, one_device: Path, tmp_path: Path
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
    assert_same_training(run_dir, one_device)


def test_resume_refuses_other_data_and_options(
    household: Household, config: TrainConfig, one_device: Path, tmp_path: Path
) -> None:
    done = household.run("attic", "train", "--resume", str(one_device), "--learning-rate", "1")
    assert done.returncode == 2
    assert "--learning-rate cannot change on --resume" in done.stderr


def test_a_device_that_dies_is_named_and_the_work_is_saved(
    household: Household, config: TrainConfig, tmp_path: Path
) -> None:
    """kill -9 of a member's agent in mid-run: its worker goes too, and the driver says who."""
    household.add("shed", "torch")
    household.wait_met(["attic", "shed"])
    killed_s: list[float] = []

    def kill(step: StepMetrics, remaining_s: float | None) -> None:
        if step.step == 3:
            killed_s.append(time.monotonic())
            household.processes["shed"].kill()

    with pytest.raises(PeerLostError, match="shed") as caught:
        run_training(
            household.homes["attic"],
            config,
            tmp_path / "run",
            steps=500,
            devices=("attic", "shed"),
            watcher=Watcher(on_step=kill),
        )
    assert time.monotonic() - killed_s[0] < 30
    assert "the work up to step 2 is saved" in str(caught.value)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text("utf-8"))
    assert summary["status"] == "failed"
    assert read_adapter(tmp_path / "run" / "adapters" / "mlx").arrays
    psutil.wait_procs(household.workers(), timeout=10)
    assert not household.workers(), "a worker outlived its run"
    household.stop("shed")


def test_a_worker_that_dies_is_named_with_its_exit_code(
    household: Household, config: TrainConfig, tmp_path: Path
) -> None:
    household.add("cellar", "torch", fault="die:2")
    household.wait_met(["hall", "cellar"])
    with pytest.raises(PeerLostError, match=r"cellar.*exit code 9"):
        run_training(household.homes["hall"], config, tmp_path / "run", devices=("hall", "cellar"))
    household.stop("cellar")


def test_numbers_that_stay_bad_stop_the_run_with_the_good_state_kept(
    household: Household, config: TrainConfig, tmp_path: Path
) -> None:
    household.add("loft", "torch", fault="nan:2")
    household.wait_met(["hall", "loft"])
    notes: list[str] = []
    outcome = run_training(
        household.homes["hall"],
        config,
        tmp_path / "run",
        devices=("hall", "loft"),
        watcher=Watcher(on_note=notes.append),
    )
    assert outcome.summary.steps == STEPS, "one bad step is dropped, the run goes on"
    assert any("step 2" in note and "loft" in note and "dropped" in note for note in notes)
    household.stop("loft")


def test_verify_names_the_wrong_stage(household: Household, config: TrainConfig) -> None:
    household.add("faulty", "torch", fault="backward:1.05", memory="3GB")
    household.wait_met(["attic", "faulty", "hall"])
    done = household.run(
        "attic", "verify", config.model, "--devices", "attic,faulty,hall", "--json"
    )
    assert done.returncode == 5, done.stderr
    report = json.loads(done.stdout)
    assert [stage["name"] for stage in report["stages"] if stage["wrong"]] == ["faulty"]
    assert "(faulty) computes wrongly" in done.stderr
    household.stop("faulty")


def test_verify_is_content_with_a_right_ring(household: Household, config: TrainConfig) -> None:
    done = household.run("hall", "verify", config.model, "--devices", "attic,desk,hall", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    assert report["loss_error"] < 1e-5
    assert max(stage["gradient_error"] for stage in report["stages"]) < 1e-3
    assert len(report["stages"]) == 3


def test_a_start_that_fails_can_be_taken_up_again(
    household: Household, config: TrainConfig, one_device: Path, tmp_path: Path
) -> None:
    """Before the first checkpoint too, `--resume` is the way on, and it ends alike."""
    run_dir = tmp_path / "run"
    stopped = Watcher(wants_stop=StopAfter(3))
    with pytest.raises(InterruptedRunError):
        run_training(household.homes["attic"], config, run_dir, devices=("attic",), watcher=stopped)
    assert not list(run_dir.glob("checkpoints/step-*"))
    options = resumed_options(run_dir, {})
    run_training(household.homes["attic"], options, run_dir, resume=run_dir)
    assert_same_training(run_dir, one_device)


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
    household: Household, config: TrainConfig, one_device: Path
) -> None:
    options = resumed_options(one_device, {})
    with (
        RunDir(one_device).in_use(),
        pytest.raises(ConfigError, match="another process trains in"),
    ):
        run_training(household.homes["attic"], options, one_device, resume=one_device)


def test_a_run_whose_options_were_edited_is_not_resumed(
    household: Household, config: TrainConfig, one_device: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(one_device, tmp_path / "copy")
    text = (copy / "config.yaml").read_text("utf-8")
    (copy / "config.yaml").write_text(text.replace("rank: 8", "rank: 4"), "utf-8")
    with pytest.raises(ConfigError, match=r"says rank: 4, but .* was trained with 8"):
        run_training(household.homes["attic"], resumed_options(copy, {}), copy, resume=copy)


def test_too_few_devices_is_exit_3_with_who_is_here(
    household: Household, config: TrainConfig, tmp_path: Path
) -> None:
    with pytest.raises(PeerError, match="nowhere wanted, but after 1 s only these are here"):
        run_training(
            household.homes["attic"],
            config,
            tmp_path / "run",
            devices=("nowhere",),
            device_wait_s=1.0,
        )
    assert not (tmp_path / "run").exists()


def test_generate_uses_the_runs_adapter(household: Household, one_device: Path) -> None:
    done = household.run("attic", "generate", str(one_device), "--prompt", "what is 1", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["adapter"] == str(one_device / "adapters" / "mlx")


def test_a_run_directory_in_use_is_not_overwritten(
    household: Household, config: TrainConfig, one_device: Path
) -> None:
    before = sorted(path.name for path in one_device.iterdir())
    with pytest.raises(ConfigError, match="not empty"):
        run_training(household.homes["attic"], config, one_device)
    assert sorted(path.name for path in one_device.iterdir()) == before
