"""Which addresses are used: two networks, tunnels, IPv6, routers, hosts that nobody can call."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.running_agents import wait_until
from tests.lan.frames import is_ipv6, is_mdns, is_tcp, is_tcp_syn
from tests.lan.hub import ANY, Rule
from tests.lan.lan_agents import LanAgent, LanAgents, host, stays, wait_all_see
from tests.lan.namespaces import SECOND_SUBNET, SUBNET, Lan

pytestmark = [pytest.mark.lan, pytest.mark.processes, pytest.mark.xdist_group("lan")]

LINKS_WITHIN_S = 20.0
SETTLED_WITHIN_S = 8.0
SLOW_BYTES_PER_S = 5e6 / 8
TOLD_WITHIN_S = 10.0
ALL_PROTOCOLS = 3  # ETH_P_ALL


@pytest.fixture(scope="module")
def on_two_networks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LanAgent]]:
    """Three devices on a fast and on a slow network; the third shall use the fast one only."""
    with Lan() as lan, LanAgents(lan, tmp_path_factory.mktemp("networks")) as launch:
        for number in (1, 2, 3):
            lan.add_host(number)
            lan.add_network(number, "wlan0", rate="5mbit")
            lan.on(number, "ip", "route", "add", "default", "dev", "wlan0")
        agents = launch(1, 2, wait=False)
        agents += launch(3, options=["--interface", "lan0"])
        wait_all_see(agents)
        yield agents


def test_both_networks_are_advertised_and_an_option_chooses_one(
    on_two_networks: list[LanAgent],
) -> None:
    """L05: as far as no link is measured."""
    one, two, three = on_two_networks
    members = one.members()
    for agent in (one, two):
        assert {a.rpartition(":")[0] for a in members[agent.id]["addresses"]} >= {
            host(agent.number),
            f"{SECOND_SUBNET}.{agent.number}",
        }
    hosts = {a.rpartition(":")[0] for a in members[three.id]["addresses"]}
    assert host(3) in hosts
    assert f"{SECOND_SUBNET}.3" not in hosts


def test_the_fast_network_is_the_link_though_the_slow_one_has_the_default_route(
    on_two_networks: list[LanAgent],
) -> None:
    """L05: each pair's link is measured, the same for both ends, and shown in words."""
    one, two, three = on_two_networks
    for agent, other in ((one, two), (two, one), (one, three), (two, three)):
        ends = {agent.name, other.name}
        wait_until(
            lambda a=agent, e=ends: _link(a, e).get("interface") == "lan0",
            LINKS_WITHIN_S,
            lambda a=agent: f"{a.status()['links']} {a.output}",
        )
        link = _link(agent, ends)
        assert min(link["bytes_per_s"]) > 2 * SLOW_BYTES_PER_S
        assert "MB/s" in link["line"] or "GB/s" in link["line"]
    # The first way that was measured is used until the others are: it must not just be that one.
    both = {"host1", "host2"}
    stays(lambda: _link(one, both)["interface"] == "lan0", SETTLED_WITHIN_S, lambda: one.output)
    assert _link(one, both) == _link(two, both)


def test_the_chosen_interface_is_the_only_one_that_listens_is_told_and_announced(
    lan: Lan, launch: LanAgents
) -> None:
    """L07."""
    for number in (1, 2):
        lan.add_host(number)
    lan.add_spare(1, "tun0", "10.8.0.1/24", routed=True)
    with _sniffed(lan) as packets:
        agents = launch(1, options=["--interface", "lan0"], wait=False) + launch(2)
        wait_all_see(agents)
    said = b"".join(packets())
    assert socket.inet_aton(host(1)) in said
    assert socket.inet_aton("10.8.0.1") not in said
    own = _hosts_of(lan, 1, "lan0")
    assert len(own) == 2, "IPv4, and the IPv6 address that each interface has"
    assert _listening(lan, 1) <= {*own, "127.0.0.1"}
    for agent in agents:
        addresses = agent.members()[agents[0].id]["addresses"]
        assert {_bare(address) for address in addresses} == own
        assert {address.rpartition(":")[2] for address in addresses} == {str(agents[0].port)}
    assert "10.8.0.1" not in agents[0].output


def test_link_local_ipv6_alone_is_enough_and_mixes_with_ipv4(lan: Lan, launch: LanAgents) -> None:
    """L16."""
    lan.add_host(1, with_address=False)
    lan.add_host(2, with_address=False)
    lan.add_host(3)
    agents = launch(1, 2, 3)
    wait_all_see(agents)
    for other in agents[1:]:
        (address, *_) = other.members()[agents[0].id]["addresses"]
        assert address.startswith("[fe80:")


def test_a_family_that_does_not_pass_is_no_obstacle(lan: Lan, launch: LanAgents) -> None:
    """L17: IPv6 is configured and advertised, and the network drops it."""
    for number in (1, 2):
        lan.add_host(number, on_hub=True)
        lan.give_address(number, f"fd00:56::{number}")
    lan.hub.set_rules(ANY, ANY, Rule(matches=is_ipv6, loss=1.0))
    assert wait_all_see(launch(1, 2)) < 10.0


