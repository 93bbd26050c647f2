"""Asks the network by mDNS who is there, once, and counts what comes back.

Owns a socket per interface for a second or two. Never raises. It does not listen on port 5353,
so that it works beside a running agent and the system's own responder: answers come to the
asking port (RFC 6762, section 6.7).
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from exo_train.cluster.checks.network import MDNS_PORT, MulticastFacts

GROUP = "224.0.0.251"
LISTEN_S = 1.5
MAX_PACKETS = 512
MAX_PACKET_BYTES = 9000  # RFC 6762, section 17
MAX_INTERFACES = 16
_ANY_SERVICE = "_services._dns-sd._udp.local"  # RFC 6763, section 9: all responders answer
_EXO_TRAIN = "_exo-train._tcp.local"
_HEADER = struct.Struct(">6H")
_QR_BIT = 0x8000
# Windows' own number for "no route to host" is not errno's.
_NO_ROUTE = (errno.EHOSTUNREACH, getattr(errno, "WSAEHOSTUNREACH", errno.EHOSTUNREACH))


@dataclass(slots=True)
class _Asking:
    socket: socket.socket
    any_id: int
    exo_id: int
    heard: set[str] = field(default_factory=set)
    exo_heard: set[str] = field(default_factory=set)
    malformed: int = 0
    error: OSError | None = None


def probe_multicast(
    hosts: Mapping[str, str], *, own: frozenset[str] = frozenset(), listen_s: float = LISTEN_S
) -> dict[str, MulticastFacts]:
    """Ask on each interface (name → its IPv4 address); answers of `own` addresses do not count.

    `heard` counts other devices, not packets.
    """
    askings: dict[str, _Asking] = {}
    facts: dict[str, MulticastFacts] = {}
    with contextlib.ExitStack() as stack:
        for name, host in list(hosts.items())[:MAX_INTERFACES]:
            try:
                opened = stack.enter_context(_open(host))
            except OSError as error:
                facts[name] = _facts(error, sent=0)
                continue
            askings[name] = _ask(opened)
        _listen(list(askings.values()), own, listen_s)
    for name, asking in askings.items():
        if asking.error is not None:
            facts[name] = _facts(asking.error, sent=0)
            continue
        facts[name] = MulticastFacts(
            sent=2,
            heard=len(asking.heard),
            exo_train_heard=len(asking.exo_heard),
            malformed=asking.malformed,
        )
    return facts


def _facts(error: OSError, *, sent: int) -> MulticastFacts:
    reason = f"{error.strerror or error} (error {error.errno})"
    is_no_route = error.errno in _NO_ROUTE
    return MulticastFacts(sent=sent, heard=0, error=reason, is_no_route=is_no_route)


def _open(host: str) -> socket.socket:
    opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        opened.setblocking(False)
        opened.bind((host, 0))
        opened.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(host))
        opened.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 255)
    except OSError:
        opened.close()
        raise
    return opened


def _ask(opened: socket.socket) -> _Asking:
    any_id, exo_id = (secrets.randbelow(1 << 16) for _ in range(2))
    asking = _Asking(opened, any_id, exo_id)
    try:
        for number, name in ((any_id, _ANY_SERVICE), (exo_id, _EXO_TRAIN)):
            opened.sendto(question(number, name), (GROUP, MDNS_PORT))
    except OSError as error:
        asking.error = error
    return asking


def question(number: int, name: str) -> bytes:
    """Encode a query for the pointers (type 12, class 1) of `name`."""
    labels = b"".join(bytes([len(part)]) + part.encode("ascii") for part in name.split("."))
    return _HEADER.pack(number, 0, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">2H", 12, 1)


def _listen(askings: list[_Asking], own: frozenset[str], listen_s: float) -> None:
    deadline_s = time.monotonic() + listen_s
    num_packets = 0
    with selectors.DefaultSelector() as selector:
        for asking in askings:
            if asking.error is None:
                selector.register(asking.socket, selectors.EVENT_READ, asking)
        while selector.get_map() and num_packets < MAX_PACKETS:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return
            for key, _ in selector.select(left_s):
                num_packets += 1
                _take(key.data, own)


def _take(asking: _Asking, own: frozenset[str]) -> None:
    try:
        packet, sender = asking.socket.recvfrom(MAX_PACKET_BYTES)
    except OSError:  # e.g. Windows passes on that some address refused
        return
    host = str(sender[0])
    if host in own:
        return
    if len(packet) < _HEADER.size:
        asking.malformed += 1
        return
    number, flags, _, num_answers, _, _ = _HEADER.unpack_from(packet)
    if not flags & _QR_BIT or not num_answers:
        asking.malformed += 1
        return
    asking.heard.add(host)
    if number == asking.exo_id:
        asking.exo_heard.add(host)
