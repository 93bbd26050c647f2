"""What an mDNS record of ours says, and what is taken from one that was heard. Pure.

Owns the four fields (id, cluster tag, port, protocol version) and the bounds on a stranger's. Must
not open a socket. Nothing here is to be trusted: a record only suggests whom to dial.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from zeroconf import ServiceInfo

from exo_train.cluster.interfaces import LocalAddress, without_zone
from exo_train.peer import Address, NodeId

SERVICE_TYPE = "_exo-train._tcp.local."
PAIRING_SERVICE_TYPE = "_exo-train-pair._tcp.local."
MAX_ADDRESSES = 16
ID = re.compile(r"[0-9a-f]{32}")
CLUSTER = re.compile(r"[0-9A-Za-z._-]{1,64}")
VERSION = re.compile(r"[0-9]{1,6}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What is said of one service; a pairing service has a random id, made for it alone."""

    service_type: str
    id: str
    cluster: str
    port: int
    protocol: int

    def to_info(self, hosts: Iterable[str]) -> ServiceInfo:
        """Build the record; its names are made from the id and nothing else."""
        bare = dict.fromkeys(without_zone(host) for host in hosts)
        return ServiceInfo(
            self.service_type,
            f"{self.id}.{self.service_type}",
            parsed_addresses=list(bare)[:MAX_ADDRESSES],
            port=self.port,
            properties={"id": self.id, "cluster": self.cluster, "v": str(self.protocol)},
            server=f"{self.id}.local.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a record claims. `addresses` are numeric; link-local ones may lack their zone."""

    node_id: NodeId
    cluster: str
    protocol: int
    addresses: tuple[Address, ...]


def id_in_name(name: str, service_type: str) -> str | None:
    """Give the id in a service's name; None when it is no name of ours."""
    label = name.removesuffix(f".{service_type}")
    return label if label != name and ID.fullmatch(label) else None


def read_info(info: ServiceInfo, *, own: Iterable[LocalAddress]) -> Seen | None:
    """Take what has the shape of ours from a record, and None from any other.

    Loopback addresses count only for who announces on loopback itself.
    """
    fields = info.decoded_properties
    node_id, cluster, version = (fields.get(key) or "" for key in ("id", "cluster", "v"))
    if node_id != id_in_name(info.name, info.type) or not info.port:
        return None
    if not CLUSTER.fullmatch(cluster) or not VERSION.fullmatch(version):
        return None
    zones = {a.index: a.host.partition("%")[2] for a in own if "%" in a.host}
    is_local = any(ipaddress.ip_address(without_zone(a.host)).is_loopback for a in own)
    hosts = [_host(scoped, zones) for scoped in info.parsed_scoped_addresses()]
    dialled = [h for h in hosts if _leads_to_one_device(h, with_loopback=is_local)]
    if not dialled:
        return None
    return Seen(
        node_id=NodeId(node_id),
        cluster=cluster,
        protocol=int(version),
        addresses=tuple(Address(host, info.port) for host in dialled[:MAX_ADDRESSES]),
    )


def _host(scoped: str, zones: dict[int, str]) -> str:
    """Name the zone as this system's addresses do; zeroconf gives the interface's number."""
    host, _, number = scoped.partition("%")
    zone = zones.get(int(number), "") if number.isdigit() else ""
    return f"{host}%{zone}" if zone else host


def _leads_to_one_device(host: str, *, with_loopback: bool) -> bool:
    parsed = ipaddress.ip_address(without_zone(host))
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped:
        return False
    if parsed.is_multicast or parsed.is_unspecified or parsed.is_loopback:
        return parsed.is_loopback and with_loopback
    return parsed.version == 6 or not parsed.is_reserved
