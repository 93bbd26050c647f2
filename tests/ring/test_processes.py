"""The ring over real processes and real gRPC: agents, workers, links, weights, files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import psutil
import pytest

from exo_train.config import TrainConfig
from exo_train.errors import PeerError
from exo_train.train.metrics import StepMetrics
from exo_train.train.watcher import Watcher
from tests.ring.household import Household
from tests.ring.household_runs import STEPS, assert_same_training, metrics, run_training

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("household"), pytest.mark.timeout(300)]

METRICS_KEYS = {
    "step", "epoch", "loss", "lr", "grad_norm", "tokens", "supervised_tokens", "positions",
    "tokens_per_s", "step_s", "period_s", "generation", "ranks",
}  # fmt: skip
RANK_KEYS = {"rank", "name", "busy_s", "bubble_fraction", "sent_bytes", "peak_memory_bytes"}


def test_three_ranks_mixed_from_a_members_command_line(
    household: Household, config: TrainConfig, one_device_run: Path, tmp_path: Path
) -> None:
    """`train` typed on the MLX member equals one PyTorch device, and documents itself."""
    for name in ("attic", "hall"):  # other tests may have had them fetch this model
        shutil.rmtree(household.homes[name].cache / "tensors", ignore_errors=True)
    run_dir = tmp_path / "a run"
    done = household.run(
        "desk", "train", config.model, "--data", config.data, "--steps", str(STEPS),
        "--batch-size", "6", "--microbatch-size", "2", "--max-seq-length", "96",
        "--learning-rate", "1e-3", "--min-devices", "3", "--run-dir", str(run_dir), "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert_same_training(run_dir, one_device_run)

    events = [json.loads(line) for line in done.stdout.splitlines()]
    begin = next(event for event in events if event["event"] == "begin")
    assert (begin["steps"], begin["trainable_share"] > 0) == (STEPS, True)
    notes = " ".join(event["text"] for event in events if event["event"] == "note")
    assert "attic fetched" in notes, "the model lies with desk alone, so it must have travelled"
    assert "hall fetched" in notes
    plan = json.loads((run_dir / "plan.json").read_text("utf-8"))
    assert {rank["name"] for rank in plan["ranks"]} == {"attic", "desk", "hall"}
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
    household: Household, config: TrainConfig, one_device_run: Path, tmp_path: Path
) -> None:
    outcome = run_training(
        household.homes["attic"], config, tmp_path / "run", devices=("attic", "hall")
    )
    assert len(outcome.summary.devices) == 2
    assert_same_training(tmp_path / "run", one_device_run)


def test_a_device_that_dies_is_named_and_the_run_goes_on(
    household: Household, config: TrainConfig, one_device_run: Path, tmp_path: Path
) -> None:
    """kill -9 of a member's agent in mid-run: its worker goes too, and the driver says who."""
    household.add("shed", "torch")
    household.wait_met(["attic", "shed"])
    notes: list[str] = []

    def kill(step: StepMetrics, remaining_s: float | None) -> None:
        if step.step == 3:
            household.processes["shed"].kill()

    outcome = run_training(
        household.homes["attic"],
        config,
        tmp_path / "run",
        devices=("attic", "shed"),
        watcher=Watcher(on_step=kill, on_note=notes.append),
    )
    assert any("shed" in note and "going on with who is left" in note for note in notes)
    assert [device.name for device in outcome.summary.devices] == ["attic"]
    (interruption,) = outcome.summary.interruptions
    assert interruption.lost == ("shed",)
    assert interruption.steps_lost <= 1
    assert_same_training(tmp_path / "run", one_device_run)
    psutil.wait_procs(household.workers(), timeout=10)
    assert not household.workers(), "a worker outlived its run"
    household.stop("shed")


def test_a_worker_that_dies_again_and_again_is_set_aside_with_its_exit_code(
    household: Household, config: TrainConfig, one_device_run: Path, tmp_path: Path
) -> None:
    household.add("cellar", "torch", fault="die:2")
    household.wait_met(["hall", "cellar"])
    notes: list[str] = []
    outcome = run_training(
        household.homes["hall"],
        config,
        tmp_path / "run",
        devices=("hall", "cellar"),
        watcher=Watcher(on_note=notes.append),
    )
    assert any("cellar" in note and "exit code 9" in note for note in notes)
    assert any("cellar is set aside" in note for note in notes)
    assert [device.name for device in outcome.summary.devices] == ["hall"]
    assert_same_training(tmp_path / "run", one_device_run)
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


def test_generate_uses_the_runs_adapter(household: Household, one_device_run: Path) -> None:
    done = household.run(
        "attic", "generate", str(one_device_run), "--prompt", "what is 1", "--json"
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["adapter"] == str(one_device_run / "adapters" / "mlx")
