"""The memory limit that a container or a service puts on this process (Linux control groups).

Owns the reading of both layouts. Must not decide how much memory to use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# Version 1 writes "no limit" as a number near 2^63, version 2 as "max".
_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    limit_bytes: int
    free_bytes: int  # what the group may still take; file cache that can be dropped counts as free


@dataclass(frozen=True, slots=True, kw_only=True)
class _Count:
    """Files of one count of memory: what may be taken, what is; and a line of memory.stat.

    `hierarchical` is the tightest limit of this group and those above, which a container's own
    mount does not show.
    """

    limits: tuple[str, ...]
    usage: str
    hierarchical: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """File names of one version, as in the kernel's cgroup-v1/memory and cgroup-v2 documents."""

    counts: tuple[_Count, ...]
    droppable: str  # the line of memory.stat


_V1 = _Layout(
    counts=(
        _Count(
            limits=("memory.limit_in_bytes",),
            usage="memory.usage_in_bytes",
            hierarchical="hierarchical_memory_limit",
        ),
        # Memory and swap together; only there when the kernel accounts for swap.
        _Count(
            limits=("memory.memsw.limit_in_bytes",),
            usage="memory.memsw.usage_in_bytes",
            hierarchical="hierarchical_memsw_limit",
        ),
    ),
    droppable="total_inactive_file",
)
# Above memory.high nothing is killed, but each allocation waits until something was swapped out.
# Swap has a limit of its own (memory.swap.max), and is no memory to plan with.
_V2 = _Layout(
    counts=(_Count(limits=("memory.max", "memory.high"), usage="memory.current"),),
    droppable="inactive_file",
)


def read_memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """Give the tightest limit from this process' group up; None where there is none.

    `root` is the directory that holds proc and sys.
    """
    limits = [limit for group, layout in _groups(root) if (limit := _read(group, layout))]
    return _tightest(limits)


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
    stat = dict(line.partition(" ")[::2] for line in _text(group / "memory.stat").splitlines())
    droppable_bytes = _number(stat.get(layout.droppable, "")) or 0
    found = []
    for count in layout.counts:
        texts = [*(_text(group / name) for name in count.limits), stat.get(count.hierarchical, "")]
        limits_bytes = [limit for text in texts if (limit := _number(text)) is not None]
        limit_bytes = min(limits_bytes, default=_UNLIMITED_BYTES)
        if limit_bytes < _UNLIMITED_BYTES:
            used_bytes = (_number(_text(group / count.usage)) or 0) - droppable_bytes
            found.append(MemoryLimit(limit_bytes, max(0, limit_bytes - max(0, used_bytes))))
    return _tightest(found)


def _tightest(limits: Sequence[MemoryLimit]) -> MemoryLimit | None:
    if not limits:
        return None
    return MemoryLimit(min(m.limit_bytes for m in limits), min(m.free_bytes for m in limits))


def _number(text: str) -> int | None:
    """Read a count of bytes; None for "max", for what is missing or cannot be read."""
    text = text.strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
