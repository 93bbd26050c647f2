"""What `exo-train doctor` says of faults that the lab can make."""

from __future__ import annotations

from typing import Any

import pytest

from tests.agent.running_agents import wait_until
from tests.lan.frames import is_mdns, is_tcp, is_tcp_syn
from tests.lan.hub import ANY, Rule
from tests.lan.lan_agents import LanAgent, LanAgents, host, wait_all_see
from tests.lan.namespaces import Lan

pytestmark = [pytest.mark.lan, pytest.mark.processes, pytest.mark.xdist_group("lan")]

NETWORK_TROUBLE = 3
TOLD_WITHIN_S = 10.0
PORT = 7070


def _said(findings: list[dict[str, Any]], *words: str) -> dict[str, Any]:
    """Give the worst finding that has these words; they come worst first."""
    for finding in findings:
        text = f"{finding['said']} {finding['fix']}".lower()
        if all(word.lower() in text for word in words):
            return finding
    raise AssertionError(f"no finding has {words}: {findings}")


def _wait_wrong(agent: LanAgent, host: str) -> None:
    """Wait until the agent has called the host in vain."""

    def is_noted() -> bool:
        failures = agent.examine()["seen_but_not_met"]
        return any(one["address"].startswith(f"{host}:") for one in failures)

    wait_until(is_noted, TOLD_WITHIN_S, lambda: f"{agent.examine()}\n{agent.output}")


def test_a_household_in_order_has_nothing_wrong(lan: Lan, launch: LanAgents) -> None:
    for number in (1, 2):
        lan.add_host(number)
    agents = launch(1, 2)
    wait_all_see(agents)
    for agent, other in zip(agents, reversed(agents), strict=True):
        code, found = agent.doctor()
        wrong = [finding for finding in found if finding["verdict"] == "wrong"]
        assert not [finding for finding in wrong if finding["area"] == "network"]
        assert code in (0, 4), "4: this machine may be short of memory"
        assert _said(found, f"{other.name} can connect to this device")["verdict"] == "ok"
        assert _said(found, "mDNS passes on lan0")["verdict"] == "ok"


def test_an_unreachable_neighbour_shows_the_routes(lan: Lan, launch: LanAgents) -> None:
    """L47: the errno of macOS' local network permission, here from a route."""
    for number in (1, 2):
        lan.add_host(number)
        lan.set_sysctl(number, "net.ipv6.conf.all.disable_ipv6", "1")
    one, two = launch(1, 2)
    wait_all_see([one, two])
    lan.drop_route(1, host(2), "unreachable")
    wait_until(lambda: one.members()[two.id]["state"] != "alive", TOLD_WITHIN_S, lambda: one.output)
    code, found = one.doctor()
    assert code == NETWORK_TROUBLE
    finding = _said(found, "no route to host", "a route or rule forbids it", host(2))
    assert f"unreachable {host(2)}" in finding["said"]


def test_each_kind_of_firewall_has_its_sentence(lan: Lan, launch: LanAgents) -> None:
    """L48: host 2 drops, host 3 refuses, host 4 passes TCP and no mDNS; the others go on."""
    for number in (1, 2, 3, 4):
        lan.add_host(number, on_hub=True)
    drops, refuses = Rule(matches=is_tcp_syn, loss=1.0), Rule(refuses=True)
    no_mdns = Rule(matches=is_mdns, loss=1.0)
    lan.hub.set_rules(ANY, 2, drops)
    lan.hub.set_rules(ANY, 3, refuses)
    lan.hub.set_rules(ANY, 4, no_mdns)
    for number, rules in ((1, (no_mdns,)), (2, (no_mdns, drops)), (3, (no_mdns, refuses))):
        lan.hub.set_rules(4, number, *rules)
    one, two, three = launch(1, 2, 3)
    (four,) = launch(4, options=["--peer", f"{host(1)}:{one.port}"])
    for agent in (one, four):
        others = [a for a in (one, two, three, four) if a is not agent]
        wait_until(lambda a=agent, o=others: a.sees(*o), TOLD_WITHIN_S, lambda a=agent: a.output)
    for agent in (two, three):
        agent.wait_said("others cannot reach this device", timeout_s=TOLD_WITHIN_S)

    code, found = one.doctor()
    assert code == NETWORK_TROUBLE
    timed_out = _said(found, f"host2 at {host(2)}:{two.port}", "timed out")
    refused = _said(found, f"host3 refuses connections at {host(3)}:{three.port}")
    unannounced = _said(found, "host4 is reached at", "not announced", "5353")
    assert timed_out["verdict"] == refused["verdict"] == "wrong"
    assert len({timed_out["said"], refused["said"], unannounced["said"]}) == 3
    code, found = two.doctor()
    assert code == NETWORK_TROUBLE
    _said(found, "cannot connect to this device", f"{host(2)}:{two.port} (timed out)")
    _, found = three.doctor()
    _said(found, "cannot connect to this device", f"{host(3)}:{three.port} (refused)")
    _, found = four.doctor()
    _said(found, "no mdns (udp 5353) comes in on lan0", "can be reached by address")


