"""Which addresses this machine has, which of them others may dial, and by which one to reach them.

Owns the choice among network interfaces. Must not send a packet.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import ifaddr
import psutil

from exo_train.cluster.interface_kinds import AIRDROP, LOOPBACK, RANKS, VIRTUAL, VPN, kind_of
from exo_train.errors import ConfigError
from exo_train.peer import Address

ANY_HOST = "::"
ANY_IPV4_HOST = "0.0.0.0"
MAX_ZONES = 4
# For documentation (RFC 5737, RFC 3849): no such network exists, so that the way there is the
# default route.
NOWHERE = ("192.0.2.1", "2001:db8::1")
DISCARD_PORT = 9
IPV6_TABLE = Path("/proc/net/if_inet6")
# linux/if_addr.h: bits 0x40 and 0x08.
TENTATIVE = 0x40 | 0x08

ONLY_THIS = "nothing else is there"  # why a VPN is used all the same
KIND_REASONS = {
    LOOPBACK: "it leads back to this device",
    VPN: "a VPN or tunnel is not the home network; name it with --interface to use it",
    VIRTUAL: "it belongs to containers or virtual machines of this device",
    AIRDROP: "it is Apple's link for AirDrop, which carries nothing else",
}
DOWN = "it is down: no cable, or not connected"
NOT_READY = "the system still checks that no other device has it"
NO_ZONE = "its zone is unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalAddress:
    """An address of this machine; IPv6 link-local with its zone, as this system writes it."""

    interface: str
    host: str
    kind: str = "network"
    index: int = 0  # the interface's, for IPv6; 0: unknown
    system_name: str = ""  # the interface's for psutil; Windows' `interface` is a description
    is_usable: bool = True
    reason: str = ""  # why it is not usable, or usable though it is a VPN

    @property
    def is_ipv4(self) -> bool:
        return ":" not in self.host

    def is_called(self, name: str) -> bool:
        """Tell whether `--interface NAME` means it: by its interface, or by its address."""
        return name in (self.interface, self.host, without_zone(self.host))

    @property
    def family(self) -> str:
        return "IPv4" if self.is_ipv4 else "IPv6"

    @property
    def rank(self) -> int:
        """Order among this machine's addresses; 0 is best."""
        return RANKS.index(self.kind)


def local_addresses(
    *,
    adapters: Iterable[ifaddr.Adapter] | None = None,
    kinds: Callable[[str], str] = kind_of,
    waiting: Mapping[str, str] | None = None,
) -> list[LocalAddress]:
    """List every address, usable ones first, best interface first, IPv4 before IPv6.

    `waiting` gives, by the interface's system name or host, why it cannot be used yet. All are
    this machine's, unless given.
    """
    if waiting is None:
        waiting = _waiting() if adapters is None else {}
    found = []
    for adapter in ifaddr.get_adapters() if adapters is None else adapters:
        label = str(adapter.nice_name or adapter.name)
        kind = kinds(label)
        for entry in adapter.ips:
            address = _to_address(label, kind, entry.ip, adapter.index or 0)
            address = replace(address, system_name=str(entry.nice_name or label))
            found.append(_judged(address, waiting))
    return sorted(
        found, key=lambda a: (not a.is_usable, a.rank, not a.is_ipv4, a.interface, a.host)
    )


def usable_addresses(
    interface: str | None = None, *, among: Iterable[LocalAddress] | None = None
) -> list[LocalAddress]:
    """List addresses to advertise, best first; only those of `interface` when it is named.

    `interface` may also be one address. A VPN's are given only when named, or when there is
    nothing else, with the reason ONLY_THIS. Raises ConfigError when the named one is not there.
    """
    addresses = list(local_addresses() if among is None else among)
    if interface is not None:
        chosen = [a for a in addresses if a.is_called(interface)]
        if not chosen:
            names = ", ".join(sorted({a.interface for a in addresses}))
            raise ConfigError(
                f"no interface '{interface}' with an address; there are: {names or 'none'}"
            )
        ready = [a for a in chosen if a.reason not in (NO_ZONE, NOT_READY)]
        return [replace(a, is_usable=True, reason="") for a in ready]
    usable = [a for a in addresses if a.is_usable]
    if usable:
        return usable
    tunnels = [a for a in addresses if a.reason == KIND_REASONS[VPN]]
    return [replace(a, is_usable=True, reason=ONLY_THIS) for a in tunnels]


def listen_hosts(interface: str | None = None) -> tuple[str, ...]:
    """Give the hosts to bind: those of the named interface, else all, in both families.

    gRPC opens one dual-stack socket for "[::]", so that IPv4 callers reach it too, and falls back
    to 0.0.0.0 by itself where IPv6 is off (measured on Linux, with IPv6 on, off, and alone).
    """
    if interface is not None:
        return tuple(a.host for a in usable_addresses(interface))
    return (ANY_HOST,) if speaks_ipv6() else (ANY_IPV4_HOST,)


