"""mDNS: says that this agent is here, and hears of others.

Owns the zeroconf objects, one per address family: macOS hears no IPv4 multicast on a socket for
both, and trouble with one stays with it. Must not decide anything: what it hears are suggestions.

Changed addresses need a new Discovery. Zeroconf can take interfaces up at run time since 0.150;
opening anew needs no more than its oldest safe version, and 50 ms.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast

from zeroconf import Error as ZeroconfError
from zeroconf import IPVersion, ServiceBrowser, ServiceInfo, ServiceStateChange, Zeroconf

from exo_train.cluster.interfaces import LocalAddress, without_zone
from exo_train.cluster.mdns_record import (
    PAIRING_SERVICE_TYPE,
    SERVICE_TYPE,
    Announcement,
    Seen,
    id_in_name,
    read_info,
)
from exo_train.cluster.multicast import MulticastCounts, MulticastEar, sender_name
from exo_train.errors import PeerError
from exo_train.peer import Address, NodeId

REGISTER_TIMEOUT_S = 3.0
LOOKUP_TIMEOUT_MS = 1000  # also the longest that an end waits for one
LOOKUP_PAUSES_S = (0.5, 1.0, 2.0, 4.0)  # of one name, when the record comes without its details
LOOKUP_THREADS = 4
CLOSE_S = 3.0  # what an end waits at most for the goodbyes
MAX_PENDING_NAMES = 64
MAX_SEEN = 256
MAX_COPIES = 4
MAX_QUEUED_CANDIDATES = 64

OnSeen = Callable[[Seen], None]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What one Discovery heard since it was opened."""

    interfaces: Mapping[str, MulticastCounts]
    left_out: Mapping[str, str]  # "lan0 (IPv6)" → why
    seen: tuple[Seen, ...]  # the last record of each id
    other_clusters: frozenset[str]
    copies: tuple[Address, ...]  # where another device claims this one's id


