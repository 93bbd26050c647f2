"""The network changes under running agents: late, moving, breaking interfaces, fading multicast."""

from __future__ import annotations

import socket
import time

import pytest
from zeroconf import DNSOutgoing, DNSPointer

from exo_train.cluster.discovery import SERVICE_TYPE
from tests.agent.running_agents import wait_until
from tests.lan.lan_agents import MEET_WITHIN_S, LanAgent, LanAgents, host, stays, wait_all_see
from tests.lan.namespaces import Lan

pytestmark = [pytest.mark.lan, pytest.mark.processes, pytest.mark.xdist_group("lan")]

FOLLOWED_WITHIN_S = 12.0
MDNS_GROUP = ("224.0.0.251", 5353)
RESPONSE = 0x8400
PTR, CLASS_IN = 12, 1


def test_a_network_that_comes_late_is_waited_for_and_one_that_moves_is_followed(
    lan: Lan, launch: LanAgents
) -> None:
    """L04, L19 and L42: certificates are bound to the device, whatever address it has."""
    lan.add_host(1)
    lan.add_host(2, with_address=False)
    lan.set_sysctl(2, "net.ipv6.conf.lan0.disable_ipv6", "1")
    one, two = launch(1, 2)
    two.wait_said("no usable network", timeout_s=5.0)
    lan.give_address(2, host(2))
    wait_all_see([one, two])

    lan.take_address(2, host(2))
    lan.give_address(2, host(22))

    def address() -> str:
        member = one.members()[two.id]
        return f"{member['state']} {' '.join(member['addresses'])}"

    moved = f"alive {host(22)}:"
    wait_until(lambda: address().startswith(moved), FOLLOWED_WITHIN_S, address)

    for last in (23, 24, 25, 26, 27):
        lan.take_address(2, host(last - 1))
        lan.give_address(2, host(last))
        time.sleep(0.4)
    moved = f"alive {host(27)}:"
    wait_until(lambda: address().startswith(moved), FOLLOWED_WITHIN_S, address)
    assert not one.says("host2", "has not answered"), "its id was followed, it was never gone"
    assert two.output.count("no usable network") == 1
    assert "Traceback" not in one.output + two.output


def test_one_bad_interface_costs_no_heartbeat(lan: Lan, launch: LanAgents) -> None:
    """L08: interfaces vanish and go down, and a route is lost, one a second."""
    for number in (1, 2):
        lan.add_host(number)
    for interface, address in (("eth7", "10.70.0.1/24"), ("eth8", "10.80.0.1/24")):
        lan.add_spare(1, interface, address)
    one, two = launch(1, 2)
    wait_all_see([one, two])

    lan.on(1, "ip", "link", "del", "eth7")
    stays(lambda: _alive(one, two), 1.0, lambda: one.output)
    lan.on(1, "ip", "link", "set", "eth8", "down")
    stays(lambda: _alive(one, two), 1.0, lambda: one.output)
    lan.on(1, "ip", "route", "del", "224.0.0.0/4")
    stays(lambda: _alive(one, two), 7.0, lambda: one.output)  # longer than "suspect" takes
    assert "Traceback" not in one.output + two.output
    assert len(one.output.splitlines()) < 25, "one line for each, and no flood"


def test_members_stay_members_when_multicast_fades_and_their_records_end(
    lan: Lan, launch: LanAgents
) -> None:
    """L21: all records are taken back at once, by a goodbye that no member sent."""
    for number in (1, 2, 3):
        lan.add_host(number)
    one, two = launch(1, 2)
    wait_all_see([one, two])
    for agent in (one, two):
        _say_goodbye_for(lan, agent)
    time.sleep(0.2)
    for number in (1, 2, 3):
        lan.set_multicast(number, passes=False)
    stays(lambda: _alive(one, two), 7.0, lambda: one.output + two.output)
    assert not one.says("left")
    assert not two.says("left")


def test_a_late_third_device_meets_two_that_changed_addresses(lan: Lan, launch: LanAgents) -> None:
    """L19: the new addresses are announced, the old ones are not."""
    for number in (1, 2, 3):
        lan.add_host(number)
    agents = launch(1, 2)
    wait_all_see(agents)
    lan.take_address(1, host(1))
    lan.give_address(1, host(11))
    agents += launch(3)
    wait_all_see(agents, MEET_WITHIN_S)
    addresses = agents[2].members()[agents[0].id]["addresses"]
    hosts = {address.rpartition(":")[0] for address in addresses}
    assert host(11) in hosts
    assert host(1) not in hosts


def _alive(one: LanAgent, two: LanAgent) -> bool:
    """Tell whether each takes the other as alive, and not as suspect."""
    return all(
        agent.members()[other.id]["state"] == "alive" for agent, other in ((one, two), (two, one))
    )


def _say_goodbye_for(lan: Lan, agent: LanAgent) -> None:
    """Multicast from host 3 that the agent's record is no more (TTL 0)."""
    goodbye = DNSOutgoing(RESPONSE)
    name = f"{agent.id}.{SERVICE_TYPE}"
    goodbye.add_answer_at_time(DNSPointer(SERVICE_TYPE, PTR, CLASS_IN, 0, name), 0)
    with lan.inside(3), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 255)
        sender.bind((host(3), MDNS_GROUP[1]))
        for packet in goodbye.packets():
            sender.sendto(packet, MDNS_GROUP)
