"""A few memberships joined by a simulated network that loses, doubles, delays and cuts.

Owns the network and the devices' power; the virtual clock moves only in `run`. Holds the rules
that are true at every moment, and raises when one breaks. No thread, no socket, no real time.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from exo_train.cluster.member import DEAD_AFTER_S, LEFT_ECHO_S, MemberState, is_long_gone, view_hash
from exo_train.cluster.membership import ASLEEP_AFTER_S, REFUSED_DEAD_AFTER_S, Effect, Membership
from exo_train.cluster.whom_to_ask import FIRST_RETRY_S, Ask, Failure
from exo_train.peer import Address, DeviceFacts, NodeId

TICK_S = 0.5
CALL_TIMEOUT_S = 2.0
EPSILON_S = 1e-6


def device_facts(node_id: str) -> DeviceFacts:
    return DeviceFacts(
        node_id=NodeId(node_id),
        name=node_id,
        backend="torch",
        device="cpu",
        chip="chip",
        memory_bytes=8,
        usable_memory_bytes=6,
        dtypes=("fp32",),
        version="1",
    )


@dataclass
class Device:
    """A machine and, while `agent` is set, the membership of its agent."""

    node_id: NodeId
    addresses: tuple[Address, ...]
    incarnation: int = 0
    agent: Membership | None = None
    is_on: bool = True  # False: power cut, or asleep
    is_stopped: bool = False  # the agent alone, as by SIGSTOP
    is_removed: bool = False
    started_s: float = 0.0
    absent_since_s: float = 0.0
    leniency_s: float = 0.0  # its absence is known to it up to its ticks
    asked_s: dict[Address, float] = field(default_factory=dict)
    under_way: set[Address] = field(default_factory=set)
    highest: dict[NodeId, int] = field(default_factory=dict)
    heard_s: dict[NodeId, float] = field(default_factory=dict)
    num_asks: int = 0
    missed: list[Callable[[], None]] = field(default_factory=list)  # while absent

    @property
    def runs(self) -> bool:
        return self.agent is not None and self.is_on and not self.is_stopped


class World:
    """The first device's address is known to all from the start; the rest they learn."""

    def __init__(self, num_devices: int, seed: int = 0) -> None:
        self.now_s = 100.0
        self.random = random.Random(seed)
        self.loss = self.doubled = self.max_delay_s = 0.0
        self.cut: set[tuple[NodeId, NodeId]] = set()  # calls from the first to the second
        self.parted: frozenset[NodeId] = frozenset()  # from all the others, both ways
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.devices = {
            NodeId(f"node{i}"): Device(
                NodeId(f"node{i}"),
                # The last one leads nowhere, as a tunnel's; the bridge's is one's own for all.
                (Address(f"10.0.0.{i}", 1), Address("172.17.0.1", 1), Address(f"10.9.9.{i}", 1)),
            )
            for i in range(num_devices)
        }
        self.seed_address = self.devices[NodeId("node0")].addresses[0]

    def start(self, node_id: NodeId) -> None:
        device = self.devices[node_id]
        device.incarnation += 1
        device.is_on, device.is_stopped = True, False
        device.agent = Membership(
            node_id,
            incarnation=device.incarnation,
            instance=f"{node_id}/{device.incarnation}",
            now_s=self.now_s,
        )
        device.started_s, device.leniency_s = self.now_s, 0.0
        device.asked_s, device.under_way, device.missed = {}, set(), []
        device.highest, device.heard_s = {}, {}
        effects = device.agent.suggested(self.seed_address, None, now_s=self.now_s, lasting=True)
        self._carry_out(device, effects)

    def crash(self, node_id: NodeId) -> None:
        self.devices[node_id].agent = None

    def leave(self, node_id: NodeId) -> None:
        device = self.devices[node_id]
        agent = device.agent
        assert agent is not None
        device.agent = None
        for member in agent.live():
            other = self.devices[member.facts.node_id]
            if member.proven and self._passes(device, other) and not self._is_lost():
                self._later(self._delay_s(), self._deliver_goodbye(other, device))

    def suspend(self, node_id: NodeId) -> None:
        device = self.devices[node_id]
        device.is_on, device.absent_since_s = False, self.now_s

    def resume(self, node_id: NodeId) -> None:
        self.devices[node_id].is_on = True
        self._listen_again(self.devices[node_id])

    def stop(self, node_id: NodeId) -> None:
        device = self.devices[node_id]
        device.is_stopped, device.absent_since_s = True, self.now_s

    def go_on(self, node_id: NodeId) -> None:
        self.devices[node_id].is_stopped = False
        self._listen_again(self.devices[node_id])

    def _listen_again(self, device: Device) -> None:
        """What came meanwhile comes now, out of order; the absence itself does not count."""
        missed, device.missed = device.missed, []
        for happens in missed:
            self._later(self._delay_s(), happens)
        absent_s = self.now_s - device.absent_since_s
        if absent_s >= ASLEEP_AFTER_S:
            for node_id, heard_s in device.heard_s.items():
                device.heard_s[node_id] = min(heard_s + absent_s, self.now_s)
        device.leniency_s += 2 * TICK_S if absent_s >= ASLEEP_AFTER_S else absent_s + TICK_S

    def remove(self, node_id: NodeId) -> None:
        self.devices[node_id].is_removed = True
        for device in self.devices.values():
            if device.agent is not None and device.node_id != node_id:
                device.agent.removed(node_id)

    def run(self, seconds: float) -> None:
        """Let time pass in ticks; each device ticks at its own moment."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            next_s = self.now_s + TICK_S
            while self._queue and self._queue[0][0] <= next_s:
                self.now_s, _, happens = heapq.heappop(self._queue)
                happens()
            self.now_s = next_s
            for device in self.devices.values():
                if device.runs and device.agent is not None:
                    self._carry_out(device, device.agent.tick(now_s=self.now_s))
                    self._check(device)

    def heal(self) -> None:
        """Mend the network and wake everybody."""
        self.loss = self.doubled = self.max_delay_s = 0.0
        self.cut, self.parted = set(), frozenset()
        for device in self.devices.values():
            if not device.is_on:
                self.resume(device.node_id)
            if device.is_stopped:
                self.go_on(device.node_id)

    def views(self) -> dict[NodeId, str]:
        return {
            d.node_id: view_hash(d.agent.view())
            for d in self.devices.values()
            if d.runs and d.agent is not None and not d.is_removed
        }

    def true_view(self) -> str:
        members = [d for d in self.devices.values() if d.runs and not d.is_removed]
        return view_hash([(d.node_id, d.incarnation) for d in members])

    # The network

    def _later(self, delay_s: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now_s + delay_s, next(self._order), happens))

    def _delay_s(self) -> float:
        return 0.001 + self.random.random() * self.max_delay_s

    def _is_lost(self) -> bool:
        return self.random.random() < self.loss

    def _passes(self, caller: Device, called: Device) -> bool:
        is_parted = (caller.node_id in self.parted) != (called.node_id in self.parted)
        return called.is_on and not is_parted and (caller.node_id, called.node_id) not in self.cut

    def _carry_out(self, device: Device, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Ask):
                self._check_ask(device, effect)
                self._call(device, effect)

    def _call(self, caller: Device, ask: Ask) -> None:
        agent = caller.agent
        assert agent is not None

        def fails(how: Failure, after_s: float) -> None:
            self._later(after_s, lambda: self._tell_failure(caller, agent, ask, how))

        owner = next((d for d in self.devices.values() if d.addresses[0] == ask.address), None)
        if ask.address.host == "172.17.0.1":
            owner = caller
        if owner is None or not self._passes(caller, owner) or self._is_lost():
            return fails(Failure.SILENT, CALL_TIMEOUT_S)
        if owner.is_stopped:
            return fails(Failure.ACCEPTED, CALL_TIMEOUT_S)
        if owner.agent is None:
            return fails(Failure.REFUSED, 0.01)
        if ask.node_id not in (None, owner.node_id):
            return fails(Failure.FOREIGN, 0.01)
        if caller.is_removed or owner.is_removed:
            return fails(Failure.FOREIGN, 0.01)
        there_s, back_s = self._delay_s(), self._delay_s()
        if owner is not caller:
            self._later(there_s, self._deliver_hello(owner, caller))
            if self.random.random() < self.doubled:
                self._later(there_s + self._delay_s(), self._deliver_hello(owner, caller))
        if there_s + back_s >= CALL_TIMEOUT_S or self._is_lost():
            return fails(Failure.SILENT, CALL_TIMEOUT_S)
        reply = self._deliver_reply(caller, owner, agent, ask.address, there_s + back_s)
        return self._later(there_s + back_s, reply)

    def _tell_failure(self, caller: Device, agent: Membership, ask: Ask, how: Failure) -> None:
        if caller.agent is not agent:
            return
        if not caller.runs:
            caller.missed.append(lambda: self._tell_failure(caller, agent, ask, how))
            return
        caller.under_way.discard(ask.address)
        effects = agent.failed(ask.address, ask.node_id, how, now_s=self.now_s)
        self._carry_out(caller, effects)
        self._check(caller)

    def _deliver_hello(self, hearer: Device, sender: Device) -> Callable[[], None]:
        incarnation = sender.incarnation

        agent = hearer.agent

        def happens() -> None:
            if hearer.agent is not agent or sender.is_removed or hearer.is_removed:
                return
            if hearer.runs:
                self._hear(hearer, sender, incarnation, proven=None, rtt_s=None)
            elif hearer.is_stopped:  # the kernel took it in
                hearer.missed.append(happens)

        return happens

    def _deliver_reply(
        self, caller: Device, owner: Device, agent: Membership, address: Address, rtt_s: float
    ) -> Callable[[], None]:
        incarnation = owner.incarnation
        known = []
        if owner.agent is not None and owner is not caller:
            known = [(a, m.facts.node_id) for m in owner.agent.live() for a in m.addresses]

        def happens() -> None:
            if caller.agent is not agent:
                return None
            if not caller.runs:
                return caller.missed.append(happens)
            caller.under_way.discard(address)
            if owner.is_removed:
                effects = agent.failed(address, None, Failure.FOREIGN, now_s=self.now_s)
                return self._carry_out(caller, effects)
            self._hear(caller, owner, incarnation, proven=address, rtt_s=rtt_s)
            for suggested, node_id in known:
                effects = agent.suggested(suggested, node_id, now_s=self.now_s)
                self._carry_out(caller, effects)
            return None

        return happens

    def _deliver_goodbye(self, hearer: Device, leaver: Device) -> Callable[[], None]:
        incarnation = leaver.incarnation

        def happens() -> None:
            if hearer.runs and hearer.agent is not None:
                hearer.agent.left(leaver.node_id, incarnation=incarnation, now_s=self.now_s)

        return happens

    def _hear(
        self,
        hearer: Device,
        sender: Device,
        incarnation: int,
        *,
        proven: Address | None,
        rtt_s: float | None,
    ) -> None:
        agent = hearer.agent
        assert agent is not None
        before = agent.members.get(sender.node_id)
        effects = agent.heard(
            device_facts(sender.node_id),
            incarnation=incarnation,
            instance=f"{sender.node_id}/{incarnation}",
            addresses=sender.addresses,
            now_s=self.now_s,
            proven=proven,
            rtt_s=rtt_s,
        )
        if sender is not hearer:
            member = agent.members[sender.node_id]
            is_open = before is not None and is_long_gone(before, self.now_s)
            if before is not None and incarnation < before.incarnation and not is_open:
                assert member.incarnation == before.incarnation, "an echo changed something"
            elif before is not None and before.state is MemberState.LEFT:
                is_echo = incarnation == before.incarnation
                is_echo &= self.now_s - before.since_s < LEFT_ECHO_S
                assert member.is_live != is_echo
            else:
                assert member.state is MemberState.ALIVE, "it was heard just now"
                assert member.incarnation == incarnation
            if member.last_heard_s == self.now_s:
                hearer.heard_s[sender.node_id] = self.now_s
        self._carry_out(hearer, effects)
        self._check(hearer)

    # What is true at every moment

    def _check_ask(self, device: Device, ask: Ask) -> None:
        assert ask.node_id != device.node_id, "asks itself"
        assert ask.address not in device.under_way, "two calls to one address"
        last_s = device.asked_s.get(ask.address, -1e9)
        assert self.now_s - last_s >= FIRST_RETRY_S - EPSILON_S, "asks an address too often"
        device.asked_s[ask.address] = self.now_s
        device.under_way.add(ask.address)
        device.num_asks += 1

    def _check(self, device: Device) -> None:
        agent = device.agent
        assert agent is not None
        assert device.node_id not in agent.members, "lists itself as another"
        assert not agent.duplicates, "nobody's home was copied"
        for node_id, member in agent.members.items():
            assert member.incarnation >= device.highest.get(node_id, 0)
            device.highest[node_id] = member.incarnation
            if is_long_gone(member, self.now_s):  # a restored home counts anew
                del device.highest[node_id]
            silent_s = self.now_s - device.heard_s[node_id]
            if member.state is MemberState.DEAD and member.since_s == self.now_s:
                least_s = REFUSED_DEAD_AFTER_S if self._may_be_refused(node_id) else DEAD_AFTER_S
                assert silent_s >= least_s - EPSILON_S, f"dead after {silent_s} s of silence"
            if silent_s >= DEAD_AFTER_S + TICK_S + device.leniency_s:
                assert not member.is_live, f"live after {silent_s} s of silence"

    def _may_be_refused(self, node_id: NodeId) -> bool:
        """Only a machine that is on, and without its agent or lately so, refuses."""
        device = self.devices[node_id]
        return device.agent is None or self.now_s - device.started_s < DEAD_AFTER_S
