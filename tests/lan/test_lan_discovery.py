"""mDNS with real packets between hosts: families, dead interfaces, moves, invitations."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from exo_train.cluster.discovery import browse_pairing
from exo_train.cluster.interfaces import (
    LocalAddress,
    default_route,
    dialable,
    interface_towards,
    usable_addresses,
    without_zone,
)
from exo_train.cluster.mdns_record import Seen
from exo_train.peer import Address
from tests.lan.discovering import CLUSTER, Hosts, wait, wait_mutual
from tests.lan.frames import is_mdns
from tests.lan.hub import Rule
from tests.lan.namespaces import SUBNET, Lan, why_no_hub

pytestmark = [pytest.mark.lan, pytest.mark.xdist_group("lan")]


@pytest.fixture
def host(lan: Lan) -> Iterator[Hosts]:
    with Hosts(lan) as hosts:
        yield hosts


def connects(lan: Lan, number: int, address: Address, own: list[LocalAddress]) -> bool:
    """Tell whether a TCP connection to one of the dialled forms of the address is accepted."""
    with lan.inside(number):
        for dialled in dialable(address, among=own):
            with (
                contextlib.suppress(OSError),
                socket.create_connection((dialled.host, dialled.port), timeout=2),
            ):
                return True
    return False


@contextlib.contextmanager
def listening(lan: Lan, number: int, port: int) -> Iterator[None]:
    with lan.inside(number):
        server = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    with server:
        yield


def test_hosts_hear_each_other_in_both_families_at_once(lan: Lan, host: Hosts) -> None:
    for number in (1, 2):
        lan.add_docker_bridge(lan.add_host(number))
    first, second = host(1), host(2)
    assert wait_mutual(first, second) < 2.0
    wait(lambda: any("%lan0" in h for h in first.hosts_of(second)), "the IPv6 record")
    assert {without_zone(h) for h in first.hosts_of(second)} == {
        without_zone(a.host) for a in second.own
    }
    assert f"{SUBNET}.2" in first.hosts_of(second)
    assert "172.17.0.1" not in first.hosts_of(second)
    assert first.discovery.heard().other_clusters == frozenset()


def test_link_local_ipv6_alone_is_enough(lan: Lan, host: Hosts) -> None:
    for number in (1, 2):
        lan.add_host(number, with_address=False)
    first, second = host(1), host(2)
    wait_mutual(first, second)
    (found,) = first.hosts_of(second)
    assert found.startswith("fe80::")
    assert found.endswith("%lan0")
    with listening(lan, 2, second.port):
        assert connects(lan, 1, Address(found, second.port), first.own)
        bare = Address(without_zone(found), second.port)
        assert connects(lan, 1, bare, first.own), "without its zone, too"
    with lan.inside(1):
        own = interface_towards(found)
    assert own == first.own[0]


def test_one_host_without_ipv4_and_one_without_ipv6(lan: Lan, host: Hosts) -> None:
    lan.add_host(1)
    lan.add_host(2, with_address=False)
    lan.add_host(3)
    lan.set_sysctl(3, "net.ipv6.conf.all.disable_ipv6", "1")
    both, ipv6_only, ipv4_only = host(1), host(2), host(3)
    wait_mutual(both, ipv6_only)
    wait_mutual(both, ipv4_only)
    assert {a.family for a in ipv6_only.own} == {"IPv6"}
    assert ipv4_only.hosts_of(both) >= {f"{SUBNET}.1"}
    assert both.hosts_of(ipv4_only) == {f"{SUBNET}.3"}
    assert not ipv6_only.sees(ipv4_only), "they have no family in common"
    heard = ipv4_only.discovery.heard()
    assert set(heard.interfaces) == {"lan0"}
    assert not heard.left_out


def test_dead_interfaces_are_ranked_out_or_cost_nothing(lan: Lan, host: Hosts) -> None:
    for number in (1, 2):
        lan.add_host(number)
    lan.set_sysctl(2, "net.ipv6.conf.default.accept_dad", "0")
    for number, name in enumerate(("utun4", "awdl0", "llw0", "eth7", "eth8"), 1):
        lan.add_spare(2, name, f"fe80::{number}/64")
    first, second = host(1), host(2)
    assert {a.interface for a in second.own} == {"lan0", "eth7", "eth8"}
    assert wait_mutual(first, second) < 3.0
    assert f"{SUBNET}.2" in first.hosts_of(second)


def test_an_interface_that_cannot_be_used_is_left_out_alone(lan: Lan, host: Hosts) -> None:
    for number in (1, 2):
        lan.add_host(number)
    with lan.inside(1):
        own = usable_addresses()
    gone = [
        LocalAddress(interface="gone0", host="10.99.0.1", kind="Ethernet", index=77),
        LocalAddress(interface="gone0", host="fe80::9%gone0", kind="Ethernet", index=77),
    ]
    first, second = host(1, [*gone, *own]), host(2)
    wait_mutual(first, second)
    assert set(first.discovery.heard().left_out) == {"gone0 (IPv4)", "gone0 (IPv6)"}


def test_an_interface_deleted_while_running_takes_no_other_with_it(
    lan: Lan, host: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2):
        lan.add_host(number)
    for name in ("eth7", "eth8"):
        lan.add_spare(1, name, f"10.9.{name[-1]}.1/24")
    first = host(1)
    assert {"eth7", "eth8"} <= {a.interface for a in first.own}
    lan.on(1, "ip", "link", "del", "eth7")
    lan.on(1, "ip", "link", "set", "eth8", "down")
    lan.on(1, "ip", "route", "del", "224.0.0.0/4")
    first.discovery.ask_again()
    second = host(2)
    wait_mutual(first, second)
    warnings = [r for r in caplog.records if r.levelname in ("WARNING", "ERROR", "CRITICAL")]
    assert not warnings, "trouble of one interface is not for the screen"


def test_a_new_address_reaches_the_others(lan: Lan, host: Hosts) -> None:
    for number in (1, 2):
        lan.add_host(number)
    first, second = host(1), host(2)
    wait_mutual(first, second)
    second.discovery.close()  # as an agent does that finds its addresses changed
    lan.take_address(2, f"{SUBNET}.2")
    lan.give_address(2, f"{SUBNET}.22")
    moved = host(2)
    wait(lambda: f"{SUBNET}.22" in first.hosts_of(moved), "the new address", 3.0)


def test_the_interface_that_takes_the_traffic_is_known(lan: Lan) -> None:
    lan.add_host(1)
    with lan.inside(1):
        assert default_route() is None
    lan.add_spare(1, "tun0", "10.8.0.1/24", routed=True)
    with lan.inside(1):
        away, near = default_route(), interface_towards(f"{SUBNET}.2")
        assert {a.interface for a in usable_addresses()} == {"lan0"}
    assert away is not None
    assert (away.interface, away.kind) == ("tun0", "VPN or tunnel")
    assert near is not None
    assert near.interface == "lan0"


def test_loss_and_delay_only_make_it_slower(lan: Lan, host: Hosts) -> None:
    missing = why_no_hub()
    if missing:
        pytest.skip(missing)
    for number in (1, 2):
        lan.add_host(number, on_hub=True)
    rule = Rule(matches=is_mdns, delay_s=0.3, loss=0.4)
    for source, target in ((1, 2), (2, 1)):
        lan.hub.set_rules(source, target, rule)
    print(f"heard after {wait_mutual(host(1), host(2)):.1f} s")


def test_two_clusters_a_copied_home_and_who_is_counted(lan: Lan, host: Hosts) -> None:
    for number in (1, 2, 3):
        lan.add_host(number)
    first, foreign = host(1), host(2, cluster="feed" * 4)
    wait_mutual(first, foreign)
    copy = host(3, node_id=first.node_id)
    wait(lambda: bool(first.discovery.heard().copies), "word of the copy")
    heard = first.discovery.heard()
    assert heard.other_clusters == {"feed" * 4}
    assert Address(f"{SUBNET}.3", copy.port) in heard.copies
    assert all(a.port == copy.port for a in heard.copies)
    assert not first.sees(copy), "an id of one's own is nobody to dial"
    assert not foreign.discovery.heard().copies


def test_invitations_are_heard_by_who_wants_to_join(lan: Lan, host: Hosts) -> None:
    for number in (1, 2):
        lan.add_host(number)
    inviter = host(1)
    found: list[Seen] = []
    stop = threading.Event()

    def browse() -> None:
        with lan.inside(2):
            for seen in browse_pairing(usable_addresses(), timeout_s=20, stop=stop):
                found.append(seen)

    thread = threading.Thread(target=browse)
    thread.start()
    time.sleep(0.3)
    assert not found
    inviter.discovery.announce_pairing("ab" * 16, 7777)
    wait(lambda: bool(found), "the invitation", 3.0)
    stop.set()
    thread.join(3.0)
    assert not thread.is_alive(), "it stops when told"
    assert found[0].node_id == "ab" * 16
    assert found[0].cluster == CLUSTER
    assert Address(f"{SUBNET}.1", 7777) in found[0].addresses

    inviter.discovery.withdraw_pairing()
    start_s = time.monotonic()
    with lan.inside(2):
        assert list(browse_pairing(usable_addresses(), timeout_s=1.0)) == []
    assert time.monotonic() - start_s < 3.0
