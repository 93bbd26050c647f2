"""The questions to this device: they give facts, end in time, and never raise."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import ifaddr
import pytest

from exo_train.cluster.checks import reading
from exo_train.cluster.checks.tools import ask_tool, ask_tools


def test_a_tool_answers_fails_is_missing_or_hangs() -> None:
    started_s = time.monotonic()
    answers = ask_tools(
        {
            "good": (sys.executable, "-c", "print('running')"),
            "refused": (sys.executable, "-c", "raise SystemExit('must be root')"),
            "missing": ("no-such-tool-anywhere",),
            "hangs": (sys.executable, "-c", "import time; time.sleep(60)"),
        },
        timeout_s=2.0,
    )
    assert time.monotonic() - started_s < 10.0
    assert answers["good"].is_answer
    assert answers["good"].text.strip() == "running"
    assert answers["refused"].outcome == "failed"
    assert "must be root" in answers["refused"].text
    assert answers["missing"].outcome == "missing"
    assert answers["hangs"].outcome == "timed out"


def test_what_a_tool_prints_is_bounded_and_may_be_no_text() -> None:
    code = "import sys; sys.stdout.buffer.write(b'\\xff\\xfe' * 200_000)"
    answer = ask_tool((sys.executable, "-c", code))
    assert answer.is_answer
    assert 0 < len(answer.text) <= 100_000


def test_a_home_that_is_not_there_yet_is_asked_of_its_parent(tmp_path: Path) -> None:
    facts = reading.read_disk(tmp_path / "not" / "yet")
    assert facts.free_bytes is not None
    assert facts.free_bytes > 0
    assert facts.write_error == ""
    assert list(tmp_path.iterdir()) == [], "the doctor leaves nothing behind"


def test_a_home_under_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    facts = reading.read_disk(tmp_path / "file" / "home")
    assert facts.write_error, "it can never be made"


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="rights do not bind this user")
def test_a_home_without_rights_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert reading.read_disk(tmp_path).write_error


def test_a_disk_that_hangs_is_given_up() -> None:
    assert reading.within(lambda: time.sleep(5) or "late", "unknown", timeout_s=0.1) == "unknown"
    assert reading.within(lambda: "there", "unknown", timeout_s=5) == "there"


def test_linux_memory_pressure(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.write_text(
        "some avg10=0.00 avg60=12.50 avg300=3.00 total=12345\n"
        "full avg10=0.00 avg60=99.00 avg300=0.00 total=2345\n"
    )
    assert reading.read_pressure(path) == 12.5
    assert reading.read_pressure(tmp_path / "none") is None
    path.write_text("nonsense")
    assert reading.read_pressure(path) is None


def test_memory_of_this_device() -> None:
    facts = reading.read_memory(ask_tool((sys.executable, "-c", "print(4)")))
    assert 0 < facts.available_bytes <= facts.total_bytes
    assert facts.macos_pressure == 4
    assert reading.read_memory(ask_tool(("no-such-tool",))).macos_pressure is None


def test_libraries_are_those_that_the_package_asks_for() -> None:
    found = {library.name: library for library in reading.read_libraries()}
    assert found["protobuf"].installed
    assert "<8" in found["protobuf"].wanted
    assert found["grpcio"].wanted.startswith(">=")
    assert reading.read_wanted_python().startswith(">=3.")


def test_the_agents_own_numbers_of_open_files_count() -> None:
    assert reading.read_open_files(17, 256).open_by_agent == 17
    assert reading.read_open_files(17, 256).limit == (None if os.name == "nt" else 256)


def test_terminals_are_named_as_in_the_settings() -> None:
    assert reading.terminal_name({"TERM_PROGRAM": "iTerm.app"}) == "iTerm"
    assert reading.terminal_name({"TERM_PROGRAM": "Hyper"}) == "Hyper"
    assert reading.terminal_name({}) == "your terminal program"


def test_the_loopback_interface_is_listed_and_not_used() -> None:
    [loopback] = [i for i in reading.read_interfaces() if i.host == "127.0.0.1"]
    assert not loopback.is_used
    assert loopback.reason
    assert loopback.network == "127.0.0.0/8"
    assert loopback.mtu_bytes > 0


def test_mtus_are_found_by_the_name_that_the_system_has_for_an_interface() -> None:
    """Windows: ifaddr describes the card, psutil gives MTUs by the connection's short name."""
    card = ifaddr.Adapter(
        "{4D36E972}", "Killer E3100G Controller", [ifaddr.IP("10.0.0.7", 24, "LAN 2")], index=3
    )
    [found] = reading.read_interfaces(adapters=[card], mtus_bytes={"LAN 2": 9000})
    assert found.interface == "Killer E3100G Controller"
    assert (found.host, found.network, found.mtu_bytes) == ("10.0.0.7", "10.0.0.0/24", 9000)
