"""What must not end with time: threads after a fault, memories of removals, a copy's original."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from exo_train.agent.meeting import Meeting
from exo_train.agent.survey import Survey
from exo_train.errors import ConfigError
from exo_train.peer import Address
from tests.agent.agents_here import LOOPBACK, wait_all_alive, wait_states
from tests.agent.conftest import Command, Join
from tests.agent.running_agents import wait_until

pytestmark = pytest.mark.xdist_group("agents-here")


def test_a_fault_in_one_turn_ends_no_thread(
    join: Join, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next turn goes on: others are still met, and links measured."""
    faults = dict.fromkeys(("hello", "turn"), 2)

    def failing_first(kind: type, name: str, key: str) -> None:
        whole = getattr(kind, name)

        def broken(self: object, *arguments: object) -> object:
            if faults[key]:
                faults[key] -= 1
                raise RuntimeError(f"broken {key}")
            return whole(self, *arguments)

        monkeypatch.setattr(kind, name, broken)

    failing_first(Meeting, "_hello_to", "hello")
    failing_first(Survey, "_turn", "turn")
    with caplog.at_level(logging.ERROR):
        first = join("first")
        second = join("second", first)
        wait_all_alive(first, second, timeout_s=20.0)
        wait_until(lambda: bool(first.agent.survey.listing()), 20.0, lambda: "no link")
    assert faults == {"hello": 0, "turn": 0}
    assert "RuntimeError: broken turn" in caplog.text


def test_a_removed_device_is_not_called_after_a_restart(join: Join) -> None:
    first = join("first")
    second = join("second", first)
    wait_all_alive(first, second)
    wait_until(lambda: len(first.home.remembered_peers()) == 1, 10.0, lambda: "not remembered")
    gone = second.id
    first.agent.admissions.remove(gone)
    first.agent.__exit__(None, None, None)
    again = join("first")
    suggested = {target.node_id for target in again.agent.meeting._machine.suggestions()}
    assert gone not in suggested
    again.agent.meeting.suggest(Address(LOOPBACK, second.port), gone)
    assert again.states() == {"first": "alive"}
    assert gone not in {target.node_id for target in again.agent.meeting._machine.suggestions()}


def test_leaving_on_a_copy_does_not_end_the_original(
    join: Join, command: Command, tmp_path: Path
) -> None:
    studio = join("studio")
    laptop = join("laptop", studio)
    wait_all_alive(studio, laptop)
    copied = tmp_path / "copied"
    shutil.copytree(laptop.home.path, copied, ignore=shutil.ignore_patterns("agent.*"))
    copy = join("laptop", studio, laptop, folder="copied")
    copy.wait_says("its home folder was copied")
    with pytest.raises(ConfigError, match=r"leaving would end its membership too.*--forget"):
        copy.client().leave()
    copy.agent.__exit__(None, None, None)

    done = command(copy.home, "leave", "--forget")
    assert (done.code, done.err) == (0, "")
    assert "belongs to no cluster any more" in done.out
    assert copy.home.identity() is None
    wait_states(studio, {"studio": "alive", "laptop": "alive"}, timeout_s=15.0)
    assert laptop.agent.failure is None
    assert command(copy.home, "leave", "--forget").code == 2, "nothing is left to forget"
