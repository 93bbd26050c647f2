"""One household of five whose machines are set up oddly: they meet nevertheless, and tell it right.

The odd things are each a separate test's matter; the household is started once.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tests.lan.lan_agents import MEET_WITHIN_S, LanAgent, LanAgents, host, wait_all_see
from tests.lan.namespaces import Lan

pytestmark = [pytest.mark.lan, pytest.mark.processes, pytest.mark.xdist_group("lan")]

LONG_HOSTNAME = "kitchen-" + "x" * 56  # 64 characters: the kernel's limit
MAC_HOSTNAME = "José's Mac mini.local"
SAME_HOSTNAME = "raspberrypi"
DEAD_INTERFACES = ("utun4", "awdl0", "llw0")
UNRELATED_PORT = 7999
DEAD_RESOLVER = "nameserver 10.56.0.99\noptions timeout:30\n"


@dataclass
class Household:
    lan: Lan
    agents: list[LanAgent]
    met_after_s: float

    def __getitem__(self, number: int) -> LanAgent:
        return self.agents[number - 1]


@pytest.fixture(scope="module")
def household(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Household]:
    """Five devices: 1 a Mac's name, 2 dead interfaces, 3 to 5 one name, 3 odd files and no IPv6."""
    with Lan() as lan, LanAgents(lan, tmp_path_factory.mktemp("odd")) as launch:
        for number in range(1, 6):
            lan.add_docker_bridge(lan.add_host(number))
        for interface in DEAD_INTERFACES:
            lan.add_spare(2, interface)
        for scope in ("all", "default"):
            lan.set_sysctl(3, f"net.ipv6.conf.{scope}.disable_ipv6", "1")
        lan.set_etc(3, "hosts", f"127.0.0.1 localhost\n127.0.1.1 {SAME_HOSTNAME}\n")
        lan.set_etc(3, "resolv.conf", DEAD_RESOLVER)
        agents = launch(1, hostname=MAC_HOSTNAME, wait=False)
        agents += launch(2, hostname=LONG_HOSTNAME, wait=False)
        agents += launch(3, 4, hostname=SAME_HOSTNAME)
        with lan.inside(5):
            unrelated = socket.create_server(("127.0.0.1", UNRELATED_PORT))
        answering = threading.Thread(target=_answer_as_no_agent, args=(unrelated,), daemon=True)
        answering.start()
        for agent in agents:
            agent.wait_started()
        peers = [f"127.0.0.1:{UNRELATED_PORT}", f"{host(5)}:7001", f"{host(1)}:{agents[0].port}"]
        options = ["--port", "7001", *(word for peer in peers for word in ("--peer", peer))]
        agents += launch(5, hostname=SAME_HOSTNAME, options=options)
        met_after_s = wait_all_see(agents)
        yield Household(lan, agents, met_after_s)
        unrelated.shutdown(socket.SHUT_RDWR)
        unrelated.close()
        answering.join()


def _answer_as_no_agent(server: socket.socket) -> None:
    while True:
        try:
            caller, _ = server.accept()
        except OSError:
            return
        with caller:
            caller.sendall(b"220 ftp.example ready\r\n")


def test_docker_bridges_of_one_address_are_no_way_to_anybody(household: Household) -> None:
    """L02."""
    for agent in household.agents:
        for member in agent.members().values():
            assert member["addresses"], member
            assert not [a for a in member["addresses"] if a.startswith("172.17.")], member


def test_dead_interfaces_cost_no_time_and_are_not_advertised(household: Household) -> None:
    """L06: with three interfaces to nowhere on host 2."""
    assert household.met_after_s < MEET_WITHIN_S
    member = household[1].members()[household[2].id]
    assert member["state"] == "alive"
    assert any(a.startswith(f"{host(2)}:") for a in member["addresses"])
    ports = {a.rpartition(":")[2] for a in member["addresses"]}
    assert len(ports) == 1
    dead = household.lan.on(2, "ip", "-6", "-br", "addr").splitlines()
    dead_hosts = [
        word for line in dead if line.startswith(DEAD_INTERFACES) for word in line.split()
    ]
    for address in member["addresses"]:
        assert address.strip("[").partition("]")[0] + "/64" not in dead_hosts


