"""Writing files so that a crash, a full disk or a power cut never leaves half of one.

Owns temp + fsync + rename and the words for what the disk refuses. Must not know file formats.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from exo_train.errors import ConfigError

_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
_FORBIDDEN = {errno.EROFS, errno.EACCES, errno.EPERM}


def write_durable(path: Path, data: bytes) -> None:
    """Replace `path` by `data`; after a crash it holds the old bytes or the new ones."""
    temp = path.with_name(f".{path.name}.tmp")
    write_synced(temp, data)
    os.replace(temp, path)
    sync_directory(path.parent)


def write_synced(path: Path, data: bytes) -> None:
    """Write and flush to the device; the caller renames."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


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
        raise ConfigError(f"cannot write {what} in {place}: {_reason(error, place)}") from None


def require_free_bytes(directory: Path, *, needed_bytes: int, what: str) -> None:
    """Refuse before the run when the disk that holds `directory` has too little space."""
    with disk_errors(what, directory):
        free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        raise ConfigError(
            f"{what} need {_mb(needed_bytes)} in {directory}, the disk has {_mb(free_bytes)} free; "
            "free some space or choose another --run-dir"
        )


def _reason(error: OSError, place: Path) -> str:
    if error.errno in _FULL:
        return f"the disk is full ({_free(place)} free); free some space or use another --run-dir"
    if error.errno in _FORBIDDEN:
        return "the folder is read-only for this user; choose another --run-dir"
    return f"{error.strerror or error}; choose another --run-dir"


def _free(place: Path) -> str:
    try:
        return _mb(shutil.disk_usage(place).free)
    except OSError:
        return "an unknown amount"


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
