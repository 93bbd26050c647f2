"""Discoveries on hosts of a LAN, as threads of this process, and hostile mDNS. For tests only.

The interfaces' kinds come from their names alone there: /sys shows this machine's own.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from zeroconf import (
    DNSIncoming,
    DNSOutgoing,
)

from exo_train.cluster.discovery import Discovery
from exo_train.cluster.interfaces import (
    LocalAddress,
    usable_addresses,
)
from exo_train.cluster.mdns_record import SERVICE_TYPE, Announcement, Seen
from exo_train.cluster.multicast import GROUP, MAX_PACKET_BYTES, PORT, SERVICE_LABEL
from exo_train.peer import NodeId
from tests.agent.running_agents import wait_until
from tests.lan.namespaces import SUBNET, Lan

HEAR_WITHIN_S = 5.0
CLUSTER = "c0ffee0123456789"
PROTOCOL = 7


class Host:
    """A discovery on one host of the LAN, and what it reported."""

    def __init__(self, lan: Lan, number: int, *, node_id: str = "", cluster: str = CLUSTER) -> None:
        self.lan, self.number, self.cluster = lan, number, cluster
        self.node_id = NodeId(node_id or f"{number:x}" * 32)
        self.port = 5000 + number
        self.seen: list[Seen] = []

    def open(self, addresses: list[LocalAddress] | None = None) -> Host:
        with self.lan.inside(self.number):
            self.own = usable_addresses() if addresses is None else addresses
            self.discovery = Discovery(
                self.node_id,
                cluster=self.cluster,
                protocol=PROTOCOL,
                port=self.port,
                addresses=self.own,
                on_seen=self.seen.append,
            )
        return self

    def hosts_of(self, other: Host) -> set[str]:
        """Give the hosts at which the other was announced to this one."""
        found = [s for s in list(self.seen) if s.node_id == other.node_id]
        assert all((s.cluster, s.protocol) == (other.cluster, PROTOCOL) for s in found)
        assert all(a.port == other.port for s in found for a in s.addresses)
        return {a.host for s in found for a in s.addresses}

    def sees(self, other: Host) -> bool:
        return bool(self.hosts_of(other))


class Hosts:
    """Opens discoveries on hosts of the LAN; `close` ends them all at once."""

    def __init__(self, lan: Lan) -> None:
        self._lan = lan
        self._opened: list[Host] = []

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda host: host.discovery.close(), self._opened))

    def __call__(
        self, number: int, addresses: list[LocalAddress] | None = None, **options: str
    ) -> Host:
        self._opened.append(Host(self._lan, number, **options).open(addresses))
        return self._opened[-1]


def wait(condition: Callable[[], bool], what: str, timeout_s: float = HEAR_WITHIN_S) -> float:
    return wait_until(condition, timeout_s, lambda: f"{what} did not come")


def wait_mutual(*hosts: Host) -> float:
    return wait(
        lambda: all(a.sees(b) for a in hosts for b in hosts if a is not b), "everyone's record"
    )


class Tap:
    """Takes down every IPv4 mDNS packet that reaches a host, and sends others of its own."""

    def __init__(self, lan: Lan, number: int, own: str = "") -> None:
        own = own or f"{SUBNET}.{number}"
        with lan.inside(number):
            self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.socket.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(own))
        self.socket.bind(("", PORT))
        member = socket.inet_aton(GROUP) + socket.inet_aton(own)
        self.socket.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)

    def packets(self, from_host: str, during_s: float) -> list[bytes]:
        taken = []
        end_s = time.monotonic() + during_s
        while (left_s := end_s - time.monotonic()) > 0:
            self.socket.settimeout(left_s)
            with contextlib.suppress(TimeoutError):
                data, (source, _) = self.socket.recvfrom(MAX_PACKET_BYTES)
                if source == from_host:
                    taken.append(data)
        return taken


def asked_names(packets: list[bytes]) -> list[str]:
    return [question.name for packet in packets for question in DNSIncoming(packet).questions]


def pointer_to(name: str) -> bytes:
    """Make a packet that says a name is there, without its details."""
    owner = SERVICE_LABEL + b"\x05local\x00"
    alias = b"\x20" + name.encode() + owner
    header = struct.pack("!6H", 0, 0x8400, 0, 1, 0, 0)
    return header + owner + struct.pack("!HHIH", 12, 1, 4500, len(alias)) + alias


def garbage(kind: int, chance: random.Random) -> bytes:
    """Make one hostile packet; the kinds go round."""
    name = f"{chance.getrandbits(128):032x}"
    header = struct.pack("!6H", 0, 0x8400, 0, 1, 0, 0)
    match kind % 8:
        case 0:
            return chance.randbytes(chance.randrange(1, 1400))
        case 1:
            return b"GET / HTTP/1.1\r\nHost: exo-train\r\n\r\n" * 20
        case 2:
            return chance.randbytes(9001)
        case 3:  # names that point at names that point at themselves
            return struct.pack("!6H", 0, 0x8400, 200, 0, 0, 0) + b"\xc0\x0c\xc0\x0e" * 300
        case 4:  # a name without details: each would cost a look-up
            return pointer_to(name)
        case 5:
            fields = b"\xff" + b"\xfe" * 255 + b"\x03v=\xff"
            owner = b"\x20" + name.encode() + SERVICE_LABEL + b"\x05local\x00"
            return header + owner + struct.pack("!HHIH", 16, 1, 4500, len(fields)) + fields
        case _:  # whole records, and false: port 0, or a loopback address
            return whole_record(name, port=0 if kind % 8 == 6 else 5000)


def whole_record(name: str, *, port: int, host: str = "127.0.0.1") -> bytes:
    info = Announcement(
        service_type=SERVICE_TYPE, id=name, cluster=CLUSTER, port=port, protocol=PROTOCOL
    ).to_info([host])
    out = DNSOutgoing(0x8400)
    for answer in (info.dns_pointer(), info.dns_service(), info.dns_text(), *info.dns_addresses()):
        out.add_answer_at_time(answer, 0)
    return bytes(out.packets()[0])
