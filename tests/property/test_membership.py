"""Membership under any order of events: what the network does to signs of life changes no rule."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from exo_train.cluster.membership import (
    DEAD_AFTER_S,
    FORGET_AFTER_S,
    LEFT_ECHO_S,
    MAX_MEMBERS,
    SUSPECT_AFTER_S,
    MembershipTable,
    MemberState,
    view_hash,
)
from exo_train.peer import Address, DeviceFacts, NodeId

SELF = NodeId("self")
PEERS = tuple(NodeId(f"peer-{i}") for i in range(2))
LIVE = (MemberState.ALIVE, MemberState.SUSPECT)


def facts(node_id: NodeId) -> DeviceFacts:
    return DeviceFacts(
        node_id=node_id,
        name=str(node_id),
        backend="torch",
        device="cpu",
        chip="chip",
        memory_bytes=8,
        usable_memory_bytes=6,
        dtypes=("fp32",),
        version="1",
    )


@dataclass(frozen=True)
class Sign:
    """A hello on its way: it may arrive late, twice, out of order or never."""

    node_id: NodeId
    incarnation: int


class Network(RuleBasedStateMachine):
    """Peers start, speak, leave and crash; the network loses, doubles and delays; time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = MembershipTable(SELF)
        self.now_s = 100.0
        self.incarnations = dict.fromkeys((SELF, *PEERS), 1)
        self.on_the_way: list[Sign] = []
        self.delivered_s: dict[NodeId, float] = {}
        self.said_left_s: dict[NodeId, float] = {}
        self.highest: dict[NodeId, int] = {}

    @rule(node_id=st.sampled_from((SELF, *PEERS)))
    def send(self, node_id: NodeId) -> None:
        self.on_the_way.append(Sign(node_id, self.incarnations[node_id]))

    @rule(node_id=st.sampled_from(PEERS))
    def restart(self, node_id: NodeId) -> None:
        self.incarnations[node_id] += 1

    @precondition(lambda self: self.on_the_way)
    @rule(data=st.data(), doubled=st.booleans())
    def deliver(self, data: st.DataObject, doubled: bool) -> None:
        position = data.draw(st.integers(0, len(self.on_the_way) - 1))
        sign = self.on_the_way[position]
        if not doubled:
            del self.on_the_way[position]
        known = self.table.members.get(sign.node_id)
        changed = self.table.heard(
            facts(sign.node_id),
            incarnation=sign.incarnation,
            addresses=(),
            proven=None,
            now_s=self.now_s,
        )
        if sign.node_id == SELF:
            assert not changed
            return
        if known and sign.incarnation < known.incarnation:
            assert not changed
            assert self.table.members[sign.node_id] is known, "an echo changed something"
            return
        if known and known.state is MemberState.LEFT and sign.incarnation == known.incarnation:
            fresh = self.now_s - self.said_left_s[sign.node_id] >= LEFT_ECHO_S
            assert changed == fresh
            if not fresh:
                return
        member = self.table.members[sign.node_id]
        assert member.state is MemberState.ALIVE
        assert member.incarnation == sign.incarnation
        self.delivered_s[sign.node_id] = self.now_s

    @precondition(lambda self: self.on_the_way)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        del self.on_the_way[data.draw(st.integers(0, len(self.on_the_way) - 1))]

    @rule(node_id=st.sampled_from((SELF, *PEERS)))
    def say_goodbye(self, node_id: NodeId) -> None:
        changed = self.table.left(node_id, now_s=self.now_s)
        if changed:
            self.said_left_s[node_id] = self.now_s
        if node_id in self.table.members:
            assert self.table.members[node_id].state is MemberState.LEFT

    @rule(
        seconds=st.one_of(
            st.floats(0.1, 20), st.sampled_from([SUSPECT_AFTER_S, DEAD_AFTER_S, FORGET_AFTER_S])
        )
    )
    def let_time_pass(self, seconds: float) -> None:
        self.now_s += seconds
        before = dict(self.table.members)
        changed = self.table.tick(now_s=self.now_s)
        for member in changed:
            assert before[member.facts.node_id].state is not member.state
        for node_id, member in self.table.members.items():
            self._check_state(node_id, member.state)
        for node_id in before.keys() - self.table.members.keys():
            assert self.now_s - self.delivered_s[node_id] >= FORGET_AFTER_S
            self.highest.pop(node_id)

    def _check_state(self, node_id: NodeId, state: MemberState) -> None:
        """Only the last sign of life counts, whatever else happened."""
        silent_s = self.now_s - self.delivered_s[node_id]
        if state is MemberState.LEFT:
            return
        if silent_s >= DEAD_AFTER_S:
            assert state is MemberState.DEAD, f"{silent_s} s of silence"
        elif silent_s >= SUSPECT_AFTER_S:
            assert state is MemberState.SUSPECT
        else:
            assert state is MemberState.ALIVE, "slow is not dead"

    @invariant()
    def never_oneself(self) -> None:
        assert SELF not in self.table.members

    @invariant()
    def incarnations_never_go_back(self) -> None:
        for node_id, member in self.table.members.items():
            assert member.incarnation >= self.highest.get(node_id, 0)
            self.highest[node_id] = member.incarnation

    @invariant()
    def live_are_the_live_in_id_order(self) -> None:
        live = self.table.live()
        assert [m.facts.node_id for m in live] == sorted(
            n for n, m in self.table.members.items() if m.state in LIVE
        )


