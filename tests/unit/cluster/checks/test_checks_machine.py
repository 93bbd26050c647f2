"""Disk, memory, open files, libraries, backends and proxies, on facts of three systems."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from exo_train.cluster.checks.finding import Finding, exit_code
from exo_train.cluster.checks.machine import (
    GB,
    DiskFacts,
    MemoryFacts,
    OpenFilesFacts,
    check_disk,
    check_memory,
    check_open_files,
)
from exo_train.cluster.checks.software import (
    BackendFacts,
    LibraryFacts,
    check_backend,
    check_libraries,
    check_proxy,
    check_python,
    satisfies,
)


def verdicts(findings: Sequence[Finding]) -> list[str]:
    return [finding.verdict for finding in findings]


@pytest.mark.parametrize(
    ("free_gb", "verdict"), [(0.99, "wrong"), (1.0, "note"), (9.9, "note"), (10.0, "ok")]
)
def test_free_space(free_gb: float, verdict: str) -> None:
    [finding] = check_disk(DiskFacts(home="/home/x/.local/exo", free_bytes=int(free_gb * GB)))
    assert finding.verdict == verdict
    assert f"{free_gb:.1f} GB" in finding.said
    assert bool(finding.fix) == (verdict != "ok")


def test_a_home_that_cannot_be_written_is_wrong_whatever_is_free() -> None:
    facts = DiskFacts(home="/mnt/x", free_bytes=900 * GB, write_error="Read-only file system")
    [finding] = check_disk(facts)
    assert finding.verdict == "wrong"
    assert "/mnt/x" in finding.said
    assert "Read-only file system" in finding.said
    assert exit_code([finding]) == 2
    assert verdicts(check_disk(DiskFacts(home="/mnt/x", free_bytes=None))) == ["unknown"]


@pytest.mark.parametrize(
    ("free_gb", "verdict"), [(0.4, "wrong"), (0.5, "note"), (1.9, "note"), (2.0, "ok")]
)
def test_free_memory(free_gb: float, verdict: str) -> None:
    [finding] = check_memory(MemoryFacts(total_bytes=16 * GB, available_bytes=int(free_gb * GB)))
    assert finding.verdict == verdict
    assert exit_code([finding]) == (4 if verdict == "wrong" else 0)


def test_a_containers_limit_is_told_and_counts() -> None:
    facts = MemoryFacts(
        total_bytes=23 * GB,
        available_bytes=20 * GB,
        limit_bytes=1 * GB,
        limit_free_bytes=GB // 4,
    )
    limit, free = check_memory(facts)
    assert limit.verdict == "note"
    assert "1.0 GB of this device's 23.0 GB" in limit.said
    assert free.verdict == "wrong"
    assert "0.2 GB of" in free.said
    no_limit = MemoryFacts(
        total_bytes=23 * GB, available_bytes=20 * GB, limit_bytes=64 * GB, limit_free_bytes=0
    )
    assert verdicts(check_memory(no_limit)) == ["ok"], "a limit above all there is limits nothing"


def test_memory_pressure() -> None:
    def judge(**given: float | int) -> list[str]:
        facts = MemoryFacts(total_bytes=16 * GB, available_bytes=8 * GB, **given)  # type: ignore[arg-type]
        return verdicts(check_memory(facts))

    assert judge(pressure_percent=9.9) == ["ok"]
    assert judge(pressure_percent=12.0) == ["ok", "note"]
    assert judge(macos_pressure=1) == ["ok"]
    assert judge(macos_pressure=2) == ["ok", "note"]
    assert judge(macos_pressure=4) == ["ok", "note"]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (OpenFilesFacts(limit=None), []),
        (OpenFilesFacts(limit=256), ["note"]),
        (OpenFilesFacts(limit=1024, open_by_agent=90), ["ok"]),
        (OpenFilesFacts(limit=1024, open_by_agent=820), ["wrong"]),
    ],
)
def test_open_files(facts: OpenFilesFacts, expected: list[str]) -> None:
    found = check_open_files(facts)
    assert verdicts(found) == expected
    if expected and expected != ["ok"]:
        assert "ulimit -n 4096" in found[0].fix


@pytest.mark.parametrize(
    ("version", "specifier", "holds"),
    [
        ("6.33.6", ">=6.31.1,<8", True),
        ("8.0.0", ">=6.31.1,<8", False),
        ("7.9", ">=6.31.1,<8", True),
        ("6.31", ">=6.31.1,<8", False),
        ("0.149.12", ">=0.149.12", True),
        ("0.149.3", ">=0.149.12", False),
        ("1.78.0rc1", ">=1.78", True),
        ("3.10.0", ">=3.10", True),
        ("3.9.18", ">=3.10", False),
        ("2.0", "!=2.0", False),
        ("2.0", "==2", True),
        ("2.1", ">2.1", False),
        ("2.1", "<=2.1", True),
        ("5", "", True),
    ],
)
def test_bounds(version: str, specifier: str, holds: bool) -> None:
    assert satisfies(version, specifier) is holds


def test_a_library_out_of_bounds_is_named_with_the_command() -> None:
    found = check_libraries(
        [
            LibraryFacts(name="grpcio", wanted=">=1.78", installed="1.80.0"),
            LibraryFacts(name="protobuf", wanted=">=6.31.1,<8", installed="5.29.0"),
            LibraryFacts(name="spake2", wanted=">=0.9", installed=None),
        ]
    )
    assert verdicts(found) == ["wrong", "wrong", "ok"]
    assert "protobuf 5.29.0 is installed" in found[0].said
    assert found[0].fix == "pip install 'protobuf>=6.31.1,<8'"
    assert "spake2 is not installed" in found[1].said
    assert exit_code(found) == 2
    assert verdicts(check_libraries([])) == ["unknown"]


def test_python() -> None:
    assert verdicts(check_python("3.12.1", ">=3.10")) == ["ok"]
    assert verdicts(check_python("3.9.1", ">=3.10")) == ["wrong"]


def backend(platform: str, **given: object) -> Finding:
    facts = {"machine": "arm64", "installed": ("mlx",), **given}
    [finding] = check_backend(BackendFacts(platform=platform, **facts))  # type: ignore[arg-type]
    return finding


def test_mlx_on_the_reference_blas_is_wrong() -> None:
    slow = backend("linux", blas="reference")
    assert slow.verdict == "wrong"
    assert "30 times" in slow.said
    assert slow.fix == "pip install 'exo-train[torch]'"
    assert backend("linux", blas="openblas").verdict == "ok"
    assert backend("linux", blas=None).verdict == "unknown"
    assert backend("linux", blas=None, installed=("torch",)).verdict == "ok"


def test_mlx_on_macos() -> None:
    assert backend("darwin", has_metal=True).verdict == "ok"
    assert backend("darwin", has_metal=False).verdict == "wrong"
    assert backend("darwin", has_metal=None).verdict == "unknown"
    translated = backend("darwin", is_translated=True, installed=())
    assert "Rosetta" in translated.said
    assert translated.verdict == "wrong"


def test_no_backend_at_all_is_wrong() -> None:
    assert backend("win32", installed=()).fix == "pip install 'exo-train[torch]'"
    assert backend("win32", installed=("torch",)).verdict == "ok"


def test_proxy_variables_are_named_but_never_their_values() -> None:
    [finding] = check_proxy({"HTTPS_PROXY": "http://me:secret@proxy:3128", "http_proxy": ""})
    assert finding.verdict == "note"
    assert "HTTPS_PROXY" in finding.said
    assert "http_proxy" not in finding.said
    assert "secret" not in finding.said + finding.fix
    assert verdicts(check_proxy({"PATH": "/bin"})) == ["ok"]
