"""What `exo-train doctor` says of faults that the lab can make."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.lan.frames import is_mdns, is_tcp_syn
from tests.lan.hub import ANY, Rule
from tests.lan.lan_agents import LanAgent, LanAgents, host, wait_all_see
from tests.lan.namespaces import Lan

pytestmark = [
    pytest.mark.lan,
    pytest.mark.processes,
    pytest.mark.xdist_group("lan"),
    pytest.mark.xfail(strict=False, reason="there is no doctor yet"),
]

NETWORK_TROUBLE = 3


def _findings(agent: LanAgent, *, verdict: str = "wrong") -> tuple[int, list[dict[str, Any]]]:
    done = agent.run("doctor", "--json")
    content = json.loads(done.stdout)
    return done.returncode, [f for f in content["findings"] if f["verdict"] == verdict]


def _said(findings: list[dict[str, Any]], *words: str) -> dict[str, Any]:
    for finding in findings:
        text = f"{finding['said']} {finding['fix']}".lower()
        if all(word.lower() in text for word in words):
            return finding
    raise AssertionError(f"no finding has {words}: {findings}")


def test_a_household_in_order_has_nothing_wrong(lan: Lan, launch: LanAgents) -> None:
    for number in (1, 2):
        lan.add_host(number)
    agents = launch(1, 2)
    wait_all_see(agents)
    for agent in agents:
        code, wrong = _findings(agent)
        assert not [finding for finding in wrong if "memory" not in finding["check"]]
        assert code in (0, 4)


def test_an_unreachable_neighbour_shows_the_routes(lan: Lan, launch: LanAgents) -> None:
    """L47: the errno of macOS' local network permission, here from a route."""
    for number in (1, 2):
        lan.add_host(number)
    one, two = launch(1, 2)
    wait_all_see([one, two])
    lan.drop_route(1, host(2), "unreachable")
    code, wrong = _findings(one)
    assert code == NETWORK_TROUBLE
    _said(wrong, "route", host(2))


def test_each_kind_of_firewall_has_its_sentence(lan: Lan, launch: LanAgents) -> None:
    """L48 and L13: host 2 drops, host 3 refuses, host 4 passes TCP and no mDNS."""
    for number in (1, 2, 3, 4):
        lan.add_host(number, on_hub=True)
    lan.hub.set_rules(ANY, 2, Rule(matches=is_tcp_syn, loss=1.0))
    lan.hub.set_rules(ANY, 3, Rule(refuses=True))
    lan.hub.set_rules(4, ANY, Rule(matches=is_mdns, loss=1.0))
    lan.hub.set_rules(ANY, 4, Rule(matches=is_mdns, loss=1.0))
    one, two, three = launch(1, 2, 3)
    (four,) = launch(4, options=["--peer", f"{host(1)}:{one.port}"])
    wait_all_see([one, four, two, three])
    code, wrong = _findings(one)
    assert code == NETWORK_TROUBLE
    timed_out = _said(wrong, "time", host(2), str(two.port))
    refused = _said(wrong, "refuse", host(3), str(three.port))
    assert timed_out["said"] != refused["said"]
    _, wrong_there = _findings(four)
    _said(wrong_there, "5353")


def test_guests_that_an_access_point_keeps_apart_are_told(lan: Lan, launch: LanAgents) -> None:
    """AP isolation: both are on the network, and neither reaches the other."""
    for number in (1, 2):
        lan.add_host(number)
    lan.isolate(1, 2)
    one, two = launch(1, 2)
    for agent, other in ((one, two), (two, one)):
        code, wrong = _findings(agent)
        assert code == NETWORK_TROUBLE, other.output
        _said(wrong, "multicast")
