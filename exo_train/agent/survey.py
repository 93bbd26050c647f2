"""Looks at the ways to the other members, in the background: how fast, and whether they lead back.

Owns the one thread that measures, and what members said of dialling this device. Must not choose
among links: the LinkTable does.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from exo_train.agent.meeting import Meeting
from exo_train.agent.noticing import going_on
from exo_train.cluster.checks.peers import DialOutcome
from exo_train.cluster.interfaces import (
    LocalAddress,
    interface_towards,
    local_addresses,
    without_zone,
)
from exo_train.cluster.link_facts import LinkFacts, PairLink, from_messages
from exo_train.cluster.links import LinkTable, Way
from exo_train.cluster.member import Member
from exo_train.errors import PeerError, ProtocolError
from exo_train.peer import Address, NodeId, short_id
from exo_train.transport.probe import Measurement, ProbeBusyError, measure
from exo_train.transport.reach import Reach, reach
from exo_train.transport.tls import MemberTls
from exo_train.wire.pb import control_pb2 as pb

LOOK_S = 1.0
REACH_TIMEOUT_S = 0.7
DIAL_BACK_AGAIN_S = 60.0
MAX_STUCK = 64
MAX_ASKED = 3  # members that dial back; one may be behind a bad cable itself
OUTCOMES: dict[pb.DialOutcome, DialOutcome] = {
    pb.CONNECTED: "connected",
    pb.REFUSED: "refused",
    pb.TIMED_OUT: "timed out",
    pb.UNREACHABLE: "no route",
}

log = logging.getLogger(__name__)


class NothingThereError(PeerError):
    """Not even a connection is taken there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DialBack:
    """What a member said of connecting to one of this device's addresses."""

    member: str
    address: Address
    outcome: DialOutcome


