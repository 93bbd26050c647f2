"""Real agents on this machine's loopback: a household for the tests.

Owns their homes, processes and end. All traffic stays on 127.0.0.1. For tests only.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from exo_train.agent.local_client import LocalClient, stop_process
from exo_train.cluster.home import Home

MEET_TIMEOUT_S = 60.0


@dataclass
class Household:
    """Agents by name; every one meets the others through the first one's address."""

    root: Path
    cluster: str = field(default_factory=lambda: f"test-{secrets.token_hex(4)}")
    homes: dict[str, Home] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, backend: str, *, fault: str = "", memory: str = "4GB") -> Home:
        home = Home(self.root / name)
        home.logs.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "exo_train", "join", "--headless", "--interface", "lo"]
        command += ["--name", name, "--backend", backend, "--memory", memory]
        for other in self.homes.values():
            endpoint = other.agent()
            if endpoint is not None:
                command += ["--peer", f"127.0.0.1:{endpoint.control_port}"]
        with (home.logs / "agent.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                env=self.environment(name) | {"EXO_TRAIN_TEST_FAULT": fault},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.homes[name] = home
        self._wait(lambda: home.agent() is not None, f"agent {name}")
        return home

    def environment(self, name: str) -> dict[str, str]:
        own = {
            "EXO_TRAIN_HOME": str(self.root / name),
            "EXO_TRAIN_CLUSTER": self.cluster,
            "OMP_NUM_THREADS": "1",
        }
        return dict(os.environ) | own

    def wait_met(self, names: Sequence[str]) -> None:
        """Wait until each of these sees all of them alive."""
        for name in names:
            self._wait(lambda name=name: set(names) <= self.alive(name), f"{name} to meet all")  # type: ignore[misc]

    def alive(self, name: str) -> set[str]:
        endpoint = self.homes[name].agent()
        if endpoint is None:
            return set()
        with LocalClient(endpoint) as client:
            members = client.status()["members"]
        return {m["name"] for m in members if m["state"] == "alive"}

    def workers(self) -> list[psutil.Process]:
        """All worker processes of these agents that still run."""
        found = []
        for process in self.processes.values():
            try:
                found += psutil.Process(process.pid).children(recursive=True)
            except psutil.NoSuchProcess:
                continue
        return [p for p in found if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def stop(self, name: str) -> None:
        stop_process(self.processes.pop(name))
        del self.homes[name]

    def run(
        self, name: str, *arguments: str, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of the product as the user of this device would."""
        return subprocess.run(
            [sys.executable, "-m", "exo_train", *arguments],
            env=self.environment(name),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def close(self) -> None:
        for name in list(self.processes):
            self.stop(name)

    def _wait(self, condition: object, what: str) -> None:
        assert callable(condition)
        deadline_s = time.monotonic() + MEET_TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline_s, f"waited {MEET_TIMEOUT_S} s for {what}"
            time.sleep(0.1)
