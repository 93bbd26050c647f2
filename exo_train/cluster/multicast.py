"""Listens beside zeroconf and counts, per interface, what multicast goes out and comes in.

Owns one receiving socket per interface and family, and so knows which of them work at all. Must
not answer, and keeps nothing of a packet but counts: the reasons that `doctor` gives rest on them.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import struct
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from exo_train.cluster.interface_kinds import LOOPBACK
from exo_train.cluster.interfaces import LocalAddress, local_addresses, without_zone

PORT = 5353
GROUP, GROUP_V6 = "224.0.0.251", "ff02::fb"  # RFC 6762, section 3
MAX_PACKET_BYTES = 9000  # RFC 6762, section 17
MAX_INTERFACES = 16
MAX_CHECKED_PER_S = 50  # packets looked into; more are counted only
MAX_SOCKET_ERRORS = 8  # of one socket in a row
QUIET_S = 60.0  # without an error: what came before is forgiven
CLOSE_CHECK_S = 0.2
CLOSE_TIMEOUT_S = 2.0
HEADER = struct.Struct("!6H")
QUESTION_TAIL_BYTES = 4
RECORD_TAIL = struct.Struct("!HHIH")  # type, class, time to live, length of what follows
MAX_LABEL_BYTES, POINTER = 0x3F, 0xC0
SERVICE_LABEL = b"\x0a_exo-train\x04_tcp"
# linux/in.h, linux/in6.h: without these a socket hears what others of the machine have joined.
IP_MULTICAST_ALL, IPV6_MULTICAST_ALL = 49, 29

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class MulticastCounts:
    """Packets on port 5353 of one interface since it was opened."""

    sent: int = 0  # of ours, as the kernel hands them back: they left, nobody need have heard
    heard: int = 0  # from other machines, whatever they say
    exo_train_heard: int = 0  # from other machines or agents, that name exo-train
    echoed: int = 0  # from other machines, that name this agent: it was heard there
    malformed: int = 0


class Patience:
    """Puts up with some errors of a socket: an interface that goes down says so once, one that
    is gone says so for ever.
    """

    def __init__(self) -> None:
        self.num_errors = 0
        self._last_s = 0.0

    def worked(self) -> None:
        self.num_errors = 0

    def is_over(self, now_s: float) -> bool:
        """Take in one more error; tells whether that was one too many."""
        self.num_errors = 1 if now_s - self._last_s >= QUIET_S else self.num_errors + 1
        self._last_s = now_s
        return self.num_errors >= MAX_SOCKET_ERRORS


class MulticastEar:
    """Opens what can be opened of `addresses`; `senders` are those, `left_out` the others."""

    def __init__(self, addresses: Iterable[LocalAddress], *, own_id: str) -> None:
        self.senders: list[LocalAddress] = []
        self.left_out: dict[str, str] = {}  # "lan0 (IPv6)" → why
        self._own_id = own_id.encode()
        self._own_hosts = {without_zone(a.host) for a in local_addresses()}
        self._counts: dict[str, MulticastCounts] = {}
        self._selector = selectors.DefaultSelector()
        self._patience: defaultdict[socket.socket, Patience] = defaultdict(Patience)
        self._checked: tuple[int, int] = (0, 0)  # the second, and how many in it
        self._closing = False
        for address in one_per_interface(addresses):
            self._open(address)
        self._thread = threading.Thread(target=self._listen, name="mdns counts", daemon=True)
        self._thread.start()

    def counts(self) -> dict[str, MulticastCounts]:
        return dict(self._counts)

    def close(self) -> None:
        self._closing = True
        self._thread.join(CLOSE_TIMEOUT_S)
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def _open(self, address: LocalAddress) -> None:
        try:
            ear = _open_socket(address)
        except OSError as error:
            self.left_out[sender_name(address)] = str(error)
            log.debug("mDNS goes without %s: %s", address.host, error)
            return
        self.senders.append(address)
        self._counts.setdefault(address.interface, MulticastCounts())
        self._selector.register(ear, selectors.EVENT_READ, address.interface)

    def _listen(self) -> None:
        while not self._closing:
            if not self._selector.get_map():
                time.sleep(CLOSE_CHECK_S)  # Windows' select refuses an empty list
                continue
            for key, _ in self._selector.select(CLOSE_CHECK_S):
                ear = key.fileobj
                assert isinstance(ear, socket.socket)
                try:
                    data, source = ear.recvfrom(MAX_PACKET_BYTES + 1)
                except OSError as error:
                    self._forgive(ear, error)
                else:
                    self._patience[ear].worked()
                    self._count(self._counts[key.data], data, without_zone(source[0]))

    def _forgive(self, ear: socket.socket, error: OSError) -> None:
        if self._patience[ear].is_over(time.monotonic()):
            log.info("no longer listening for mDNS on one interface: %s", error)
            self._selector.unregister(ear)
            ear.close()

    def _count(self, counts: MulticastCounts, data: bytes, source: str) -> None:
        names_us = self._own_id in data
        is_from_here = source in self._own_hosts
        if is_from_here and names_us:
            counts.sent += 1
            return
        if SERVICE_LABEL in data:
            counts.exo_train_heard += 1
        if is_from_here:
            return
        counts.heard += 1
        counts.echoed += names_us
        if self._may_check():
            counts.malformed += not is_well_formed(data)

    def _may_check(self) -> bool:
        second = int(time.monotonic())
        number = self._checked[1] + 1 if self._checked[0] == second else 1
        self._checked = (second, number)
        return number <= MAX_CHECKED_PER_S


def sender_name(address: LocalAddress) -> str:
    return f"{address.interface} ({address.family})"


def is_well_formed(data: bytes) -> bool:
    """Walk a DNS message (RFC 1035, section 4.1) by its own counts and lengths."""
    if not HEADER.size <= len(data) <= MAX_PACKET_BYTES:
        return False
    _id, _flags, questions, *others = HEADER.unpack_from(data)
    offset = HEADER.size
    try:
        for _ in range(questions):
            offset = _after_name(data, offset) + QUESTION_TAIL_BYTES
        for _ in range(sum(others)):
            offset = _after_name(data, offset) + RECORD_TAIL.size
            offset += RECORD_TAIL.unpack_from(data, offset - RECORD_TAIL.size)[-1]
    except (IndexError, ValueError, struct.error):
        return False
    return offset <= len(data)


def _after_name(data: bytes, offset: int) -> int:
    """Give where the name at `offset` ends; raises ValueError or IndexError if it does not."""
    while (length := data[offset]) != 0:
        if length >= POINTER:
            if (length - POINTER) * 256 + data[offset + 1] >= offset:
                raise ValueError("a pointer must point back")
            return offset + 2
        if length > MAX_LABEL_BYTES:
            raise ValueError("a label is at most 63 bytes")
        offset += 1 + length
    return offset + 1


def one_per_interface(addresses: Iterable[LocalAddress]) -> list[LocalAddress]:
    """Choose whom to send from: one address per interface and family, link-local for IPv6.

    Loopback has no IPv6 multicast.
    """
    chosen: dict[tuple[str, bool], LocalAddress] = {}
    for address in sorted(addresses, key=lambda a: "%" not in a.host):
        if address.is_ipv4 or (address.index and address.kind != LOOPBACK):
            chosen.setdefault((address.interface, address.is_ipv4), address)
    ordered = sorted(chosen.values(), key=lambda a: (a.rank, not a.is_ipv4, a.interface))
    return ordered[: 2 * MAX_INTERFACES]


def _open_socket(address: LocalAddress) -> socket.socket:
    """Join the group on that interface alone; raises OSError where it cannot be used."""
    family = socket.AF_INET if address.is_ipv4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as sender:  # what zeroconf will do
        # Python takes the zone from the number alone.
        scope = () if address.is_ipv4 else (0, address.index)
        sender.bind((without_zone(address.host), 0, *scope))
    with contextlib.ExitStack() as undo:
        ear = undo.enter_context(socket.socket(family, socket.SOCK_DGRAM))
        ear.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            ear.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if address.is_ipv4:
            _join_ipv4(ear, address)
        else:
            _join_ipv6(ear, address)
        ear.setblocking(False)
        undo.pop_all()
    return ear


def _join_ipv4(ear: socket.socket, address: LocalAddress) -> None:
    # Bound to the group, it takes no unicast answer away from another program's socket.
    ear.bind(("" if sys.platform == "win32" else GROUP, PORT))
    member = socket.inet_aton(GROUP) + socket.inet_aton(address.host)
    if sys.platform == "linux":
        ear.setsockopt(socket.IPPROTO_IP, IP_MULTICAST_ALL, 0)
        member += struct.pack("@i", address.index)
    ear.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)


def _join_ipv6(ear: socket.socket, address: LocalAddress) -> None:
    ear.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    if sys.platform == "linux":
        ear.setsockopt(socket.IPPROTO_IPV6, IPV6_MULTICAST_ALL, 0)
    ear.bind(("" if sys.platform == "win32" else GROUP_V6, PORT, 0, address.index))
    member = socket.inet_pton(socket.AF_INET6, GROUP_V6) + struct.pack("@I", address.index)
    ear.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, member)