def speaks_ipv6() -> bool:
    """Tell whether gRPC uses IPv6 here, by its own test: can ::1 be bound?"""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def link_local_zones(among: Iterable[LocalAddress] | None = None) -> tuple[str, ...]:
    """Give the zones in which a link-local peer may be, the best interface's first."""
    addresses = usable_addresses() if among is None else among
    zones = [a.host.partition("%")[2] for a in addresses if "%" in a.host]
    return tuple(dict.fromkeys(zones))[:MAX_ZONES]


def dialable(
    address: Address, *, among: Iterable[LocalAddress] | None = None
) -> tuple[Address, ...]:
    """Give what to dial: a link-local address without zone once for each own zone, others as is."""
    if "%" in address.host or not _is_link_local_ipv6(address.host):
        return (address,)
    zones = link_local_zones(among)
    return tuple(Address(f"{address.host}%{zone}", address.port) for zone in zones)


def all_dialable(addresses: Iterable[Address]) -> list[Address]:
    """Give what to dial for each address, in their order."""
    among: list[LocalAddress] | None = None
    found: list[Address] = []
    for address in addresses:
        if among is None and _is_link_local_ipv6(address.host):
            among = usable_addresses()
        found += dialable(address, among=among)
    return list(dict.fromkeys(found))


def interface_towards(
    host: str, *, among: Iterable[LocalAddress] | None = None
) -> LocalAddress | None:
    """Give the own address from which the system would send to `host`; None without a route."""
    try:
        # Numeric, so no resolver is asked: it turns a zone into the interface's number.
        family, kind, _, _, target = socket.getaddrinfo(
            host, DISCARD_PORT, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
        )[0]
        with socket.socket(family, kind) as asked:
            asked.connect(target)  # sends nothing: UDP only looks up the route
            own = asked.getsockname()
    except OSError:
        return None
    index = own[3] if len(own) > 3 else 0
    for address in local_addresses() if among is None else among:
        if without_zone(address.host) == without_zone(own[0]) and index in (0, address.index):
            return address
    return None


def default_route() -> LocalAddress | None:
    """Give the own address that traffic to the Internet leaves from; None without such a route."""
    found = (interface_towards(host) for host in NOWHERE)
    return next((address for address in found if address is not None), None)


def without_zone(host: str) -> str:
    return host.partition("%")[0]


def _to_address(label: str, kind: str, ip: str | tuple[str, int, int], index: int) -> LocalAddress:
    if isinstance(ip, str):
        return LocalAddress(interface=label, host=ip, kind=kind, index=index)
    host, _flow, scope = ip
    parsed = ipaddress.IPv6Address(without_zone(host))
    text = str(parsed)
    if parsed.is_link_local and scope:
        # Windows knows zones by number alone.
        text = f"{parsed}%{scope if sys.platform == 'win32' else label}"
    return LocalAddress(interface=label, host=text, kind=kind, index=scope or index)


def _judged(address: LocalAddress, waiting: Mapping[str, str]) -> LocalAddress:
    reason = KIND_REASONS.get(address.kind, "")
    parsed = ipaddress.ip_address(without_zone(address.host))
    if parsed.is_loopback:
        reason = KIND_REASONS[LOOPBACK]
    elif parsed.is_unspecified or parsed.is_multicast:
        reason = "it is no address of one device"
    elif _is_link_local_ipv6(address.host) and "%" not in address.host:
        reason = NO_ZONE
    reason = waiting.get(address.system_name) or waiting.get(address.host) or reason
    return replace(address, is_usable=not reason, reason=reason)


def _is_link_local_ipv6(host: str) -> bool:
    parsed = ipaddress.ip_address(without_zone(host))
    return parsed.version == 6 and parsed.is_link_local


def _waiting() -> dict[str, str]:
    """Find interfaces that are down and IPv6 addresses that cannot be bound yet."""
    try:
        stats = psutil.net_if_stats()
    except (OSError, psutil.Error):
        stats = {}
    waiting = {name: DOWN for name, state in stats.items() if not state.isup}
    waiting.update(dict.fromkeys(tentative_hosts(), NOT_READY))
    return waiting


def tentative_hosts(table: Path = IPV6_TABLE) -> list[str]:
    """Read Linux's table of IPv6 addresses; elsewhere there is none, and the bind tells."""
    try:
        lines = table.read_text("ascii").splitlines()
    except (OSError, UnicodeError):
        return []
    hosts = []
    for line in lines:
        digits, _index, _prefix, _scope, flags, name = line.split()
        if int(flags, 16) & TENTATIVE:
            host = ipaddress.IPv6Address(int(digits, 16))
            hosts.append(f"{host}%{name}" if host.is_link_local else str(host))
    return hosts
