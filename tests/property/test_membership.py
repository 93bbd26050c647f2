"""One membership under any order of events: what the network does to hellos changes no rule."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from exo_train.cluster.member import (
    DEAD_AFTER_S,
    LEFT_ECHO_S,
    SUSPECT_AFTER_S,
    MemberState,
    is_long_gone,
)
from exo_train.cluster.membership import (
    ASLEEP_AFTER_S,
    FORGET_AFTER_S,
    MAX_PROVEN,
    Changed,
    Duplicate,
    Effect,
    Membership,
)
from exo_train.cluster.whom_to_ask import (
    FIRST_RETRY_S,
    LOST_AFTER_S,
    MAX_ADDRESSES,
    Ask,
    Failure,
)
from exo_train.peer import Address, NodeId
from tests.property.membership_world import device_facts

SELF = NodeId("self")
PEERS = tuple(NodeId(f"peer-{i}") for i in range(2))
PLACES = tuple(Address(f"10.0.0.{i}", 1) for i in range(4))
TICK_S = 0.5

node_ids = st.sampled_from((SELF, *PEERS))
places = st.sampled_from(PLACES)
# REFUSED ends a silent member sooner, and ACCEPTED keeps it: their rules have tests of their own.
failures = st.sampled_from((Failure.SILENT, Failure.NO_ROUTE, Failure.FOREIGN))


@dataclass(frozen=True)
class Sign:
    """A hello on its way: it may arrive late, twice, out of order or never."""

    node_id: NodeId
    incarnation: int


class Network(RuleBasedStateMachine):
    """Peers start, speak, leave and crash; the network loses, doubles and delays; time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.membership = Membership(SELF, incarnation=1, instance="self/1", now_s=self.now_s)
        self.incarnations = dict.fromkeys((SELF, *PEERS), 1)
        self.on_the_way: list[Sign] = []
        self.heard_s: dict[NodeId, float] = {}
        self.highest: dict[NodeId, int] = {}
        self.asked_s: dict[Address, float] = {}
        self.under_way: dict[Address, Ask] = {}

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Ask):
                last_s = self.asked_s.get(effect.address, 0.0)
                assert self.now_s - last_s >= FIRST_RETRY_S, "asks an address too often"
                if effect.address in self.under_way:
                    assert self.now_s - last_s >= LOST_AFTER_S, "two calls to one address"
                self.asked_s[effect.address] = self.now_s
                self.under_way[effect.address] = effect

    @rule(node_id=node_ids)
    def send(self, node_id: NodeId) -> None:
        self.on_the_way.append(Sign(node_id, self.incarnations[node_id]))

    @rule(node_id=st.sampled_from(PEERS))
    def restart(self, node_id: NodeId) -> None:
        self.incarnations[node_id] += 1

    @precondition(lambda self: self.on_the_way)
    @rule(data=st.data(), doubled=st.booleans(), addresses=st.lists(places, max_size=4))
    def deliver(self, data: st.DataObject, doubled: bool, addresses: list[Address]) -> None:
        position = data.draw(st.integers(0, len(self.on_the_way) - 1))
        sign = self.on_the_way[position]
        if not doubled:
            del self.on_the_way[position]
        self.hear(sign, tuple(addresses), proven=None)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), node_id=st.sampled_from(PEERS))
    def answer(self, data: st.DataObject, node_id: NodeId) -> None:
        address = data.draw(st.sampled_from(sorted(self.under_way)))
        del self.under_way[address]
        self.hear(Sign(node_id, self.incarnations[node_id]), (address,), proven=address)

    def hear(self, sign: Sign, addresses: tuple[Address, ...], proven: Address | None) -> None:
        known = self.membership.members.get(sign.node_id)
        effects = self.membership.heard(
            device_facts(sign.node_id),
            incarnation=sign.incarnation,
            instance=f"{sign.node_id}/{sign.incarnation}",
            addresses=addresses,
            now_s=self.now_s,
            proven=proven,
        )
        self.take(effects)
        if sign.node_id == SELF:
            assert not any(isinstance(e, (Changed, Duplicate)) for e in effects)
            return
        member = self.membership.members[sign.node_id]
        is_open = known is not None and is_long_gone(known, self.now_s)
        if known and sign.incarnation < known.incarnation and not is_open:
            assert member is known, "an echo changed something"
            return
        has_left = known is not None and known.state is MemberState.LEFT
        if known and has_left and sign.incarnation == known.incarnation:
            is_echo = self.now_s - known.since_s < LEFT_ECHO_S
            assert is_echo == (member is known), "an echo undid a goodbye"
            if is_echo:
                return
        assert member.state is MemberState.ALIVE
        assert member.incarnation == sign.incarnation
        assert proven is None or proven in member.proven
        self.heard_s[sign.node_id] = self.now_s

    @precondition(lambda self: self.on_the_way)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        del self.on_the_way[data.draw(st.integers(0, len(self.on_the_way) - 1))]

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), how=failures)
    def fail(self, data: st.DataObject, how: Failure) -> None:
        ask = self.under_way.pop(data.draw(st.sampled_from(sorted(self.under_way))))
        self.take(self.membership.failed(ask.address, ask.node_id, how, now_s=self.now_s))

    @rule(address=places, node_id=st.none() | node_ids, lasting=st.booleans())
    def suggest(self, address: Address, node_id: NodeId | None, lasting: bool) -> None:
        self.take(self.membership.suggested(address, node_id, now_s=self.now_s, lasting=lasting))

    @rule(node_id=st.sampled_from(PEERS), address=st.none() | places)
    def pin(self, node_id: NodeId, address: Address | None) -> None:
        self.membership.pin(node_id, address)

    @rule(node_id=node_ids)
    def say_goodbye(self, node_id: NodeId) -> None:
        known = self.membership.members.get(node_id)
        incarnation = self.incarnations[node_id]
        self.membership.left(node_id, incarnation=incarnation, now_s=self.now_s)
        if known is not None and incarnation >= known.incarnation:
            assert self.membership.members[node_id].state is MemberState.LEFT

    @rule(
        seconds=st.one_of(
            st.floats(0.5, 20), st.sampled_from([SUSPECT_AFTER_S, DEAD_AFTER_S, FORGET_AFTER_S])
        )
    )
    def let_time_pass(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += TICK_S
            self.take(self.membership.tick(now_s=self.now_s))

    @rule(seconds=st.floats(ASLEEP_AFTER_S, 1000.0), is_counted=st.booleans())
    def sleep(self, seconds: float, is_counted: bool) -> None:
        """A device sleeps; some systems' clocks stop meanwhile."""
        live = [m.facts.node_id for m in self.membership.live()]
        known_s = self.now_s - LOST_AFTER_S
        under_way = [a for a in self.under_way if self.asked_s.get(a, known_s) > known_s]
        self.now_s += seconds if is_counted else 0.0
        for node_id in live:
            self.heard_s[node_id] = min(self.heard_s[node_id] + seconds, self.now_s)
        # After it all may be asked at once, but where a call has not ended yet.
        self.asked_s = dict.fromkeys(under_way, self.now_s)
        if not is_counted:
            self.take(self.membership.woke(now_s=self.now_s, asleep_s=seconds))
        self.take(self.membership.tick(now_s=self.now_s))
        kept = [m.facts.node_id for m in self.membership.live()]
        assert kept == live, "its own absence killed somebody"

    @invariant()
    def state_follows_from_the_last_sign_of_life(self) -> None:
        for node_id, member in self.membership.members.items():
            silent_s = self.now_s - self.heard_s[node_id]
            if member.state in (MemberState.LEFT, MemberState.DEAD):
                continue
            assert silent_s < DEAD_AFTER_S + 2 * TICK_S
            if silent_s < SUSPECT_AFTER_S - TICK_S:
                assert member.state is MemberState.ALIVE, "slow is not dead"

    @invariant()
    def incarnations_never_go_back(self) -> None:
        assert SELF not in self.membership.members
        self.highest = {n: i for n, i in self.highest.items() if n in self.membership.members}
        for node_id, member in self.membership.members.items():
            assert member.incarnation >= self.highest.get(node_id, 0)
            self.highest[node_id] = member.incarnation
            if is_long_gone(member, self.now_s):  # a restored home counts anew
                del self.highest[node_id]

    @invariant()
    def all_is_bounded_and_in_order(self) -> None:
        live = [m.facts.node_id for m in self.membership.live()]
        assert live == sorted(n for n, m in self.membership.members.items() if m.is_live)
        assert [n for n, _ in self.membership.view()] == sorted([SELF, *live])
        for member in self.membership.members.values():
            assert len(member.addresses) <= MAX_ADDRESSES
            assert len(set(member.proven)) == len(member.proven) <= MAX_PROVEN


TestNetwork = Network.TestCase
# Without Phase.explain: it traces every line of a failing example, for minutes.
TestNetwork.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
)
