"""The learning rate of each optimizer update, and clipping. Pure arithmetic; owns nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass

from exo_train.config import TrainConfig
from exo_train.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The rate over a run, counted in optimizer updates: never in microbatches or rows.

    Linear warm-up (Goyal et al. 2017, arXiv:1706.02677, section 2.2): update w - 1 of w is the
    first at the peak, and none is zero. From there "cosine" is one period of SGDR (Loshchilov &
    Hutter 2016, arXiv:1608.03983, equation 5) and "linear" a straight line, both to
    `peak * min_ratio` at the last update; "constant" stays.
    """

    kind: str
    total_updates: int
    peak: float
    warmup_updates: int = 0
    min_ratio: float = 0.0

    @classmethod
    def of(cls, config: TrainConfig, total_updates: int) -> Schedule:
        """Make the run's; raises ConfigError where the warm-up is longer than the run."""
        if config.warmup_steps > total_updates:
            raise ConfigError(
                f"'warmup_steps' {config.warmup_steps} is more than the run's {total_updates} "
                f"updates; ask for at most {total_updates}"
            )
        return cls(
            kind=config.lr_schedule,
            total_updates=total_updates,
            peak=config.learning_rate,
            # 0.07 of 100 updates are 7, though the product of the floats is a little more.
            warmup_updates=config.warmup_steps
            or math.ceil(round(config.warmup_ratio * total_updates, 6)),
            min_ratio=config.min_lr_ratio,
        )

    def rate(self, update: int) -> float:
        """Give the rate of `update`, from 0 to `total_updates - 1`."""
        assert 0 <= update < self.total_updates
        if update < self.warmup_updates:
            return self.peak * ((update + 1) / self.warmup_updates)  # exactly `peak` at the last
        start = max(self.warmup_updates - 1, 0)
        if self.kind == "constant" or update == start:  # the latter: a run of a single update
            return self.peak
        progress = (update - start) / (self.total_updates - 1 - start)
        if self.kind == "linear":
            share = 1 - progress
        else:
            assert self.kind == "cosine", self.kind
            share = 0.5 * (1 + math.cos(math.pi * progress))
        lowest = self.peak * self.min_ratio
        return lowest + (self.peak - lowest) * share


def clip_scale(grad_norm: float, max_grad_norm: float) -> float:
    """Give the factor that brings the global norm down to `max_grad_norm` (0: no clipping).

    Pascanu et al. 2013, arXiv:1211.5063, algorithm 1; PyTorch's `clip_grad_norm_` adds 1e-6.
    """
    if max_grad_norm <= 0:
        return 1.0
    return min(1.0, max_grad_norm / (grad_norm + 1e-6))
