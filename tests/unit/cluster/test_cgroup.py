"""Memory limits of containers and services, from files laid out as the kernel does."""

from __future__ import annotations

from pathlib import Path

import pytest

from exo_train.cluster.cgroup import MemoryLimit, read_memory_limit

GB = 10**9


def lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_version_2_takes_the_tightest_limit_up_the_tree(tmp_path: Path) -> None:
    root = lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/job.scope\n",
            "sys/fs/cgroup/user.slice/memory.max": f"{4 * GB}\n",
            "sys/fs/cgroup/user.slice/memory.current": f"{3 * GB}\n",
            "sys/fs/cgroup/user.slice/job.scope/memory.max": f"{6 * GB}\n",
            "sys/fs/cgroup/user.slice/job.scope/memory.current": f"{1 * GB}\n",
        },
    )
    assert read_memory_limit(root) == MemoryLimit(limit_bytes=4 * GB, free_bytes=1 * GB)


def test_file_cache_that_can_be_dropped_is_free(tmp_path: Path) -> None:
    root = lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{4 * GB}\n",
            "sys/fs/cgroup/memory.current": f"{3 * GB}\n",
            "sys/fs/cgroup/memory.stat": f"anon 5\nfile 9\ninactive_file {2 * GB}\n",
        },
    )
    assert read_memory_limit(root) == MemoryLimit(limit_bytes=4 * GB, free_bytes=3 * GB)


def test_version_1_in_a_container_that_sees_its_hosts_path(tmp_path: Path) -> None:
    root = lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "9:cpu,cpuacct:/docker/ab12\n4:memory:/docker/ab12\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GB}\n",
            "sys/fs/cgroup/memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {GB // 2}\n",
        },
    )
    assert read_memory_limit(root) == MemoryLimit(limit_bytes=2 * GB, free_bytes=3 * GB // 2)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/\n"},
        {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"},
        {
            "proc/self/cgroup": "4:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
        {"proc/self/cgroup": "garbage\n\n::\n", "sys/fs/cgroup/memory.max": "5\n"},
    ],
    ids=["no files", "root group", "max", "v1 unlimited", "garbage"],
)
def test_no_limit(tmp_path: Path, files: dict[str, str]) -> None:
    assert read_memory_limit(lay_out(tmp_path, files)) is None


def test_a_path_cannot_lead_out_of_the_mount(tmp_path: Path) -> None:
    root = lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../../../x\n",
            "x/memory.max": "5\n",
            "sys/fs/cgroup/cgroup.procs": "",
        },
    )
    assert read_memory_limit(root) is None


def test_more_used_than_allowed_leaves_nothing(tmp_path: Path) -> None:
    root = lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "100\n",
            "sys/fs/cgroup/memory.current": "150\n",
        },
    )
    assert read_memory_limit(root) == MemoryLimit(limit_bytes=100, free_bytes=0)


def limit_of(root: Path, folder: str, files: dict[str, int | str]) -> MemoryLimit | None:
    version = "4:memory:/a/b\n" if folder.startswith("memory") else "0::/a/b\n"
    named = {f"sys/fs/cgroup/{folder}/{name}": f"{text}\n" for name, text in files.items()}
    return read_memory_limit(lay_out(root, {"proc/self/cgroup": version, **named}))


def test_above_memory_high_everything_waits_so_it_is_a_limit(tmp_path: Path) -> None:
    files: dict[str, int | str] = {"memory.max": "max", "memory.high": 3 * GB, "memory.current": GB}
    assert limit_of(tmp_path, "a/b", files) == MemoryLimit(3 * GB, 2 * GB)
    files |= {"memory.max": 2 * GB}
    assert limit_of(tmp_path, "a/b", files) == MemoryLimit(2 * GB, GB)


def test_swap_of_version_2_is_no_memory(tmp_path: Path) -> None:
    files: dict[str, int | str] = {
        "memory.max": 2 * GB,
        "memory.current": GB,
        "memory.swap.max": 8 * GB,
        "memory.swap.current": 0,
    }
    assert limit_of(tmp_path, "a/b", files) == MemoryLimit(2 * GB, GB)


def test_version_1_counts_memory_and_swap_together_too(tmp_path: Path) -> None:
    """Half a gigabyte lies in swap: what is free of memory may not be taken any more."""
    files: dict[str, int | str] = {
        "memory.limit_in_bytes": 2 * GB,
        "memory.usage_in_bytes": GB,
        "memory.memsw.limit_in_bytes": 2 * GB,
        "memory.memsw.usage_in_bytes": 3 * GB // 2,
    }
    assert limit_of(tmp_path, "memory/a/b", files) == MemoryLimit(2 * GB, GB // 2)


def test_version_1_tells_of_a_parents_limit_that_the_mount_hides(tmp_path: Path) -> None:
    files: dict[str, int | str] = {
        "memory.limit_in_bytes": 9223372036854771712,
        "memory.usage_in_bytes": GB,
        "memory.stat": f"cache 5\nhierarchical_memory_limit {3 * GB}\ntotal_inactive_file 0",
    }
    assert limit_of(tmp_path, "memory", files) == MemoryLimit(3 * GB, 2 * GB)


@pytest.mark.parametrize("folder", ["a", "memory/a"], ids=["version 2", "version 1"])
def test_each_group_up_the_tree_counts_with_its_own_usage(tmp_path: Path, folder: str) -> None:
    """The inner group has room below its limit, the outer one has less left."""
    limit, usage = ("memory.max", "memory.current")
    if folder.startswith("memory"):
        limit, usage = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    outer: dict[str, int | str] = {limit: 8 * GB, usage: 7 * GB}
    inner: dict[str, int | str] = {limit: 4 * GB, usage: GB}
    limit_of(tmp_path, folder, outer)
    assert limit_of(tmp_path, f"{folder}/b", inner) == MemoryLimit(4 * GB, GB)


def test_what_cannot_be_read_limits_nothing(tmp_path: Path) -> None:
    """Directories in place of files: reading fails, whoever asks."""
    root = lay_out(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max/x": ""})
    assert read_memory_limit(root) is None
    (tmp_path / "sys/fs/cgroup/memory.high").write_text(f"{3 * GB}\n")
    (tmp_path / "sys/fs/cgroup/memory.current").mkdir()
    assert read_memory_limit(root) == MemoryLimit(limit_bytes=3 * GB, free_bytes=3 * GB)
