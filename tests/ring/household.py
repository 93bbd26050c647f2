"""Real agents on this machine's loopback: a household for the tests.

Owns what tests need beyond the product's own `LocalAgents`. All traffic stays on 127.0.0.1.
"""

from __future__ import annotations

import subprocess
import sys

import psutil

from exo_train.agent.local_agents import LocalAgents
from exo_train.cluster.home import Home


class Household(LocalAgents):
    """Agents by name; each one meets the others through their addresses."""

    def add(self, name: str, backend: str, *, fault: str = "", memory: str = "4GB") -> Home:
        variables = {"EXO_TRAIN_TEST_FAULT": fault}
        home = self.start(
            name,
            backend=backend,
            memory=memory,
            options=["--interface", "lo"],
            variables=variables,
        )
        self.wait_listening(name)
        return home

    def workers(self) -> list[psutil.Process]:
        """All worker processes of these agents that still run."""
        found = []
        for process in self.processes.values():
            try:
                found += psutil.Process(process.pid).children(recursive=True)
            except psutil.NoSuchProcess:
                continue
        return [p for p in found if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

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