class Survey:
    """`interface` limits what is measured; `addresses` are this device's own, as told."""

    def __init__(
        self,
        meeting: Meeting,
        tls: MemberTls,
        *,
        interface: str | None,
        addresses: Callable[[], tuple[Address, ...]],
        is_running: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self._meeting = meeting
        self._tls = tls
        self._interface = interface
        self._addresses = addresses
        self._is_running = is_running
        self._say = say
        self._table = LinkTable(tls.identity.node_id)
        self._followed: set[NodeId] = set()
        self._stuck: dict[tuple[NodeId, Address], str] = {}
        self._dial_backs: tuple[DialBack, ...] = ()
        self._asked: tuple[object, ...] = ()
        self._ask_again_s = 0.0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="survey", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(timeout=LOOK_S)

    @property
    def is_unreachable(self) -> bool:
        """Tell whether members tried to connect to this device, and none could."""
        tried = self._dial_backs
        return bool(tried) and all(one.outcome != "connected" for one in tried)

    def dial_backs(self) -> tuple[DialBack, ...]:
        return self._dial_backs

    def own_links(self) -> tuple[LinkFacts, ...]:
        with self._lock:
            return self._table.own()

    def listing(self) -> list[PairLink]:
        """Give the chosen link of each pair of live members."""
        live = {member.facts.node_id for member in self._meeting.live()}
        with self._lock:
            return self._table.listing({*live, self._tls.identity.node_id})

    def _look(self) -> None:
        while not self._ended.wait(LOOK_S):
            with going_on(log):
                self._turn(self._meeting.live())

    def _turn(self, members: list[Member]) -> None:
        self._follow(members)
        self._ask_back([member for member in members if member.answers])
        with self._lock:
            due = self._table.next_due(now_s=time.monotonic(), is_running=self._is_running())
        if due is not None:
            self._measure(*due)
        self._pin(members)

    def _follow(self, members: list[Member]) -> None:
        """Bring the table up to date with who is there and what leads to them."""
        among, now_s = local_addresses(), time.monotonic()
        live = {member.facts.node_id for member in members}
        failed: dict[NodeId | None, list[Address]] = {}
        for one in self._meeting.noticed.not_met():
            failed.setdefault(one.node_id, []).append(one.address)
        for node_id in self._followed - live:
            with self._lock:
                self._table.forget(node_id)
            self._stuck = {key: why for key, why in self._stuck.items() if key[0] != node_id}
        self._followed = live
        for member in members:
            node_id = member.facts.node_id
            told = self._meeting.told(node_id)
            try:
                links = from_messages(told.links) if told else ()
            except ProtocolError as error:
                log.info("%s: %s", member.facts.name, error)
                links = ()
            ways = [way for a in member.addresses if (way := self._way(a, among)) is not None]
            with self._lock:
                self._table.heard(node_id, links)
                self._table.follow(node_id, ways, now_s=now_s)
                for address in failed.get(node_id, ()):
                    self._table.doubt(node_id, address, now_s=now_s)

    def _way(self, address: Address, among: list[LocalAddress]) -> Way | None:
        own = interface_towards(address.host, among=among)
        if own is None:
            return None
        named = self._interface
        if not (_leads_out(own, address) if named is None else own.is_called(named)):
            return None
        return Way(address=address, local_host=own.host, interface=own.interface, kind=own.kind)

    def _measure(self, peer_id: NodeId, way: Way) -> None:
        """Measure one way; whatever comes of it, the table hears, or it would wait for ever."""
        found: Measurement | None = None
        is_busy = False
        try:
            found = self._measured(peer_id, way)
        except ProbeBusyError:
            is_busy = True
        except PeerError as error:
            log.debug("the way to %s by %s: %s", short_id(peer_id), way.address, error)
            self._note_stuck(peer_id, way, error)
        finally:
            now_s = time.monotonic()
            with self._lock:
                if found is not None:
                    self._stuck.pop((peer_id, way.address), None)
                    facts = way.facts(peer_id, **dataclasses.asdict(found))
                    self._table.measured(peer_id, way, facts, now_s=now_s)
                elif is_busy:
                    self._table.postpone(peer_id, way, now_s=now_s)
                else:
                    self._table.failed(peer_id, way, now_s=now_s)

    def _note_stuck(self, peer_id: NodeId, way: Way, error: PeerError) -> None:
        """Keep that a way connects and carries nothing: large packets may be lost on it."""
        key = peer_id, way.address
        if isinstance(error, NothingThereError):
            self._stuck.pop(key, None)
            return
        if key not in self._stuck and len(self._stuck) >= MAX_STUCK:
            return
        self._stuck[key] = (
            f"{way.address} ({way.kind} {way.interface}) takes connections, but nothing passes: "
            f"often an MTU on the way that is smaller than the devices' own, which loses full-size "
            f"packets; set the same MTU on both ends and the switch between"
        )

    def stuck(self) -> dict[tuple[NodeId, Address], str]:
        """Give the ways that connect and carry nothing, with a sentence for each."""
        return dict(self._stuck)

    def _measured(self, peer_id: NodeId, way: Way) -> Measurement:
        # Most ways that lead nowhere (a link-local address in another zone) show it at once.
        if reach(way.address, timeout_s=REACH_TIMEOUT_S) is not Reach.CONNECTED:
            raise NothingThereError("nothing answers there")
        tls = self._tls.to(peer_id)
        return measure(way.address, credentials=tls.credentials, tls_name=tls.name)

    def _pin(self, members: list[Member]) -> None:
        for member in members:
            with self._lock:
                host = self._table.pinned_host(member.facts.node_id)
            pinned = [a for a in member.addresses if host == a.host]
            pinned += [a for a in member.addresses if host == without_zone(a.host)]
            self._meeting.pin(member.facts.node_id, pinned[0] if pinned else None)

    def _ask_back(self, members: list[Member]) -> None:
        """Have members connect to us: a firewall or NAT here is invisible from within."""
        asked = [m for m in members if not m.slow][:MAX_ASKED]
        addresses, now_s = self._addresses(), time.monotonic()
        key = (addresses, *(m.facts.node_id for m in asked))
        if not asked or (key == self._asked and now_s < self._ask_again_s):
            return
        self._asked, self._ask_again_s = key, now_s + DIAL_BACK_AGAIN_S
        heard = []
        for member in asked:
            try:
                outcomes = self._meeting.dial_back(member, addresses)
            except PeerError as error:
                log.info("%s did not dial back: %s", member.facts.name, error)
                continue
            heard += [
                DialBack(member=member.facts.name, address=address, outcome=OUTCOMES[outcome])
                for address, outcome in zip(addresses, outcomes, strict=False)
                if outcome in OUTCOMES
            ]
        was_unreachable, self._dial_backs = self.is_unreachable, tuple(heard)
        if self.is_unreachable and not was_unreachable:
            tried = "; ".join(f"{d.address} {d.outcome} from {d.member}" for d in heard)
            self._say(
                f"others cannot reach this device ({tried}): it stays a member, but gets no place "
                f"in a ring; `exo-train doctor` says what to do"
            )


def _leads_out(own: LocalAddress, address: Address) -> bool:
    """Tell whether a way is worth measuring: over a network of this home, or this very machine."""
    return own.is_usable or own.kind == "loopback" or address.host == own.host
