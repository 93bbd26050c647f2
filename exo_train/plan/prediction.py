"""What a plan promises of a step, and how far the run was from it. Pure value types.

Must not plan or measure.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPrediction:
    """One rank; `peak_memory_bytes` as the rank's own report counts it."""

    name: str
    busy_share: float
    peak_memory_bytes: int
    sent_bytes: int  # to both neighbours, in a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A step of `positions` positions (tokens and padding, over all microbatches).

    `period_s` is the mean time between the ends of rank 0's backwards, `step_s` that of the whole
    step with its update. Times and bytes grow with the positions.
    """

    positions: int
    step_s: float
    period_s: float
    ranks: tuple[RankPrediction, ...]
