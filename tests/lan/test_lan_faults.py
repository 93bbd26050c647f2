"""Devices that die, vanish, leave and come back: what the others say, and when."""

from __future__ import annotations

import signal
import time

import pytest

from tests.agent.running_agents import wait_until
from tests.lan.lan_agents import MEET_WITHIN_S, LanAgent, LanAgents, host, wait_all_see
from tests.lan.namespaces import Lan

pytestmark = [pytest.mark.lan, pytest.mark.processes, pytest.mark.xdist_group("lan")]

DEAD_WITHIN_S = 15.0  # what is promised
FIXED_PORT = 7070
NUM_RESTARTS = 3
MARGIN_S = 3.0
LEAVE_HEARD_WITHIN_S = 2.0
MAX_MORE_FILES = 12
FORCED_END_S = 1.0
EXIT_INTERRUPTED = 130


def test_a_power_cut_a_dead_cable_and_a_leave_are_noticed_and_mended(
    lan: Lan, launch: LanAgents
) -> None:
    """L20, L40: host 2 loses power, 3 its way through the switch, 4 its cable, 5 leaves."""
    for number in range(1, 6):
        lan.add_host(number)
    agents = launch(1, 2, 3, 4, 5)
    wait_all_see(agents)
    one, two, three, four, five = agents

    lan.cut(2)
    two.close()
    lan.cut(3)
    lan.pull_cable(4)
    lost_s = time.monotonic()
    assert five.end(signal.SIGTERM) == 0
    _wait_left(one, five)
    left_s = DEAD_WITHIN_S + MARGIN_S - (time.monotonic() - lost_s)
    wait_until(lambda: one.sees(), left_s, lambda: f"{one.states()}\n{one.output}")
    for agent in (two, three, four):
        assert one.members()[agent.id]["state"] == "dead"
        assert one.members()[agent.id]["addresses"], "it is remembered where it was"

    lan.mend(2)
    lan.mend(3)
    lan.plug_cable(4)
    launch(2, 5)
    wait_all_see(agents, MEET_WITHIN_S)
    assert len(one.members()) == 5


def test_a_device_that_restarts_is_one_member_with_a_new_incarnation(
    lan: Lan, launch: LanAgents
) -> None:
    """L10, L29, L44: power cuts and crashes of host 2, on one port, one after the other."""
    for number in (1, 2):
        lan.add_host(number)
    one, two = launch(1, 2, options=["--port", str(FIXED_PORT)])
    wait_all_see([one, two])
    node_id, incarnation = two.id, two.incarnation
    files_before, hashes = one.running().num_fds(), {one.status()["view_hash"]}
    for count in range(1, NUM_RESTARTS + 1):
        is_power_cut = count % 2 == 1
        if is_power_cut:
            lan.cut(2)
        two.close()
        if is_power_cut:
            lan.mend(2)
        two.start()
        wait_all_see([one, two])
        assert two.id == node_id
        assert two.incarnation == incarnation + count
        assert set(one.members()) == {one.id, node_id}
        hashes.add(one.status()["view_hash"])
    assert len(hashes) == NUM_RESTARTS + 1, "each start is another view"
    assert one.running().num_fds() <= files_before + MAX_MORE_FILES


def test_a_second_agent_of_one_home_is_refused_and_of_another_home_is_another_device(
    lan: Lan, launch: LanAgents
) -> None:
    """L29."""
    lan.add_host(1)
    (one,) = launch(1)
    again = one.run("join", "--headless")
    assert again.returncode == 2, again.stderr
    assert f"pid {one.running().pid}" in again.stderr
    second = launch.second_on_host(1)
    wait_all_see([one, second])
    assert one.port != second.port


def test_any_way_to_end_an_agent_ends_it_and_the_others_know(lan: Lan, launch: LanAgents) -> None:
    """L38, the agent's part: while calls to a stuck device are under way."""
    for number in range(1, 6):
        lan.add_host(number)
    agents = launch(1, 2, 3, 4, 5)
    wait_all_see(agents)
    one, stuck = agents[0], agents[4]
    stuck.running().suspend()
    time.sleep(2.5)  # heartbeats to it hang now
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for agent, number in zip(agents[1:4], ends, strict=True):
        assert agent.end(number) == 0
        _wait_left(one, agent)
    assert "Traceback" not in one.output


def test_a_second_interrupt_ends_at_once(lan: Lan, launch: LanAgents) -> None:
    """L38: a goodbye to a stuck device need not be waited for."""
    for number in (1, 2):
        lan.add_host(number)
    one, stuck = launch(1, 2)
    wait_all_see([one, stuck])
    stuck.running().suspend()
    time.sleep(2.5)
    process = one.process
    assert process is not None
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(FORCED_END_S) == EXIT_INTERRUPTED
    assert "Traceback" not in one.output


def test_who_was_away_is_met_again_at_once_and_where_it_is_now(lan: Lan, launch: LanAgents) -> None:
    """L40: longer away than any back-off is short, and back on another port and address."""
    for number in (1, 2):
        lan.add_host(number)
    one, two = launch(1, 2)
    wait_all_see([one, two])
    two.close()
    wait_until(lambda: one.sees(), DEAD_WITHIN_S + MARGIN_S, lambda: one.output)
    lan.take_address(2, host(2))
    lan.give_address(2, host(22))
    two.start()
    assert wait_all_see([one, two]) < 5.0
    addresses = one.members()[two.id]["addresses"]
    assert f"{host(22)}:{two.port}" in addresses
    assert not [a for a in addresses if a.startswith(f"{host(2)}:")]


def _wait_left(observer: LanAgent, gone: LanAgent) -> None:
    wait_until(
        lambda: observer.members()[gone.id]["state"] == "left",
        LEAVE_HEARD_WITHIN_S,
        lambda: observer.output,
    )