class Discovery:
    """Announces one agent and reports others; `on_seen` is called from this object's threads.

    Raises PeerError when mDNS works on none of the addresses. The name is not asked for first, as
    RFC 6762 (section 8.1) wants of names that people chose: it is made from a key.
    """

    def __init__(
        self,
        node_id: NodeId,
        *,
        cluster: str,
        protocol: int,
        port: int,
        addresses: Sequence[LocalAddress],
        on_seen: OnSeen,
    ) -> None:
        self._node_id = node_id
        self._cluster = cluster
        self._protocol = protocol
        self._port = port
        self._addresses = tuple(addresses)
        self._on_seen = on_seen
        self._lock = threading.Lock()
        self._seen: dict[NodeId, Seen] = {}
        self._copies: dict[Address, None] = {}
        self._pairing: list[Announcing] = []
        self._ear = MulticastEar(addresses, own_id=node_id)
        with contextlib.ExitStack() as undo:
            undo.callback(self._ear.close)
            self._zeroconfs = _open_all(self._ear)
            undo.callback(_close_all, self._zeroconfs)
            self._own = self._announce(SERVICE_TYPE, node_id, port)
            self._browsing = Browsing(
                self._zeroconfs, SERVICE_TYPE, own=self._addresses, on_seen=self._take
            )
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Say goodbye on the network and stop."""
        self._browsing.close()
        self._undo.close()

    def ask_again(self) -> None:
        """Ask the network anew who is there: zeroconf by itself stops after a quarter minute."""
        self._browsing.ask_again()

    def say_again(self) -> None:
        """Announce this agent anew, for those whose questions do not reach us."""
        for announcing in self._own:
            announcing.repeat()

    def announce_pairing(self, pairing_id: str, port: int) -> None:
        """Announce an open invitation under a random id of its own, in place of one before."""
        self.withdraw_pairing()
        announced = self._announce(PAIRING_SERVICE_TYPE, pairing_id, port)
        with self._lock:
            self._pairing += announced

    def withdraw_pairing(self) -> None:
        with self._lock:
            announced, self._pairing = self._pairing, []
        for announcing in announced:
            announcing.withdraw()

    def heard(self) -> Heard:
        with self._lock:
            seen, copies = tuple(self._seen.values()), tuple(self._copies)
        return Heard(
            interfaces=self._ear.counts(),
            left_out=dict(self._ear.left_out),
            seen=seen,
            other_clusters=frozenset(s.cluster for s in seen if s.cluster != self._cluster),
            copies=copies,
        )

    def _announce(self, service_type: str, service_id: str, port: int) -> list[Announcing]:
        announcement = Announcement(
            service_type=service_type,
            id=service_id,
            cluster=self._cluster,
            port=port,
            protocol=self._protocol,
        )
        hosts = [a.host for a in self._addresses]
        announced: list[Announcing] = []
        try:
            for zeroconf in self._zeroconfs:
                announced.append(Announcing(zeroconf, announcement.to_info(hosts)))
        except PeerError:
            for announcing in announced:  # else nobody would ever take them back
                announcing.withdraw()
            raise
        return announced

    def _take(self, seen: Seen) -> None:
        if seen.node_id == self._node_id:
            self._note_copy(seen)
            return
        with self._lock:
            self._seen.pop(seen.node_id, None)
            if len(self._seen) >= MAX_SEEN:
                self._seen.pop(next(iter(self._seen)))
            self._seen[seen.node_id] = seen
        self._on_seen(seen)

    def _note_copy(self, seen: Seen) -> None:
        own = {without_zone(a.host) for a in self._addresses}
        for address in seen.addresses:
            is_own = address.port == self._port and without_zone(address.host) in own
            if not is_own and len(self._copies) < MAX_COPIES:
                with self._lock:
                    self._copies[address] = None


class Announcing:
    """One record in force on one zeroconf, whose three announcements go out by themselves.

    Raises PeerError when that does not work.
    """

    def __init__(self, zeroconf: Zeroconf, info: ServiceInfo) -> None:
        self._zeroconf = zeroconf
        self._info = info
        assert zeroconf.loop is not None
        self._loop = zeroconf.loop
        registering = zeroconf.async_register_service(info, cooperating_responders=True)
        try:
            registered = asyncio.run_coroutine_threadsafe(registering, self._loop)
            # Zeroconf promises an awaitable, and gives the task that repeats.
            self._repeating = cast("asyncio.Future[None]", registered.result(REGISTER_TIMEOUT_S))
        except (OSError, ZeroconfError, concurrent.futures.TimeoutError) as error:
            raise PeerError(
                f"mDNS does not work here ({type(error).__name__}: {error}); name a device with "
                f"--peer HOST:PORT"
            ) from None

    def repeat(self) -> None:
        """Send the announcement once more."""
        with contextlib.suppress(OSError, ZeroconfError, RuntimeError):
            self._zeroconf.send(self._zeroconf.generate_service_broadcast(self._info, None))

    def withdraw(self) -> None:
        """Say goodbye for this record alone; announcements still to come would undo it."""
        with contextlib.suppress(OSError, ZeroconfError, RuntimeError):
            self._loop.call_soon_threadsafe(self._repeating.cancel)
            self._zeroconf.unregister_service(self._info)


class Browsing:
    """Watches one service type on some zeroconfs and reports records that have our shape."""

    def __init__(
        self,
        zeroconfs: Sequence[Zeroconf],
        service_type: str,
        *,
        own: Sequence[LocalAddress],
        on_seen: OnSeen,
    ) -> None:
        self._zeroconfs = zeroconfs
        self._service_type = service_type
        self._own = own
        self._on_seen = on_seen
        self._lock = threading.Lock()
        self._pending: set[tuple[Zeroconf, str]] = set()
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="mdns lookup")
        self._browsers = [self._browser(zeroconf) for zeroconf in zeroconfs]

    def close(self) -> None:
        """Stop; what is being looked up ends first, within LOOKUP_TIMEOUT_MS."""
        self._ended.set()
        for browser in self._browsers:
            browser.cancel()
        self._pool.shutdown(cancel_futures=True)

    def ask_again(self) -> None:
        for browser in self._browsers:
            browser.cancel()
        self._browsers = [self._browser(zeroconf) for zeroconf in self._zeroconfs]

    def _browser(self, zeroconf: Zeroconf) -> ServiceBrowser:
        return ServiceBrowser(zeroconf, self._service_type, handlers=[self._on_state_change])

    def _on_state_change(
        self,
        zeroconf: Zeroconf,
        service_type: str,
        name: str,
        state_change: ServiceStateChange,
    ) -> None:
        is_gone = state_change is ServiceStateChange.Removed
        if is_gone or self._ended.is_set() or id_in_name(name, service_type) is None:
            return
        info = ServiceInfo(service_type, name)
        if info.load_from_cache(zeroconf):
            self._report(info)
            return
        key = (zeroconf, name)
        with self._lock:
            if key in self._pending or len(self._pending) >= MAX_PENDING_NAMES:
                return
            self._pending.add(key)
        self._pool.submit(self._look_up, zeroconf, name)

    def _look_up(self, zeroconf: Zeroconf, name: str) -> None:
        """Ask for a record's details, with growing pauses; what comes late reports itself."""
        try:
            for pause_s in (*LOOKUP_PAUSES_S, 0.0):
                info = self._asked(zeroconf, name)
                if info is not None:
                    self._report(info)
                if info is not None or self._ended.wait(pause_s):
                    return
        finally:
            with self._lock:
                self._pending.discard((zeroconf, name))

    def _asked(self, zeroconf: Zeroconf, name: str) -> ServiceInfo | None:
        try:
            return zeroconf.get_service_info(self._service_type, name, LOOKUP_TIMEOUT_MS)
        except (ZeroconfError, OSError, RuntimeError) as error:
            log.debug("mDNS look-up of '%s' failed: %s", name, error)
            return None

    def _report(self, info: ServiceInfo) -> None:
        seen = read_info(info, own=self._own)
        if seen is not None:
            self._on_seen(seen)


