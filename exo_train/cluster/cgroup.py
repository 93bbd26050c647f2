"""The memory limit that a container or a service puts on this process (Linux control groups).

Owns the reading of both layouts. Must not decide how much memory to use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Version 1 writes "no limit" as a number near 2^63, version 2 as "max".
_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    limit_bytes: int
    free_bytes: int  # what the group may still take; file cache that can be dropped counts as free


@dataclass(frozen=True, slots=True)
class _Layout:
    """File names of one version, as in the kernel's cgroup-v1/memory and cgroup-v2 documents."""

    limit: str
    usage: str
    droppable: str  # the line of memory.stat


_V1 = _Layout("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Layout("memory.max", "memory.current", "inactive_file")


def read_memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """Give the tightest limit from this process' group up; None where there is none.

    `root` is the directory that holds proc and sys.
    """
    limits = [limit for group, layout in _groups(root) if (limit := _read(group, layout))]
    if not limits:
        return None
    return MemoryLimit(min(m.limit_bytes for m in limits), min(m.free_bytes for m in limits))


def _groups(root: Path) -> Iterator[tuple[Path, _Layout]]:
    """Walk this process' groups and their parents.

    A container often sees a path of its host there; then only the mount's own directory exists.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        mount, layout = root / "sys/fs/cgroup", _V2
        if "memory" in controllers.split(","):
            mount, layout = mount / "memory", _V1
        elif number != "0":
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:depth]), layout


def _read(group: Path, layout: _Layout) -> MemoryLimit | None:
    limit = _text(group / layout.limit).strip()
    if not limit.isdecimal() or int(limit) >= _UNLIMITED_BYTES:
        return None
    usage = _text(group / layout.usage).strip()
    used_bytes = int(usage) if usage.isdecimal() else 0
    for line in _text(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == layout.droppable and value.isdecimal():
            used_bytes -= int(value)
    return MemoryLimit(int(limit), max(0, int(limit) - max(0, used_bytes)))


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
