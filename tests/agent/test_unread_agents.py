"""An agent whose reader or terminal has gone away: it lives on, and notices what happens."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.running_agents import RunningAgent, loopback_interface, wait_met, wait_until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("agents"),
    pytest.mark.skipif(sys.platform == "win32", reason="has no pipes or terminals like these"),
]

NOTICED_WITHIN_S = 20.0  # of silence 15 s are needed, and a busy machine looks late
READ_BYTES = 10


class Unread(RunningAgent):
    """Its standard output goes to somebody who reads the first words, and then is no more."""

    on_terminal = False

    def launch_and_turn_away(self) -> None:
        reading, writing = os.openpty() if self.on_terminal else os.pipe()
        command = self.command("join", "--name", self.name, *self.options)
        if not self.on_terminal:
            command.append("--headless")
        with (self.root / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env={**self.environment(), "TERM": "xterm"},
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=log,
                start_new_session=True,  # so that no SIGHUP comes, which would end it in order
            )
        os.close(writing)
        self.wait_started()
        assert os.read(reading, READ_BYTES)
        os.close(reading)


class OnTerminal(Unread):
    on_terminal = True


@pytest.fixture
def started() -> Iterator[list[RunningAgent]]:
    agents: list[RunningAgent] = []
    yield agents
    for agent in agents:
        agent.close()


@pytest.mark.parametrize("kind", [Unread, OnTerminal], ids=["pipe", "terminal"])
def test_an_agent_outlives_whoever_reads_it(
    started: list[RunningAgent], tmp_path: Path, kind: type[Unread]
) -> None:
    options = ("--interface", loopback_interface())
    unread = kind("unread", tmp_path, "", options, is_paired=False)
    started.append(unread)
    unread.launch_and_turn_away()
    code = unread.run("invite", "--json").stdout
    (code,) = [part for part in code.split('"') if part.count("-") == 2]
    other = RunningAgent("other", tmp_path, "", (*options, "--code", code), is_paired=False)
    started.append(other)
    other.start()
    wait_met([unread, other], 10)
    other.close()  # as a power cut would
    wait_until(
        lambda: unread.states() == {"unread": "alive", "other": "dead"},
        NOTICED_WITHIN_S,
        lambda: f"{unread.states()} {unread.output}",
    )
    num_told = unread.output.count("nobody reads what is said here")
    assert num_told == 1 or (unread.on_terminal and num_told == 0), "its screen hides the log"
    assert "Traceback" not in unread.output
    assert unread.end() == 0


def test_an_agent_whose_terminal_has_gone_ends_in_order(
    started: list[RunningAgent], tmp_path: Path
) -> None:
    options = ("--interface", loopback_interface())
    unread = OnTerminal("unread", tmp_path, "", options, is_paired=False)
    started.append(unread)
    unread.launch_and_turn_away()
    time.sleep(2.5)  # its screen is drawn each second
    assert unread.states() == {"unread": "alive"}
    assert unread.end() == 0
    assert unread.output.count("nobody reads what is said here") == 1
