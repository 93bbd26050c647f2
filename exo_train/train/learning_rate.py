"""The learning rate of each optimizer update, and clipping. Pure arithmetic; owns nothing else."""

from __future__ import annotations

import math

from exo_train.errors import ConfigError


def learning_rate_at(
    update: int,
    *,
    total_updates: int,
    peak: float,
    schedule: str,
    warmup_steps: int = 0,
    min_ratio: float = 0.0,
) -> float:
    """Give the rate of `update`, from 0 to `total_updates - 1`; updates, never microbatches.

    Linear warm-up (Goyal et al. 2017, arXiv:1706.02677, section 2.2): update w - 1 of w is the
    first at the peak, and none is zero. "cosine" is one period of SGDR (Loshchilov & Hutter 2016,
    arXiv:1608.03983, equation 5) from there to `peak * min_ratio` at the last update.
    """
    assert 0 <= update < total_updates
    if warmup_steps > total_updates:
        raise ConfigError(
            f"'warmup_steps' {warmup_steps} is more than the run's {total_updates} updates; "
            f"ask for at most {total_updates}"
        )
    if update < warmup_steps:
        return peak * ((update + 1) / warmup_steps)  # exactly `peak` at the last
    if schedule == "constant":
        return peak
    if schedule != "cosine":
        raise ConfigError(f"no learning-rate schedule is called '{schedule}'")
    start = max(warmup_steps - 1, 0)
    if update == start:  # a run of a single update
        return peak
    progress = (update - start) / (total_updates - 1 - start)
    lowest = peak * min_ratio
    return lowest + (peak - lowest) * 0.5 * (1 + math.cos(math.pi * progress))


def clip_scale(grad_norm: float, max_grad_norm: float) -> float:
    """Give the factor that brings the global norm down to `max_grad_norm` (0: no clipping).

    Pascanu et al. 2013, arXiv:1211.5063, algorithm 1; PyTorch's `clip_grad_norm_` adds 1e-6.
    """
    if max_grad_norm <= 0:
        return 1.0
    return min(1.0, max_grad_norm / (grad_norm + 1e-6))
