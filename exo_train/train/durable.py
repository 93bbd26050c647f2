"""Writing files so that a crash, a full disk or a power cut never leaves half of one.

Owns temp + fsync + rename and the words for what the disk refuses. Must not know file formats.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from exo_train.errors import ConfigError

_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
_FORBIDDEN = {errno.EROFS, errno.EACCES, errno.EPERM}


class DiskError(ConfigError):
    """A disk does not take a file; `obstacle` says why, to follow "the disk of NAME"."""

    def __init__(self, message: str, *, obstacle: str = "") -> None:
        super().__init__(message)
        self.obstacle = obstacle or f"has an obstacle: {message}"


def write_durable(path: Path, data: bytes) -> None:
    """Replace `path` by `data`; after a crash it holds the old bytes or the new ones."""
    temp = path.with_name(f".{path.name}.tmp")
    try:
        write_synced(temp, data)
        os.replace(temp, path)
    except OSError:
        with contextlib.suppress(OSError):  # what a full disk took of it is needed elsewhere
            temp.unlink()
        raise
    sync_directory(path.parent)


def write_synced(path: Path, data: bytes) -> None:
    """Write and flush to the device; the caller renames."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def append_whole(path: Path, data: bytes) -> None:
    """Add `data` and hand it to the system, all of it or nothing: it may be tried again."""
    before_bytes = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as file:
            file.write(data)
    except OSError:
        with contextlib.suppress(OSError):
            os.truncate(path, before_bytes)
        raise


def sync_directory(path: Path) -> None:
    """Flush a rename to the device where the system can (Windows cannot open directories)."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_errors(what: str, place: Path) -> Iterator[None]:
    """Turn an OSError inside into one sentence: what could not be written where, and why."""
    try:
        yield
    except OSError as error:
        raise DiskError(
            f"cannot write {what} in {place}: {_reason(error, place)}",
            obstacle=_obstacle(error, what, place),
        ) from None


def require_free_bytes(
    directory: Path,
    *,
    needed_bytes: int,
    what: str,
    remedy: str = "free some space or choose another --run-dir",
) -> None:
    """Refuse when the disk that holds `directory`, made or not, has too little space.

    Raises DiskError.
    """
    with disk_errors(what, directory):
        free_bytes = shutil.disk_usage(_existing(directory)).free
    if free_bytes < needed_bytes:
        measured = f"{what} needs {_mb(needed_bytes)} in {directory}"
        raise DiskError(
            f"{measured}, the disk has {_mb(free_bytes)} free; {remedy}",
            obstacle=f"is full: {measured}, {_mb(free_bytes)} free",
        )


def _existing(directory: Path) -> Path:
    """Give the nearest folder that is there: its disk will hold `directory`."""
    return next(path for path in (directory, *directory.absolute().parents) if path.exists())


def _reason(error: OSError, place: Path) -> str:
    if error.errno in _FULL:
        return f"the disk is full ({_free(place)} free); free some space or use another --run-dir"
    if error.errno in _FORBIDDEN:
        return "the folder is read-only for this user; choose another --run-dir"
    return f"{error.strerror or error}; choose another --run-dir"


def _obstacle(error: OSError, what: str, place: Path) -> str:
    if error.errno in _FULL:
        return f"is full: {what} does not fit in {place}, {_free(place)} free"
    if error.errno in _FORBIDDEN:
        return f"is read-only for this user: {what} cannot be written in {place}"
    return f"does not take {what} in {place} ({error.strerror or error})"


def _free(place: Path) -> str:
    try:
        return _mb(shutil.disk_usage(place).free)
    except OSError:
        return "an unknown amount"


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
