"""Is this device on a network where others can be met: interfaces, multicast, routes, VPN, MTU.

Owns what is said about this device's side of the network. Pure: others give the facts.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exo_train.cluster.checks.finding import Finding
from exo_train.cluster.interface_kinds import LOOPBACK

MDNS_PORT = 5353
# RFC 8200, section 5: what every IPv6 link carries; TLS over less is needlessly slow, too.
MIN_MTU_BYTES = 1280
ETHERNET_MTU_BYTES = 1500
SHOWN_ROUTES = 8
# How `ip route` begins the lines of destinations that are forbidden.
FORBIDDING_ROUTES = ("unreachable", "prohibit", "blackhole")


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceFacts:
    """One address of this device."""

    interface: str
    host: str
    kind: str  # "Ethernet", "Wi-Fi", "VPN or tunnel", …
    is_used: bool
    reason: str = ""  # why it is not used
    network: str = ""  # its subnet, like 192.168.1.0/24, where known
    mtu_bytes: int = 0  # 0: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class MulticastFacts:
    """What went out and came in on UDP 5353 of one interface."""

    sent: int
    heard: int
    exo_train_heard: int = 0
    echoed: int = 0  # of others, that name this device: they have heard it
    malformed: int = 0
    error: str = ""  # why nothing could be sent
    is_no_route: bool = False  # EHOSTUNREACH: on macOS, the sign of a missing permission


def check_interfaces(interfaces: Sequence[InterfaceFacts]) -> list[Finding]:
    """Say of each interface whether it is used, and why not."""
    found = []
    for name in dict.fromkeys(i.interface for i in interfaces):
        own = [i for i in interfaces if i.interface == name]
        used = [i for i in own if i.is_used]
        hosts = ", ".join(i.host for i in used or own)
        label = f"{name} ({own[0].kind}, {hosts})" if own[0].kind else f"{name} ({hosts})"
        if used:
            found.append(Finding("interfaces", "ok", f"{label} is used"))
        else:
            reason = own[0].reason or "others cannot reach it"
            found.append(Finding("interfaces", "ok", f"{label} is not used: {reason}"))
    used_kinds = {i.kind for i in interfaces if i.is_used}
    if not used_kinds:
        said = (
            "no usable network: no interface has an address at which others can reach this device"
        )
        fix = "plug in a cable or connect to the Wi-Fi that the other devices are in"
        found.append(Finding("interfaces", "wrong", said, fix))
    elif used_kinds <= {"VPN or tunnel"}:
        said = "only a VPN's address is usable; devices outside that VPN cannot be met"
        fix = "connect this device to the home network, too"
        found.append(Finding("interfaces", "note", said, fix))
    return found


def check_mtu(interfaces: Sequence[InterfaceFacts]) -> list[Finding]:
    """Find packet sizes that other devices may not be able to take."""
    found = []
    used = {
        i.interface: i.mtu_bytes
        for i in interfaces
        if i.is_used and i.mtu_bytes and i.kind != LOOPBACK
    }
    for name, mtu_bytes in used.items():
        if mtu_bytes < MIN_MTU_BYTES:
            said = f"the MTU of {name} is {mtu_bytes} bytes, less than {MIN_MTU_BYTES}: it is slow"
            found.append(Finding("mtu", "wrong", said, _mtu_fix(name)))
        elif mtu_bytes > ETHERNET_MTU_BYTES:
            said = (
                f"the MTU of {name} is {mtu_bytes} bytes (jumbo frames): where a device or switch "
                f"on the way has {ETHERNET_MTU_BYTES}, large messages vanish without a word"
            )
            fix = f"give all devices and the switch the same MTU, or here: {_mtu_fix(name)}"
            found.append(Finding("mtu", "note", said, fix))
    if used and not found:
        sizes = ", ".join(f"{name} {mtu_bytes}" for name, mtu_bytes in used.items())
        found.append(Finding("mtu", "ok", f"usual packet sizes in bytes: {sizes}"))
    return found


def _mtu_fix(interface: str) -> str:
    return f"set the MTU of {interface} to {ETHERNET_MTU_BYTES} in the system's network settings"


def check_multicast(
    multicast: Mapping[str, MulticastFacts],
    *,
    known: Mapping[str, Sequence[str]],
    open_lines: str,
) -> list[Finding]:
    """Say whether mDNS passes, per interface.

    `known` are the devices of this cluster with an address in that interface's network that were
    met, so that silence has a meaning; `open_lines` lets UDP 5353 through this device's firewall.
    """
    found = []
    is_heard = any(facts.exo_train_heard for facts in multicast.values())
    for name, facts in multicast.items():
        names = known.get(name, ())
        if facts.error:
            said = f"mDNS cannot be sent on {name}: {facts.error}"
            fix = "check the interface, and the firewall's rules for outgoing traffic"
            found.append(Finding("multicast", "wrong", said, fix))
        elif facts.exo_train_heard:
            said = (
                f"mDNS passes on {name}: {facts.sent} sent, {facts.heard} heard, "
                f"{facts.exo_train_heard} of them of exo-train"
                + (", and others name this device" if facts.echoed else "")
            )
            found.append(Finding("multicast", "ok", said))
        elif facts.heard:
            found.append(_others_heard(name, facts, names))
        elif names and not is_heard:
            found.append(_dropped(name, facts, names, open_lines))
        else:
            said = (
                f"no mDNS (UDP {MDNS_PORT}) at all comes in on {name}; {facts.sent} packets were "
                f"sent. Either no other device is there, or a firewall or the router drops it"
            )
            fix = "meet by address: exo-train join --peer HOST:PORT (the other's screen shows it)"
            found.append(Finding("multicast", "note", said, fix))
        if facts.malformed:
            said = (
                f"{facts.malformed} malformed mDNS packets came in on {name} and were dropped; a "
                f"device there is broken or hostile"
            )
            found.append(Finding("multicast", "note", said))
    return found


def check_left_out(left_out: Mapping[str, str]) -> list[Finding]:
    """Tell of interfaces that mDNS could not be opened on; it goes on with the others."""
    return [
        Finding("multicast", "note", f"mDNS goes without {name}: {reason}")
        for name, reason in left_out.items()
    ]


def _others_heard(name: str, facts: MulticastFacts, names: Sequence[str]) -> Finding:
    said = f"mDNS is heard on {name} ({facts.heard}), but nothing of another exo-train device"
    if not names:
        return Finding("multicast", "ok", said)
    said += f", though {_listed(names)} can be reached: it is not announced"
    return Finding("multicast", "note", said, _not_announced_fix(names))


def _dropped(name: str, facts: MulticastFacts, names: Sequence[str], open_lines: str) -> Finding:
    said = (
        f"no mDNS (UDP {MDNS_PORT}) comes in on {name}; {facts.sent} packets were sent, and "
        f"{_listed(names)} can be reached by address: a firewall here, or the multicast filter "
        f"(IGMP snooping) of the router or switch, drops it"
    )
    by_hand = "or switch that filter off; meeting by address (join --peer HOST:PORT) works anyway"
    return Finding("multicast", "wrong", said, f"{open_lines}\n{by_hand}".strip())


def _not_announced_fix(known: Sequence[str]) -> str:
    return (
        f"run `exo-train doctor` on {known[0]}: a firewall there may drop UDP {MDNS_PORT} on its "
        f"way out; meeting by address goes on working"
    )


def check_vpn(
    outward: str,
    interfaces: Sequence[InterfaceFacts],
    *,
    is_anyone_met: bool,
    is_running: bool,
) -> list[Finding]:
    """Say whether a VPN takes all traffic; `outward` is the interface that the internet is on.

    Only a running agent that met nobody makes it wrong.
    """
    if not outward:
        return []
    kind = next((i.kind for i in interfaces if i.interface == outward), "")
    if kind != "VPN or tunnel":
        return [Finding("vpn", "ok", f"the default route is on {outward}, no VPN")]
    said = f"a VPN ({outward}) takes all traffic"
    if is_anyone_met:
        return [Finding("vpn", "note", f"{said}; other devices were met all the same")]
    said += "; many VPNs cut a device off from its own home network, and no device was met"
    fix = "switch the VPN off, or allow access to the local network (LAN) in its settings"
    return [Finding("vpn", "wrong" if is_running else "note", said, fix)]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRoute:
    """The system said EHOSTUNREACH (65 on macOS, 113 on Linux) for an address."""

    device: str
    host: str


def check_no_route(
    failures: Sequence[NoRoute],
    interfaces: Sequence[InterfaceFacts],
    *,
    platform: str,
    terminal: str,
    routes: str,
) -> list[Finding]:
    """Explain "no route to host": of one's own subnet, macOS says it when a permission lacks."""
    found = []
    for failure in failures:
        where = f"{failure.device} ({failure.host})"
        own = network_of(failure.host, interfaces)
        if own and platform == "darwin":
            said = (
                f'"no route to host" for {where} in this device\'s own network {own}: macOS does '
                f"not let {terminal} use the local network"
            )
            found.append(Finding("local network", "wrong", said, permission_fix(terminal)))
            continue
        said = f'"no route to host" for {where}'
        if own:
            said += f", though it lies in this device's own network {own}: "
            said += _own_network_cause(platform, routes)
            fix = _routes_fix(failure.host, platform)
        else:
            fix = "connect both devices to one network, or add a route between their networks"
        if routes:
            said += f". The routes are: {'; '.join(routes.splitlines()[:SHOWN_ROUTES])}"
        found.append(Finding("routes", "wrong", said, fix))
    return found


