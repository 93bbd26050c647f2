"""What an interface is, from each system's own description of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from exo_train.cluster.interface_kinds import (
    kind_of,
    linux_kind,
    macos_kind,
    parse_hardware_ports,
    windows_kind,
)

MAC_STUDIO = """
Hardware Port: Ethernet
Device: en0
Ethernet Address: 00:00:5e:00:53:01

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 00:00:5e:00:53:02

Hardware Port: Wi-Fi
Device: en1
Ethernet Address: 00:00:5e:00:53:03

Hardware Port: Thunderbolt 1
Device: en2
Ethernet Address: 00:00:5e:00:53:04

Hardware Port: Thunderbolt Ethernet Slot 0
Device: en7
Ethernet Address: 00:00:5e:00:53:05

Hardware Port: USB 10/100/1000 LAN
Device: en8
Ethernet Address: 00:00:5e:00:53:06

Hardware Port: iPhone USB
Device: en9
Ethernet Address: 00:00:5e:00:53:07

VLAN Configurations
===================
"""


class Sysfs:
    """A /sys/class/net of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, name: str, type_: str = "1", **content: str) -> Path:
        folder = self.root / name
        folder.mkdir()
        (folder / "type").write_text(type_ + "\n")
        for file, text in content.items():
            (folder / file).write_text(text + "\n")
        return folder

    def add_card(self, name: str) -> Path:
        folder = self.add(name)
        (folder / "device").mkdir()
        return folder

    def kind(self, name: str) -> str:
        return linux_kind(name, self.root)


@pytest.fixture
def net(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path)


def test_linux_cards_and_wifi(net: Sysfs) -> None:
    net.add_card("enp3s0")
    (net.add_card("wlp2s0") / "wireless").mkdir()
    (net.add_card("wlan1") / "phy80211").mkdir()
    net.add_card("thunderbolt0")
    net.add("eth0")  # a container's end of a veth pair
    kinds = [net.kind(n) for n in ("enp3s0", "wlp2s0", "wlan1", "thunderbolt0", "eth0", "absent")]
    assert kinds == ["Ethernet", "Wi-Fi", "Wi-Fi", "Thunderbolt", "network", "network"]


def test_linux_tunnels_are_known_by_more_than_their_names(net: Sysfs) -> None:
    net.add("home-vpn", "65534", tun_flags="0x1001")
    net.add("office", "65534")
    net.add("six", "776")
    net.add("lan0", tun_flags="0x1002")  # TAP: it carries Ethernet frames
    net.add("broken", tun_flags="what")
    kinds = [net.kind(n) for n in ("home-vpn", "office", "six", "lan0", "broken")]
    assert kinds == ["VPN or tunnel"] * 3 + ["network"] * 2
    assert net.kind("wg0") == net.kind("tun0") == net.kind("zt5u4y6ejv") == "VPN or tunnel"
    assert net.kind("tunnel") == net.kind("greenlan") == "network"


def test_a_linux_bridge_is_what_hangs_on_it(net: Sysfs) -> None:
    net.add_card("enp3s0")
    net.add("veth12")
    for name, member in (("br-lan", "enp3s0"), ("docker0", "veth12"), ("bridge7", "")):
        folder = net.add(name)
        (folder / "bridge").mkdir()
        (folder / "brif").mkdir()
        if member:
            (folder / "brif" / member).mkdir()
    assert net.kind("br-lan") == "Ethernet"
    assert net.kind("docker0") == net.kind("bridge7") == "container or virtual"


def test_a_linux_vlan_is_as_good_as_its_card(net: Sysfs) -> None:
    card = net.add_card("enp3s0")
    (net.add("vlan10") / "lower_enp3s0").symlink_to(card)
    (net.add("vlan11") / "lower_absent").symlink_to(net.root / "absent")
    assert net.kind("vlan10") == "Ethernet"
    assert net.kind("vlan11") == "network"


def test_the_hardware_ports_of_a_mac() -> None:
    ports = parse_hardware_ports(MAC_STUDIO)
    assert ports["en1"] == "Wi-Fi"
    assert len(ports) == 7
    kinds = {device: macos_kind(device, ports) for device in ports}
    assert kinds == {
        "en0": "Ethernet",
        "bridge0": "Thunderbolt",
        "en1": "Wi-Fi",
        "en2": "Thunderbolt",
        "en7": "Ethernet",
        "en8": "Ethernet",
        "en9": "network",
    }


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("lo0", "loopback"),
        ("bridge0", "Thunderbolt"),
        ("bridge100", "container or virtual"),
        ("vmenet0", "container or virtual"),
        ("anpi0", "container or virtual"),
        ("ap1", "container or virtual"),
        ("utun3", "VPN or tunnel"),
        ("awdl0", "AirDrop family"),
        ("llw0", "AirDrop family"),
        ("p2p0", "AirDrop family"),
        ("en5", "network"),
    ],
)
def test_what_a_mac_does_not_list_goes_by_its_name(name: str, kind: str) -> None:
    assert macos_kind(name, {}) == kind


@pytest.mark.parametrize("text", ["", "garbage", "Device: en0\n", "Hardware Port: Wi-Fi\n"])
def test_half_an_answer_of_macos_names_no_port(text: str) -> None:
    assert parse_hardware_ports(text) == {}
    assert parse_hardware_ports("Hardware Port: Wi-Fi\nDevice: en0\nDevice: en1\n") == {
        "en0": "Wi-Fi"
    }


@pytest.mark.parametrize(
    ("description", "kind"),
    [
        ("Realtek PCIe GbE Family Controller", "Ethernet"),
        ("Intel(R) Wi-Fi 6 AX201 160MHz", "Wi-Fi"),
        ("Microsoft Wi-Fi Direct Virtual Adapter", "container or virtual"),
        ("Hyper-V Virtual Ethernet Adapter", "container or virtual"),
        ("VirtualBox Host-Only Ethernet Adapter", "container or virtual"),
        ("TAP-Windows Adapter V9", "VPN or tunnel"),
        ("WireGuard Tunnel", "VPN or tunnel"),
        ("Software Loopback Interface 1", "loopback"),
        ("USB4 P2P Network Adapter", "Thunderbolt"),
        ("Something New", "network"),
    ],
)
def test_windows_descriptions(description: str, kind: str) -> None:
    assert windows_kind(description) == kind
    assert kind_of(description, system="win32") == kind