def test_both_ends_say_which_direction_is_dead(lan: Lan, launch: LanAgents) -> None:
    """L13: host 1 cannot open connections to host 2; the other way works."""
    for number in (1, 2):
        lan.add_host(number, on_hub=True)
    lan.hub.set_rules(1, 2, Rule(matches=is_tcp_syn, loss=1.0))
    one, two = launch(1, 2)
    wait_all_see([one, two])
    two.wait_said("others cannot reach this device", "from host1", timeout_s=TOLD_WITHIN_S)
    code, found = one.doctor()
    assert code == NETWORK_TROUBLE
    _said(found, "host2", f"{host(2)}:{two.port}", "timed out")
    assert not [f for f in found if f["check"] == "reachable" and f["verdict"] == "wrong"]
    code, found = two.doctor()
    assert code == NETWORK_TROUBLE
    _said(found, "host1 cannot connect to this device", f"{host(2)}:{two.port} (timed out)")


def test_guests_that_an_access_point_keeps_apart_are_told(lan: Lan, launch: LanAgents) -> None:
    """AP isolation, multicast included: the only sign of the other is its typed address."""
    for number in (1, 2):
        lan.add_host(number)
    lan.isolate(1, 2)
    typed = [word for number in (1, 2) for word in ("--peer", f"{host(number)}:{PORT}")]
    agents = launch(1, 2, options=["--port", f"{PORT}", *typed])
    for agent, other in zip(agents, reversed(agents), strict=True):
        _wait_wrong(agent, host(other.number))
        code, found = agent.doctor()
        assert code == NETWORK_TROUBLE
        assert _said(found, host(other.number), "access point")["verdict"] == "wrong"
        _said(found, "no mDNS (UDP 5353) at all comes in on lan0")


def test_who_is_heard_but_not_reached_is_told(lan: Lan, launch: LanAgents) -> None:
    """AP isolation that lets multicast through."""
    for number in (1, 2):
        lan.add_host(number, on_hub=True)
    lan.hub.set_rules(ANY, ANY, Rule(matches=is_tcp, loss=1.0))
    agents = launch(1, 2)
    for agent, other in zip(agents, reversed(agents), strict=True):
        _wait_wrong(agent, host(other.number))
        code, found = agent.doctor()
        assert code == NETWORK_TROUBLE
        _said(found, f"{host(other.number)}:{other.port} does not answer", "access point")


def test_packets_that_are_lost_for_their_size_are_thought_of(lan: Lan, launch: LanAgents) -> None:
    """Nothing that needs a packet of full size passes, not even the start of TLS."""
    for number in (1, 2):
        lan.add_host(number, on_hub=True)
    lan.hub.set_rules(ANY, ANY, Rule(mtu_bytes=1300))
    one, two = launch(1, 2)
    _wait_wrong(one, host(2))
    code, found = one.doctor()
    assert code == NETWORK_TROUBLE
    _said(found, f"takes connections at {host(2)}:{two.port} and then says nothing", "MTU")
