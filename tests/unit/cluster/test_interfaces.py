"""Which addresses are offered to others, on machines with more interfaces than one."""

from __future__ import annotations

import ifaddr
import pytest

from exo_train.cluster.interfaces import usable_addresses
from exo_train.errors import ConfigError


def adapter(name: str, *ips: str | tuple[str, int, int], nice_name: str = "") -> ifaddr.Adapter:
    label = nice_name or name
    return ifaddr.Adapter(name, label, [ifaddr.IP(ip, 24, label) for ip in ips])


MACHINE = [
    adapter("lo", "127.0.0.1", ("::1", 0, 0)),
    adapter("wlan0", "10.0.0.7", ("fe80::2", 0, 3)),
    adapter("lan0", ("fd00::5", 0, 0), "192.168.1.20"),
    adapter("docker0", "172.17.0.1"),
    adapter("utun4", ("fe80::9", 0, 9)),
    adapter("awdl0", ("fe80::7", 0, 7)),
    adapter("tailscale0", "100.64.0.9"),
    adapter("{4D36E972}", "172.20.0.1", nice_name="vEthernet (WSL)"),
]


def test_containers_tunnels_and_loopback_are_not_offered() -> None:
    found = usable_addresses(adapters=MACHINE)
    assert [(a.interface, a.host) for a in found] == [
        ("lan0", "192.168.1.20"),
        ("wlan0", "10.0.0.7"),
        ("lan0", "fd00::5"),
        ("wlan0", "fe80::2%wlan0"),
    ]


@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        ("tailscale0", ["100.64.0.9"]),
        ("lo", ["127.0.0.1", "::1"]),
        ("lan0", ["192.168.1.20", "fd00::5"]),
    ],
)
def test_a_named_interface_is_taken_as_it_is_and_alone(name: str, hosts: list[str]) -> None:
    assert [a.host for a in usable_addresses(name, adapters=MACHINE)] == hosts


def test_a_link_local_address_without_its_zone_is_dropped() -> None:
    assert usable_addresses(adapters=[adapter("lan0", ("fe80::1", 0, 0))]) == []


def test_an_unknown_interface_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no interface 'eth9' with an address; there are: .*lan"):
        usable_addresses("eth9", adapters=MACHINE)


def test_no_network_is_no_error() -> None:
    assert usable_addresses(adapters=[adapter("lo", "127.0.0.1")]) == []
