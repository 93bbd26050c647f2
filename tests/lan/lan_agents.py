"""Agents on the hosts of a lab. For tests and bench/meeting.py only.

Owns their start, their end, and what is asked of them. Every test of this folder starts its agents
through `LanAgents`, so that how devices come to trust each other is one function's matter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from exo_train.agent.local_client import LocalClient
from exo_train.errors import PeerError
from tests.agent.running_agents import RunningAgent, wait_until
from tests.lan.inside import door
from tests.lan.namespaces import SUBNET, Lan
from tests.paired_homes import ensure_member
from tests.tiny_models import make_tiny_model

MEET_WITHIN_S = 10.0
LIVE = ("alive", "suspect")
WIDE = "1000"
NUM_LAYERS, NUM_STEPS = 5, 3
TRAIN_TIMEOUT_S = 90


def prepare_homes(agents: Sequence[LanAgent]) -> None:
    """Make these devices members of one cluster before any of them starts.

    Called with all agents of the cluster so far, those started earlier first, before each start of
    new ones; a home that is prepared already is left alone.
    """
    for agent in agents:
        if agent.is_paired:
            ensure_member(agent.home, root=agent.root, cluster=agent.cluster)


class LanAgent(RunningAgent):
    """An agent on a host of the lab; `number` is the host's."""

    number: int
    lan: Lan

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "COLUMNS": WIDE}  # so that a sentence is a line

    def status(self) -> dict[str, Any]:
        """Ask through a door: `exo-train status` would cost a second of a core each time."""
        with self._asked() as client:
            return client.status()

    def examine(self) -> dict[str, Any]:
        """Give what the agent tells doctor, in a thousandth of doctor's time."""
        with self._asked() as client:
            return dict(client.examine())

    @contextlib.contextmanager
    def _asked(self) -> Iterator[LocalClient]:
        endpoint = self.home.agent()
        if endpoint is None:
            raise PeerError(f"{self.name} does not run")
        namespace = self.lan.namespace(self.number)
        with (
            door(namespace, "127.0.0.1", endpoint.local_port) as port,
            LocalClient(dataclasses.replace(endpoint, local_port=port)) as client,
        ):
            yield client

    def members(self) -> dict[str, dict[str, Any]]:
        """Give what this agent says of each member, by id."""
        return {member["id"]: member for member in self.status()["members"]}

    def sees(self, *others: RunningAgent) -> bool:
        """Tell whether it lists just these and itself as live."""
        try:
            live = {i for i, member in self.members().items() if member["state"] in LIVE}
        except PeerError:
            return False
        return live == {agent.id for agent in (self, *others)}

    def says(self, *words: str) -> bool:
        return any(all(word in line for word in words) for line in self.output.splitlines())

    def wait_said(self, *words: str, timeout_s: float) -> float:
        return wait_until(
            lambda: self.says(*words),
            timeout_s,
            lambda: f"{self.name} has no line with {words}: {self.output}",
        )

    def invite(self) -> dict[str, Any]:
        """Give what `exo-train invite --json` prints: a code, and where the pairing port is."""
        done = self.run("invite", "--json")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def doctor(self) -> tuple[int, list[dict[str, Any]]]:
        """Give the exit code and the findings of `exo-train doctor --json`, worst first."""
        done = self.run("doctor", "--json")
        assert done.stdout, done.stderr
        content = json.loads(done.stdout)
        assert content["ok"] == (done.returncode == 0)
        return done.returncode, content["findings"]

    def train(self, root: Path, *options: str) -> subprocess.CompletedProcess[str]:
        """Run a tiny training from here; model and data are made under `root` at the first use."""
        model, data = root / "model", root / "data.jsonl"
        if not data.exists():
            make_tiny_model(model, num_layers=NUM_LAYERS)
            lines = [json.dumps({"text": f"the river {'on ' * n}and on"}) for n in range(8)]
            data.write_text("\n".join(lines), "utf-8")
        few = (
            "--steps",
            f"{NUM_STEPS}",
            "--batch-size",
            "4",
            "--dtype",
            "fp32",
            "--profile-s",
            "0",
        )
        command = self.command("train", str(model), "--data", str(data), *few, *options)
        return subprocess.run(
            command,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TRAIN_TIMEOUT_S,
            check=False,
        )

    def running(self) -> psutil.Process:
        """Give the agent's own process; `ip netns exec` and the shells became it."""
        assert self.process is not None
        return psutil.Process(self.process.pid)


