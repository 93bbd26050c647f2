"""Which addresses of this machine others may dial.

Owns the choice among network interfaces. Must not open a connection.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

import ifaddr

from exo_train.errors import ConfigError

# Interfaces of containers, tunnels and Apple's AirDrop family: their addresses lead nowhere for
# another device, or (docker0 has the same one everywhere) back to that device itself.
VIRTUAL_PREFIXES = (
    "docker",
    "br-",
    "veth",
    "virbr",
    "vmnet",
    "vboxnet",
    "tun",
    "tap",
    "utun",
    "wg",
    "tailscale",
    "zt",
    "awdl",
    "llw",
    "anpi",
    "cni",
    "flannel",
)


@dataclass(frozen=True, slots=True)
class LocalAddress:
    interface: str
    host: str  # numeric; IPv6 link-local with zone
    is_ipv4: bool


def usable_addresses(
    interface: str | None = None, *, adapters: Iterable[ifaddr.Adapter] | None = None
) -> list[LocalAddress]:
    """List addresses to advertise, IPv4 first; only those of `interface` when it is named.

    `adapters` are this machine's, unless given. Raises ConfigError when the named interface does
    not exist or has no address.
    """
    found: list[LocalAddress] = []
    names: set[str] = set()
    for adapter in ifaddr.get_adapters() if adapters is None else adapters:
        label = str(adapter.nice_name or adapter.name)
        names.add(label)
        chosen = interface in (label, str(adapter.name))
        if interface is not None and not chosen:
            continue
        for entry in adapter.ips:
            address = _to_address(label, entry.ip)
            if address and (chosen or _is_reachable_for_others(address)):
                found.append(address)
    if interface is not None and not found:
        raise ConfigError(
            f"no interface '{interface}' with an address; there are: {', '.join(sorted(names))}"
        )
    return sorted(found, key=lambda a: (not a.is_ipv4, a.interface, a.host))


def _to_address(label: str, ip: str | tuple[str, int, int]) -> LocalAddress | None:
    if isinstance(ip, str):
        return LocalAddress(label, ip, True)
    host, _flow, scope = ip
    parsed = ipaddress.IPv6Address(host.split("%")[0])
    if parsed.is_link_local:
        return LocalAddress(label, f"{parsed}%{label}", False) if scope else None
    return LocalAddress(label, str(parsed), False)


def _is_reachable_for_others(address: LocalAddress) -> bool:
    parsed = ipaddress.ip_address(address.host.split("%")[0])
    if parsed.is_loopback or parsed.is_unspecified or parsed.is_multicast:
        return False
    return not address.interface.lower().startswith(VIRTUAL_PREFIXES)