class TestNetwork(Network.TestCase):
    settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_views_converge_once_the_network_is_quiet() -> None:
    """Whatever each of three missed before, one hello each way gives them one view."""
    nodes = (SELF, *PEERS)
    tables = {node_id: MembershipTable(node_id) for node_id in nodes}
    tables[SELF].heard(facts(PEERS[0]), incarnation=1, addresses=(), proven=None, now_s=0.0)
    tables[PEERS[1]].left(SELF, now_s=1.0)
    incarnations = {SELF: 3, PEERS[0]: 2, PEERS[1]: 1}
    for hearer in nodes:
        for sayer in nodes:
            tables[hearer].heard(
                facts(sayer),
                incarnation=incarnations[sayer],
                addresses=(),
                proven=None,
                now_s=20.0,
            )
        tables[hearer].tick(now_s=21.0)
    hashes = set()
    for node_id, table in tables.items():
        view = [(m.facts.node_id, m.incarnation) for m in table.live()]
        hashes.add(view_hash([*view, (node_id, incarnations[node_id])]))
    assert len(hashes) == 1
    assert hashes != {view_hash([(n, i + 1) for n, i in incarnations.items()])}


def test_the_table_is_capped_and_the_known_stay() -> None:
    table = MembershipTable(SELF)
    for number in range(MAX_MEMBERS + 10):
        table.heard(
            facts(NodeId(f"{number:032}")), incarnation=1, addresses=(), proven=None, now_s=0.0
        )
    assert len(table.members) == MAX_MEMBERS
    first = NodeId(f"{0:032}")
    assert not table.heard(facts(first), incarnation=1, addresses=(), proven=None, now_s=5.0)
    assert table.members[first].last_heard_s == 5.0


def test_addresses_are_proven_latest_first_and_forgotten_at_a_restart() -> None:
    table = MembershipTable(SELF)
    here, there = Address("10.0.0.1", 1), Address("10.0.0.2", 1)

    def heard(incarnation: int, proven: Address | None) -> tuple[Address, ...]:
        table.heard(
            facts(PEERS[0]), incarnation=incarnation, addresses=(), proven=proven, now_s=0.0
        )
        return table.members[PEERS[0]].proven

    assert heard(1, here) == (here,)
    assert heard(1, there) == (there, here)
    assert heard(1, here) == (here, there)
    assert heard(1, None) == (here, there)
    assert heard(2, None) == (), "another process may answer there now"
