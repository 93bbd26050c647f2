"""What is said about this device's side of the network, on facts of three systems."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from exo_train.cluster.checks.finding import Finding, exit_code
from exo_train.cluster.checks.network import (
    InterfaceFacts,
    MulticastFacts,
    NoRoute,
    check_interfaces,
    check_mtu,
    check_multicast,
    check_no_route,
    check_send_permission,
    check_vpn,
    home_networks,
    network_of,
)

LAN = InterfaceFacts(
    interface="en0",
    host="192.168.1.5",
    kind="Wi-Fi",
    is_used=True,
    network="192.168.1.0/24",
    mtu_bytes=1500,
)
LINK_LOCAL = InterfaceFacts(
    interface="en0", host="fe80::1%en0", kind="Wi-Fi", is_used=True, network="fe80::/64"
)
DOCKER = InterfaceFacts(
    interface="docker0",
    host="172.17.0.1",
    kind="container or virtual",
    is_used=False,
    reason="it belongs to containers of this device",
    network="172.17.0.0/16",
)
VPN = InterfaceFacts(
    interface="utun4",
    host="10.8.0.2",
    kind="VPN or tunnel",
    is_used=False,
    reason="a VPN is not the home network",
    network="10.8.0.2/32",
)


def verdicts(findings: Sequence[Finding]) -> list[str]:
    return [finding.verdict for finding in findings]


def with_mtu(mtu_bytes: int) -> InterfaceFacts:
    return InterfaceFacts(
        interface="eth0", host="10.0.0.1", kind="Ethernet", is_used=True, mtu_bytes=mtu_bytes
    )


def test_each_interface_is_told_once_with_the_reason() -> None:
    found = check_interfaces([LAN, LINK_LOCAL, DOCKER])
    assert verdicts(found) == ["ok", "ok"]
    assert found[0].said == "en0 (Wi-Fi, 192.168.1.5, fe80::1%en0) is used"
    assert found[1].said.endswith("is not used: it belongs to containers of this device")


def test_no_usable_interface_is_wrong() -> None:
    wrong = check_interfaces([DOCKER])[-1]
    assert wrong.verdict == "wrong"
    assert wrong.said.startswith("no usable network")
    assert wrong.fix
    assert verdicts(check_interfaces([])) == ["wrong"]


def test_a_vpn_alone_is_a_note() -> None:
    used = InterfaceFacts(interface="utun4", host="10.8.0.2", kind="VPN or tunnel", is_used=True)
    assert verdicts(check_interfaces([used])) == ["ok", "note"]
    assert verdicts(check_interfaces([used, LAN])) == ["ok", "ok"]


@pytest.mark.parametrize(
    ("mtu_bytes", "verdict"), [(1279, "wrong"), (1280, "ok"), (1500, "ok"), (9000, "note")]
)
def test_mtu(mtu_bytes: int, verdict: str) -> None:
    [finding] = check_mtu([with_mtu(mtu_bytes)])
    assert finding.verdict == verdict
    assert str(mtu_bytes) in finding.said
    assert bool(finding.fix) == (verdict != "ok")


def test_an_unknown_mtu_is_not_judged() -> None:
    assert check_mtu([with_mtu(0)]) == []


def judge(facts: MulticastFacts, names: tuple[str, ...] = ()) -> list[Finding]:
    return check_multicast({"en0": facts}, known={"en0": names}, open_lines="sudo let 5353 in")


def test_multicast_that_passes_gives_its_numbers() -> None:
    [finding] = judge(MulticastFacts(sent=12, heard=40, exo_train_heard=3))
    assert finding.verdict == "ok"
    assert all(number in finding.said for number in ("12", "40", "3", "en0"))


def test_silence_is_wrong_only_when_somebody_is_there() -> None:
    silent = MulticastFacts(sent=9, heard=0)
    [alone] = judge(silent)
    assert alone.verdict == "note"
    assert "--peer" in alone.fix
    [dropped] = judge(silent, ("den-pc",))
    assert dropped.verdict == "wrong"
    assert "den-pc" in dropped.said
    assert "5353" in dropped.said
    assert dropped.fix.splitlines()[0] == "sudo let 5353 in"


def test_silence_of_a_second_interface_is_no_fault_while_the_first_one_hears() -> None:
    facts = {
        "eth0": MulticastFacts(sent=9, heard=5, exo_train_heard=2),
        "wlan0": MulticastFacts(sent=9, heard=0),
    }
    known = {"eth0": ["den-pc"], "wlan0": ["den-pc"]}
    assert verdicts(check_multicast(facts, known=known, open_lines="")) == ["ok", "note"]


def test_a_member_that_is_reached_but_not_announced_is_named() -> None:
    printers = MulticastFacts(sent=9, heard=7)
    [finding] = judge(printers, ("den-pc",))
    assert finding.verdict == "note"
    assert "den-pc can be reached: it is not announced" in finding.said
    assert verdicts(judge(printers)) == ["ok"]


def test_what_could_not_be_sent_is_wrong_with_the_systems_reason() -> None:
    facts = MulticastFacts(sent=0, heard=0, error="Network is unreachable (error 101)")
    [finding] = judge(facts)
    assert finding.verdict == "wrong"
    assert "Network is unreachable (error 101)" in finding.said


def test_malformed_packets_are_counted() -> None:
    found = judge(MulticastFacts(sent=1, heard=2, exo_train_heard=1, malformed=77))
    assert verdicts(found) == ["ok", "note"]
    assert "77 malformed" in found[1].said


def test_a_vpn_that_takes_all_traffic() -> None:
    def judge_vpn(outward: str, *, met: bool, running: bool = True) -> list[str]:
        found = check_vpn(outward, [LAN, VPN], is_anyone_met=met, is_running=running)
        return verdicts(found)

    assert judge_vpn("utun4", met=False) == ["wrong"]
    assert judge_vpn("utun4", met=True) == ["note"]
    assert judge_vpn("utun4", met=False, running=False) == ["note"]
    assert judge_vpn("en0", met=False) == ["ok"]
    assert judge_vpn("", met=False) == []
    [wrong] = check_vpn("utun4", [LAN, VPN], is_anyone_met=False, is_running=True)
    assert "utun4" in wrong.said


def no_route(platform: str, host: str = "192.168.1.7", routes: str = "") -> Finding:
    [finding] = check_no_route(
        [NoRoute(device="den-pc", host=host)],
        [LAN],
        platform=platform,
        terminal="iTerm",
        routes=routes,
    )
    return finding


def test_no_route_to_the_own_subnet_on_macos_is_a_permission() -> None:
    finding = no_route("darwin")
    assert finding.verdict == "wrong"
    assert "192.168.1.0/24" in finding.said
    assert "System Settings → Privacy & Security → Local Network" in finding.fix
    assert "iTerm" in finding.fix
    assert exit_code([finding]) == 3


def test_no_route_elsewhere_on_macos_is_none() -> None:
    finding = no_route("darwin", "10.1.2.3")
    assert "Local Network" not in finding.fix
    assert "connect both devices to one network" in finding.fix


def test_no_route_on_linux_prints_the_routes() -> None:
    routes = "default via 192.168.1.1 dev eth0\nunreachable 192.168.1.7\n"
    finding = no_route("linux", routes=routes)
    assert "unreachable 192.168.1.7" in finding.said
    assert finding.fix == "ip route get 192.168.1.7"
    assert "route print" in no_route("win32").fix


def test_macos_permission_by_the_errno_of_a_multicast() -> None:
    refused = {"en0": MulticastFacts(sent=0, heard=0, error="No route to host", is_no_route=True)}
    [wrong] = check_send_permission(refused, platform="darwin", terminal="Ghostty")
    assert wrong.verdict == "wrong"
    assert "Local Network: switch Ghostty on" in wrong.fix
    fine = {"en0": MulticastFacts(sent=2, heard=0)}
    assert verdicts(check_send_permission(fine, platform="darwin", terminal="")) == ["ok"]
    assert check_send_permission(refused, platform="linux", terminal="") == []


def test_networks_of_this_device() -> None:
    assert network_of("192.168.1.77", [LAN, VPN]) == "192.168.1.0/24"
    assert network_of("fe80::9%en0", [LAN, LINK_LOCAL]) == "fe80::/64"
    assert network_of("192.168.2.77", [LAN]) == ""
    assert network_of("den-pc.local", [LAN]) == ""
    loop = InterfaceFacts(
        interface="lo", host="127.0.0.1", kind="loopback", is_used=False, network="127.0.0.0/8"
    )
    assert network_of("127.0.0.1", [loop]) == ""
    used_vpn = InterfaceFacts(
        interface="utun4", host="10.8.0.2", kind="VPN or tunnel", is_used=True,
        network="10.8.0.2/32",
    )  # fmt: skip
    networks = home_networks([LINK_LOCAL, LAN, DOCKER, used_vpn])
    assert networks == ["192.168.1.0/24", "fe80::/64"], "no others live in a /32"
