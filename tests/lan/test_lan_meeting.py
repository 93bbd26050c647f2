"""Devices find each other where multicast is lost or one-sided, and keep apart from strangers."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lan.frames import is_mdns, is_multicast, is_tcp_syn
from tests.lan.hub import ANY, Rule
from tests.lan.joining import JOINED_WITHIN_S, join_under_loss
from tests.lan.lan_agents import LanAgent, LanAgents, host, stays, wait_all_see
from tests.lan.namespaces import Lan

pytestmark = [pytest.mark.lan, pytest.mark.processes, pytest.mark.xdist_group("lan")]

HINT_WITHIN_S = 20.0  # 15 s of silence, and the start of mDNS before
LOSSY_ROUNDS = 2  # bench/meeting.py runs 20
MDNS_LOSS, MDNS_DELAY_S = 0.4, 0.3


@dataclass
class Deaf:
    launch: LanAgents
    agents: list[LanAgent]


@pytest.fixture(scope="module")
def deaf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deaf]:
    """Three devices that multicast does not reach; the third has a VPN with the default route."""
    with Lan() as lan, LanAgents(lan, tmp_path_factory.mktemp("deaf")) as launch:
        for number in (1, 2, 3):
            lan.add_host(number)
            lan.set_multicast(number, passes=False)
        lan.add_spare(3, "tun0", "10.8.0.1/24", routed=True)
        yield Deaf(launch, launch(1, 2, 3))


def test_deaf_devices_say_so_and_how_to_join_and_nobody_trains_alone(
    deaf: Deaf, tmp_path: Path
) -> None:
    """L01."""
    one, two, _ = deaf.agents
    alone = one.train(tmp_path, "--min-devices", "2", "--device-wait-s", "1")
    assert alone.returncode == 3, alone.stderr
    assert "2 devices wanted" in alone.stderr
    for agent in (one, two):
        agent.wait_said("lan0", "multicast", "--peer", timeout_s=HINT_WITHIN_S)


def test_the_hint_names_the_vpn_that_holds_the_default_route(deaf: Deaf) -> None:
    """L22."""
    deaf.agents[2].wait_said("--peer", timeout_s=HINT_WITHIN_S)
    deaf.agents[2].wait_said("tun0", timeout_s=2.0)


def test_a_typed_address_joins_deaf_devices_and_the_third_is_told(deaf: Deaf) -> None:
    """L01: one address typed on one device."""
    one, two, three = deaf.agents
    peer = ("--peer", f"{host(1)}:{one.port}")
    for agent in (two, three):
        agent.close()
    deaf.launch(2, 3, options=peer)
    assert wait_all_see([one, two, three]) < 5.0


def test_five_devices_become_one_membership_under_loss(lan: Lan, tmp_path: Path) -> None:
    """L12."""
    for number in range(1, 6):
        lan.add_host(number, on_hub=True)
    for number in range(LOSSY_ROUNDS):
        with LanAgents(lan, tmp_path / f"round{number}") as launch:
            joined = join_under_loss(lan, launch, seed=number)
        assert joined.took_s < JOINED_WITHIN_S
        assert len(joined.view_hashes) == 1
    assert lan.hub.num_lost > 0


def test_one_sided_multicast_and_one_sided_connections_are_enough(
    lan: Lan, launch: LanAgents
) -> None:
    """L13: only host 2 hears host 1; then only host 2 can connect to host 1."""
    for number in (1, 2):
        lan.add_host(number, on_hub=True)
    lan.hub.set_rules(2, 1, Rule(matches=is_multicast, loss=1.0))
    launch.prepare(2)
    (one,) = launch(1)
    time.sleep(4.0)  # its announcements are out, and it does not hear who asks for more
    (two,) = launch(2)
    assert wait_all_see([one, two]) < 10.0

    assert one.end(signal.SIGTERM) == 0
    lan.hub.set_rules(2, 1)
    lan.hub.set_rules(1, 2, Rule(matches=is_tcp_syn, loss=1.0))
    launch(1)
    wait_all_see([one, two])
    stays(lambda: one.sees(two) and two.sees(one), 8.0, lambda: one.output + two.output)


def test_lossy_and_late_mdns_leads_to_a_meeting_without_a_traceback(
    lan: Lan, launch: LanAgents
) -> None:
    """L25: records are found, and their details come late or never."""
    for number in (1, 2, 3):
        lan.add_host(number, on_hub=True)
    lan.hub.set_rules(ANY, ANY, Rule(matches=is_mdns, loss=MDNS_LOSS, delay_s=MDNS_DELAY_S))
    agents = launch(1, 2, 3)
    wait_all_see(agents, 25.0)
    assert all("Traceback" not in agent.output for agent in agents)


def test_two_clusters_on_one_lan_stay_two(lan: Lan, launch: LanAgents) -> None:
    """L28, and L42: a certificate of another authority."""
    for number in (1, 2, 3, 4):
        lan.add_host(number)
    agents = {}
    for number, household in ((3, "b"), (1, "a"), (4, "b"), (2, "a")):
        (agents[number],) = launch(number, household=household, wait=False)
    for agent in agents.values():
        agent.wait_started()
    first, second = [agents[1], agents[2]], [agents[3], agents[4]]
    wait_all_see(first)
    wait_all_see(second)
    assert {a.status()["other_clusters"] for a in agents.values()} == {1}

    agents[3].close()
    target = f"{host(1)}:{agents[1].port}"
    launch(3, household="b", options=["--peer", target])
    wait_all_see(second)
    agents[3].wait_said(target, "another device or cluster", timeout_s=5.0)
    stays(
        lambda: agents[1].sees(agents[2]) and agents[3].sees(agents[4]),
        3.0,
        lambda: "\n".join(agent.output for agent in agents.values()),
    )
    hashes = [agent.status()["view_hash"] for agent in (*first, *second)]
    assert hashes[0] == hashes[1] != hashes[2] == hashes[3]
