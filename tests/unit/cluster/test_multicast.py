"""Telling a DNS message from garbage, and choosing whom to send from."""

from __future__ import annotations

import random
import struct

import pytest
from zeroconf import DNSOutgoing

from exo_train.cluster.interfaces import LocalAddress
from exo_train.cluster.mdns_record import SERVICE_TYPE, Announcement
from exo_train.cluster.multicast import (
    MAX_SOCKET_ERRORS,
    QUIET_S,
    SERVICE_LABEL,
    Patience,
    is_well_formed,
    one_per_interface,
)

QUERY = struct.pack("!6H", 0, 0, 1, 0, 0, 0) + SERVICE_LABEL + b"\x05local\x00\x00\x0c\x00\x01"


def with_counts(*counts: int, body: bytes = b"") -> bytes:
    return struct.pack("!6H", 0, 0, *counts) + body


def test_messages_as_zeroconf_writes_them_are_well_formed() -> None:
    announced = Announcement(
        service_type=SERVICE_TYPE, id="ab" * 16, cluster="c0ffee", port=5000, protocol=7
    )
    info = announced.to_info(["10.0.0.2", "fe80::2"])
    out = DNSOutgoing(0x8400)
    for answer in (info.dns_pointer(), info.dns_service(), info.dns_text(), *info.dns_addresses()):
        out.add_answer_at_time(answer, 0)
    (packet,) = out.packets()
    assert is_well_formed(packet)
    assert SERVICE_LABEL in packet, "compression must not hide who speaks"
    assert not is_well_formed(packet[:-1])
    assert is_well_formed(QUERY)
    assert is_well_formed(with_counts(0, 0, 0, 0))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello\n",
        b"GET / HTTP/1.1\r\nHost: printer\r\n\r\n",
        QUERY[:-1],
        QUERY + b"\x00" * 9000,
        with_counts(1, 0, 0, 0, body=b"\xc0\x0c\x00\x0c\x00\x01"),  # points to itself
        with_counts(1, 0, 0, 0, body=b"\xc0\xff\x00\x0c\x00\x01"),  # points ahead
        with_counts(1, 0, 0, 0, body=b"\x7f" + b"a" * 200),
        with_counts(0, 1, 0, 0, body=b"\x00\x00\x10\x00\x01\x00\x00\x00\x01\xff\xff"),
        with_counts(65535, 65535, 65535, 65535),
    ],
)
def test_garbage_is_not(data: bytes) -> None:
    assert not is_well_formed(data)


def test_random_bytes_are_hardly_ever_and_never_raise() -> None:
    chance = random.Random(7)
    passed = sum(is_well_formed(chance.randbytes(chance.randrange(600))) for _ in range(2000))
    assert passed < 20


def test_one_address_per_interface_and_family_sends() -> None:
    def at(interface: str, host: str, kind: str = "network", index: int = 2) -> LocalAddress:
        return LocalAddress(interface=interface, host=host, kind=kind, index=index)

    found = one_per_interface(
        [
            at("wlan0", "10.0.0.7", "Wi-Fi"),
            at("lan0", "192.168.1.20", "Ethernet"),
            at("lan0", "192.168.1.21", "Ethernet"),
            at("lan0", "fd00::5", "Ethernet"),
            at("lan0", "fe80::5%lan0", "Ethernet"),
            at("old0", "fd00::6", index=0),
            at("lo", "127.0.0.1", "loopback"),
            at("lo", "::1", "loopback"),
        ]
    )
    assert [a.host for a in found] == ["192.168.1.20", "fe80::5%lan0", "10.0.0.7", "127.0.0.1"]
    assert len(one_per_interface([at(f"e{n}", f"10.0.{n}.1") for n in range(90)])) == 32


def test_a_socket_that_only_fails_is_given_up_soon() -> None:
    patience = Patience()
    given_up = [patience.is_over(100.0 + n / 10) for n in range(MAX_SOCKET_ERRORS)]
    assert given_up == [False] * (MAX_SOCKET_ERRORS - 1) + [True]


def test_errors_of_a_whole_life_do_not_add_up() -> None:
    """A cable that is plugged in and out for years."""
    patience = Patience()
    for number in range(10 * MAX_SOCKET_ERRORS):
        assert not patience.is_over(5.0 + QUIET_S * number)
    working = Patience()
    for number in range(10 * MAX_SOCKET_ERRORS):
        assert not working.is_over(5.0 + number)
        working.worked()
