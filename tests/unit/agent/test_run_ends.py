"""The first and the last of a run on a disk: room for what it will save, and a way to go on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from exo_train.agent import driver
from exo_train.agent.driver import num_to_make_room_for
from exo_train.agent.finishing import Finish
from exo_train.agent.resuming import check_unfinished
from exo_train.config import TrainConfig
from exo_train.errors import ConfigError, ExoTrainError, InterruptedRunError
from exo_train.lora_config import LoraConfig
from exo_train.train.checkpoint import Checkpoint, save_checkpoint
from exo_train.train.disk_pause import DiskPause
from exo_train.train.durable import DiskError
from exo_train.train.progress import Progress
from exo_train.train.rundir import RunDir
from exo_train.train.step_shapes import full_steps
from exo_train.train.watcher import Watcher


@pytest.mark.parametrize(
    ("options", "steps_left", "num_there", "needed"),
    [
        ({}, 1000, 0, 5),  # three kept, the best, the one that is being written
        ({}, 40, 0, 2),
        ({}, 41, 0, 3),
        ({"save_every": 0}, 1000, 0, 1),
        ({"save_every": 0, "save_minutes": 1.0}, 1000, 0, 5),
        ({"keep": 100}, 1000, 0, 50),
        ({"save_every": 500, "early_stop": 2}, 1000, 0, 5),
        ({}, 900, 4, 1),
        ({}, 900, 9, 0),
        ({}, 0, 1, 0),
    ],
)
def test_room_is_asked_for_what_the_run_will_save(
    options: dict[str, Any], steps_left: int, num_there: int, needed: int
) -> None:
    config = TrainConfig(model="m", **options)
    found = num_to_make_room_for(config, steps_left=steps_left, num_there=num_there)
    assert found == needed


class Trainer:
    """Has trained."""

    def __init__(self, *given: object, **more: object) -> None:
        totals = SimpleNamespace(num_dropped=0)
        self.replicate = self.try_run_files = None
        self.progress = SimpleNamespace(step=4, saved_step=4, totals=totals)

    def run(self, *given: object, **more: object) -> None: ...


@pytest.mark.parametrize(
    ("error", "stops", "raised"),
    [
        (DiskError("full", obstacle="is full"), True, InterruptedRunError),
        (ExoTrainError("no adapter"), False, ExoTrainError),
    ],
    ids=["stopped while the disk is full", "what is written does not read back"],
)
def test_the_last_write_can_be_done_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    stops: bool,
    raised: type[Exception],
) -> None:
    left: list[str] = []

    def leave(finish: Finish, status: str) -> None:
        left.append(status)
        raise error

    for name in ("Trainer", "Replicator", "Saver"):
        monkeypatch.setattr(driver, name, Trainer)
    monkeypatch.setattr(Finish, "leave", leave)
    pause = DiskPause(device="attic", say=lambda note: None, wants_stop=lambda: stops)
    plan = SimpleNamespace(run_id="r", generation=1, microbatch_size=1, max_seq_length=8)
    ring: Any = SimpleNamespace(plan=plan)
    data: Any = SimpleNamespace()
    household: Any = SimpleNamespace(holders=list)
    config = TrainConfig(model="m", steps=4)
    recovery: Any = SimpleNamespace(
        run=SimpleNamespace(steps=full_steps(config)),
        chosen=SimpleNamespace(prediction=None, advise=None),
    )
    model: Any = SimpleNamespace(manifest=SimpleNamespace(spec=SimpleNamespace(vocab_size=8)))
    with pytest.raises(raised, match=f"step 4 is saved in .*--resume {tmp_path}"):
        driver._train_on(
            ring, config, data, RunDir(tmp_path), model, Watcher(),
            household, recovery, None, {}, pause,
        )  # fmt: skip
    assert left == ["done", "interrupted" if stops else "failed"]


@pytest.mark.parametrize(("ended_early", "left"), [("", 8), ("stopped after step 8: no better", 4)])
def test_an_early_end_leaves_the_best_steps_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended_early: str, left: int
) -> None:
    for step in (4, 8):
        arrays = {"model.layers.0.mlp.up_proj.lora_a": np.full(2, step, np.float32)}
        count = {"step": np.array(step, np.int64)}
        save_checkpoint(tmp_path, step=step, adapter=arrays, optimizer=count, state={})
    progress = Progress(step=8, saved_step=8, ended_early=ended_early)
    progress.held_out_losses = [(0, 3.0), (4, 1.0), (8, 2.0)]
    written: list[Checkpoint] = []
    monkeypatch.setattr(Finish, "_write_adapters", lambda finish, found: written.append(found))
    nothing: Any = None
    ring: Any = SimpleNamespace(plan=SimpleNamespace(lora=LoraConfig()))
    summary = Finish(RunDir(tmp_path), ring, nothing, progress).leave("done")
    assert [checkpoint.step for checkpoint in written] == [left]
    assert (summary.steps, summary.saved_step) == (8, left)
    assert (summary.best_step, summary.best_eval_loss) == (4, 1.0)
    with pytest.raises(ConfigError, match=ended_early or "all its 8 steps are done"):
        check_unfinished(tmp_path)
