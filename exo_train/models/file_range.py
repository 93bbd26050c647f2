"""Reads of byte ranges from weight files, with errors that name file and cause.

Must not keep files open: Windows cannot replace an open file, and a read may come from any thread.
"""

from __future__ import annotations

from pathlib import Path

from exo_train.errors import ModelError

LFS_POINTER = b"version https://git-lfs"


def file_size_bytes(file: Path) -> int:
    """Give the size; refuses what is absent or only a git-LFS pointer."""
    try:
        size_bytes = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(len(LFS_POINTER))
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror or error})") from None
    if start == LFS_POINTER:
        raise ModelError(
            f"{file}: is a git-LFS pointer of {size_bytes} bytes, not the weights; "
            "run 'git lfs pull' in its directory"
        )
    return size_bytes


def read_range(file: Path, offset_bytes: int, num_bytes: int) -> bytes:
    """Read exactly `num_bytes`; a shorter file is an error."""
    try:
        with file.open("rb") as stream:
            stream.seek(offset_bytes)
            data = stream.read(num_bytes)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror or error})") from None
    if len(data) != num_bytes:
        raise ModelError(
            f"{file}: truncated, needs {offset_bytes + num_bytes} bytes, "
            f"has {offset_bytes + len(data)}; fetch it again"
        )
    return data
