"""Real agents as child processes, each with its own home. For tests only.

Owns their start, their end and the look at their status. `prefix` puts one into a namespace.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ifaddr

from exo_train.agent.local_client import LocalClient
from exo_train.backends.registry import available_backends
from exo_train.cluster.home import Home
from exo_train.errors import PeerError
from tests.paired_homes import ensure_member

START_TIMEOUT_S = 60.0
MEET_TIMEOUT_S = 20.0
END_TIMEOUT_S = 5.0


def loopback_interface() -> str:
    """Give its name here: lo, lo0, or a long one."""
    for adapter in ifaddr.get_adapters():
        if any(entry.ip == "127.0.0.1" for entry in adapter.ips):
            return str(adapter.nice_name)
    raise AssertionError("this machine has no loopback interface")


@dataclass
class RunningAgent:
    """`start` may be called again after an end: the same device, restarted."""

    name: str
    root: Path
    cluster: str
    options: Sequence[str]
    prefix: Sequence[str] = ()
    is_named_by_host: bool = False
    is_paired: bool = True  # with those of the same cluster label, before it starts
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def home(self) -> Home:
        return Home(self.root / self.name)

    @property
    def id(self) -> str:
        return self.home.paired_identity().node_id

    @property
    def incarnation(self) -> int:
        return int(json.loads((self.home.path / "node.json").read_text())["incarnation"])

    @property
    def output(self) -> str:
        return (self.root / f"{self.name}.log").read_text("utf-8")

    @property
    def port(self) -> int:
        endpoint = self.home.agent()
        assert endpoint is not None, self.output
        return endpoint.control_port

    def start(self) -> None:
        self.launch()
        self.wait_started()

    def launch(self) -> None:
        if self.is_paired:
            ensure_member(self.home, root=self.root, cluster=self.cluster)
        name = [] if self.is_named_by_host else ["--name", self.name]
        with (self.root / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command("join", "--headless", *name, *self.options),
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait_started(self) -> None:
        wait_until(lambda: self.home.agent() is not None, START_TIMEOUT_S, self._not_started)

    def command(self, *arguments: str) -> list[str]:
        backend = ["--backend", available_backends()[0]] if arguments[0] == "join" else []
        return [*self.prefix, sys.executable, "-m", "exo_train", *arguments, *backend]

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "EXO_TRAIN_HOME": str(self.home.path),
            "PYTHONUNBUFFERED": "1",
        }

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command as the user of this device would."""
        return subprocess.run(
            self.command(*arguments),
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    def status(self) -> dict[str, Any]:
        if self.prefix:  # its loopback is another one than ours
            done = self.run("status", "--json")
            if done.returncode != 0:
                raise PeerError(done.stderr)
            content = json.loads(done.stdout)
            assert isinstance(content, dict)
            return content
        endpoint = self.home.agent()
        if endpoint is None:
            raise PeerError(f"{self.name} does not run")
        with LocalClient(endpoint) as client:
            return client.status()

    def states(self) -> dict[str, str]:
        """Give the state of each member that was met; nothing while the agent does not answer."""
        try:
            members = self.status()["members"]
        except PeerError:
            return {}
        return {m["name"]: m["state"] for m in members if m["state"] != "away"}

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send the signal and give the exit code; a signalled end must come within 5 s."""
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(END_TIMEOUT_S)
        self.process = None
        return code

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _not_started(self) -> str:
        return f"{self.name} did not start: {self.output}"


def wait_until(condition: Callable[[], bool], timeout_s: float, why: Callable[[], str]) -> float:
    """Wait for the condition and give how long it took; at the deadline, fail with `why()`."""
    start_s = time.monotonic()
    while not condition():
        if time.monotonic() - start_s > timeout_s:
            raise AssertionError(f"{why()} (waited {timeout_s:.0f} s)")
        time.sleep(0.1)
    return time.monotonic() - start_s


def wait_met(agents: Sequence[RunningAgent], timeout_s: float = MEET_TIMEOUT_S) -> float:
    """Wait until each of these sees just these alive, and give how long it took."""
    wanted = {agent.name for agent in agents}

    def alive(agent: RunningAgent) -> set[str]:
        return {name for name, state in agent.states().items() if state == "alive"}

    return wait_until(
        lambda: all(alive(agent) == wanted for agent in agents),
        timeout_s,
        lambda: "\n".join(f"{a.name} sees {a.states()}\n{a.output}" for a in agents),
    )
