"""Small clusters on a bad network: whatever happened, once it is quiet all have one view."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from exo_train.cluster.member import DEAD_AFTER_S
from exo_train.cluster.whom_to_ask import MAX_RETRY_S
from exo_train.peer import NodeId
from tests.property.membership_world import CALL_TIMEOUT_S, TICK_S, World

SEED = NodeId("node0")
# The dead are told; then a last call that fails, one back-off, and two calls that bring gossip.
QUIET_S = DEAD_AFTER_S + 2 * CALL_TIMEOUT_S + 2 * MAX_RETRY_S


class Cluster(RuleBasedStateMachine):
    """Devices start, crash, leave, sleep, hang and are removed while the network misbehaves."""

    @initialize(num_devices=st.integers(3, 4), seed=st.integers(0, 2**16))
    def begin(self, num_devices: int, seed: int) -> None:
        self.world = World(num_devices, seed)
        for node_id in self.world.devices:
            self.world.start(node_id)

    def _pick(self, data: st.DataObject, *, running: bool) -> NodeId | None:
        devices = self.world.devices.values()
        there = [d.node_id for d in devices if d.runs == running and not d.is_removed]
        return data.draw(st.sampled_from(there)) if there else None

    @rule(seconds=st.floats(0.5, 20))
    def let_time_pass(self, seconds: float) -> None:
        self.world.run(seconds)

    @rule(
        loss=st.sampled_from((0.0, 0.2, 0.5)),
        doubled=st.sampled_from((0.0, 0.5)),
        max_delay_s=st.sampled_from((0.0, 0.3, 1.5)),
    )
    def change_the_weather(self, loss: float, doubled: float, max_delay_s: float) -> None:
        self.world.loss, self.world.doubled = loss, doubled
        self.world.max_delay_s = max_delay_s

    @rule(data=st.data())
    def part(self, data: st.DataObject) -> None:
        some = data.draw(st.sets(st.sampled_from(sorted(self.world.devices))))
        self.world.parted = frozenset(some)

    @rule(data=st.data())
    def cut_one_way(self, data: st.DataObject) -> None:
        ids = sorted(self.world.devices)
        self.world.cut = data.draw(
            st.sets(st.tuples(st.sampled_from(ids), st.sampled_from(ids)), max_size=3)
        )

    @rule(data=st.data(), how=st.sampled_from(("crash", "leave", "suspend", "stop")))
    def lose_one(self, data: st.DataObject, how: str) -> None:
        node_id = self._pick(data, running=True)
        if node_id is not None:
            getattr(self.world, how)(node_id)

    @rule(data=st.data())
    def bring_one_back(self, data: st.DataObject) -> None:
        node_id = self._pick(data, running=False)
        if node_id is None:
            return
        device = self.world.devices[node_id]
        if device.agent is None:
            self.world.start(node_id)
        elif not device.is_on:
            self.world.resume(node_id)
        else:
            self.world.go_on(node_id)

    @precondition(lambda self: not any(d.is_removed for d in self.world.devices.values()))
    @rule(data=st.data())
    def remove_one(self, data: st.DataObject) -> None:
        others = sorted(self.world.devices.keys() - {SEED})
        self.world.remove(data.draw(st.sampled_from(others)))

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.heal()
        if self.world.devices[SEED].agent is None:
            self.world.start(SEED)  # it is whom the others know from the start
        for device in self.world.devices.values():
            device.num_asks = 0
        self.world.run(QUIET_S)
        assert set(self.world.views().values()) == {self.world.true_view()}
        for device in self.world.devices.values():
            # Three addresses for each other device, none asked more than once in FIRST_RETRY_S;
            # a quiet cluster asks far less: heartbeats, and what is gone every MAX_RETRY_S.
            others = len(self.world.devices) - 1
            assert device.num_asks <= others * (QUIET_S + 3 * QUIET_S / 2)


TestCluster = Cluster.TestCase
# Without Phase.explain: it traces every line of a failing example, for minutes.
TestCluster.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
)


@pytest.mark.parametrize("num_devices", [2, 3, 5])
def test_all_meet_within_seconds_though_they_know_only_the_first(num_devices: int) -> None:
    world = World(num_devices)
    for node_id in world.devices:
        world.start(node_id)
    world.run(3.0)
    assert set(world.views().values()) == {world.true_view()}


def test_a_quiet_cluster_only_beats() -> None:
    world = World(4)
    for node_id in world.devices:
        world.start(node_id)
    world.run(10.0)
    for device in world.devices.values():
        device.num_asks = 0
    world.run(60.0)
    for device in world.devices.values():
        assert device.num_asks <= 3 * (60.0 / 2.0 + 1), "one call to each other device in 2 s"


def test_five_devices_meet_under_loss_in_every_round() -> None:
    for seed in range(20):
        world = World(5, seed)
        world.loss = 0.2
        for node_id in world.devices:
            world.start(node_id)
            world.run(world.random.random())
        world.run(30.0)
        assert set(world.views().values()) == {world.true_view()}, f"round {seed}"


def test_a_way_that_works_from_one_side_only_counts_for_both() -> None:
    world = World(3)
    world.cut = {(NodeId("node1"), NodeId("node2")), (NodeId("node0"), NodeId("node2"))}
    for node_id in world.devices:
        world.start(node_id)
    world.run(30.0)
    assert set(world.views().values()) == {world.true_view()}
    agent = world.devices[NodeId("node1")].agent
    assert agent is not None
    assert agent.members[NodeId("node2")].answers is False
    assert agent.members[SEED].answers is True


@pytest.mark.parametrize("tick_phase_s", [0.0, 0.5, 1.0, 1.5, 2.0, 2.5])
@pytest.mark.parametrize(
    ("how", "within_s", "not_before_s"),
    [
        ("crash", 5.0, 2.0),
        ("suspend", DEAD_AFTER_S + TICK_S, DEAD_AFTER_S - 2.5),
        ("stop", DEAD_AFTER_S + TICK_S, DEAD_AFTER_S - 2.5),
        ("leave", TICK_S, 0.0),
    ],
)
def test_a_loss_is_seen_by_all_within_its_bound(
    how: str, within_s: float, not_before_s: float, tick_phase_s: float
) -> None:
    world = World(4)
    for node_id in world.devices:
        world.start(node_id)
    world.run(10.0 + tick_phase_s)
    lost = NodeId("node2")
    getattr(world, how)(lost)
    lost_s = world.now_s
    seen_s: dict[NodeId, float] = {}
    while len(seen_s) < 3:
        world.run(TICK_S)
        assert world.now_s - lost_s <= within_s, f"{sorted(seen_s)} have seen it"
        for device in world.devices.values():
            if device.runs and device.agent and not device.agent.members[lost].is_live:
                seen_s.setdefault(device.node_id, world.now_s - lost_s)
    assert min(seen_s.values()) >= not_before_s
    assert len(set(world.views().values())) == 1
