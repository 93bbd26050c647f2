"""A disk that is full or read-only: said once, waited for, and nothing old is lost.

The disks are real ones where the system lets us mount them, in a process of its own.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from exo_train.errors import ConfigError, InterruptedRunError
from exo_train.train import durable
from exo_train.train.disk_pause import DiskPause
from exo_train.train.durable import DiskError, disk_errors

ROOT = Path(__file__).parents[3]

# What the process on its own mounts has at hand. A megabyte is left free beside each checkpoint.
PRELUDE = """
import os, shutil, subprocess, sys
from pathlib import Path
import numpy as np
from exo_train.errors import ConfigError, InterruptedRunError
from exo_train.train.checkpoint import newest_checkpoint
from exo_train.train.disk_pause import DiskPause
from exo_train.train.saving import Saver, check_space

run_dir = Path(sys.argv[1]) / "dônnées é 数据"
notes, now_s = [], [0.0]
adapter = {"a": np.ones(100_000, np.float32)}
optimizer = {"step": np.array(1, np.int64)}

def mount(*options):
    subprocess.run(["mount", *options, sys.argv[1]], check=True)

def disk_pause(sleep, wants_stop=lambda: False):
    def slept(seconds):
        now_s[0] += seconds
        assert now_s[0] < 3600, notes
        sleep()
    return DiskPause(
        device="den-pc", say=notes.append, wants_stop=wants_stop, clock_s=lambda: now_s[0],
        sleep=slept,
    )

def newest_step():
    return newest_checkpoint(run_dir).step

def save(step, pause):
    Saver(run_dir, keep=9, pause=pause).save(step, adapter, optimizer, {})

def names():
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())

def fill():
    (run_dir / "film.mkv").write_bytes(b"x" * (shutil.disk_usage(run_dir).free - 1_300_000))

mount("-t", "tmpfs", "-o", "size=4m", "tmpfs")
run_dir.mkdir()
save(20, disk_pause(lambda: None))
"""


def run_on_own_disk(place: Path, script: str) -> str:
    """Run in a process that may mount disks nobody else sees."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("mounting a disk needs root on Linux")
    if subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("this system allows no mounts of its own")
    place.mkdir()
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", PRELUDE + script, str(place)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_full_disk_is_waited_for_and_said_once(tmp_path: Path) -> None:
    out = run_on_own_disk(
        tmp_path / "disk",
        """
fill()
looks = []
def user_wakes_up():
    looks.append((newest_step(), names()))
    if now_s[0] > 60:
        (run_dir / "film.mkv").unlink(missing_ok=True)
save(40, disk_pause(user_wakes_up))
assert set(map(str, looks)) == {str((20, ["step-000020"]))}, looks
assert names() == ["step-000020", "step-000040"]
assert newest_step() == 40
print(*notes, sep="\\n")
""",
    )
    first, second = out.splitlines()
    assert first.startswith(
        "the disk of den-pc is full: the checkpoint of step 40 needs 1.5 MB in "
    )
    assert first.endswith("dônnées é 数据, 1.3 MB free; the run waits")
    assert second == "the disk of den-pc takes files again after 65 s; the run goes on"


def test_a_read_only_disk_is_waited_for(tmp_path: Path) -> None:
    out = run_on_own_disk(
        tmp_path / "disk",
        """
mount("-o", "remount,ro")
def user_wakes_up():
    assert newest_step() == 20
    if now_s[0] > 7:
        mount("-o", "remount,rw")
save(40, disk_pause(user_wakes_up))
assert newest_step() == 40
print(*notes, sep="\\n")
""",
    )
    assert "the disk of den-pc is read-only for this user: the checkpoint of step 40" in out
    assert len(out.splitlines()) == 2


def test_who_stops_the_waiting_run_has_the_last_checkpoint(tmp_path: Path) -> None:
    out = run_on_own_disk(
        tmp_path / "disk",
        """
fill()
try:
    save(40, disk_pause(lambda: None, wants_stop=lambda: now_s[0] > 2))
except InterruptedRunError as error:
    print(error)
assert now_s[0] < 3, "the wish is heard before the next try"
assert names() == ["step-000020"]
assert newest_step() == 20
""",
    )
    assert "stopped while the disk of den-pc is full: the checkpoint of step 40 needs" in out
    assert "what is saved is the state of the last checkpoint" in out


