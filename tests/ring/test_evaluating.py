"""`eval`: what it measures is what the run measured itself by, and nothing is half right."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from exo_train.agent.planning import make_plan
from exo_train.agent.run_data import encode_data
from exo_train.cli.main import app
from exo_train.config import TrainConfig
from exo_train.errors import ConfigError, DataError, NumericsError
from exo_train.export.adapters import write_adapters
from exo_train.train.checkpoint import newest_checkpoint
from exo_train.train.data_set import read_data
from exo_train.train.evaluation import HeldOut
from exo_train.train.kept_rows import write_rows
from exo_train.train.rundir import RunDir
from exo_train.train.watcher import Watcher
from tests.ring.rings import TIMEOUT_S, candidates, manifest_of, open_local_ring
from tests.ring.trainers import make_trainer

NUM_STEPS = 6


@pytest.fixture(scope="module")
def run(
    tiny_model: Path, chats: Path, config: TrainConfig, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[tuple[int, float]]]:
    """A run of a mixed ring of two, with the held-out losses that it measured."""
    run_dir = tmp_path_factory.mktemp("run")
    options = replace(config, dtype="fp32", learning_rate=1e-2, microbatch_size=2)
    manifest = manifest_of(tiny_model)
    data = encode_data(
        read_data(str(chats)), options, model_path=tiny_model, spec=manifest.spec, on_note=print
    )
    plan = make_plan(candidates(["torch", "mlx"]), options, manifest, cluster="test")
    ring, access = open_local_ring(tiny_model, plan)
    with ring:
        ring.prepare()
        ring.load(access, step_timeout_s=TIMEOUT_S)
        trainer = make_trainer(ring, options, data, run_dir, num_steps=NUM_STEPS, watcher=Watcher())
        trainer.run()
        measured = trainer.progress.held_out_losses
    RunDir(run_dir).write_config(options.to_dict() | {"model": str(tiny_model)})
    write_rows(run_dir, train=data.batches.examples, held_out=data.held_out)
    return run_dir, measured


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXO_TRAIN_HOME", str(tmp_path / "home"))


def _eval(*words: str | Path) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["eval", *map(str, words), "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert isinstance(report, dict)
    return report


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_losses_are_those_that_the_run_measured(
    run: tuple[Path, list[tuple[int, float]]], chats: Path, backend: str
) -> None:
    run_dir, measured = run
    before, after = dict(measured)[0], dict(measured)[NUM_STEPS]
    assert after < before - 0.1, "a run that learns nothing cannot tell them apart"
    by_data = _eval(run_dir, "--data", chats / "valid.jsonl", "--backend", backend)
    assert by_data["base"]["loss"] == pytest.approx(before, abs=1e-4)
    assert by_data["tuned"]["loss"] == pytest.approx(after, abs=1e-4)
    assert by_data["tuned"]["perplexity"] == pytest.approx(math.exp(after), rel=1e-4)
    kept = _eval(run_dir, "--backend", backend)
    assert (kept["base"], kept["tuned"]) == (by_data["base"], by_data["tuned"])
    assert kept["rows"] == by_data["rows"] == 4


def test_directory_is_its_held_out_part(
    run: tuple[Path, list[tuple[int, float]]], chats: Path
) -> None:
    assert _eval(run[0], "--data", chats)["base"] == _eval(run[0])["base"]
    assert _eval(run[0], "--data", chats / "train.jsonl")["rows"] == 12


def test_exported_adapter_measures_as_its_checkpoint(
    run: tuple[Path, list[tuple[int, float]]], tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    copy.mkdir()
    for name in ("config.yaml", "rows.safetensors"):
        (copy / name).write_bytes((run[0] / name).read_bytes())
    checkpoint = newest_checkpoint(run[0])
    assert checkpoint is not None
    config = TrainConfig.from_mapping(RunDir(copy).read_config(), source="")
    write_adapters(
        copy / "adapters", checkpoint.adapter, lora=config.lora, base_model=config.model,
        num_layers=5, steps=NUM_STEPS,
    )  # fmt: skip
    report = _eval(copy)
    assert report["tuned"] == _eval(run[0])["tuned"]
    assert report["adapter"].endswith("mlx")


def test_bare_model_is_measured_alone(
    run: tuple[Path, list[tuple[int, float]]], tiny_model: Path, chats: Path
) -> None:
    report = _eval(tiny_model, "--data", chats / "valid.jsonl", "--samples", "2")
    assert report["tuned"] is None
    assert report["adapter"] is None
    assert report["base"]["loss"] == pytest.approx(dict(run[1])[0], abs=1e-4)
    assert [sample["tuned"] for sample in report["samples"]] == [None, None]


def test_samples_ask_what_the_rows_ask(
    run: tuple[Path, list[tuple[int, float]]], chats: Path
) -> None:
    report = _eval(run[0], "--data", chats / "valid.jsonl", "--samples", "2", "--max-tokens", "8")
    rows = [json.loads(line) for line in (chats / "valid.jsonl").read_text("utf-8").splitlines()]
    assert len(report["samples"]) == 2
    for sample, row in zip(report["samples"], rows, strict=False):
        question, answer = (message["content"] for message in row["messages"])
        assert question.strip() in sample["prompt"]
        assert answer.strip() not in sample["prompt"]
        assert sample["expected"] == answer.strip()
        assert sample["base"] != sample["tuned"]


def test_screen_shows_both(run: tuple[Path, list[tuple[int, float]]]) -> None:
    result = CliRunner().invoke(app, ["eval", str(run[0]), "--samples", "1"])
    assert result.exit_code == 0
    for word in ("base", "tuned", "perplexity", "4 rows", "expected"):
        assert word in result.stdout
    assert f"{dict(run[1])[0]:.4f}" in result.stdout


def _refused(*words: str | Path) -> Exception:
    result = CliRunner().invoke(app, ["eval", *map(str, words)])
    assert result.exception is not None
    assert isinstance(result.exception, Exception)
    return result.exception


def test_wrong_input_is_exit_2(
    run: tuple[Path, list[tuple[int, float]]], tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": \n', "utf-8")
    for words, kind, said in (
        ((tiny_model,), ConfigError, "--data is missing"),
        ((run[0], "--data", bad), DataError, "bad.jsonl, line 2"),
        ((run[0], "--data", tmp_path / "none.jsonl"), DataError, "none.jsonl"),
        ((run[0], "--max-seq-length", "8"), ConfigError, "--max-seq-length is for --data"),
        ((tiny_model, "--data", chats, "--max-seq-length", "9999"), ConfigError, "positions"),
    ):
        error = _refused(*words)
        assert isinstance(error, kind), error
        assert error.exit_code == 2
        assert said in str(error)


def test_run_without_a_step_has_nothing_to_measure(
    run: tuple[Path, list[tuple[int, float]]], tmp_path: Path
) -> None:
    for name in ("config.yaml", "rows.safetensors"):
        (tmp_path / name).write_bytes((run[0] / name).read_bytes())
    error = _refused(tmp_path)
    assert isinstance(error, ConfigError)
    assert "has trained nothing yet" in str(error)


def test_numbers_that_are_not_finite_are_exit_5(
    run: tuple[Path, list[tuple[int, float]]], chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "exo_train.agent.evaluating.loss_on_one_device", lambda *args, **more: HeldOut(loss=np.nan)
    )
    error = _refused(run[0])
    assert isinstance(error, NumericsError)
    assert error.exit_code == 5
