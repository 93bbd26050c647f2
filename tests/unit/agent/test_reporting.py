"""A run's numbers in tracking libraries: what is called, what is left out, what is refused.

The libraries are stood in for by modules with the same calls; TensorBoard's own is read back where
it is installed.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from exo_train.agent import reporting
from exo_train.agent.driver import train
from exo_train.agent.opening import Narrator
from exo_train.agent.reporting import Reports, check_installed, step_values
from exo_train.cli.main import app
from exo_train.cluster.home import Home
from exo_train.config import TrainConfig
from exo_train.errors import ConfigError
from exo_train.models.spec import ModelSpec
from exo_train.option_rules import REPORT_LIBRARIES
from exo_train.train.batches import BatchPlan
from exo_train.train.beginning import Beginning, beginning_of
from exo_train.train.examples import Example
from exo_train.train.loop import Data
from exo_train.train.metrics import RankMetrics, StepMetrics
from exo_train.train.watcher import Watcher
from tests.tiny_models import tiny_config

RANK = RankMetrics(
    rank=0, name="den-pc", busy_s=0.5, bubble_fraction=0.25, sent_bytes=8, peak_memory_bytes=9
)
STEP = StepMetrics(
    step=1, epoch=0.5, loss=1.25, lr=1e-3, grad_norm=math.nan, tokens=10, supervised_tokens=4,
    positions=16, tokens_per_s=20.0, step_s=0.5, period_s=0.1, generation=1, ranks=(RANK,),
)  # fmt: skip
Calls = list[tuple[Any, ...]]


def _beginning(run_dir: Path) -> Beginning:
    row = Example(tokens=(1, 2), supervised=(False, True), where="")
    batches = BatchPlan(examples=(row,), batch_size=1, seed=0)
    spec = ModelSpec.from_config(tiny_config(), place="tiny")
    data = Data(batches=batches, held_out=())
    return beginning_of(TrainConfig(), spec, data, rates=[1.0], run_dir=str(run_dir))


def _report(run_dir: Path, *libraries: str) -> list[str]:
    """Have a run of two steps heard by the libraries; give what it said."""
    notes: list[str] = []
    reports = Reports(TrainConfig(report_to=libraries), on_note=notes.append)
    with reports:
        watcher, narrator = reports.carrying(Watcher(), Narrator())
        narrator.on_begin(_beginning(run_dir))
        watcher.on_ring(None)  # type: ignore[arg-type]
        watcher.on_evaluation(0, 2.5)
        watcher.on_step(STEP, None)
        watcher.on_step(replace(STEP, step=2, loss=1.0), None)
    return notes


def _fake(calls: Calls, *, fails: str = "") -> types.ModuleType:
    def call(name: str) -> Callable[..., None]:
        def record(*args: Any, **more: Any) -> None:
            print("welcome")
            if name == fails:
                raise RuntimeError("no such\nserver")
            calls.append((name, *args, more))

        return record

    module = types.ModuleType("fake")
    for name in ("init", "log", "finish"):
        setattr(module, name, call(name))
    return module


@pytest.mark.parametrize("library", ["wandb", "trackio", "swanlab"])
def test_numbers_reach_the_library(
    library: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: Calls = []
    monkeypatch.setitem(sys.modules, library, _fake(calls))
    assert _report(tmp_path / "my-run", library) == []
    opened, held_out, first, second, closed = calls
    assert (opened[0], opened[1]["project"], opened[1]["name"]) == ("init", "exo-train", "my-run")
    assert opened[1]["config"]["trainable_parameters"] > 0
    assert held_out == ("log", {"held_out/loss": 2.5}, {"step": 0})
    assert first[1]["train/loss"] == 1.25
    assert first[1]["devices/den-pc/busy_s"] == 0.5
    assert "train/grad_norm" not in first[1], "it is not finite"
    assert (second[1]["train/loss"], second[2]) == (1.0, {"step": 2})
    assert closed == ("finish", {})
    assert capsys.readouterr().out.count("welcome") == 3, "only log may write to standard output"


@pytest.mark.parametrize("fails", ["init", "log", "finish"])
def test_library_that_fails_is_said_once_and_the_others_go_on(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Calls = []
    monkeypatch.setitem(sys.modules, "wandb", _fake([], fails=fails))
    monkeypatch.setitem(sys.modules, "trackio", _fake(calls))
    (note,) = _report(tmp_path, "wandb", "trackio")
    assert note.startswith("reporting to wandb failed and is left out from here on")
    assert note.endswith("no such server")
    assert [call[0] for call in calls] == ["init", "log", "log", "log", "finish"]


def test_a_resumed_run_goes_on_without_a_library_that_is_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    (note,) = _report(tmp_path, "wandb")
    assert "reporting to wandb failed" in note


def test_missing_library_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting.importlib.util, "find_spec", lambda name: None)
    said = "--report-to wandb,trackio: not installed here; install with `pip install wandb trackio`"
    with pytest.raises(ConfigError, match=said) as refused:
        check_installed(("wandb", "trackio"))
    assert refused.value.exit_code == 2
    config = TrainConfig(model="none", data="none.jsonl", report_to=("wandb",))
    with pytest.raises(ConfigError, match="pip install wandb"):
        train(Home(tmp_path), config, watcher=Watcher(), narrator=Narrator())
    words = ["train", "none", "--data", "none.jsonl", "--report-to", "swanlab"]
    assert "pip install swanlab" in str(CliRunner().invoke(app, words).exception)


def test_unknown_library_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'wandbb' is not known; did you mean 'wandb'"):
        TrainConfig(report_to=("wandbb",))
    assert TrainConfig(report_to=REPORT_LIBRARIES).report_to == REPORT_LIBRARIES


def test_names_of_numbers() -> None:
    assert step_values(replace(STEP, grad_norm=0.5)).keys() == {
        *(f"train/{name}" for name in (
            "epoch", "loss", "lr", "grad_norm", "tokens", "supervised_tokens", "positions",
            "tokens_per_s", "step_s", "period_s", "generation",
        )),
        *(f"devices/den-pc/{name}" for name in (
            "busy_s", "bubble_fraction", "sent_bytes", "peak_memory_bytes",
        )),
    }  # fmt: skip


def test_tensorboard_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Calls = []

    class Writer:
        def __init__(self, folder: str) -> None:
            calls.append(("open", folder))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            calls.append((name, value, step))

        def flush(self) -> None:
            calls.append(("flush",))

        def close(self) -> None:
            calls.append(("close",))

    summary = types.ModuleType("tensorboard.summary")
    summary.Writer = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "tensorboard.summary", summary)
    assert _report(tmp_path, "tensorboard") == []
    assert calls[0] == ("open", str(tmp_path / "tensorboard"))
    assert ("held_out/loss", 2.5, 0) in calls
    assert ("train/loss", 1.0, 2) in calls
    assert calls[-1] == ("close",)


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not among the tests' packages")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert _report(tmp_path, "tensorboard") == []
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    losses = [(e.step, e.tensor_proto.float_val[0]) for e in events.Tensors("train/loss")]
    assert losses == [(1, 1.25), (2, 1.0)]
