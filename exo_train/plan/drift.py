"""Do steps take longer than they did? Owns that judgement, and what planning anew would gain.

Pure: a step's times are arguments. Must not read clocks, print or re-plan a run.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from exo_train.plan.exact import ExactPlan, exact_plan, plan_with_layers
from exo_train.plan.profiles import DeviceProfile, Household, Workload

WARM_UP_STEPS = 2  # frameworks compile, caches fill
# Steps that make a median, and for how many steps on end it must say the same.
WINDOW = 10
# What counts as drift, and what as worse than said before.
THRESHOLD = 1.15
# Of a run that goes to and fro, the user has heard enough then.
MAX_DRIFTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Steps take `factor` times as long as at the start.

    `rank` is the one whose computing grew most, `rank_factor` times; None: no rank's did by as
    much as counts, so it is a link.
    """

    factor: float
    rank: int | None
    rank_factor: float | None


class DriftWatch:
    """Compares the run with its own first steps, as the prediction itself may be off."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._recent: deque[tuple[float, ...]] = deque(maxlen=WINDOW)
        self._baseline: list[float] = []  # of the step, then of each rank
        self._level = 1.0  # what was said last; 1: nothing, or it has recovered
        self._num_worse = self._num_recovered = self._num_drifts = 0

    def observe(self, step_ratio: float, busy_ratios: Sequence[float]) -> Drift | None:
        """Take in a committed step; give what there is to say, once for each time it gets worse.

        `step_ratio` is the step's seconds over those predicted for its positions, `busy_ratios`
        by rank the seconds of computing over anything that grows with the positions (always 0: not
        known). A step with a ratio that is not finite, or below 0, says nothing and is left out.
        """
        ratios = (step_ratio, *busy_ratios)
        if step_ratio == 0 or not all(math.isfinite(ratio) and ratio >= 0 for ratio in ratios):
            return None
        self._num_steps += 1
        if self._num_steps <= WARM_UP_STEPS:
            return None
        self._recent.append(ratios)
        if len(self._recent) < WINDOW:
            return None
        medians = [statistics.median(values) for values in zip(*self._recent, strict=True)]
        if not self._baseline:
            self._baseline = medians
        factor, *by_rank = (
            now / was if was > 0 else 1.0 for now, was in zip(medians, self._baseline, strict=True)
        )
        return self._judge(factor, by_rank)

    def _judge(self, factor: float, by_rank: list[float]) -> Drift | None:
        """Count for how long it has been worse than said, or as good as at the start."""
        self._num_worse = self._num_worse + 1 if factor > THRESHOLD * self._level else 0
        self._num_recovered = self._num_recovered + 1 if factor <= THRESHOLD else 0
        if self._num_recovered >= WINDOW:
            self._level = 1.0
        if self._num_worse < WINDOW or self._num_drifts >= MAX_DRIFTS:
            return None
        self._level, self._num_worse = factor, 0
        self._num_drifts += 1
        rank_factor = max(by_rank, default=0.0)
        if rank_factor <= THRESHOLD:
            return Drift(factor=factor, rank=None, rank_factor=None)
        return Drift(factor=factor, rank=by_rank.index(rank_factor), rank_factor=rank_factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanning:
    """A step as it is split now, and as `plan` would split it for devices as slow as they are."""

    current_step_s: float
    best_step_s: float
    plan: ExactPlan


def replan(
    household: Household,
    workload: Workload,
    current: ExactPlan,
    slowdowns: Sequence[float],
    *,
    at_least: int = 1,
) -> Replanning:
    """Predict what planning anew would gain when devices are `slowdowns` times as slow.

    `slowdowns` go by the household's devices; `at_least` as for `exact_plan`. Raises like
    `exact_plan`.
    """
    slowed = Household(
        devices=tuple(
            _slowed(device, factor)
            for device, factor in zip(household.devices, slowdowns, strict=True)
        ),
        links=household.links,
    )
    layers = [stage.stage.num_layers for stage in current.stages]
    now = plan_with_layers(slowed, workload, current.devices, layers)
    best = exact_plan(slowed, workload, at_least=at_least)
    return Replanning(current_step_s=now.step_s, best_step_s=best.step_s, plan=best)


def _slowed(device: DeviceProfile, factor: float) -> DeviceProfile:
    """Give the device with everything that it computes taking `factor` times as long."""
    return dataclasses.replace(
        device,
        layer_s=factor * device.layer_s,
        embedding_s=factor * device.embedding_s,
        head_s=factor * device.head_s,
        head_layer_s=None if device.head_layer_s is None else factor * device.head_layer_s,
        overhead_s=factor * device.overhead_s,
        layer_update_s=factor * device.layer_update_s,
    )
