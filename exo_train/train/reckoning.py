"""What a run's steps came to: against what the plan promised, and against how it began.

Owns which steps count, how they are scaled to the promise, and the sentences. Must not read a
clock, plan or print.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from exo_train.plan.drift import WARM_UP_STEPS, Drift, DriftWatch
from exo_train.plan.prediction import Achieved, Prediction, RankAchieved, compare, sentence
from exo_train.train.metrics import StepMetrics

KEPT_STEPS = 4096  # the newest; bounds the memory of a long run


class Reckoning:
    """One start of a run. Without a prediction it only tells of drift."""

    def __init__(self, prediction: Prediction | None = None) -> None:
        self._prediction = prediction
        self._watch = DriftWatch()
        self._num_steps = 0
        self._kept: deque[tuple[int, StepMetrics]] = deque(maxlen=KEPT_STEPS)

    def after_step(self, metrics: StepMetrics, *, num_microbatches: int) -> Drift | None:
        """Take in a committed step; give what there is to tell of the run's slowing down."""
        self._num_steps += 1
        if self._num_steps == WARM_UP_STEPS + 1:
            self._kept.clear()  # no plan promises that a framework compiles
        self._kept.append((num_microbatches, metrics))
        # For one run, seconds a position are what was promised but for a constant factor.
        return self._watch.observe(
            metrics.step_s / metrics.positions,
            [rank.busy_s / metrics.positions for rank in metrics.ranks],
        )

    def compared(self) -> dict[str, Any] | None:
        """Give promise, outcome and error of each number, and of how many steps it is.

        None without a promise, and before the first step.
        """
        steps = self._counted()
        if self._prediction is None or not steps:
            return None
        return {"steps": len(steps), **compare(self._prediction, achieved(self._prediction, steps))}

    def sentence(self) -> str:
        """Say in a line how good the promise was; empty where `compared` gives None."""
        steps = self._counted()
        if self._prediction is None or not steps:
            return ""
        said = sentence(self._prediction, achieved(self._prediction, steps))
        if self._num_steps <= WARM_UP_STEPS:
            said += f"; only {self._num_steps} done, and the first {WARM_UP_STEPS} steps are slow"
        return said

    def _counted(self) -> list[StepMetrics]:
        """Give the steps of whole batches: an epoch's short last one has another bubble."""
        most = max((num for num, _ in self._kept), default=0)
        return [metrics for num, metrics in self._kept if num == most]


def achieved(prediction: Prediction, steps: list[StepMetrics]) -> Achieved:
    """Give the steps' medians as they would be at the prediction's positions; memory's peak."""

    def scaled(value_of: Callable[[StepMetrics], float]) -> float:
        return statistics.median(value_of(s) * prediction.positions / s.positions for s in steps)

    def of_rank(rank: int) -> RankAchieved:
        return RankAchieved(
            busy_share=1 - statistics.median(s.ranks[rank].bubble_fraction for s in steps),
            peak_memory_bytes=max(s.ranks[rank].peak_memory_bytes for s in steps),
            sent_bytes=round(scaled(lambda s: s.ranks[rank].sent_bytes)),
        )

    return Achieved(
        step_s=scaled(lambda s: s.step_s),
        period_s=scaled(lambda s: s.period_s),
        ranks=tuple(of_rank(rank) for rank in range(len(prediction.ranks))),
    )


def drift_sentence(step: int, drift: Drift, names: Sequence[str]) -> str:
    """Say that the run has become slower, and whose fault it seems."""
    said = f"step {step}: steps take {drift.factor:.1f} times as long as at the start; "
    if drift.rank is not None and drift.rank_factor is not None:
        return said + (
            f"{names[drift.rank]} computes {drift.rank_factor:.1f} times as slowly (hot, or busy "
            f"with something else?)"
        )
    if len(names) > 1:
        return said + "no device computes more slowly, so it is a link (weak Wi-Fi, or busy?)"
    return said + f"{names[0]} does not compute more slowly, but waits longer"
