"""Which addresses are offered to others, on machines with more interfaces than one."""

from __future__ import annotations

from pathlib import Path

import ifaddr
import psutil
import pytest

from exo_train.cluster.interface_kinds import linux_kind, macos_kind, windows_kind
from exo_train.cluster.interfaces import (
    MAX_ZONES,
    ONLY_THIS,
    LocalAddress,
    dialable,
    interface_towards,
    link_local_zones,
    listen_hosts,
    local_addresses,
    tentative_hosts,
    usable_addresses,
    without_zone,
)
from exo_train.errors import ConfigError
from exo_train.peer import Address

KINDS = {
    "lo": "loopback",
    "wlan0": "Wi-Fi",
    "lan0": "Ethernet",
    "docker0": "container or virtual",
    "utun4": "VPN or tunnel",
    "awdl0": "AirDrop family",
    "tailscale0": "VPN or tunnel",
    "vEthernet (WSL)": "container or virtual",
}


def adapter(
    name: str, *ips: str | tuple[str, int, int], nice_name: str = "", index: int = 0
) -> ifaddr.Adapter:
    label = nice_name or name
    return ifaddr.Adapter(name, label, [ifaddr.IP(ip, 24, label) for ip in ips], index=index)


MACHINE = [
    adapter("lo", "127.0.0.1", ("::1", 0, 0), index=1),
    adapter("wlan0", "10.0.0.7", ("fe80::2", 0, 3), index=3),
    adapter("lan0", ("fd00::5", 0, 0), "192.168.1.20", ("fe80::5", 0, 2), index=2),
    adapter("docker0", "172.17.0.1"),
    adapter("utun4", ("fe80::9", 0, 9)),
    adapter("awdl0", ("fe80::7", 0, 7)),
    adapter("tailscale0", "100.64.0.9"),
    adapter("{4D36E972}", "172.20.0.1", nice_name="vEthernet (WSL)"),
]


def machine(
    adapters: list[ifaddr.Adapter] = MACHINE, waiting: dict[str, str] | None = None
) -> list[LocalAddress]:
    return local_addresses(
        adapters=adapters, kinds=lambda name: KINDS.get(name, "network"), waiting=waiting
    )


def test_only_real_networks_are_offered_the_cable_first() -> None:
    found = usable_addresses(among=machine())
    assert [(a.interface, a.host, a.kind) for a in found] == [
        ("lan0", "192.168.1.20", "Ethernet"),
        ("lan0", "fd00::5", "Ethernet"),
        ("lan0", "fe80::5%lan0", "Ethernet"),
        ("wlan0", "10.0.0.7", "Wi-Fi"),
        ("wlan0", "fe80::2%wlan0", "Wi-Fi"),
    ]


def test_every_other_address_is_listed_last_with_its_reason() -> None:
    others = [a for a in machine() if not a.is_usable]
    assert [a.interface for a in others] == [
        "tailscale0",
        "utun4",
        "docker0",
        "vEthernet (WSL)",
        "awdl0",
        "lo",
        "lo",
    ]
    reasons = {a.interface: a.reason for a in others}
    assert "--interface" in reasons["tailscale0"]
    assert "containers" in reasons["docker0"]
    assert "AirDrop" in reasons["awdl0"]
    assert "back to this device" in reasons["lo"]


@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        ("tailscale0", ["100.64.0.9"]),
        ("lo", ["127.0.0.1", "::1"]),
        ("lan0", ["192.168.1.20", "fd00::5", "fe80::5%lan0"]),
        ("192.168.1.20", ["192.168.1.20"]),
        ("fe80::2", ["fe80::2%wlan0"]),
    ],
)
def test_a_named_interface_or_address_is_taken_as_it_is_and_alone(
    name: str, hosts: list[str]
) -> None:
    found = usable_addresses(name, among=machine())
    assert [a.host for a in found] == hosts
    assert all(a.is_usable and not a.reason for a in found)


def test_a_vpn_is_used_only_when_nothing_else_is_there_and_says_so() -> None:
    rest = [a for a in MACHINE if a.name in ("lo", "docker0", "tailscale0", "awdl0")]
    (vpn,) = usable_addresses(among=machine(rest))
    assert (vpn.host, vpn.is_usable, vpn.reason) == ("100.64.0.9", True, ONLY_THIS)


def test_what_is_down_or_not_ready_waits() -> None:
    waiting = {"lan0": "it is down", "fe80::2%wlan0": "not ready"}
    found = machine(waiting=waiting)
    assert [a.host for a in usable_addresses(among=found)] == ["10.0.0.7"]
    assert {a.host: a.reason for a in found}["192.168.1.20"] == "it is down"
    assert {a.host: a.reason for a in found}["fe80::2%wlan0"] == "not ready"


