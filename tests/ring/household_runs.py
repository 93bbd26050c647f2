"""Runs on a household: what the process tests share. For tests only."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exo_train.agent.driver import Outcome, train
from exo_train.agent.opening import Narrator
from exo_train.cluster.home import Home
from exo_train.config import TrainConfig
from exo_train.export.adapters import read_adapter
from exo_train.train.watcher import Watcher

STEPS = 4


def run_training(home: Home, config: TrainConfig, run_dir: Path, **changes: Any) -> Outcome:
    """Train from `home`, in this process as driver."""
    watcher = changes.pop("watcher", Watcher())
    resume = changes.pop("resume", None)
    options = replace(config, run_dir=str(run_dir), **changes)
    return train(
        home, options, watcher=watcher, narrator=Narrator(on_note=watcher.on_note), resume=resume
    )


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


def assert_same_training(run_dir: Path, oracle: Path) -> None:
    assert losses(run_dir) == pytest.approx(losses(oracle), rel=1e-5)
    ours, theirs = (read_adapter(path / "adapters" / "peft").arrays for path in (run_dir, oracle))
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        # AdamW moves a value by about the rate however small its gradient: where that is no more
        # than rounding, backends may differ in its sign. Such values are rare.
        off = np.abs(ours[name] - array) >= 1e-4
        assert off.mean() < 0.005, name
