"""The numbers of each step. Owns their names in `metrics.jsonl`, and the smoothed throughput.

Pure. Must not read a clock or write a file.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from dataclasses import dataclass
from typing import Any

WINDOW_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMetrics:
    """One rank during one step; `bubble_fraction` is the share of the step it waited."""

    rank: int
    name: str
    busy_s: float
    bubble_fraction: float
    sent_bytes: int
    peak_memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One committed step: a line of `metrics.jsonl`.

    `positions` are all that were computed, padding included; `period_s` is rank 0's mean time
    between the ends of backwards (0: one microbatch).
    """

    step: int
    epoch: float
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    supervised_tokens: int
    positions: int
    tokens_per_s: float
    step_s: float
    period_s: float
    generation: int
    ranks: tuple[RankMetrics, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Give plain values; a number that JSON cannot hold (NaN, infinity) becomes null."""
        plain = dataclasses.asdict(self)
        ranks = [finite_or_none(rank) for rank in plain.pop("ranks")]
        return finite_or_none(plain) | {"ranks": ranks}


def finite_or_none(plain: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinities among the values by None."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in plain.items()
    }


@dataclass(frozen=True, slots=True)
class Throughput:
    """The last steps as (tokens, seconds); the first step is left out once there are others.

    The first step compiles and warms up, which would make the estimate pessimistic for long.
    """

    recent: tuple[tuple[int, float], ...] = ()
    num_steps: int = 0

    def after_step(self, *, tokens: int, step_s: float) -> Throughput:
        kept = () if self.num_steps == 1 else self.recent
        return Throughput((*kept, (tokens, step_s))[-WINDOW_STEPS:], self.num_steps + 1)

    @property
    def tokens_per_s(self) -> float:
        seconds = sum(step_s for _, step_s in self.recent)
        return sum(tokens for tokens, _ in self.recent) / seconds if seconds > 0 else 0.0

    def remaining_s(self, *, num_steps_left: int) -> float | None:
        """Estimate the time left; the median keeps one stall from moving it. None: no step yet."""
        if not self.recent:
            return None
        return num_steps_left * statistics.median(step_s for _, step_s in self.recent)