def browse_pairing(
    addresses: Sequence[LocalAddress],
    *,
    timeout_s: float,
    stop: threading.Event | None = None,
    poll_s: float = 0.2,
) -> Iterator[Seen]:
    """Yield open invitations as they are heard, each change once, until the time is up or `stop`.

    `cluster` of each is the inviter's. Raises PeerError when mDNS works on none of the addresses.
    """
    deadline_s = time.monotonic() + timeout_s
    found: queue.Queue[Seen] = queue.Queue(MAX_QUEUED_CANDIDATES)
    known: set[Seen] = set()

    def take(seen: Seen) -> None:
        with contextlib.suppress(queue.Full):
            found.put_nowait(seen)

    with contextlib.ExitStack() as undo:
        ear = MulticastEar(addresses, own_id=PAIRING_SERVICE_TYPE)
        undo.callback(ear.close)
        zeroconfs = _open_all(ear)
        undo.callback(_close_all, zeroconfs)
        browsing = Browsing(zeroconfs, PAIRING_SERVICE_TYPE, own=addresses, on_seen=take)
        undo.callback(browsing.close)
        while time.monotonic() < deadline_s and not (stop is not None and stop.is_set()):
            with contextlib.suppress(queue.Empty):
                seen = found.get(timeout=poll_s)
                if seen not in known and len(known) < MAX_SEEN:
                    known.add(seen)
                    yield seen


def _open_all(ear: MulticastEar) -> list[Zeroconf]:
    """Open one zeroconf per family; raises PeerError when none opens."""
    logging.getLogger("zeroconf").addFilter(_log_in_one_line)
    opened = []
    for version, is_ipv4 in ((IPVersion.V4Only, True), (IPVersion.V6Only, False)):
        senders = [a for a in ear.senders if a.is_ipv4 == is_ipv4]
        if not senders:
            continue
        try:
            opened.append(
                Zeroconf(interfaces=_choices(senders), ip_version=version, use_asyncio=False)
            )
        except (OSError, ZeroconfError, RuntimeError) as error:
            ear.left_out.update((sender_name(sender), str(error)) for sender in senders)
    if not opened:
        reasons = "; ".join(f"{where}: {why}" for where, why in ear.left_out.items())
        raise PeerError(
            f"mDNS does not work here ({reasons or 'no network that can carry it'}); "
            f"name a device with --peer HOST:PORT"
        )
    return opened


def _choices(senders: Sequence[LocalAddress]) -> list[str | int]:
    """Name the interfaces as zeroconf wants it: by address, so that packets come from that one.

    It drops zones, so where VLANs of one card share an address it needs the interface's number.
    """
    hosts = [without_zone(a.host) for a in senders]
    return [
        host if a.is_ipv4 or hosts.count(host) == 1 else a.index
        for a, host in zip(senders, hosts, strict=True)
    ]


def _close_all(zeroconfs: Sequence[Zeroconf]) -> None:
    """Say goodbye for all records, in all families at once: it takes a third of a second.

    On a stalled machine zeroconf waits up to 13 s for its own thread, so these are daemons: an end
    of the process is not to wait for that.
    """
    closing = [
        threading.Thread(target=_close, args=(zeroconf,), name="mdns close", daemon=True)
        for zeroconf in zeroconfs
    ]
    for thread in closing:
        thread.start()
    deadline_s = time.monotonic() + CLOSE_S
    for thread in closing:
        thread.join(max(deadline_s - time.monotonic(), 0))


def _close(zeroconf: Zeroconf) -> None:
    with contextlib.suppress(OSError, ZeroconfError, RuntimeError):  # the network may be gone
        zeroconf.close()


def _log_in_one_line(record: logging.LogRecord) -> bool:
    """Take over what zeroconf logs, with tracebacks, when an interface goes away."""
    log.info("mDNS: %s", record.getMessage().partition("\n")[0])
    return False
