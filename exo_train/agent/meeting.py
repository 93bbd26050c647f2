"""Finds the other agents and keeps hearing them.

Owns the heartbeat thread and the membership table's lock. mDNS, remembered peers and --peer only
suggest addresses; an answered Hello with the expected id proves one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc

from exo_train.agent.protocol import (
    HEARTBEAT_S,
    HELLO_TIMEOUT_S,
    PROTOCOL_VERSION,
    from_node_facts,
    to_node_facts,
)
from exo_train.cluster.membership import Member, MembershipTable, MemberState
from exo_train.errors import ExoTrainError, ProtocolError
from exo_train.peer import Address, DeviceFacts, NodeId
from exo_train.transport.channel import open_channel
from exo_train.wire.pb import control_pb2 as pb
from exo_train.wire.pb.control_pb2_grpc import ControlStub

ANOTHER_CLUSTER = "another cluster"  # a refusal that reveals no more
MAX_SUGGESTIONS = 256
MAX_PARALLEL_HELLOS = 16
MAX_OTHER_CLUSTERS = 32
MAX_REFUSALS_SAID = 64
GOODBYE_TIMEOUT_S = 1.0
FORGET_SUGGESTION_AFTER_S = 120.0

log = logging.getLogger(__name__)


class Meeting:
    """Thread-safe. `facts` is asked anew for each hello: free memory changes."""

    def __init__(
        self,
        *,
        cluster: str,
        incarnation: int,
        facts: Callable[[], DeviceFacts],
        addresses: Callable[[], tuple[Address, ...]],
        lasting: tuple[Address, ...] = (),
        say: Callable[[str], None] = log.info,
    ) -> None:
        self.cluster = cluster
        self.incarnation = incarnation
        self.other_clusters: set[str] = set()
        self._facts = facts
        self._addresses = addresses
        self._lasting = lasting
        self._say = say
        self._self_id = facts().node_id
        self._table = MembershipTable(self._self_id)
        self._suggested: dict[Address, tuple[NodeId | None, float]] = {}
        self._said: set[str] = set()
        self._channels: dict[Address, grpc.Channel] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._asking: set[Address] = set()
        # Two pools: addresses that swallow packets cost HELLO_TIMEOUT_S each, and the heartbeats
        # of live members must not queue behind them.
        self._pool = ThreadPoolExecutor(MAX_PARALLEL_HELLOS, thread_name_prefix="hello")
        self._search_pool = ThreadPoolExecutor(MAX_PARALLEL_HELLOS, thread_name_prefix="search")
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Say goodbye to all live members and stop."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout=2 * HELLO_TIMEOUT_S)
        self._pool.shutdown(cancel_futures=True)  # a hello after the goodbye would undo it
        self._search_pool.shutdown(wait=False, cancel_futures=True)
        goodbye = pb.GoodbyeRequest(cluster=self.cluster, node_id=self._self_id)
        calls = [
            ControlStub(self._channel(m.proven[0])).Goodbye.future(
                goodbye, timeout=GOODBYE_TIMEOUT_S
            )
            for m in self.live()
            if m.proven
        ]
        for call in calls:
            if call.exception() is not None:
                log.debug("a goodbye was not heard: %s", call.exception())
        with self._lock:  # searches may still be ending
            channels = list(self._channels.values())
        for channel in channels:
            channel.close()

    def suggest(self, address: Address, node_id: NodeId | None = None) -> None:
        """Take in that an agent may answer at `address`."""
        if node_id == self._self_id:
            return
        with self._lock:
            is_new = address not in self._suggested
            if is_new and len(self._suggested) >= MAX_SUGGESTIONS:
                return
            self._suggested[address] = (node_id, time.monotonic())
        if is_new:
            self._wake.set()

    def seen(self, node_id: NodeId, cluster: str, addresses: tuple[Address, ...]) -> None:
        """Take in what mDNS heard."""
        if cluster != self.cluster:
            if len(self.other_clusters) < MAX_OTHER_CLUSTERS:
                self.other_clusters.add(cluster)
            return
        for address in addresses:
            self.suggest(address, node_id)

    def live(self) -> list[Member]:
        with self._lock:
            return self._table.live()

    def members(self) -> list[Member]:
        with self._lock:
            return [member for _, member in sorted(self._table.members.items())]

    def hello(self, request: pb.HelloRequest) -> pb.HelloReply:
        """Answer another agent's hello; a refusal reveals nothing but the reason."""
        if request.protocol != PROTOCOL_VERSION:
            return pb.HelloReply(
                protocol=PROTOCOL_VERSION,
                refusal=f"protocol {request.protocol} is not {PROTOCOL_VERSION}; "
                f"install the same version of exo-train on both",
            )
        if request.cluster != self.cluster:
            return pb.HelloReply(protocol=PROTOCOL_VERSION, refusal=ANOTHER_CLUSTER)
        if request.expected_node_id not in ("", self._self_id):
            return pb.HelloReply(protocol=PROTOCOL_VERSION, refusal="another device answers here")
        facts, incarnation, addresses = from_node_facts(request.sender)
        self._heard(facts, incarnation, addresses, proven=None)
        for address in addresses:
            self.suggest(address, facts.node_id)
        known = [
            to_node_facts(m.facts, incarnation=m.incarnation, addresses=m.addresses)
            for m in self.live()
        ]
        return pb.HelloReply(
            protocol=PROTOCOL_VERSION, cluster=self.cluster, self=self._own(), known=known
        )

    def goodbye(self, request: pb.GoodbyeRequest) -> None:
        if request.cluster != self.cluster:
            return
        node_id = NodeId(request.node_id)
        with self._lock:
            member = self._table.members.get(node_id)
            changed = self._table.left(node_id, now_s=time.monotonic())
            self._suggested = {a: (n, t) for a, (n, t) in self._suggested.items() if n != node_id}
        if changed and member is not None:
            self._say(f"{member.facts.name} left")

    def _own(self) -> pb.NodeFacts:
        return to_node_facts(
            self._facts(), incarnation=self.incarnation, addresses=self._addresses()
        )

    def _heard(
        self,
        facts: DeviceFacts,
        incarnation: int,
        addresses: tuple[Address, ...],
        *,
        proven: Address | None,
    ) -> None:
        with self._lock:
            is_new = self._table.heard(
                facts,
                incarnation=incarnation,
                addresses=addresses,
                proven=proven,
                now_s=time.monotonic(),
            )
        if is_new:
            gb = facts.usable_memory_bytes / 1e9
            self._say(f"{facts.name} is here: {facts.backend} on {facts.chip}, {gb:.1f} GB usable")

    def _beat(self) -> None:
        while not self._stopping:
            for address, node_id, is_member in self._targets():
                pool = self._pool if is_member else self._search_pool
                pool.submit(self._ask, address, node_id)
            with self._lock:
                changed = self._table.tick(now_s=time.monotonic())
            for member in changed:
                if member.state is MemberState.DEAD:
                    self._say(f"{member.facts.name} has not answered for 15 s: taken as gone")
            self._wake.wait(HEARTBEAT_S)
            self._wake.clear()

    def _targets(self) -> list[tuple[Address, NodeId | None, bool]]:
        """Choose whom to ask now: each member where it answered last, others where suggested.

        The last value tells the first kind; an address still being asked is left out.
        """
        now_s = time.monotonic()
        with self._lock:
            live = {m.facts.node_id: m for m in self._table.live()}
            self._suggested = {
                address: (node_id, since_s)
                for address, (node_id, since_s) in self._suggested.items()
                if now_s - since_s < FORGET_SUGGESTION_AFTER_S or address in self._lasting
            }
            members = {m.proven[0]: node_id for node_id, m in live.items() if m.proven}
            targets: dict[Address, NodeId | None] = dict(members)
            proven = {node_id for node_id, m in live.items() if m.proven}
            for address, (node_id, _) in self._suggested.items():
                if node_id is None or node_id not in proven:
                    targets.setdefault(address, node_id)
            for node_id, member in self._table.members.items():
                silent = member.state is not MemberState.ALIVE
                if silent and member.state is not MemberState.LEFT:
                    for address in member.addresses:
                        targets.setdefault(address, node_id)
            for address in self._lasting:
                targets.setdefault(address, None)
            chosen = [(a, n, a in members) for a, n in targets.items() if a not in self._asking]
            self._asking.update(address for address, _, _ in chosen)
        return chosen

    def _ask(self, address: Address, node_id: NodeId | None) -> None:
        try:
            request = pb.HelloRequest(
                protocol=PROTOCOL_VERSION,
                cluster=self.cluster,
                sender=self._own(),
                expected_node_id=node_id or "",
            )
            reply = ControlStub(self._channel(address)).Hello(request, timeout=HELLO_TIMEOUT_S)
            self._take_reply(address, reply)
        except grpc.RpcError as error:
            log.debug("no hello from %s: %s", address, error)
            self._drop_channel(address)
        except ExoTrainError as error:
            log.warning("hello from %s ignored: %s", address, error)
        finally:
            with self._lock:
                self._asking.discard(address)

    def _take_reply(self, address: Address, reply: pb.HelloReply) -> None:
        if reply.refusal:
            self._take_refusal(address, reply)
            return
        if reply.cluster != self.cluster:
            raise ProtocolError("it answers for another cluster")
        facts, incarnation, addresses = from_node_facts(reply.self)
        if facts.node_id == self._self_id:
            with self._lock:
                self._suggested.pop(address, None)
            return
        self._heard(facts, incarnation, addresses, proven=address)
        for known in reply.known:
            other, _, other_addresses = from_node_facts(known)
            if all(m.facts.node_id != other.node_id for m in self.live()):
                for other_address in other_addresses:
                    self.suggest(other_address, other.node_id)

    def _take_refusal(self, address: Address, reply: pb.HelloReply) -> None:
        """Say it once, in our words: what a stranger sends is not for the screen."""
        if reply.protocol != PROTOCOL_VERSION:
            sentence = (
                f"{address} speaks protocol {reply.protocol}, this device {PROTOCOL_VERSION}; "
                f"install the same version of exo-train on both"
            )
        elif address in self._lasting and reply.refusal == ANOTHER_CLUSTER:
            sentence = (
                f"{address} belongs to another cluster than '{self.cluster}'; give both the same "
                f"EXO_TRAIN_CLUSTER"
            )
        else:
            return
        with self._lock:
            if sentence in self._said or len(self._said) >= MAX_REFUSALS_SAID:
                return
            self._said.add(sentence)
        self._say(sentence)

    def _drop_channel(self, address: Address) -> None:
        """Let the next call connect anew: after a cut, or from an address this device had before,
        the old connection waits out TCP's growing retransmission time.
        """
        with self._lock:
            channel = self._channels.pop(address, None)
        if channel is not None:
            channel.close()

    def _channel(self, address: Address) -> grpc.Channel:
        with self._lock:
            if address not in self._channels:
                if len(self._channels) >= MAX_SUGGESTIONS:
                    self._channels.pop(next(iter(self._channels))).close()
                self._channels[address] = open_channel(address)
            return self._channels[address]
