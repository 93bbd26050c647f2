"""What the systems say of their memory, in psutil's shapes, and what is offered of it."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import pytest

from exo_train.cluster.cgroup import MemoryLimit, read_memory_limit
from exo_train.cluster.hardware import Processor, free_now_bytes, metal_processor, offer
from exo_train.cluster.system_memory import Memory, system_memory, within

GIB = 1 << 30
KIB = 1 << 10
PAGE = 16 * KIB  # of Apple Silicon

Mac = namedtuple("Mac", "total available percent used free active inactive wired")
Linux = namedtuple(
    "Linux",
    "total available percent used free active inactive buffers cached shared slab",
)
Windows = namedtuple("Windows", "total available percent used free")

# `vm_stat` of a Mac with 16 GB under load: free 4312, inactive 231845, wired 188410 pages; psutil
# counts free and inactive ones as available.
MAC_16_GB = Mac(
    16 * GIB, (4312 + 231845) * PAGE, 77.5, 9 * GIB, 4312 * PAGE, 240000 * PAGE, 231845 * PAGE,
    188410 * PAGE,
)  # fmt: skip
MAC_192_GB = Mac(
    192 * GIB, (9_100_000 + 1_800_000) * PAGE, 13.4, 20 * GIB, 9_100_000 * PAGE, 900_000 * PAGE,
    1_800_000 * PAGE, 500_000 * PAGE,
)  # fmt: skip
# /proc/meminfo: MemTotal 32658716 kB, MemAvailable 24113052 kB.
LINUX_32_GB = Linux(
    32658716 * KIB, 24113052 * KIB, 26.2, 8 * GIB, 9 * GIB, 5 * GIB, 13 * GIB, 1 * GIB, 14 * GIB,
    1 * GIB, 1 * GIB,
)  # fmt: skip
# WSL2 gives its machine half of the PC's memory: MemTotal 16310124 kB, MemAvailable 14902340 kB.
WSL_16_OF_32_GB = Linux(
    16310124 * KIB, 14902340 * KIB, 8.6, 1 * GIB, 12 * GIB, 1 * GIB, 2 * GIB, 0, 2 * GIB, 0, 0
)
WINDOWS_16_GB = Windows(17_099_399_168, 9_261_498_368, 45.8, 7_837_900_800, 9_261_498_368)


def memory_of(reading: Mac | Linux | Windows, limit: MemoryLimit | None = None) -> Memory:
    return within(Memory(total_bytes=reading.total, free_bytes=reading.available), limit)


def usable(memory: Memory, *, working_set: int | None = None) -> int:
    processor = (
        Processor(device="cpu", chip="chip", memory=memory, dtypes=("fp32",))
        if working_set is None
        else metal_processor(memory, chip="Apple M2 Ultra", limit_bytes=working_set)
    )
    return offer("torch", [processor], memory_bytes=None).usable_memory_bytes


@pytest.mark.parametrize(
    ("reading", "working_set", "usable_gb"),
    [
        (MAC_16_GB, 12_713_115_648, 3.40),  # other programs leave less than Metal would hold
        (MAC_192_GB, 144 * GIB, 136.07),  # Metal holds less than is free
        (MAC_192_GB, 160 * GIB, 151.18),  # the user raised iogpu.wired_limit_mb
        (LINUX_32_GB, None, 21.73),
        (WSL_16_OF_32_GB, None, 13.43),
        (WINDOWS_16_GB, None, 8.15),
    ],
    ids=["mac 16", "mac 192", "mac 192 raised", "linux", "wsl", "windows"],
)
def test_usable_memory(
    reading: Mac | Linux | Windows, working_set: int | None, usable_gb: float
) -> None:
    found = usable(memory_of(reading), working_set=working_set)
    assert found / 1e9 == pytest.approx(usable_gb, abs=0.01)


def test_a_container_has_what_its_limit_leaves(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/docker/ab12\n",
        "sys/fs/cgroup/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{2 * GIB}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    memory = memory_of(LINUX_32_GB, read_memory_limit(tmp_path))
    assert memory == Memory(total_bytes=8 * GIB, free_bytes=6 * GIB)
    assert usable(memory) == int(6 * GIB * 0.88)


def test_a_limit_above_the_machines_memory_changes_nothing() -> None:
    wide = MemoryLimit(limit_bytes=64 * GIB, free_bytes=60 * GIB)
    assert memory_of(LINUX_32_GB, wide) == memory_of(LINUX_32_GB)


def test_what_this_process_holds_already_counts_as_free_to_its_stage() -> None:
    held = bytearray(256 << 20)
    held[::4096] = b"x" * len(held[::4096])
    before = system_memory().free_bytes
    free = free_now_bytes("cpu")
    assert free is not None
    assert free > before + (200 << 20)
    assert len(held)


def test_nobody_knows_what_is_free_on_a_gpu_that_is_gone() -> None:
    assert free_now_bytes("cuda:15") is None