def test_ipv6_serves_where_ipv4_does_not_pass(lan: Lan, launch: LanAgents) -> None:
    """L17, the other way round."""
    for number in (1, 2):
        lan.add_host(number, on_hub=True)
        lan.give_address(number, f"fd00:56::{number}")
    lan.hub.set_rules(
        ANY, ANY, Rule(matches=lambda frame: is_tcp(frame) and not is_ipv6(frame), loss=1.0)
    )
    assert wait_all_see(launch(1, 2)) < 10.0


def test_a_port_that_is_taken_is_an_error_and_not_silence(lan: Lan, launch: LanAgents) -> None:
    """L18."""
    lan.add_host(1)
    with lan.inside(1):
        taken = socket.create_server(("0.0.0.0", 0))
    with taken:
        port = taken.getsockname()[1]
        agent = launch.prepare(1)
        refused = agent.run("join", "--headless", "--port", str(port))
    assert refused.returncode == 3, refused.stderr
    assert f"{port}" in refused.stderr
    assert "choose another port" in refused.stderr


def test_a_typed_address_leads_over_a_router_and_spreads(lan: Lan, launch: LanAgents) -> None:
    """L22: host 3 is in another subnet; only host 1's address was typed, host 2 hears of it."""
    for number in (1, 2, 3):
        lan.add_host(number)
    _route(lan)
    one, two = launch(1, 2)
    (three,) = launch(3, options=["--peer", f"{host(1)}:{one.port}"])
    wait_all_see([one, two, three])
    known = {_bare(address) for address in two.members()[three.id]["addresses"]}
    assert f"{SECOND_SUBNET}.3" in known
    assert two.members()[three.id]["addresses"][0].startswith(f"{SECOND_SUBNET}.3:"), "it answers"


def test_a_device_that_can_call_and_not_be_called_is_told_so_and_kept_out(
    lan: Lan, launch: LanAgents, tmp_path: Path
) -> None:
    """L23: as behind NAT; connections to host 3 do not open, and mDNS does not reach it.

    Its membership stays, and a run takes the others.
    """
    for number in (1, 2, 3):
        lan.add_host(number, on_hub=True)
    lan.hub.set_rules(ANY, 3, Rule(matches=is_tcp_syn, loss=1.0), Rule(matches=is_mdns, loss=1.0))
    lan.hub.set_rules(3, ANY, Rule(matches=is_mdns, loss=1.0))
    one, two = launch(1, 2)
    (three,) = launch(3, options=["--peer", f"{host(1)}:{one.port}"])
    three.wait_said("others cannot reach this device", host(3), timeout_s=TOLD_WITHIN_S)
    for agent in (one, two):
        wait_until(
            lambda agent=agent: agent.members()[three.id]["unreachable"],
            TOLD_WITHIN_S,
            lambda agent=agent: agent.output,
        )
        members = agent.members()
        assert members[three.id]["state"] == "alive"
        assert not members[one.id]["unreachable"]
        assert not members[two.id]["unreachable"]
    refused = one.train(tmp_path, "--min-devices", "3", "--device-wait-s", "1")
    assert refused.returncode == 3, refused.stderr
    assert "others cannot connect to host3" in refused.stderr


def _link(agent: LanAgent, ends: set[str]) -> dict[str, Any]:
    links = agent.status()["links"]
    found = (link for link in links if {end["name"] for end in link["ends"]} == ends)
    return next(found, {})


def _route(lan: Lan) -> None:
    lan.add_router(inner_host=3)
    for number in (1, 2):
        lan.route_via_router(number, SUBNET)
    lan.route_via_router(3, SECOND_SUBNET)


@contextlib.contextmanager
def _sniffed(lan: Lan) -> Iterator[Callable[[], list[bytes]]]:
    """Give a function for the mDNS frames that passed the switch so far."""
    with lan.inside_switch():
        sniffer = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
    sniffer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    sniffer.bind(("br0", 0))
    sniffer.setblocking(False)
    found: list[bytes] = []

    def packets() -> list[bytes]:
        with contextlib.suppress(BlockingIOError, ValueError, OSError):
            while True:
                frame = sniffer.recv(65536)
                if is_mdns(frame):
                    found.append(frame)
        return found

    with sniffer:
        yield packets
        packets()


def _listening(lan: Lan, number: int) -> set[str]:
    """Give the hosts on which something listens for TCP there."""
    shown = lan.on(number, "ss", "-Hltn").splitlines()
    return {_bare(line.split()[3]) for line in shown}


def _hosts_of(lan: Lan, number: int, interface: str) -> set[str]:
    words = lan.on(number, "ip", "-br", "addr", "show", "dev", interface).split()
    return {word.partition("/")[0] for word in words if "/" in word}


def _bare(address: str) -> str:
    """Give the host of HOST:PORT as the kernel writes it: no brackets, no zone."""
    host = address.rpartition(":")[0].strip("[]").partition("%")[0].strip("[]")
    return host.removeprefix("::ffff:")
