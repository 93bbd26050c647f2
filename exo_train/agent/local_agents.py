"""Several agents on this machine, each with a home of its own, as several devices would be.

Owns their processes and their end. Used by the demo, the benchmarks and the tests; must not
know what they are for.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from exo_train.agent.local_client import LocalClient, stop_process
from exo_train.cluster.home import Home
from exo_train.errors import PeerError

MEET_TIMEOUT_S = 60.0
POLL_S = 0.1
SHOWN_LOG_CHARS = 400


@dataclass(slots=True)
class LocalAgents:
    """Context manager; the first agent makes a cluster, the others are paired with it by a code."""

    root: Path
    homes: dict[str, Home] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __enter__(self) -> LocalAgents:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def start(
        self,
        name: str,
        *,
        backend: str,
        memory: str,
        threads: int = 1,
        options: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> Home:
        """Start `exo-train join` as `name`; `threads` are what its workers compute with."""
        home = Home(self.root / name)
        home.logs.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "exo_train", "join", "--headless", "--tied"]
        command += ["--name", name, "--backend", backend, "--memory", memory, *options]
        if self.homes and home.identity() is None:
            command += self._pairing_options()
        environment = self.environment(name) | {"OMP_NUM_THREADS": str(threads)}
        with self._log(name).open("ab") as log_file:
            self.processes[name] = subprocess.Popen(
                command,
                env=environment | dict(variables or {}),
                stdin=subprocess.PIPE,  # closes when this process ends, however it ends
                stdout=log_file,
                stderr=log_file,
                start_new_session=True,  # Ctrl-C is for whoever started us, who then ends these
            )
        self.homes[name] = home
        return home

    def environment(self, name: str) -> dict[str, str]:
        """Give the variables under which commands belong to this agent's home."""
        return dict(os.environ) | {"EXO_TRAIN_HOME": str(self.root / name)}

    def wait_met(self, names: Iterable[str] | None = None) -> float:
        """Wait until each of `names` (default: all) sees all of them alive; gives the seconds.

        Raises PeerError when one ends or they do not meet in time.
        """
        wanted = set(names if names is not None else self.homes)
        return self._wait(
            lambda: all(wanted <= self.alive(name) for name in wanted),
            "the agents did not find each other: does a firewall on this machine block its own "
            "connections?",
        )

    def _pairing_options(self) -> list[str]:
        """Have the first agent invite one more; a code is for one device."""
        first = next(iter(self.homes))
        self.wait_listening(first)
        endpoint = self.homes[first].agent()
        assert endpoint is not None
        with LocalClient(endpoint) as client:
            invitation = client.invite()
        peers = [f"--peer={address}" for address in invitation.addresses]
        return ["--code", invitation.code, *peers]

    def wait_listening(self, name: str) -> None:
        self._wait(lambda: self.homes[name].agent() is not None, f"agent {name} does not listen")

    def alive(self, name: str) -> set[str]:
        """Names of the members that this agent takes for alive, itself included."""
        endpoint = self.homes[name].agent()
        if endpoint is None:
            return set()
        with LocalClient(endpoint) as client:
            members = client.status()["members"]
        return {member["name"] for member in members if member["state"] == "alive"}

    def stop(self, name: str) -> None:
        stop_process(self.processes.pop(name))
        del self.homes[name]

    def close(self) -> None:
        for name in list(self.processes):
            self.stop(name)

    def _wait(self, condition: Callable[[], bool], failure: str) -> float:
        started_s = time.monotonic()
        while not condition():
            for name, process in self.processes.items():
                if process.poll() is not None:
                    said = self._log(name).read_text("utf-8", "replace").strip()
                    raise PeerError(f"agent {name} ended: {said[-SHOWN_LOG_CHARS:]}")
            if time.monotonic() - started_s > MEET_TIMEOUT_S:
                raise PeerError(f"after {MEET_TIMEOUT_S:.0f} s {failure}")
            time.sleep(POLL_S)
        return time.monotonic() - started_s

    def _log(self, name: str) -> Path:
        return self.root / name / "logs" / "agent.log"
