"""Finds the other agents and keeps hearing them: the shell around the pure Membership.

Owns the heartbeat's threads and the lock of the membership. Must not decide who is asked, alive
or dead: the machine does; this carries out what it asks for, and says what changed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import assert_never

from exo_train.agent.admissions import Admissions
from exo_train.agent.dialling import (
    Dialling,
    NotTheDeviceError,
    RemovedHereError,
    VersionError,
    calling,
)
from exo_train.agent.noticing import Noticing, going_on
from exo_train.agent.protocol import (
    HELLO_TIMEOUT_S,
    PROTOCOL_VERSION,
    Introduction,
    from_node_facts,
    to_node_facts,
)
from exo_train.agent.saying import changed_sentence, duplicate_sentence
from exo_train.cluster.interfaces import all_dialable
from exo_train.cluster.mdns_record import Seen
from exo_train.cluster.member import Member, view_hash
from exo_train.cluster.membership import Changed, Duplicate, Effect, Membership
from exo_train.cluster.steady_clock import steady_s
from exo_train.cluster.whom_to_ask import Ask, Failure
from exo_train.errors import ExoTrainError, PeerError, ProtocolError
from exo_train.peer import Address, NodeId
from exo_train.train.messages import to_endpoints
from exo_train.transport.reach import Reach, reach
from exo_train.wire.pb import control_pb2 as pb
from exo_train.wire.pb.control_pb2_grpc import ControlStub

ANOTHER_CLUSTER = "another cluster"  # a refusal that reveals no more
TICK_S = 0.5
MAX_HEARTBEATS = 32
MAX_SEARCHES = 24  # the machine asks for fewer at once
GOODBYE_TIMEOUT_S = 1.0
SPREAD_TIMEOUT_S = 2.0
DIAL_BACK_TIMEOUT_S = 5.0
MAX_CLOCK_S = 1e11  # the year 5138
FAILURES = {
    Reach.CONNECTED: Failure.ACCEPTED,
    Reach.REFUSED: Failure.REFUSED,
    Reach.TIMED_OUT: Failure.SILENT,
    Reach.NO_ROUTE: Failure.NO_ROUTE,
}

log = logging.getLogger(__name__)


class Meeting:
    """Thread-safe. `introduce` is asked anew for each hello: free memory and runs change."""

    def __init__(
        self,
        *,
        admissions: Admissions,
        dialling: Dialling,
        introduce: Callable[[], Introduction],
        on_expelled: Callable[[NodeId | None, str], None],
        lasting: tuple[Address, ...] = (),
        may_dial: Callable[[Address], bool] = lambda address: True,
        say: Callable[[str], None] = log.info,
        clock: Callable[[], float] = steady_s,
    ) -> None:
        self.cluster = admissions.identity.cluster
        self._admissions = admissions
        self._dialling = dialling
        self._introduce = introduce
        self._on_expelled = on_expelled
        self._may_dial = may_dial
        self._say = say
        self.now_s = clock  # the clock of all of the members' times
        own = introduce()
        self._self_id = own.facts.node_id
        self._machine = Membership(
            self._self_id,
            incarnation=own.incarnation,
            instance=own.instance,
            now_s=clock(),
        )
        self._lasting = {a for address in lasting for a in all_dialable([address])}
        self._told: dict[NodeId, Introduction] = {}  # the last hello of each member
        self.noticed = Noticing(say)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        # Two pools: addresses that swallow packets cost HELLO_TIMEOUT_S each, and the heartbeats
        # of live members must not queue behind them.
        self._heartbeats = ThreadPoolExecutor(MAX_HEARTBEATS, thread_name_prefix="heartbeat")
        self._searches = ThreadPoolExecutor(MAX_SEARCHES, thread_name_prefix="search")
        self._thread = threading.Thread(target=self._beat, name="membership", daemon=True)

    def start(self) -> None:
        for address in self._lasting:
            self.suggest(address, None, is_lasting=True)
        self._thread.start()

    def close(self) -> None:
        """Say goodbye to all live members and stop."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout=2 * HELLO_TIMEOUT_S)
        self._heartbeats.shutdown(cancel_futures=True)  # a hello after the goodbye would undo it
        self._searches.shutdown(wait=False, cancel_futures=True)
        goodbye = pb.GoodbyeRequest(
            cluster=self.cluster, node_id=self._self_id, incarnation=self._machine.incarnation
        )
        calls = []
        for member in self.live():
            with contextlib.suppress(PeerError):
                stub = self._stub(member)
                with calling(member.proven[0]):
                    calls.append(stub.Goodbye.future(goodbye, GOODBYE_TIMEOUT_S))
        for call in calls:
            if call.exception() is not None:
                log.debug("a goodbye was not heard: %s", call.exception())

    def suggest(
        self, address: Address, node_id: NodeId | None, *, is_lasting: bool = False
    ) -> None:
        """Take in that an agent may answer at `address`."""
        if not is_lasting and not self._may_dial(address):
            return
        self._apply(
            lambda now_s: self._machine.suggested(address, node_id, now_s=now_s, lasting=is_lasting)
        )

    def seen(self, seen: Seen) -> None:
        """Take in what mDNS heard."""
        if seen.cluster == self.cluster:
            for address in all_dialable(seen.addresses):
                self.suggest(address, seen.node_id)

    def live(self) -> list[Member]:
        with self._lock:
            return self._machine.live()

    def members(self) -> list[Member]:
        with self._lock:
            return [member for _, member in sorted(self._machine.members.items())]

    def view_hash(self) -> str:
        with self._lock:
            return view_hash(self._machine.view())

    def duplicates(self) -> list[Duplicate]:
        with self._lock:
            return list(self._machine.duplicates.values())

    def told(self, node_id: NodeId) -> Introduction | None:
        """Give the last hello of a member."""
        with self._lock:
            return self._told.get(node_id)

    def told_addresses(self, node_id: NodeId) -> tuple[Address, ...]:
        told = self.told(node_id)
        return told.addresses if told else ()

    def pin(self, node_id: NodeId, address: Address | None) -> None:
        with self._lock:
            self._machine.pin(node_id, address)

    def removed(self, node_id: NodeId) -> None:
        """Take in that a device belongs to the cluster no more."""
        self._dialling.drop_all_of(node_id)
        self._apply(lambda now_s: self._machine.removed(node_id))

    def spread_roster(self) -> list[NodeId]:
        """Tell every live member now what we know of who belongs here; gives who has heard."""
        calls = []
        for member in self.live():
            with contextlib.suppress(PeerError):
                node_id = member.facts.node_id
                stub = self._stub(member)
                with calling(member.proven[0]):
                    future = stub.SyncRoster.future(self._admissions.message(), SPREAD_TIMEOUT_S)
                calls.append((node_id, future))
        return [node_id for node_id, call in calls if call.exception() is None]

    def hello(self, request: pb.HelloRequest) -> pb.HelloReply:
        """Answer another agent's hello; raises ProtocolError when it makes no sense."""
        if request.protocol != PROTOCOL_VERSION or request.cluster != self.cluster:
            return pb.HelloReply(protocol=PROTOCOL_VERSION, refusal=ANOTHER_CLUSTER)
        if request.expected_node_id not in ("", self._self_id):
            return pb.HelloReply(protocol=PROTOCOL_VERSION, refusal="another device answers here")
        told = from_node_facts(request.sender)
        self._heard(told)
        return pb.HelloReply(
            protocol=PROTOCOL_VERSION,
            cluster=self.cluster,
            self=to_node_facts(self._introduce()),
            known=[*self._known(), *self._copies_of(told.facts.node_id)],
            roster_digest=self._admissions.digest(),
            clock_s=time.time(),
        )

    def goodbye(self, request: pb.GoodbyeRequest) -> None:
        if request.cluster == self.cluster:
            node_id, incarnation = NodeId(request.node_id), request.incarnation
            self._apply(
                lambda now_s: self._machine.left(node_id, incarnation=incarnation, now_s=now_s)
            )

    def _stub(self, member: Member) -> ControlStub:
        """Give what calls it, on the channel of its heartbeats; raises PeerError without one."""
        if not member.answers:
            raise PeerError(f"{member.facts.name} cannot be called from here")
        return self._dialling.to(member.proven[0], member.facts.node_id).control

    def dial_back(self, member: Member, addresses: tuple[Address, ...]) -> list[pb.DialOutcome]:
        """Have a member connect to us; gives an outcome for each address. Raises PeerError."""
        request = pb.DialBackRequest(endpoints=to_endpoints(addresses))
        stub = self._stub(member)
        with calling(member.proven[0]):
            return list(stub.DialBack(request, timeout=DIAL_BACK_TIMEOUT_S).outcomes)

    def _known(self) -> list[pb.NodeFacts]:
        """Tell whom else we hear; after our own sleep that is old news until one has answered."""
        with self._lock:
            if self._machine.is_revalidating:
                return []
            ids = [member.facts.node_id for member in self._machine.live()]
            told = [self._told[node_id] for node_id in ids if node_id in self._told]
        # Each member tells of its own links.
        return [to_node_facts(replace(introduction, links=())) for introduction in told]

    def _copies_of(self, node_id: NodeId) -> list[pb.NodeFacts]:
        """Tell a device of another one that runs with its identity, so that it looks there."""
        with self._lock:
            copy, told = self._machine.duplicates.get(node_id), self._told.get(node_id)
        if copy is None or told is None:
            return []
        other = replace(told, instance=copy.instance, addresses=copy.addresses, links=(), run=None)
        return [to_node_facts(other)]

    def _heard(
        self, told: Introduction, *, proven: Address | None = None, rtt_s: float | None = None
    ) -> None:
        addresses = tuple(a for a in all_dialable(told.addresses) if self._may_dial(a))
        node_id = told.facts.node_id

        def take(now_s: float) -> list[Effect]:
            effects = self._machine.heard(
                told.facts,
                incarnation=told.incarnation,
                instance=told.instance,
                addresses=addresses,
                now_s=now_s,
                proven=proven,
                rtt_s=rtt_s,
            )
            member = self._machine.members.get(node_id)
            if member is not None and member.instance == told.instance:  # no echo, no copy
                self._told[node_id] = told
            return effects

        self._apply(take)

    def _beat(self) -> None:
        while not self._stopping:
            with going_on(log):
                self._apply(lambda now_s: self._machine.tick(now_s=now_s))
            self._wake.wait(TICK_S)
            self._wake.clear()

    def _apply(self, event: Callable[[float], Iterable[Effect]]) -> None:
        """Let the machine take an event in, and carry out what follows from it."""
        with self._lock:
            self._machine.roster = frozenset(self._admissions.members())
            effects = list(event(self.now_s()))
            is_quiet = self._machine.is_revalidating
            gone = self._told.keys() - self._machine.members.keys()
            for node_id in gone:
                del self._told[node_id]
        for effect in effects:
            match effect:
                case Ask():
                    if not self._stopping:
                        pool = self._heartbeats if effect.is_heartbeat else self._searches
                        pool.submit(self._ask, effect)
                case Changed():
                    self._follow(effect, is_quiet=is_quiet)
                case Duplicate():
                    self.noticed.say_once(duplicate_sentence(effect, self._self_id))
                case _:
                    assert_never(effect)

    def _follow(self, change: Changed, *, is_quiet: bool) -> None:
        sentence = changed_sentence(change)
        if sentence and not is_quiet:
            self._say(sentence)

    def _ask(self, ask: Ask) -> None:
        """Call one address; whatever comes of it, the machine hears."""
        is_told = False
        with going_on(log):
            try:
                self._try(ask)
                is_told = True
            finally:
                if not is_told:
                    self._failed(ask, Failure.FOREIGN)

    def _try(self, ask: Ask) -> None:
        try:
            self._hello_to(ask)
        except RemovedHereError as error:
            self._failed(ask, Failure.FOREIGN)
            self._on_expelled(ask.node_id, str(error))
        except VersionError as error:
            self.noticed.say_once(str(error))
            self._failed(ask, Failure.FOREIGN)
        except ProtocolError as error:
            if ask.address in self._lasting:
                self.noticed.say_once(f"--peer {error}")
            log.debug("no hello from %s: %s", ask.address, error)
            self._dialling.drop(ask.address)  # another version may be there now: greet anew
            self._failed(ask, Failure.FOREIGN)
        except ExoTrainError as error:
            log.debug("no hello from %s: %s", ask.address, error)
            self._dialling.drop(ask.address)
            self._failed(ask, FAILURES[reach(ask.address)])

    def _hello_to(self, ask: Ask) -> None:
        proven = self._dialling.to(ask.address, ask.node_id)
        if proven.node_id == self._self_id:
            own = self._introduce()
            self._heard(
                Introduction(
                    facts=own.facts,
                    incarnation=own.incarnation,
                    instance=proven.instance,
                    addresses=own.addresses if proven.instance == own.instance else (ask.address,),
                ),
                proven=ask.address,
            )
            return
        request = pb.HelloRequest(
            protocol=PROTOCOL_VERSION,
            cluster=self.cluster,
            sender=to_node_facts(self._introduce()),
            expected_node_id=proven.node_id,
            roster_digest=self._admissions.digest(),
            clock_s=time.time(),
        )
        sent_s, stub = time.monotonic(), proven.control
        with calling(ask.address):
            reply = stub.Hello(request, timeout=HELLO_TIMEOUT_S)
            rtt_s = time.monotonic() - sent_s
            if reply.roster_digest != self._admissions.digest():
                self._admissions.merge(
                    stub.SyncRoster(self._admissions.message(), timeout=HELLO_TIMEOUT_S)
                )
        self._take_reply(ask, proven.node_id, reply, rtt_s=rtt_s)

    def _take_reply(self, ask: Ask, node_id: NodeId, reply: pb.HelloReply, *, rtt_s: float) -> None:
        if reply.refusal:
            raise NotTheDeviceError(f"{ask.address} refuses this device as {reply.refusal[:40]!r}")
        told = from_node_facts(reply.self)
        if told.facts.node_id != node_id or reply.cluster != self.cluster:
            raise NotTheDeviceError(f"{ask.address} claims to be another than it proves to be")
        if not abs(reply.clock_s) < MAX_CLOCK_S:
            raise ProtocolError(f"{ask.address} sent a clock that makes no sense")
        skew_s = reply.clock_s - (time.time() - rtt_s / 2)
        self.noticed.answered(ask.address)
        self.noticed.clock(node_id, told.facts.name, skew_s)
        self._heard(told, proven=ask.address, rtt_s=rtt_s)
        live = {member.facts.node_id for member in self.live()}
        for known in reply.known:
            other = from_node_facts(known)
            is_copy = other.facts.node_id == self._self_id
            if other.facts.node_id not in live:
                for address in all_dialable(other.addresses):
                    # Whoever runs with our identity is asked as a stranger: who are you?
                    self.suggest(address, None if is_copy else other.facts.node_id)

    def _failed(self, ask: Ask, how: Failure) -> None:
        self.noticed.failed(ask.address, ask.node_id, how)
        self._apply(lambda now_s: self._machine.failed(ask.address, ask.node_id, how, now_s=now_s))
