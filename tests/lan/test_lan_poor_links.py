"""Members on a bad network: Wi-Fi that stalls, a thin line, a way that swallows large packets."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.agent.running_agents import wait_until
from tests.lan.hub import ANY, Air, Rule
from tests.lan.lan_agents import LIVE, LanAgents, host, stays, wait_all_see
from tests.lan.namespaces import SECOND_SUBNET, Lan

pytestmark = [pytest.mark.lan, pytest.mark.processes, pytest.mark.xdist_group("lan")]

POOR_MEET_WITHIN_S = 30.0
POOR_FOR_S = 18.0  # longer than what makes a member dead
BULK_PORT = 7999
CHUNK_BYTES = 65536
MEASURED_WITHIN_S = 15.0


def test_wifi_that_loses_and_stalls_costs_no_member(lan: Lan, launch: LanAgents) -> None:
    """One air for all: 2 ms, 12 % loss, and half a second of nothing every second or three."""
    for number in (1, 2, 3):
        lan.add_host(number, on_hub=True)
    lan.hub.set_rules(ANY, ANY, Rule(delay_s=0.002, loss=0.12))
    lan.hub.share_air(Air(bits_per_s=60e6, stall_s=(0.1, 0.5)), (1, 2, 3))
    agents = launch(1, 2, 3)
    wait_all_see(agents, POOR_MEET_WITHIN_S)
    view = agents[0].status()["view_hash"]

    def is_whole() -> bool:
        stories = [agent.status() for agent in agents]
        states = {member["state"] for story in stories for member in story["members"]}
        return states <= set(LIVE) and {story["view_hash"] for story in stories} == {view}

    stays(is_whole, POOR_FOR_S, lambda: "\n".join(f"{a.states()} {a.output}" for a in agents))
    assert lan.hub.num_lost > 0
    assert all("has not answered" not in agent.output for agent in agents)


def test_a_line_full_of_bulk_data_costs_no_member(lan: Lan, launch: LanAgents) -> None:
    """L34: 256 kbit/s, a second of queue, measured by the agents and filled by somebody else."""
    for number in (1, 2):
        lan.add_host(number)
        shape = ("tbf", "rate", "256kbit", "burst", "6kb", "latency", "1s")
        lan.on(number, "tc", "qdisc", "add", "dev", "lan0", "root", *shape)
    one, two = launch(1, 2)
    wait_all_see([one, two], POOR_MEET_WITHIN_S)

    def is_whole() -> bool:
        return all(
            agent.members()[other.id]["state"] == "alive"
            for agent, other in ((one, two), (two, one))
        )

    with _bulk(lan) as sent_bytes:
        stays(is_whole, POOR_FOR_S, lambda: f"{one.states()} {one.output}\n{two.output}")
        assert sent_bytes() > 256e3 / 8 * POOR_FOR_S / 4, "the line was not full"


def test_a_way_that_swallows_large_packets_is_not_used_and_shown(
    lan: Lan, launch: LanAgents
) -> None:
    """A black hole on the fast network: connections open there, and nothing large passes."""
    for number in (1, 2):
        lan.add_host(number)
        lan.add_network(number, "wlan0", rate="20mbit")
        lan.on(number, "ip", "link", "set", "lan0", "gso_max_segs", "1")
        lan.switch("ip", "link", "set", lan.port(number), "mtu", "1300")
    one, two = launch(1, 2)
    wait_all_see([one, two])
    for agent in (one, two):
        wait_until(
            lambda a=agent: bool(a.status()["links"]), MEASURED_WITHIN_S, lambda a=agent: a.output
        )
        (link,) = agent.status()["links"]
        hosts = {end["host"] for end in link["ends"]}
        assert not hosts & {host(1), host(2)}
        assert link["interface"] == "wlan0"
        assert f"{SECOND_SUBNET}." in str(hosts) or "fe80" in str(hosts)
    measurer = min(one, two, key=lambda agent: agent.id)  # the smaller id looks for both

    def told() -> list[str]:
        _, findings = measurer.doctor()
        return [f["said"] for f in findings if f["check"] == "links" and f["verdict"] == "wrong"]

    wait_until(
        lambda: any("takes connections, but nothing passes" in said for said in told()),
        MEASURED_WITHIN_S,
        lambda: str(told()),
    )
    assert all("MTU" in said and "lan0" in said for said in told())


@contextlib.contextmanager
def _bulk(lan: Lan) -> Iterator[Callable[[], int]]:
    """Fill the line from host 1 to host 2; gives a function for how much went out."""
    ended, sent = threading.Event(), [0]
    with lan.inside(2):
        sink = socket.create_server((host(2), BULK_PORT))
    with lan.inside(1):
        source = socket.create_connection((host(2), BULK_PORT), 5.0)
    taking, _ = sink.accept()
    for end in (source, taking):
        end.settimeout(0.2)

    def pump() -> None:
        while not ended.is_set():
            with contextlib.suppress(TimeoutError):
                sent[0] += source.send(bytes(CHUNK_BYTES))

    def drain() -> None:
        while not ended.is_set():
            with contextlib.suppress(TimeoutError):
                taking.recv(CHUNK_BYTES)

    threads = [threading.Thread(target=work, daemon=True) for work in (pump, drain)]
    for thread in threads:
        thread.start()
    try:
        yield lambda: sent[0]
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        for end in (source, taking, sink):
            end.close()