WINDOWS = [
    ifaddr.Adapter(
        "{4D36E972-E325}",
        "Intel(R) Wi-Fi 6 AX200 160MHz",
        [ifaddr.IP("192.168.1.20", 24, "WLAN"), ifaddr.IP(("fe80::5", 0, 7), 64, "WLAN")],
        index=7,
    ),
    ifaddr.Adapter(
        "{4D36E973-E325}",
        "Realtek PCIe GbE Family Controller",
        [ifaddr.IP("169.254.8.9", 16, "Ethernet 2")],
        index=8,
    ),
]


def test_windows_calls_an_interface_by_two_names_and_both_are_known() -> None:
    """Where addresses come from it is a description, where "up or down" comes from a short name."""
    found = local_addresses(
        adapters=WINDOWS, kinds=windows_kind, waiting={"Ethernet 2": "it is down"}
    )
    assert [(a.interface, a.system_name, a.kind, a.reason) for a in found] == [
        ("Intel(R) Wi-Fi 6 AX200 160MHz", "WLAN", "Wi-Fi", ""),
        ("Intel(R) Wi-Fi 6 AX200 160MHz", "WLAN", "Wi-Fi", ""),
        ("Realtek PCIe GbE Family Controller", "Ethernet 2", "Ethernet", "it is down"),
    ]
    assert "192.168.1.20" in {a.host for a in usable_addresses(among=found)}
    assert "169.254.8.9" not in {a.host for a in usable_addresses(among=found)}


def test_interfaces_of_this_machine_have_the_names_that_the_system_gives_their_state_by() -> None:
    states = psutil.net_if_stats()
    assert {a.system_name for a in local_addresses()} <= states.keys()


def test_addresses_that_linux_still_checks_are_known(tmp_path: Path) -> None:
    table = tmp_path / "if_inet6"
    table.write_text(
        "fe800000000000000000000000000005 02 40 20 c0     lan0\n"
        "fd000000000000000000000000000005 02 40 00 40     lan0\n"
        "fd000000000000000000000000000006 02 40 00 08     lan0\n"
        "00000000000000000000000000000001 01 80 10 80       lo\n"
    )
    assert tentative_hosts(table) == ["fe80::5%lan0", "fd00::5", "fd00::6"]
    assert tentative_hosts(tmp_path / "absent") == []


def test_a_link_local_address_without_its_zone_is_dropped() -> None:
    found = machine([adapter("lan0", ("fe80::1", 0, 0))])
    assert usable_addresses(among=found) == []
    assert found[0].reason == "its zone is unknown"


def test_an_unknown_interface_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no interface 'eth9' with an address; there are: .*lan"):
        usable_addresses("eth9", among=machine())
    with pytest.raises(ConfigError, match="there are: none"):
        usable_addresses("eth9", among=[])


def test_no_network_is_no_error() -> None:
    assert usable_addresses(among=machine([adapter("lo", "127.0.0.1")])) == []


def test_a_bare_link_local_address_is_dialled_in_each_own_zone() -> None:
    bare = Address("fe80::77", 5000)
    usable = usable_addresses(among=machine())
    assert dialable(bare, among=usable) == (
        Address("fe80::77%lan0", 5000),
        Address("fe80::77%wlan0", 5000),
    )
    many = [LocalAddress(interface=f"e{n}", host=f"fe80::{n}%e{n}") for n in range(1, 9)]
    assert len(dialable(bare, among=many)) == MAX_ZONES
    assert link_local_zones(many) == ("e1", "e2", "e3", "e4")


@pytest.mark.parametrize("host", ["192.168.1.7", "fd00::7", "fe80::7%lan0", "169.254.3.4"])
def test_any_other_address_is_dialled_as_it_is(host: str) -> None:
    address = Address(host, 5000)
    assert dialable(address, among=usable_addresses(among=machine())) == (address,)


def test_a_zone_is_taken_off() -> None:
    assert without_zone("fe80::1%lan0") == "fe80::1"
    assert without_zone("10.0.0.1") == "10.0.0.1"


def test_the_way_to_this_device_is_its_loopback() -> None:
    own = interface_towards("127.0.0.1")
    assert own is not None
    assert (own.host, own.kind) == ("127.0.0.1", "loopback")


def test_a_named_interface_is_all_that_servers_listen_on() -> None:
    own = interface_towards("127.0.0.1")
    assert own is not None
    assert "127.0.0.1" in listen_hosts(own.interface)
    assert listen_hosts("127.0.0.1") == ("127.0.0.1",)
    assert listen_hosts() in (("::",), ("0.0.0.0",))


def test_names_alone_are_judged_alike_on_every_system(tmp_path: Path) -> None:
    for name, kind in KINDS.items():
        if kind not in ("Wi-Fi", "Ethernet"):
            assert linux_kind(name, tmp_path) == kind
    for name in ("awdl0", "llw0", "utun4"):
        assert macos_kind(name, {}) == linux_kind(name, tmp_path)
