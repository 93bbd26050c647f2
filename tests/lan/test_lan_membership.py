"""Agents on hosts of their own, on one switch: meeting, cut cables, missing and moving networks."""

from __future__ import annotations

import contextlib
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from exo_train.cluster.membership import DEAD_AFTER_S
from tests.agent.running_agents import RunningAgent, wait_until
from tests.lan.namespaces import SUBNET, Lan, why_not

MEET_WITHIN_S = 10.0
MARGIN_S = 5.0

pytestmark = [pytest.mark.lan, pytest.mark.processes, pytest.mark.xdist_group("lan")]

Launch = Callable[..., list[RunningAgent]]


@pytest.fixture
def lan() -> Iterator[Lan]:
    missing = why_not()
    if missing:
        pytest.skip(missing)
    with Lan() as lan:
        yield lan


@pytest.fixture
def launch(lan: Lan, tmp_path: Path) -> Iterator[Launch]:
    """Starts agents on hosts, named by their host names; they are gone after the test."""
    cluster = f"test-{secrets.token_hex(4)}"
    with contextlib.ExitStack() as stack:

        def launch(*numbers: int, options: Sequence[str] = ()) -> list[RunningAgent]:
            agents = []
            for number in numbers:
                name = f"host{number}"
                prefix = lan.shell_prefix(number, name)
                agent = RunningAgent(
                    name, tmp_path, cluster, options, prefix, is_named_by_host=True
                )
                stack.callback(agent.close)
                agent.launch()
                agents.append(agent)
            for agent in agents:
                agent.wait_started()
            return agents

        yield launch


def wait_said(agent: RunningAgent, sentence: str, *, times: int = 1, timeout_s: float) -> None:
    wait_until(
        lambda: agent.output.count(sentence) >= times,
        timeout_s,
        lambda: f"{agent.name} did not say '{sentence}': {agent.output}",
    )


def wait_heard(agents: Sequence[RunningAgent], timeout_s: float) -> None:
    for agent in agents:
        for other in agents:
            if other is not agent:
                wait_said(agent, f"{other.name} is here", timeout_s=timeout_s)


def test_hosts_meet_by_mdns_and_a_lost_one_is_dead_within_the_bound(
    lan: Lan, launch: Launch
) -> None:
    for number in (1, 2, 3):
        lan.add_docker_bridge(lan.add_host(number))
    agents = launch(1, 2, 3)
    wait_heard(agents, MEET_WITHIN_S)

    lan.cut(3)
    for agent in agents[:2]:
        wait_said(agent, "host3 has not answered for 15 s", timeout_s=DEAD_AFTER_S + MARGIN_S)
    status = agents[0].status()
    assert {m["name"]: m["state"] for m in status["members"]} == {
        "host1": "alive",
        "host2": "alive",
        "host3": "dead",
    }
    addresses = {m["name"]: m["addresses"] for m in status["members"]}
    for number in (1, 2, 3):
        (address,) = addresses[f"host{number}"]
        assert address.startswith(f"{SUBNET}.{number}:"), "docker0 is no way to a host"

    lan.mend(3)
    for agent, other in ((agents[0], 3), (agents[1], 3), (agents[2], 1), (agents[2], 2)):
        wait_said(agent, f"host{other} is here", times=2, timeout_s=MEET_WITHIN_S)
    assert len({agent.status()["view_hash"] for agent in agents}) == 1


def test_without_multicast_a_typed_address_joins(lan: Lan, launch: Launch) -> None:
    for number in (1, 2):
        lan.add_host(number)
        lan.set_multicast(number, passes=False)
    first, deaf = launch(1, 2)
    time.sleep(4.0)  # with multicast they meet within two
    assert "host1" not in deaf.output
    assert deaf.end(signal.SIGTERM) == 0

    (second,) = launch(2, options=["--peer", f"{SUBNET}.1:{first.port}"])
    wait_heard([first, second], 5.0)
    assert second.states() == {"host1": "alive", "host2": "alive"}


def test_a_network_that_comes_late_and_an_address_that_changes_are_followed(
    lan: Lan, launch: Launch
) -> None:
    lan.add_host(1)
    lan.add_host(2, with_address=False)
    first, second = launch(1, 2)
    wait_said(second, "no usable network with IPv4 yet", timeout_s=5.0)
    lan.give_address(2, f"{SUBNET}.2")
    wait_heard([first, second], MEET_WITHIN_S)

    lan.on(2, "ip", "addr", "del", f"{SUBNET}.2/24", "dev", "lan0")
    lan.give_address(2, f"{SUBNET}.22")

    def address() -> str:
        (member,) = (m for m in first.status()["members"] if m["name"] == "host2")
        return f"{member['state']} {' '.join(member['addresses'])}"

    moved = f"alive {SUBNET}.22:"
    wait_until(lambda: address().startswith(moved), MEET_WITHIN_S + 2, address)
    assert "host2 has not answered" not in first.output
