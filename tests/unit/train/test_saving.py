"""Saving: what stays, what is copied first, what is said, and when it is due."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from exo_train.errors import ConfigError, PeerError
from exo_train.train.checkpoint import (
    expected_checkpoint_bytes,
    load_checkpoint,
    newest_checkpoint,
)
from exo_train.train.disk_pause import DiskPause
from exo_train.train.saving import Saver, SaveTimer, check_space

ADAPTER = {"model.layers.0.q_proj.lora_a": np.ones((4, 2), np.float32)}
OPTIMIZER = {"step": np.array(1, np.int64)}


class Said:
    """Collects notes; a disk that has to be waited for fails the test."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def pause(self) -> DiskPause:
        def never(seconds: float) -> None:
            raise AssertionError(self.notes)

        return DiskPause(device="den-pc", say=self.notes.append, sleep=never)


def steps_in(run_dir: Path) -> list[int]:
    """Give the numbers of the folders there, whatever the product makes of them."""
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*"))


def save_all(saver: Saver, metrics: dict[int, float | None]) -> None:
    for step, metric in metrics.items():
        saver.save(step, ADAPTER, OPTIMIZER, {"tokens": step}, metric)


def test_newest_and_best_and_last_stay(tmp_path: Path) -> None:
    """Twelve saves, two digits to seven; the best is neither first nor last."""
    steps = [20, 40, 60, 80, 100, 120, 9980, 10_000, 99_980, 100_000, 999_980, 1_000_000]
    losses = [3.0, 2.9, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0, 2.1, 2.2, 2.3, 2.4]
    saver = Saver(tmp_path, keep=3, pause=Said().pause())
    save_all(saver, dict(zip(steps, losses, strict=True)))
    assert steps_in(tmp_path) == [60, 100_000, 999_980, 1_000_000]
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    assert newest.step == 1_000_000
    assert newest.state == {"tokens": 1_000_000, "best": {"step": 60, "metric": 1.5}}


def test_the_best_so_far_survives_a_resume(tmp_path: Path) -> None:
    save_all(Saver(tmp_path, keep=1, pause=Said().pause()), {20: 1.0, 40: 2.0, 60: None})
    assert steps_in(tmp_path) == [20, 60]
    resumed = newest_checkpoint(tmp_path)
    saver = Saver(tmp_path, keep=1, pause=Said().pause(), resumed=resumed)
    save_all(saver, {80: 1.1, 100: math.nan})
    assert steps_in(tmp_path) == [20, 100], "1.1 is no better than 1.0"
    save_all(saver, {120: 0.9, 140: 5.0})
    assert steps_in(tmp_path) == [120, 140], "what was best once is not kept for ever"


def test_a_run_that_measures_nothing_keeps_the_newest(tmp_path: Path) -> None:
    save_all(Saver(tmp_path, keep=2, pause=Said().pause()), dict.fromkeys((20, 40, 60)))
    assert steps_in(tmp_path) == [40, 60]


def test_a_checkpoint_counts_only_when_its_copy_is_confirmed(tmp_path: Path) -> None:
    seen = []

    def replicate(folder: Path, step: int, keep_steps: Sequence[int]) -> None:
        # All is on the disk and proven, but does not count yet; what was there counts still.
        assert load_checkpoint(folder).step == step
        seen.append((step, list(keep_steps), steps_in(tmp_path)))

    saver = Saver(tmp_path, keep=2, pause=Said().pause(), replicate=replicate)
    save_all(saver, {20: 1.0, 40: 2.0, 60: 3.0, 80: 4.0})
    assert seen == [
        (20, [], []),
        (40, [20], [20]),
        (60, [20, 40], [20, 40]),
        (80, [20, 60], [20, 40, 60]),
    ]
    assert steps_in(tmp_path) == [20, 60, 80]


