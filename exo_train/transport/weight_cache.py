"""Encoded tensors on this device's disk, found by their SHA-256.

Owns the folder `<first 2 digits>/<digest>`, the checks of its files and its cap. Must not fetch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from exo_train.errors import ConfigError
from exo_train.wire.tensor import Bytes

MAX_CACHE_BYTES = 64 << 30
# A crash leaves its unfinished file behind; a live fetch is never this old.
MAX_PART_AGE_S = 24 * 3600.0
PART_SUFFIX = ".part"


@dataclass(frozen=True, slots=True, order=True)
class _File:
    used_s: float
    path: Path
    num_bytes: int


class WeightCache:
    """Several processes may share the folder: files appear whole or not at all."""

    def __init__(self, folder: Path, *, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._total_bytes: int | None = None
        self._lock = threading.Lock()

    def has(self, sha256: str, num_bytes: int) -> bool:
        """Say whether a file of the right size is there; `read` checks its bytes."""
        try:
            return self._path(sha256).stat().st_size == num_bytes
        except OSError:
            return False

    def read(self, sha256: str, num_bytes: int) -> bytes | None:
        """Give verified bytes; None, and the file removed, when it is missing or damaged."""
        path = self._path(sha256)
        try:
            data = path.read_bytes() if self.has(sha256, num_bytes) else b""
        except OSError:
            data = b""
        if len(data) != num_bytes or hashlib.sha256(data).hexdigest() != sha256:
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # eviction takes what was unused longest
        return data

    def pending(self, sha256: str) -> PendingEntry:
        """Open a new entry to write; it counts only once committed."""
        return PendingEntry(self, self._path(sha256), sha256)

    def added(self, path: Path, num_bytes: int) -> None:
        """Count a new file, and remove those unused longest while all are above the cap."""
        with self._lock:
            if self._total_bytes is not None:
                self._total_bytes += num_bytes
            if self._total_bytes is None or self._total_bytes > self._max_bytes:
                self._total_bytes = self._evict(keep=path)

    def _evict(self, *, keep: Path) -> int:
        files = sorted(self._files())
        total_bytes = sum(file.num_bytes for file in files)
        for file in files:
            unfinished = file.path.suffix == PART_SUFFIX
            stale = unfinished and time.time() - file.used_s > MAX_PART_AGE_S
            above = total_bytes > self._max_bytes and not unfinished and file.path != keep
            if stale or above:
                # Windows keeps a file that another process reads; the next round gets it.
                with contextlib.suppress(OSError):
                    file.path.unlink()
                    total_bytes -= file.num_bytes
        return total_bytes

    def _files(self) -> Iterator[_File]:
        for path in self._folder.glob("??/*"):
            with contextlib.suppress(OSError):
                status = path.stat()
                yield _File(status.st_mtime, path, status.st_size)

    def _path(self, sha256: str) -> Path:
        return self._folder / sha256[:2] / sha256


class PendingEntry:
    """A file being written beside its final place; left without `commit`, it is removed."""

    def __init__(self, cache: WeightCache, path: Path, sha256: str) -> None:
        self._cache = cache
        self._path = path
        self._sha256 = sha256
        self._hash = hashlib.sha256()
        self._num_bytes = 0
        self._part = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART_SUFFIX}")
        with self._writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._part.open("xb")

    def __enter__(self) -> PendingEntry:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        with contextlib.suppress(OSError):
            self._part.unlink()

    def write(self, data: Bytes) -> None:
        with self._writing():
            self._file.write(data)
        self._hash.update(data)
        self._num_bytes += len(data)

    def commit(self) -> bool:
        """Put the file in its place; False when its bytes are not the digest's."""
        if self._hash.hexdigest() != self._sha256:
            return False
        with self._writing():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            try:
                self._part.replace(self._path)
            except PermissionError:
                # Windows: another process reads the same entry, which is just as good.
                if not self._path.exists():
                    raise
        self._cache.added(self._path, self._num_bytes)
        return True

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"Cannot write the weight cache {self._path.parent}: {error.strerror or error}; "
                "free some space or choose another folder"
            ) from None