def _own_network_cause(platform: str, routes: str) -> str:
    """Say why a neighbour has no route: Linux says so, too, when nothing answers for its address.

    Its `ip route` shows one family only and no rules, so that none forbids is never certain.
    """
    is_forbidden = any(line.startswith(FORBIDDING_ROUTES) for line in routes.splitlines())
    if platform != "linux" or is_forbidden:
        return "a route or rule forbids it"
    return (
        "nothing answers for it there (it is off, asleep, or an access point keeps the two "
        "apart), or a route or rule forbids it"
    )


def check_send_permission(
    multicast: Mapping[str, MulticastFacts], *, platform: str, terminal: str
) -> list[Finding]:
    """Tell macOS' missing permission by the errno of a multicast that was not let out."""
    refused = [name for name, facts in multicast.items() if facts.is_no_route]
    if platform != "darwin":
        return []
    if not refused:
        return [Finding("local network", "ok", f"macOS lets {terminal} use the local network")]
    said = (
        f'"no route to host" when sending mDNS on {", ".join(refused)}: macOS does not let '
        f"{terminal} use the local network"
    )
    return [Finding("local network", "wrong", said, permission_fix(terminal))]


def permission_fix(terminal: str) -> str:
    """Say where macOS keeps the permission; Apple's own Terminal never needs it."""
    return (
        f"System Settings → Privacy & Security → Local Network: switch {terminal} on, then start "
        f"{terminal} anew; or run exo-train from Apple's Terminal, which needs no permission"
    )


def _routes_fix(host: str, platform: str) -> str:
    if platform == "linux":
        return f"ip route get {host}"
    return f"route print {host}" if platform == "win32" else f"route -n get {host}"


def network_of(host: str, interfaces: Sequence[InterfaceFacts]) -> str:
    """Give the subnet of this device that holds `host`, or an empty string."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    for facts in interfaces:
        if not facts.network or address.is_loopback:
            continue
        network = ipaddress.ip_network(facts.network, strict=False)
        if address.version == network.version and address in network:
            return facts.network
    return ""


def home_networks(interfaces: Sequence[InterfaceFacts]) -> list[str]:
    """Give the subnets of the used interfaces, IPv4 first: whom a firewall should let in."""
    networks = {i.network for i in interfaces if i.is_used and i.network}
    shared = {n for n in networks if not n.endswith(("/32", "/128"))}  # those hold others, too
    return sorted(shared, key=lambda n: (":" in n, n))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)
