"""Waiting for the copies of a mark: which are there, which are not and why.

Owns when that wait is over. Must not know how often copies are made (`shadowing` does).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from exo_train.errors import ExoTrainError
from exo_train.plan.history import StepId, shadow_holder
from exo_train.plan.plan import Plan, RankPlan
from exo_train.train.conversation import Conversation, Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class LateCopy:
    """The copy of `rank`'s state that `holder` does not have, and why."""

    rank: RankPlan
    holder: RankPlan
    error: ExoTrainError


def wait_copies(talk: Conversation, plan: Plan, at: StepId, *, timeout_s: float) -> list[LateCopy]:
    """Wait until all ranks' copies of `at` are there; gives those that are not.

    The wait ends with the first copy that could not be made, or after `timeout_s`.
    """
    deadline_s = talk.deadline_s(timeout_s)
    what = f"copying the state of step {at.step}"
    while missing := [r for r in talk.ranks if r.shadowed is None or r.shadowed < at]:
        failed = [
            (rank, rank.copy_failure[1])
            for rank in missing
            if rank.copy_failure is not None and rank.copy_failure[0] >= at
        ]
        if not failed and talk.is_over(deadline_s):
            late = ExoTrainError(f"it was not there after {timeout_s:.0f} s")
            failed = [(rank, late) for rank in missing]
        if failed:
            return [_late(plan, rank, error) for rank, error in failed]
        talk.next("shadowed", math.inf, missing, what)
    return []


def _late(plan: Plan, rank: Rank, error: ExoTrainError) -> LateCopy:
    holder = shadow_holder(plan, rank.plan.rank)
    assert holder is not None, "it was to be copied"
    return LateCopy(rank=rank.plan, holder=plan.ranks[holder], error=error)
