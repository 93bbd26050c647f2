"""Points of a run's history, who holds the trainable state of which, and where copies lie.

Owns the one question of recovery: which state can all layers be brought back to? Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from exo_train.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class StepId:
    """The state after `step` as it was committed in `generation` (0, 0: before the first step).

    After a rewind the same step is done anew in a later generation: that is another history, and
    states of two histories never go together. A restored state keeps the generation in which it
    was committed. Ordered by generation first: a later one went on from what was chosen.
    """

    generation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Somebody holds the state of layers [start, end) at one point of the history."""

    at: StepId
    start: int
    end: int


def newest_whole(holdings: Iterable[Holding], *, num_layers: int, up_to: StepId) -> StepId | None:
    """Give the newest point, none after `up_to`, that all layers can be brought to; None: none.

    `up_to` is the last one that all ranks are known to have committed. Holdings come from the
    network: one of layers that the model does not have counts for nothing.
    """
    by_point: dict[StepId, set[int]] = {}
    for holding in holdings:
        if holding.at <= up_to and 0 <= holding.start < holding.end <= num_layers:
            by_point.setdefault(holding.at, set()).update(range(holding.start, holding.end))
    whole = [at for at, layers in by_point.items() if layers.issuperset(range(num_layers))]
    return max(whole, default=None)


def shadow_holder(plan: Plan, rank: int) -> int | None:
    """Give the rank that keeps the copy of `rank`'s state: the next one on another computer.

    None: all ranks are on one.
    """
    count = len(plan.ranks)
    own = plan.ranks[rank].node_id
    for distance in range(1, count):
        other = (rank + distance) % count
        if plan.ranks[other].node_id != own:
            return other
    return None
