"""Preference tuning over real agents and workers, from the page's command to `eval`."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from exo_train.agent.chosen_options import choose_options
from exo_train.cli.main import app
from exo_train.config import TrainConfig
from tests.ring.household import Household
from tests.ring.household_runs import assert_same_training, metrics, run_training

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("household"), pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
PAIRS = ROOT / "examples" / "preferences"


@pytest.fixture(scope="module")
def options(tiny_model: Path) -> TrainConfig:
    """The options of the page's command, for the tiny model."""
    page = (ROOT / "docs" / "preference.md").read_text("utf-8")
    found = re.search(r"^exo-train train MODEL (--data .*)$", page, re.MULTILINE)
    assert found is not None
    words = found[1].split()
    given = {
        name.removeprefix("--").replace("-", "_"): value
        for name, value in zip(words[::2], words[1::2], strict=True)
    }
    assert given.pop("data") == "examples/preferences"
    more = {"model": str(tiny_model), "data": str(PAIRS), "max_seq_length": 400, "dtype": "fp32"}
    more |= {"microbatch_size": 2, "profile_s": 0, "learning_rate": 1e-3}
    return choose_options(None, {**given, **more}, resume=None).config


@pytest.fixture(scope="module")
def runs(
    household: Household, options: TrainConfig, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A run on one device, and one on three."""
    folder = tmp_path_factory.mktemp("preference")
    home = household.homes["attic"]
    run_training(home, options, folder / "one", devices=("attic",))
    run_training(home, options, folder / "three", min_devices=3)
    return folder / "one", folder / "three"


def test_three_devices_are_one(runs: tuple[Path, Path]) -> None:
    one, three = runs
    assert_same_training(three, one)
    rows = metrics(three)
    assert len(rows) == 12
    assert len(rows[0]["ranks"]) == 3
    assert rows[0]["loss"] == pytest.approx(math.log(2), rel=1e-12)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["reward_accuracy"] == 1.0
    for key in ("rewards_chosen", "rewards_rejected", "reward_margin"):
        assert rows[-1][key] == pytest.approx(metrics(one)[-1][key], rel=1e-3, abs=1e-5)
    # The base's activations go up as well; they are as large as the others.
    first, _, last = (rank["sent_bytes"] for rank in rows[0]["ranks"])
    assert first == 2 * last


def _said(*words: str | Path) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*map(str, words), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert isinstance(report, dict)
    return report


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_eval_measures_by_the_run_s_objective(
    runs: tuple[Path, Path], backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXO_TRAIN_HOME", str(tmp_path))
    run = runs[1]
    report = _said("eval", run, "--backend", backend, "--samples", "1", "--max-tokens", "2")
    summary = json.loads((run / "summary.json").read_text("utf-8"))
    assert report["base"]["loss"] == pytest.approx(math.log(2), rel=1e-9)
    assert report["base"]["reward_accuracy"] == 0.0
    assert report["tuned"]["loss"] == pytest.approx(summary["eval_loss_after"], rel=1e-4)
    assert report["tuned"]["reward_margin"] > 0
    assert "perplexity" not in report["tuned"]
    assert report["rows"] == 4
    assert report["samples"][0]["expected"] == "No. Every two or three weeks."
    named = _said("eval", run, "--backend", backend, "--data", PAIRS)
    assert named["tuned"] == report["tuned"]
    shown = CliRunner().invoke(app, ["eval", str(run), "--backend", backend])
    assert all(word in shown.stdout for word in ("loss", "accuracy", "margin", "tuned"))


def test_validate_counts_pairs(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXO_TRAIN_HOME", str(tmp_path))
    report = _said("validate", PAIRS, "--model", tiny_model)
    assert report["formats"] == {"prompt/chosen/rejected": 12, "chosen/rejected": 4}
    assert (report["rows"], report["usable"], report["sequences"]) == (16, 16, 32)
    assert 0 < report["supervised_tokens"] < report["tokens"]
    learnt = [part["text"] for part in report["sample"]["parts"] if part["supervised"]]
    assert learnt[0].startswith("Seven minutes for a firm one")


def test_a_plan_reckons_with_two_answers_and_the_base(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXO_TRAIN_HOME", str(tmp_path))
    house = tmp_path / "house.yaml"
    device = "{name: %s, memory: 8GB, layer_ms: 10}"
    house.write_text("devices:\n" + "".join(f"  - {device % name}\n" for name in "ab"))
    plans = {
        objective: _said(
            "plan", tiny_model, "--devices", house, "--batch-size", "8", "--objective", objective
        )
        for objective in ("sft", "dpo", "orpo")
    }
    times = {name: plan["step_s"] for name, plan in plans.items()}
    assert times["orpo"] == pytest.approx(2 * times["sft"], rel=0.1)
    assert times["dpo"] == pytest.approx(1.5 * times["orpo"], rel=0.1)
    assert plans["dpo"]["step_positions"] == 2 * plans["sft"]["step_positions"]