def test_devices_of_one_name_are_all_members_and_told_apart(household: Household) -> None:
    """L09."""
    same = [household[number] for number in (3, 4, 5)]
    members = household[1].members()
    assert {members[agent.id]["name"] for agent in same} == {SAME_HOSTNAME}
    assert len({agent.id for agent in same}) == 3
    shown = household[1].run("status")
    assert shown.returncode == 0, shown.stderr
    for agent in same:
        assert agent.id[:8] in shown.stdout


def test_what_answers_elsewhere_is_no_member_and_nobody_meets_itself(household: Household) -> None:
    """L15: host 5 was told to ask an unrelated server on its loopback, and itself."""
    members = household[5].members()
    assert len(members) == 5
    for member in members.values():
        assert f"127.0.0.1:{UNRELATED_PORT}" not in member["addresses"]
    assert "Traceback" not in household[5].output


def test_a_host_without_ipv6_is_reached(household: Household) -> None:
    """L18."""
    for agent in household.agents:
        assert agent.members()[household[3].id]["state"] == "alive"
        addresses = agent.members()[household[3].id]["addresses"]
        assert any(a.startswith(f"{host(3)}:") for a in addresses)


def test_a_hosts_file_that_says_loopback_is_not_believed(household: Household) -> None:
    """L24."""
    seen = household[1].members()[household[3].id]["addresses"]
    own = household[3].members()[household[3].id]["addresses"]
    assert not [a for a in (*seen, *own) if a.startswith(("127.", "[::1]", "localhost"))]


def test_a_dead_resolver_and_names_in_local_play_no_part(household: Household) -> None:
    """L39: host 3's resolver is dead; a name is refused at once, by the command."""
    assert household[3].sees(*(a for a in household.agents if a is not household[3]))

    def refused(peer: str) -> tuple[str, float]:
        start_s = time.monotonic()
        done = household[3].run("join", "--headless", "--peer", peer)
        assert done.returncode == 2
        return done.stderr, time.monotonic() - start_s

    said, named_s = refused("host1.local:7001")
    assert "host1.local:7001" in said
    assert "numeric" in said
    _, other_s = refused("10.56.0.1:no-port")
    assert named_s < other_s + 5.0, "a resolver that is dead costs ten seconds"


def test_long_and_foreign_names_are_shown_cut_and_hostile_ones_refused(
    household: Household,
) -> None:
    """L26."""
    for agent in household.agents:
        names = {i: member["name"] for i, member in agent.members().items()}
        assert names[household[1].id] == "José's Mac mini"
        assert LONG_HOSTNAME.startswith(names[household[2].id])
        assert len(names[household[2].id]) >= 32
    for name in ("den\npc", "den\x1b[2J", "x\u202ecp"):
        refused = household[4].run("join", "--headless", "--name", name)
        assert refused.returncode == 2, refused.stderr
        assert "control characters" in refused.stderr
    assert all("Traceback" not in agent.output for agent in household.agents)


def test_status_answers_within_a_second_while_many_ask(household: Household) -> None:
    """L41: as far as there is no run."""

    def ask(_: int) -> float:
        start_s = time.monotonic()
        assert len(household[1].members()) == 5
        return time.monotonic() - start_s

    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(ask, range(80))) < 1.0


def test_all_tell_the_same_story(household: Household) -> None:
    """One view, whoever is asked."""
    stories = [agent.status() for agent in household.agents]
    assert len({story["view_hash"] for story in stories}) == 1
    assert {tuple(m["id"] for m in story["members"]) for story in stories} == {
        tuple(sorted(agent.id for agent in household.agents))
    }