class LanAgents:
    """Context manager; calling it starts agents on the hosts with these numbers."""

    def __init__(self, lan: Lan, root: Path) -> None:
        self._lan = lan
        self._root = root
        root.mkdir(exist_ok=True)
        self._tag = f"test-{secrets.token_hex(4)}"
        self._households: dict[str, list[LanAgent]] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> LanAgents:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._stack.close()

    def __call__(
        self,
        *numbers: int,
        options: Sequence[str] = (),
        hostname: str = "",
        household: str = "a",
        suffix: str = "",
        is_paired: bool = True,
        wait: bool = True,
    ) -> list[LanAgent]:
        """Start agents of one household (a cluster), named by their hosts: host1, host2.

        The same number again is the same device, restarted, unless `suffix` differs. One that is
        not paired begins as people's devices do: it makes a cluster, or joins with a code.
        """
        agents = [
            self.prepare(n, options=options, hostname=hostname, household=household, suffix=suffix)
            for n in numbers
        ]
        for agent in agents:
            agent.is_paired = is_paired
        prepare_homes(self._households[household])
        for agent in agents:
            agent.launch()
        if wait:
            for agent in agents:
                agent.wait_started()
        return agents

    def prepare(
        self,
        number: int,
        *,
        options: Sequence[str] = (),
        hostname: str = "",
        household: str = "a",
        suffix: str = "",
    ) -> LanAgent:
        """Make an agent without starting it; `start_one_by_one` does."""
        name = f"host{number}{suffix}" if household == "a" else f"host{number}{household}"
        prefix = self._lan.shell_prefix(number, hostname or name)
        known = self._households.setdefault(household, [])
        agent = next((a for a in known if a.name == name), None)
        if agent is None:
            tag = f"{self._tag}-{household}"
            agent = LanAgent(name, self._root, tag, options, prefix, is_named_by_host=True)
            agent.number, agent.lan = number, self._lan
            known.append(agent)
            self._stack.callback(agent.close)
        agent.options, agent.prefix = options, prefix
        return agent

    def second_on_host(self, number: int) -> LanAgent:
        """Start one more agent of this household on a host, with a home of its own."""
        (agent,) = self(number, suffix="-second")
        return agent

    def start_one_by_one(self, agents: Sequence[LanAgent], offsets_s: Sequence[float]) -> None:
        """Start prepared agents, each so many seconds after now; returns after the last start."""
        prepare_homes(agents)
        start_s = time.monotonic()
        for offset_s, agent in sorted(
            zip(offsets_s, agents, strict=True), key=lambda pair: pair[0]
        ):
            time.sleep(max(0.0, start_s + offset_s - time.monotonic()))
            agent.launch()


def host(number: int) -> str:
    return f"{SUBNET}.{number}"


def wait_all_see(agents: Sequence[LanAgent], timeout_s: float = MEET_WITHIN_S) -> float:
    """Wait until each lists just these as live, and all agree; give how long that took."""

    def agree() -> bool:
        if not all(agent.sees(*(a for a in agents if a is not agent)) for agent in agents):
            return False
        return len({agent.status()["view_hash"] for agent in agents}) == 1

    return wait_until(
        agree, timeout_s, lambda: "\n".join(f"{a.name}: {a.states()}\n{a.output}" for a in agents)
    )


def stays(condition: Callable[[], bool], for_s: float, why: Callable[[], str]) -> None:
    """Assert the condition again and again for that long."""
    end_s = time.monotonic() + for_s
    while time.monotonic() < end_s:
        assert condition(), why()
        time.sleep(0.2)