def test_without_another_device_it_is_saved_all_the_same_and_said_once(tmp_path: Path) -> None:
    reasons = ["attic is away"] * 2 + ["disk: 1.5 MB free", "disk: 0.9 MB free", "attic is away"]

    def replicate(folder: Path, step: int, keep_steps: Sequence[int]) -> None:
        raise PeerError(reasons[step // 20 - 1])

    said = Said()
    saver = Saver(tmp_path, keep=9, pause=said.pause(), replicate=replicate)
    save_all(saver, dict.fromkeys((20, 40, 60, 80, 100)))
    assert steps_in(tmp_path) == [20, 40, 60, 80, 100]
    assert said.notes == [
        "the checkpoints are on den-pc only: attic is away",
        "the checkpoints are on den-pc only: disk: 1.5 MB free",
    ]


@pytest.mark.parametrize("dies_in", ["replicate", "publish"])
def test_a_crash_before_publication_leaves_the_old_one_the_newest(
    tmp_path: Path, dies_in: str
) -> None:
    """The process ends itself when all files of step 40 are written, but it is not published."""
    save_all(Saver(tmp_path, keep=3, pause=Said().pause()), {20: None})
    script = f"""
import os, sys
from pathlib import Path
import numpy as np
from exo_train.train import saving
from exo_train.train.disk_pause import DiskPause
def dies(*arguments):
    os._exit(9)
if {dies_in!r} == "publish":
    saving.publish_checkpoint = dies
pause = DiskPause(device="den-pc", say=print)
replicate = dies if {dies_in!r} == "replicate" else None
saver = saving.Saver(Path(sys.argv[1]), keep=3, pause=pause, replicate=replicate)
saver.save(40, {{"a": np.ones(3, np.float32)}}, {{"step": np.array(1)}}, {{}})
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == 9
    left = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert left == {"step-000020", ".step-000040.tmp"}
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    assert newest.step == 20
    # Another step's save cleans up, so that crashes do not fill the disk.
    save_all(Saver(tmp_path, keep=3, pause=Said().pause()), {30: None})
    left = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert left == {"step-000020", "step-000030"}


def test_a_crash_while_replacing_a_step_loses_neither(tmp_path: Path) -> None:
    """Between the two renames the old one is aside and the new one not yet there."""
    save_all(Saver(tmp_path, keep=3, pause=Said().pause()), {20: None, 40: None})
    folder = tmp_path / "checkpoints"
    (folder / "step-000040").rename(folder / ".step-000040.old")
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    assert newest.step == 40
    save_all(Saver(tmp_path, keep=3, pause=Said().pause()), {40: None})
    assert {path.name for path in folder.iterdir()} == {"step-000020", "step-000040"}


@pytest.mark.parametrize(
    ("every_steps", "every_minutes", "wanted"),
    [
        (4, 0, [4, 8, 12]),
        (0, 0, []),
        (0, 5, [5, 10]),
        (4, 3, [3, 4, 7, 8, 11, 12]),  # the minutes begin anew after each save
    ],
)
def test_saves_are_due_by_steps_or_minutes(
    every_steps: int, every_minutes: float, wanted: list[int]
) -> None:
    """Each of 12 steps takes a minute."""
    now_s = 1000.0
    timer = SaveTimer(every_steps=every_steps, every_minutes=every_minutes, clock_s=lambda: now_s)
    saved = []
    for step in range(1, 13):
        now_s += 60
        if timer.is_due(step):
            saved.append(step)
            timer.saved()
    assert saved == wanted


def test_too_little_space_for_a_run_is_known_before_it(tmp_path: Path) -> None:
    place = tmp_path / "not made yet" / "run"
    check_space(place, checkpoint_bytes=1000, num_checkpoints=5)
    needs = (
        r"room for 5 checkpoints and the adapters needs 6000000001.0 MB in .*not made yet.* free"
    )
    with pytest.raises(ConfigError, match=needs):
        check_space(place, checkpoint_bytes=10**15, num_checkpoints=5)
    assert not place.parent.exists(), "a question makes nothing"


def test_a_checkpoint_takes_no_more_than_was_expected(tmp_path: Path) -> None:
    adapter = {f"model.layers.{i}.lora_a": np.ones((64, 8), np.float32) for i in range(40)}
    moments = {
        f"{name}.{moment}": array
        for name, array in adapter.items()
        for moment in ("exp_avg", "exp_avg_sq")
    }
    saver = Saver(tmp_path, keep=1, pause=Said().pause())
    path = saver.save(20, adapter, {**moments, **OPTIMIZER}, {"losses": [[1, 2.5]] * 100})
    taken_bytes = sum(file.stat().st_size for file in path.iterdir())
    expected_bytes = expected_checkpoint_bytes(array_bytes=3 * 40 * 64 * 8 * 4, num_arrays=121)
    assert taken_bytes <= expected_bytes <= 1.5 * taken_bytes
