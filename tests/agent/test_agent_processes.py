"""Agents as a household runs them: processes that meet over mDNS, end, crash and come back.

All on this machine's loopback, in clusters of their own.
"""

from __future__ import annotations

import json
import re
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from exo_train.cluster.member import DEAD_AFTER_S, SUSPECT_AFTER_S, view_hash
from exo_train.cluster.membership import REFUSED_DEAD_AFTER_S
from exo_train.cluster.whom_to_ask import HEARTBEAT_S
from exo_train.peer import NodeId
from tests.agent.running_agents import RunningAgent, loopback_interface, wait_met, wait_until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("agents"),
    pytest.mark.skipif(sys.platform == "win32", reason="ends agents with POSIX signals"),
]

Start = Callable[..., RunningAgent]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("household")


@pytest.fixture(scope="module")
def cluster() -> str:
    return f"test-{secrets.token_hex(4)}"


@pytest.fixture(scope="module")
def pair(root: Path, cluster: str) -> Iterator[tuple[RunningAgent, RunningAgent]]:
    """Two agents that have only mDNS to find each other."""
    options = ["--interface", loopback_interface()]
    agents = [RunningAgent(name, root, cluster, options) for name in ("studio", "den-pc")]
    try:
        for agent in agents:
            agent.launch()
        for agent in agents:
            agent.wait_started()
        wait_met(agents)
        yield agents[0], agents[1]
    finally:
        for agent in agents:
            agent.close()


@pytest.fixture
def start(root: Path, cluster: str) -> Iterator[Start]:
    """Starts one more agent; it is gone after the test."""
    started: list[RunningAgent] = []

    def start(name: str, *options: str, cluster: str = cluster) -> RunningAgent:
        options = ("--interface", loopback_interface(), *options)
        agent = RunningAgent(name, root, cluster, options)
        started.append(agent)
        agent.start()
        return agent

    yield start
    for agent in started:
        agent.close()


def test_all_members_tell_the_same_story(pair: tuple[RunningAgent, RunningAgent]) -> None:
    done = [agent.run("status", "--json") for agent in pair]
    assert [d.returncode for d in done] == [0, 0], done
    first, second = (json.loads(d.stdout) for d in done)
    expected = view_hash([(NodeId(agent.id), agent.incarnation) for agent in pair])
    assert first["view_hash"] == second["view_hash"] == expected
    assert (first["self"], second["self"]) == (pair[0].id, pair[1].id)
    assert first["schema"] == 1
    assert first["cluster"] == second["cluster"] == pair[0].home.paired_identity().cluster
    assert first["run"] is None
    for status in (first, second):
        assert {m["name"]: m["state"] for m in status["members"]} == {
            "studio": "alive",
            "den-pc": "alive",
        }
        addresses = {m["id"]: m["addresses"] for m in status["members"]}
        for agent in pair:
            assert f"127.0.0.1:{agent.port}" in addresses[agent.id]


def test_a_second_join_in_the_same_home_is_refused(
    pair: tuple[RunningAgent, RunningAgent],
) -> None:
    done = pair[0].run("join", "--headless")
    assert done.returncode == 2
    assert "already runs" in done.stderr
    assert str(pair[0].process and pair[0].process.pid) in done.stderr
    assert pair[0].run("join", "--code", "7-maple-tiger").returncode == 2
    assert pair[0].states() == {"studio": "alive", "den-pc": "alive"}


def test_an_orderly_end_is_seen_at_once_and_a_return_is_the_same_member(
    pair: tuple[RunningAgent, RunningAgent], start: Start
) -> None:
    laptop = start("laptop")
    wait_met([*pair, laptop])
    before = laptop.id, laptop.incarnation

    assert laptop.end(signal.SIGTERM) == 0

    def seen() -> set[str]:
        return {agent.states().get("laptop", "") for agent in pair}

    wait_until(lambda: seen() == {"left"}, 2.0, lambda: str(seen()))
    assert "laptop left" in pair[0].output

    laptop.start()
    wait_met([*pair, laptop])
    assert (laptop.id, laptop.incarnation) == (before[0], before[1] + 1)
    hashes = {agent.status()["view_hash"] for agent in (*pair, laptop)}
    assert hashes == {
        view_hash([(NodeId(agent.id), agent.incarnation) for agent in (*pair, laptop)])
    }
    assert laptop.end(signal.SIGTERM) == 0


