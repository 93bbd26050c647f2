"""A full disk when a run is taken over: what is in others' memory stays there until it is saved."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from exo_train.agent import adopting
from exo_train.agent.adopting import Estate
from exo_train.plan.history import StepId
from exo_train.plan.plan import Plan
from exo_train.train import checkpoint
from exo_train.train.disk_pause import DiskPause
from exo_train.train.durable import DiskError

STATE = {"layers.0.q_proj.lora_a": np.ones(3, np.float32), "step": np.array(1)}


@dataclass(frozen=True)
class Before:
    run_id: str = "r1"
    generation: int = 1
    num_layers: int = 1
    model_hash: str = "m"
    ranks: tuple[Any, ...] = ()


@dataclass
class Left:
    """A ring whose workers end when it is left; the disk is full twice."""

    saved: list[str] = field(default_factory=list)
    metrics_left: tuple[str, ...] = (
        json.dumps(
            {"step": 1, "generation": 1, "loss": 2.0, "grad_norm": 1.0, "tokens": 9, "step_s": 1.0}
        ),
    )

    def __call__(self, *given: object, **more: object) -> Left:
        return self

    def __enter__(self) -> Left:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.saved.append("workers ended")

    def adopt(self) -> None: ...

    def rewind(self, generation: int) -> list[Any]:
        return [SimpleNamespace(at=StepId(generation=1, step=1))]

    def collect_held(self, at: StepId) -> dict[str, Any]:
        return STATE

    def write(self, *given: Any, **more: Any) -> Path:
        if len(self.saved) < 2:
            self.saved.append("full")
            raise DiskError("full", obstacle="is full")
        self.saved.append("saved")
        return checkpoint.write_checkpoint(*given, **more)


def status() -> dict[str, Any]:
    run = {"id": "r1", "generation": 1, "orphaned": True}
    return {"members": [{"id": "b", "name": "b", "state": "alive", "run": run, "addresses": []}]}


def estate(run_dir: Path, *, data_hash: str | None) -> Estate:
    return Estate(
        run_dir=run_dir,
        before=cast(Plan, Before()),
        checkpoint=None,
        identity={"model_hash": "m", "data_hash": "d"},
        data_hash=data_hash,
        is_anothers=True,
    )


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Left:
    left = Left()
    monkeypatch.setattr(adopting, "LeftRing", left)
    monkeypatch.setattr(adopting, "write_checkpoint", left.write)
    monkeypatch.setattr(adopting, "_wait_gone", lambda status, run_id: None)
    monkeypatch.setattr(adopting, "newest_whole", lambda known, *, num_layers, up_to: known[0].at)
    return left


def pausing(notes: list[str]) -> DiskPause:
    now_s = iter(range(10_000))
    return DiskPause(
        device="hall", say=notes.append, clock_s=lambda: next(now_s), sleep=lambda seconds: None
    )


def test_the_disk_is_waited_for_before_anything_is_let_go(left: Left, tmp_path: Path) -> None:
    notes: list[str] = []
    _, found = estate(tmp_path, data_hash="d").taken(
        status, cast(Any, None), pausing(notes), spec=cast(Any, None)
    )
    assert left.saved == ["full", "full", "saved", "workers ended"]
    assert found is not None
    assert (found.step, found.state["tokens"]) == (1, 9)
    assert "the disk of hall is full; the run waits" in notes


@pytest.mark.parametrize("data_hash", ["other", None])
def test_state_of_other_data_is_not_taken(
    left: Left, tmp_path: Path, data_hash: str | None
) -> None:
    taken = estate(tmp_path, data_hash=data_hash).taken(
        status, cast(Any, None), pausing([]), spec=cast(Any, None)
    )
    assert taken[1] is None
    assert left.saved == []
