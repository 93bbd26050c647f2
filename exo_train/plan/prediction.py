"""What a plan promises of a step, and how far the run was from it. Pure value types.

Must not plan or measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from exo_train.plan.exact import ExactPlan
from exo_train.plan.profiles import Household, Workload


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
    step with its update. Times and bytes sent grow with the positions.
    """

    positions: int
    step_s: float
    period_s: float
    ranks: tuple[RankPrediction, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAchieved:
    """What one rank reported; `peak_memory_bytes` 0: its backend cannot tell."""

    busy_share: float
    peak_memory_bytes: int
    sent_bytes: int  # to both neighbours, in a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Achieved:
    """What the run's usual step was, scaled to the prediction's positions.

    `period_s` is 0 where a step had one microbatch: then the step is the period.
    """

    step_s: float
    period_s: float
    ranks: tuple[RankAchieved, ...]


def predict(
    plan: ExactPlan,
    household: Household,
    workload: Workload,
    *,
    positions: int,
    counts_process: Sequence[bool],
) -> Prediction:
    """Promise what the run's reports will be held against.

    `counts_process` tells by rank whether its own count of memory has the process in it, or only
    what the framework's allocator gave out.
    """
    ranks = []
    last = len(plan.stages) - 1
    for rank, (stage, with_process) in enumerate(zip(plan.stages, counts_process, strict=True)):
        device = household.devices[stage.device]
        process_bytes = workload.costs_of(device).per_stage.static_bytes
        num_messages = (rank > 0) + (rank < last) * workload.num_forwards
        ranks.append(
            RankPrediction(
                name=device.name,
                busy_share=stage.busy_share,
                peak_memory_bytes=stage.memory_bytes - (0 if with_process else process_bytes),
                sent_bytes=num_messages * workload.boundary_bytes * workload.num_microbatches,
            )
        )
    return Prediction(
        positions=positions, step_s=plan.step_s, period_s=plan.pace_s, ranks=tuple(ranks)
    )


def compare(prediction: Prediction, achieved: Achieved) -> dict[str, Any]:
    """Put each promise beside what came of it; `error` is relative, None where 0 was promised."""
    return {
        "positions": prediction.positions,
        "step_s": _against(prediction.step_s, achieved.step_s),
        "period_s": _against(prediction.period_s, achieved.period_s or achieved.step_s),
        "devices": [
            {
                "rank": rank,
                "name": promised.name,
                "peak_memory_bytes": _against(promised.peak_memory_bytes, came.peak_memory_bytes),
                "bubble_fraction": _against(
                    max(0.0, 1.0 - promised.busy_share), max(0.0, 1.0 - came.busy_share)
                ),
                "sent_bytes": _against(promised.sent_bytes, came.sent_bytes),
            }
            for rank, (promised, came) in enumerate(
                zip(prediction.ranks, achieved.ranks, strict=True)
            )
        ],
    }


def sentence(prediction: Prediction, achieved: Achieved) -> str:
    """Say in one line how good the promise was."""
    parts = [
        f"predicted {_seconds(prediction.step_s)} a step, "
        f"achieved {_difference(prediction.step_s, achieved.step_s)}"
    ]
    has_period = prediction.period_s < prediction.step_s  # more than one microbatch
    if has_period and prediction.period_s > 0 and achieved.period_s > 0:
        parts.append(
            f"period {_seconds(prediction.period_s)}, "
            f"achieved {_difference(prediction.period_s, achieved.period_s)}"
        )
    off = [
        abs(came.peak_memory_bytes / promised.peak_memory_bytes - 1)
        for promised, came in zip(prediction.ranks, achieved.ranks, strict=True)
        if promised.peak_memory_bytes > 0 and came.peak_memory_bytes > 0
    ]
    if off:
        parts.append(f"memory within {_percent(max(off))}")
    return "; ".join(parts)


def _against(predicted: float, achieved: float) -> dict[str, float | None]:
    error = achieved / predicted - 1 if predicted else None
    return {"predicted": predicted, "achieved": achieved, "error": error}


def _difference(predicted_s: float, achieved_s: float) -> str:
    text = _seconds(achieved_s)
    if predicted_s <= 0:
        return text
    error = achieved_s / predicted_s - 1
    if round(abs(error), 2) == 0:
        return f"{text} (as predicted)"
    return f"{text} ({_percent(abs(error))} {'slower' if error > 0 else 'faster'})"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _seconds(time_s: float) -> str:
    """Round to three digits, in ms below 0.1 s."""
    if time_s < 0.1:
        return f"{1000 * time_s:.3g} ms"
    return f"{time_s:.3g} s" if time_s < 100 else f"{time_s:.0f} s"
