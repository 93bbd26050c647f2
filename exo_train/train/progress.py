"""What a run has come to, and how it goes back to an earlier step.

Owns counts and curves. Must not know devices, messages or files.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from exo_train.plan.plan import RankPlan
from exo_train.train.loss_scaling import FIRST, LossScale, scale_of
from exo_train.train.metrics import StepMetrics, Throughput
from exo_train.train.reckoning import Reckoning


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What adds up from step to step; a checkpoint's state has it."""

    tokens: int = 0
    seconds: float = 0.0
    num_dropped: int = 0
    dropped_in_a_row: int = 0  # but for those that a smaller loss scale may cure
    loss_scale: LossScale = FIRST

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Totals:
        return cls(
            tokens=int(state["tokens"]),
            seconds=float(state["seconds"]),
            num_dropped=int(state.get("num_dropped", 0)),
            loss_scale=scale_of(state),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """A time at which the ring was formed anew.

    `seconds` is from the error to the next committed step, None where another one came before it;
    `steps_lost` are committed ones that
    had to be done again; `lost` names the devices that were gone, `joined` those taken in.
    """

    step: int
    reason: str
    lost: tuple[str, ...]
    joined: tuple[str, ...]
    steps_lost: int
    seconds: float | None = None


@dataclass(slots=True)
class Progress:
    """Survives an error, so that what there is can be written down."""

    step: int = 0  # the last committed one
    saved_step: int = 0
    totals: Totals = field(default_factory=Totals)
    train_losses: list[tuple[int, float]] = field(default_factory=list)
    held_out_losses: list[tuple[int, float]] = field(default_factory=list)
    interruptions: list[Interruption] = field(default_factory=list)
    ended_early: str = ""  # why, as a sentence
    # Since the ring was formed last: it may have had other devices before.
    ranks: tuple[RankPlan, ...] = ()
    busy_s: list[float] = field(default_factory=list)
    seconds_here: float = 0.0
    peak_memory_bytes: list[int] = field(default_factory=list)
    throughput: Throughput = field(default_factory=Throughput)
    reckoning: Reckoning = field(default_factory=Reckoning)
    _totals_at: dict[int, Totals] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.totals.tokens

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.totals.seconds if self.totals.seconds > 0 else 0.0

    def busy_share(self, rank: int) -> float:
        return self.busy_s[rank] / self.seconds_here if self.seconds_here > 0 else 0.0

    def in_new_ring(self, ranks: tuple[RankPlan, ...], reckoning: Reckoning) -> None:
        """Count devices' times anew."""
        self.ranks = ranks
        self.busy_s = [0.0] * len(ranks)
        self.peak_memory_bytes = [0] * len(ranks)
        self.seconds_here = 0.0
        self.reckoning = reckoning

    def after_step(self, metrics: StepMetrics, *, finite: bool, overflowed: bool = False) -> None:
        """Count a step that all ranks committed, or dropped where it was not finite."""
        before = self.totals
        self._totals_at.setdefault(self.step, before)
        self.step = metrics.step
        self.totals = self._totals_at[self.step] = Totals(
            tokens=before.tokens + metrics.tokens,
            seconds=before.seconds + metrics.step_s,
            num_dropped=before.num_dropped + (not finite),
            dropped_in_a_row=0 if finite else before.dropped_in_a_row + (not overflowed),
            loss_scale=before.loss_scale.after(overflowed=not finite),
        )
        self.seconds_here += metrics.step_s
        self.train_losses.append((metrics.step, metrics.loss))
        self.throughput = self.throughput.after_step(tokens=metrics.tokens, step_s=metrics.step_s)
        for rank in metrics.ranks:
            self.busy_s[rank.rank] += rank.busy_s
            peak = max(self.peak_memory_bytes[rank.rank], rank.peak_memory_bytes)
            self.peak_memory_bytes[rank.rank] = peak

    def has_totals(self, step: int) -> bool:
        return step == self.step or step in self._totals_at

    def go_back(self, step: int, *, totals: Totals | None = None) -> None:
        """Forget what came after `step`; `totals` where that was before this process began."""
        self.totals = totals or self._totals_at.get(step, self.totals)
        self.step = step
        self._totals_at = {s: t for s, t in self._totals_at.items() if s <= step}
        self.saved_step = min(self.saved_step, step)
        self.train_losses = [point for point in self.train_losses if point[0] <= step]
        self.held_out_losses = [point for point in self.held_out_losses if point[0] <= step]

    def restore(
        self, step: int, state: dict[str, Any], train_losses: Sequence[tuple[int, float]]
    ) -> None:
        """Take over what a checkpoint of `step` says."""
        self.held_out_losses = [
            (int(at), math.nan if loss is None else float(loss))
            for at, loss in state["held_out_losses"]
        ]
        self.train_losses = list(train_losses)
        self.go_back(step, totals=Totals.from_state(state))
        self.saved_step = step

    def to_state(self) -> dict[str, Any]:
        """Give what a checkpoint keeps."""
        return {
            "tokens": self.totals.tokens,
            "seconds": self.totals.seconds,
            "num_dropped": self.totals.num_dropped,
            "loss_scale": dataclasses.asdict(self.totals.loss_scale),
            "held_out_losses": [
                [step, loss if math.isfinite(loss) else None] for step, loss in self.held_out_losses
            ],
        }
