"""Codes over a real network: by multicast, by address, over IPv6 alone; and a device put out."""

from __future__ import annotations

import signal

import pytest

from tests.agent.running_agents import wait_until
from tests.lan.lan_agents import LanAgent, LanAgents, host, wait_all_see
from tests.lan.namespaces import Lan

pytestmark = [pytest.mark.lan, pytest.mark.processes, pytest.mark.xdist_group("lan")]

PAIRED_WITHIN_S = 10.0
ENDED_WITHIN_S = 10.0
CONFIGURATION, NETWORK_TROUBLE = 2, 3  # exit codes


def test_a_code_is_all_that_is_typed(lan: Lan, launch: LanAgents) -> None:
    """The first device shows it; the second is found by mDNS, and needs no code later."""
    for number in (1, 2):
        lan.add_host(number)
    (one,) = launch(1, is_paired=False)
    one.wait_said("exo-train join --code", timeout_s=5.0)
    code = next(line.split()[-1] for line in one.output.splitlines() if "--code" in line)
    (two,) = launch(2, is_paired=False, options=["--code", code])
    wait_all_see([one, two], PAIRED_WITHIN_S)
    two.wait_said("paired", timeout_s=1.0)
    one.wait_said("the code was used", timeout_s=5.0)

    assert two.end(signal.SIGTERM) == 0
    launch(2, is_paired=False)
    wait_all_see([one, two])
    assert len(one.members()) == 2


def test_an_address_helps_where_multicast_is_dead(lan: Lan, launch: LanAgents) -> None:
    """L01 and L22 for pairing: the invitation tells the address to type."""
    for number in (1, 2):
        lan.add_host(number)
        lan.set_multicast(number, passes=False)
    (one,) = launch(1, is_paired=False)
    invitation = one.invite()
    (address,) = (a for a in invitation["addresses"] if a.startswith(f"{host(1)}:"))
    options = ["--code", invitation["code"], "--peer", address]
    (two,) = launch(2, is_paired=False, options=options)
    wait_all_see([one, two], PAIRED_WITHIN_S)


def test_link_local_ipv6_is_enough_for_a_code(lan: Lan, launch: LanAgents) -> None:
    """L16: no host has an IPv4 address."""
    for number in (1, 2):
        lan.add_host(number, with_address=False)
    (one,) = launch(1, is_paired=False)
    (two,) = launch(2, is_paired=False, options=["--code", one.invite()["code"]])
    wait_all_see([one, two], PAIRED_WITHIN_S)


def test_a_device_that_was_put_out_is_refused_by_all(lan: Lan, launch: LanAgents) -> None:
    """L42: host 3 is removed while it is away, and comes back to one who only heard of it."""
    for number in (1, 2, 3):
        lan.add_host(number)
    one, two, three = launch(1, 2, 3)
    wait_all_see([one, two, three])
    assert three.end(signal.SIGTERM) == 0
    removed = one.run("remove", "host3")
    assert removed.returncode == 0, removed.stderr
    assert "host3 is a member no more" in removed.stdout
    assert one.end(signal.SIGTERM) == 0

    launch(3)
    assert _end_code(three) == NETWORK_TROUBLE
    assert three.says("removed from the cluster", "exo-train invite")
    wait_until(lambda: two.sees(), ENDED_WITHIN_S, lambda: two.output)
    assert three.id not in two.members()
    again = three.run("join", "--headless")
    assert again.returncode == CONFIGURATION, again.stderr
    assert "removed from its cluster" in again.stderr


def _end_code(agent: LanAgent) -> int:
    assert agent.process is not None
    return agent.process.wait(ENDED_WITHIN_S)
