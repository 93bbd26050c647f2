"""What a worker keeps of its history: enough to go back, and not more."""

from __future__ import annotations

import numpy as np

from exo_train.plan.history import Holding, StepId
from exo_train.train.snapshots import MAX_POINTS, Snapshot, SnapshotStore


def snapshot(step: int, *, start: int = 0, end: int = 2, generation: int = 1) -> Snapshot:
    arrays = {f"layer.{start}": np.full(4, step, np.float32), "step": np.array(step)}
    at = StepId(generation=generation, step=step)
    return Snapshot(at=at, start=start, end=end, arrays=arrays)


def steps(store: SnapshotStore, start: int = 0) -> list[int]:
    return sorted(h.at.step for h in store.holdings() if h.start == start)


def test_own_and_neighbours_state_of_one_point_go_together() -> None:
    store = SnapshotStore()
    store.put(snapshot(3))
    store.put(snapshot(3, start=2, end=5))
    store.put(snapshot(4))
    at = StepId(generation=1, step=3)
    assert store.arrays(at).keys() == {"layer.0", "layer.2", "step"}
    assert Holding(at=at, start=2, end=5) in store.holdings()
    assert store.arrays(StepId(generation=2, step=3)) == {}, "that is another history"
    assert store.find(at, 0, 2) is not None
    assert store.find(at, 0, 3) is None


def test_a_point_is_kept_once() -> None:
    store = SnapshotStore()
    store.put(snapshot(3))
    store.put(snapshot(3))
    assert steps(store) == [3]
    assert len(store.holdings()) == 1


def test_older_than_safe_and_later_than_the_chosen_point_are_dropped() -> None:
    store = SnapshotStore()
    for step in (1, 2, 3):
        store.put(snapshot(step))
        store.put(snapshot(step, start=2, end=5))
    store.forget_before(StepId(generation=1, step=2))
    assert steps(store) == steps(store, 2) == [2, 3]
    store.forget_after(StepId(generation=1, step=2))
    assert steps(store) == steps(store, 2) == [2]


def test_while_copies_fail_memory_stays_bounded_and_the_safe_point_is_kept() -> None:
    store = SnapshotStore()
    for step in range(1, 50):
        store.put(snapshot(step))
        store.put(snapshot(step // 2, start=2, end=5))
    assert steps(store) == [1, 48, 49]
    assert steps(store, 2) == [0, 23, 24]
    assert len(store.holdings()) == 2 * MAX_POINTS
