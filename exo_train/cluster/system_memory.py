"""How much memory a process can take here, and how much of it is offered.

Owns the reserve, and what the system and a container's limits leave. Must not know of GPUs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import psutil

from exo_train.cluster.cgroup import MemoryLimit, read_memory_limit

# Of what is free, kept for the system, other programs and the frameworks' own needs.
RESERVE_FRACTION = 0.12


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What there is, and what can be taken now without swapping."""

    total_bytes: int
    free_bytes: int


def system_memory() -> Memory:
    """Ask the system; swap is not memory, and a container's limit counts.

    psutil's `available` is what each system means by it: MemAvailable on Linux (and in WSL's
    machine, which has a share of Windows' memory), free and inactive pages on macOS, ullAvailPhys
    on Windows.
    """
    now = psutil.virtual_memory()
    limit = read_memory_limit() if sys.platform == "linux" else None
    return within(Memory(total_bytes=now.total, free_bytes=now.available), limit)


def within(memory: Memory, limit: MemoryLimit | None) -> Memory:
    """Give what a control group leaves of the machine's memory."""
    if limit is None:
        return memory
    return Memory(
        total_bytes=min(memory.total_bytes, limit.limit_bytes),
        free_bytes=min(memory.free_bytes, limit.free_bytes),
    )


def less_reserve(free_bytes: int) -> int:
    return int(free_bytes * (1 - RESERVE_FRACTION))