def test_a_stopped_agent_is_suspended_after_the_bound_and_alive_again_when_it_goes_on(
    pair: tuple[RunningAgent, RunningAgent], start: Start
) -> None:
    sleeper = start("sleeper")
    wait_met([*pair, sleeper])
    assert sleeper.process is not None
    sleeper.process.send_signal(signal.SIGSTOP)

    def seen() -> set[str]:
        return {agent.states().get("sleeper", "") for agent in pair}

    wait_until(lambda: seen() == {"suspect"}, SUSPECT_AFTER_S + 3, lambda: str(seen()))
    row = next(m for m in pair[0].status()["members"] if m["name"] == "sleeper")
    assert re.fullmatch(r"silent for \d+ s; taken as gone in \d+ s", row["waiting"])
    took_s = wait_until(lambda: seen() == {"suspended"}, DEAD_AFTER_S, lambda: str(seen()))
    assert took_s > DEAD_AFTER_S - SUSPECT_AFTER_S - 4, "slow is not gone"
    assert "its agent is stopped, stuck or asleep" in pair[0].output
    sleeper.process.send_signal(signal.SIGCONT)
    wait_met([*pair, sleeper])
    assert "has not answered" not in sleeper.output, "it slept itself: it says nothing of others"
    assert sleeper.end() == 0


def test_a_crash_is_seen_within_the_bound_and_a_return_is_the_same_member(
    pair: tuple[RunningAgent, RunningAgent], start: Start
) -> None:
    tower = start("tower", "--peer", f"127.0.0.1:{pair[0].port}")
    wait_met([*pair, tower], 30.0)
    assert tower.end(signal.SIGKILL) == -signal.SIGKILL

    def seen() -> set[str]:
        return {agent.states().get("tower", "") for agent in pair}

    took_s = wait_until(lambda: seen() == {"dead"}, DEAD_AFTER_S + 4, lambda: str(seen()))
    # Its machine refuses the connection at once, so nobody need wait for silence to tell.
    assert took_s < REFUSED_DEAD_AFTER_S + 2 * HEARTBEAT_S + 2
    assert "tower ended: its machine is there, its agent is not" in pair[0].output

    tower.start()
    wait_met([*pair, tower])
    assert [m["id"] for m in pair[0].status()["members"] if m["name"] == "tower"] == [tower.id]
    assert tower.end(signal.SIGTERM) == 0


def test_ctrl_c_ends_join_and_leaves_nothing(start: Start) -> None:
    agent = start("alone", cluster="test-alone")
    assert agent.process is not None
    process = psutil.Process(agent.process.pid)
    children = process.children(recursive=True)
    port = agent.port
    assert agent.end(signal.SIGINT) == 0  # within 5 s
    assert not process.is_running()
    assert not any(child.is_running() for child in children)
    assert agent.home.agent() is None
    kept = {"agent.lock", "cluster.json", "node.json", "roster.json"}
    assert {path.name for path in agent.home.path.iterdir()} == kept
    for name in ("cluster.json", "roster.json"):
        assert (agent.home.path / name).stat().st_mode & 0o77 == 0, f"others may read {name}"
    assert "leaving" in agent.output
    assert "Traceback" not in agent.output
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))


def test_another_cluster_is_counted_and_not_joined(
    pair: tuple[RunningAgent, RunningAgent], start: Start
) -> None:
    address = f"127.0.0.1:{pair[0].port}"
    neighbour = start("neighbour", "--peer", address, cluster="test-next-door")
    said = f"--peer {address} answers with a certificate of another device or cluster"
    wait_until(lambda: said in neighbour.output, 10.0, lambda: neighbour.output)
    wait_until(
        lambda: neighbour.status()["other_clusters"] >= 1, 10.0, lambda: str(neighbour.status())
    )
    assert neighbour.states() == {"neighbour": "alive"}
    assert "neighbour" not in pair[0].states()
    assert neighbour.end(signal.SIGTERM) == 0


def test_a_port_that_is_taken_is_named(pair: tuple[RunningAgent, RunningAgent], root: Path) -> None:
    options = ["--interface", loopback_interface(), "--port", str(pair[0].port)]
    agent = RunningAgent("late", root, "test-late", options)
    done = agent.run("join", "--headless", *options)
    assert done.returncode == 3
    assert f"port {pair[0].port}" in done.stderr
    assert agent.home.agent() is None
