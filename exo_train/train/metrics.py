"""The numbers of each step. Owns their names in `metrics.jsonl`, and the smoothed throughput.

Pure. Must not read a clock or write a file.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from dataclasses import dataclass
from typing import Any

from exo_train.backends.preference import PairSums
from exo_train.objective_config import ObjectiveConfig
from exo_train.wire.pb import control_pb2 as pb

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
class PairMetrics:
    """What preference pairs came to, each a mean over all of them; names are TRL's.

    A reward is beta times the log-probability of an answer over the base's (dpo), or times its mean
    log-probability a token (orpo); `reward_accuracy` is the share of pairs whose chosen answer has
    the larger one. The last two are orpo's: nats a token, and the log of the odds ratio.
    """

    rewards_chosen: float
    rewards_rejected: float
    reward_margin: float
    reward_accuracy: float
    nll_loss: float | None = None
    log_odds_chosen: float | None = None

    @classmethod
    def of(cls, sums: PairSums | pb.PairSums, objective: ObjectiveConfig) -> PairMetrics | None:
        """Give the means; None where nothing was counted."""
        count = sums.num_pairs
        if not count:
            return None
        is_orpo = objective.name == "orpo"
        return cls(
            rewards_chosen=sums.chosen / count,
            rewards_rejected=sums.rejected / count,
            reward_margin=(sums.chosen - sums.rejected) / count,
            reward_accuracy=sums.num_right / count,
            nll_loss=sums.nll / count if is_orpo else None,
            log_odds_chosen=sums.log_odds / count if is_orpo else None,
        )

    def to_dict(self) -> dict[str, float]:
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}


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
    pairs: PairMetrics | None = None  # its fields are among the line's own

    def to_dict(self) -> dict[str, Any]:
        """Give plain values; a number that JSON cannot hold (NaN, infinity) becomes null."""
        plain = dataclasses.asdict(self)
        del plain["pairs"]
        ranks = [finite_or_none(rank) for rank in plain.pop("ranks")]
        pairs = self.pairs.to_dict() if self.pairs else {}
        return finite_or_none(plain | pairs) | {"ranks": ranks}


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
