"""What mDNS packets reveal, what is counted of them, and what garbage on port 5353 costs."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Iterator

import psutil
import pytest
from zeroconf import (
    DNSAddress,
    DNSIncoming,
    DNSNsec,
    DNSPointer,
    DNSService,
    DNSText,
)

from exo_train.cluster.mdns_record import PAIRING_SERVICE_TYPE, SERVICE_TYPE
from exo_train.cluster.multicast import GROUP, PORT
from exo_train.peer import Address
from tests.lan.discovering import (
    CLUSTER,
    PROTOCOL,
    Hosts,
    Tap,
    asked_names,
    garbage,
    pointer_to,
    wait,
    wait_mutual,
    whole_record,
)
from tests.lan.namespaces import SECOND_SUBNET, SUBNET, Lan

pytestmark = [pytest.mark.lan, pytest.mark.xdist_group("lan")]


@pytest.fixture
def host(lan: Lan) -> Iterator[Hosts]:
    with Hosts(lan) as hosts:
        yield hosts


def test_the_packets_say_tag_id_port_and_version_and_nothing_else(lan: Lan, host: Hosts) -> None:
    for number in (1, 2):
        lan.add_host(number)
    tap = Tap(lan, 2)
    with tap.socket:
        first = host(1)
        first.discovery.announce_pairing("ab" * 16, 7777)
        packets = tap.packets(f"{SUBNET}.1", 1.5)
    messages = [DNSIncoming(packet) for packet in packets]
    assert all(message.valid for message in messages)
    records = [record for message in messages for record in message.answers()]
    names = {r.name for r in records} | {q.name for m in messages for q in m.questions}
    services = {SERVICE_TYPE: first.node_id, PAIRING_SERVICE_TYPE: "ab" * 16}
    own_names = {f"{id_}.{type_}" for type_, id_ in services.items()}
    servers = {f"{id_}.local." for id_ in services.values()}
    assert names == set(services) | own_names | servers
    assert {r.alias for r in records if isinstance(r, DNSPointer)} == own_names
    ports = {(r.server, r.port, r.priority, r.weight) for r in records if isinstance(r, DNSService)}
    assert ports == {
        (f"{first.node_id}.local.", first.port, 0, 0),
        (f"{'ab' * 16}.local.", 7777, 0, 0),
    }
    fields = [f"cluster={CLUSTER}", f"v={PROTOCOL}"]
    for record in (r for r in records if isinstance(r, DNSText)):
        said = [f"id={record.name.partition('.')[0]}", *fields]
        assert record.text == b"".join(bytes([len(field)]) + field.encode() for field in said)
    kinds = (DNSPointer, DNSService, DNSText, DNSAddress, DNSNsec)
    assert {type(record) for record in records} <= set(kinds)


def test_counts_tell_deafness_from_nobody_there(lan: Lan, host: Hosts) -> None:
    for number in (1, 2):
        lan.add_host(number)
        lan.set_multicast(number, passes=False)
    first = host(1)
    wait(lambda: first.discovery.heard().interfaces["lan0"].sent > 0, "a packet of our own")
    counts = first.discovery.heard().interfaces["lan0"]
    assert (counts.heard, counts.exo_train_heard, counts.echoed) == (0, 0, 0)

    for number in (1, 2):
        lan.set_multicast(number, passes=True)
    with Tap(lan, 2).socket as stranger:
        stranger.sendto(struct.pack("!6H", 0, 0, 0, 0, 0, 0), (GROUP, PORT))
        wait(lambda: first.discovery.heard().interfaces["lan0"].heard == 1, "the stranger")
        counts = first.discovery.heard().interfaces["lan0"]
        assert (counts.exo_train_heard, counts.echoed) == (0, 0)

    second = host(2)
    wait_mutual(first, second)
    second.discovery.ask_again()  # a question names the answers that are known already
    wait(
        lambda: (
            first.discovery.heard().interfaces["lan0"].exo_train_heard > 0
            and first.discovery.heard().interfaces["lan0"].echoed > 0
        ),
        "an answer that names the first",
    )
    assert first.discovery.heard().interfaces["lan0"].malformed == 0


def test_an_agent_of_the_same_machine_is_met_but_proves_no_network(lan: Lan, host: Hosts) -> None:
    lan.add_host(1)
    first, second = host(1), host(1, node_id="e" * 32)
    wait_mutual(first, second)
    counts = first.discovery.heard().interfaces["lan0"]
    assert counts.exo_train_heard > 0
    assert (counts.heard, counts.echoed) == (0, 0)


def test_each_packet_counts_for_the_interface_it_came_by(lan: Lan, host: Hosts) -> None:
    for number in (1, 2):
        lan.add_host(number)
        lan.add_network(number, "wlan0")
    first = host(1)
    with Tap(lan, 2, f"{SECOND_SUBNET}.2").socket as stranger:
        for packet in (b"hello", struct.pack("!6H", 0, 0, 0, 0, 0, 0)):
            stranger.sendto(packet, (GROUP, PORT))
        wait(lambda: first.discovery.heard().interfaces["wlan0"].heard == 2, "the stranger")
    counts = first.discovery.heard().interfaces
    assert counts["wlan0"].malformed == 1
    assert (counts["lan0"].heard, counts["lan0"].malformed) == (0, 0)
    assert counts["lan0"].sent > 0
    assert counts["wlan0"].sent > 0


def test_a_name_without_details_is_asked_for_with_pauses(lan: Lan, host: Hosts) -> None:
    for number in (1, 2):
        lan.add_host(number)
    first = host(1)
    name = "cd" * 16
    tap = Tap(lan, 2)
    with tap.socket:
        tap.socket.sendto(pointer_to(name), (GROUP, PORT))
        tap.socket.sendto(pointer_to("somebody-else's-printer-upstairs"), (GROUP, PORT))
        early, late = (asked_names(tap.packets(f"{SUBNET}.1", s)) for s in (2.8, 2.0))
        assert f"{name}.{SERVICE_TYPE}" in early
        assert f"{name}.{SERVICE_TYPE}" in late, "it gives up too soon"
        assert early.count(f"{name}.{SERVICE_TYPE}") <= 20
        assert set(early) <= {f"{name}.{SERVICE_TYPE}", f"{name}.local.", SERVICE_TYPE}
        assert not first.seen
        record = whole_record(name, port=6000, host=f"{SUBNET}.2")
        tap.socket.sendto(record, (GROUP, PORT))
        wait(lambda: bool(first.seen), "what came late")
    assert first.seen[0].addresses == (Address(f"{SUBNET}.2", 6000),)


def test_two_thousand_hostile_packets_cost_little_and_hide_nobody(
    lan: Lan, host: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2, 3):
        lan.add_host(number)
    first = host(1)
    chance = random.Random(5)
    packets = [garbage(kind, chance) for kind in range(2000)]
    process = psutil.Process()
    memory_bytes, cpu_s = process.memory_info().rss, time.process_time()
    with Tap(lan, 3).socket as hostile:
        for number, packet in enumerate(packets):
            hostile.sendto(packet, (GROUP, PORT))
            if number % 20 == 19:
                time.sleep(0.02)
    second = host(2)
    took_s = wait_mutual(first, second)
    spent_s = time.process_time() - cpu_s
    grown_bytes = process.memory_info().rss - memory_bytes
    print(f"found after {took_s:.1f} s; {spent_s:.2f} s of CPU, {grown_bytes / 1e6:.1f} MB more")
    assert grown_bytes < 30e6
    assert spent_s < 4.0
    assert {s.node_id for s in first.seen} == {second.node_id}, "a false record was believed"
    counts = first.discovery.heard().interfaces["lan0"]
    assert counts.heard > 1000
    assert counts.malformed > 20
    assert len(caplog.records) < 30
    start_s = time.monotonic()
    first.discovery.ask_again()
    assert time.monotonic() - start_s < 2.0