def test_what_a_crash_left_is_deleted_before_space_is_asked_for(tmp_path: Path) -> None:
    run_on_own_disk(
        tmp_path / "disk",
        """
left = run_dir / "checkpoints" / ".step-000030.tmp"
left.mkdir()
(left / "adapter.safetensors").write_bytes(b"x" * 2_400_000)
save(40, disk_pause(lambda: None))
assert notes == []
assert names() == ["step-000020", "step-000040"]
""",
    )


def test_a_disk_too_small_for_the_run_is_said_before_it(tmp_path: Path) -> None:
    out = run_on_own_disk(
        tmp_path / "disk",
        """
check_space(run_dir, checkpoint_bytes=500_000, num_checkpoints=1)
try:
    check_space(run_dir, checkpoint_bytes=500_000, num_checkpoints=5)
except ConfigError as error:
    print(error)
""",
    )
    assert "room for 5 checkpoints and the adapters needs 4.0 MB in " in out
    assert "MB free; free some space or choose another --run-dir" in out


class FailingDisk:
    """Lets the given calls of `os.fsync`, which every file needs, fail; then it works again."""

    def __init__(self, code: int, num_failures: int) -> None:
        self.code, self.left = code, num_failures

    def fsync(self, descriptor: int) -> None:
        if self.left:
            self.left -= 1
            raise OSError(self.code, os.strerror(self.code))


def no_time_pause(notes: list[str], **changes: Callable[..., object]) -> DiskPause:
    now_s = [0.0]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    return DiskPause(
        device="den-pc", say=notes.append, clock_s=lambda: now_s[0], sleep=sleep, **changes
    )


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.ENOSPC, "is full: summary does not fit in"),
        (errno.EDQUOT, "is full: summary does not fit in"),
        (errno.EROFS, "is read-only for this user: summary cannot be written in"),
        (errno.EACCES, "is read-only for this user: summary cannot be written in"),
        (errno.EIO, "does not take summary in"),
    ],
)
def test_every_refusal_of_the_disk_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, said: str
) -> None:
    disk = FailingDisk(code, num_failures=3)
    monkeypatch.setattr(durable.os, "fsync", disk.fsync)
    notes: list[str] = []

    def write() -> str:
        with disk_errors("summary", tmp_path):
            durable.write_durable(tmp_path / "summary", b"new")
        return "written"

    assert no_time_pause(notes).pausing(write) == "written"
    assert len(notes) == 2
    assert f"the disk of den-pc {said}" in notes[0]
    assert "after 15 s" in notes[1]
    assert [path.name for path in tmp_path.iterdir()] == ["summary"]


def test_what_is_no_fault_of_the_disk_is_not_waited_for() -> None:
    def wrong() -> None:
        raise ConfigError("the state has too many bytes")

    notes: list[str] = []
    with pytest.raises(ConfigError, match="too many bytes"):
        no_time_pause(notes).pausing(wrong)
    assert notes == []


def test_an_error_of_the_disk_outside_of_a_run_is_a_sentence() -> None:
    """It may be raised anew as its own kind with more words, as the driver does."""
    again = DiskError(f"{DiskError('cannot write x')}; nothing was begun")
    assert str(again) == "cannot write x; nothing was begun"
    with pytest.raises(InterruptedRunError, match="cannot write x"):
        no_time_pause([], wants_stop=lambda: True).pausing(lambda: raise_it(again))


def raise_it(error: Exception) -> None:
    raise error


def test_a_line_that_did_not_fit_is_not_there_twice(tmp_path: Path) -> None:
    """The disk takes half a line of metrics.jsonl; tried again, all lines are whole."""
    out = run_on_own_disk(
        tmp_path / "disk",
        """
sys.path.insert(0, "tests/unit/train")
from test_rundir import make_step
from exo_train.train.rundir import RunDir
run = RunDir(run_dir)
run.append_metrics(make_step(1))
film = run_dir / "film.mkv"
with film.open("wb", buffering=0) as file:  # to the last byte
    try:
        while file.write(b"x" * 4096):
            pass
    except OSError:
        pass
def user_wakes_up():
    film.unlink(missing_ok=True)
long_name = "x" * 5000  # longer than what is left of the file's last page
disk_pause(user_wakes_up).pausing(lambda: run.append_metrics(make_step(2, long_name)))
run.append_metrics(make_step(3))
print([row["step"] for row in run.read_metrics()], len(notes))
""",
    )
    assert out.strip() == "[1, 2, 3] 2"
