"""When a run ends before its last step: nothing gets better any more, or the loss ran away.

Owns both judgements, from the curves alone, so that a resumed run judges alike. Pure. Must not end
anything: the loop does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from exo_train.config import TrainConfig
from exo_train.errors import ConfigError, NumericsError
from exo_train.train.metrics import StepMetrics

Curve = Sequence[tuple[int, float]]  # (step, loss), oldest first
# One bad batch is no trend; a run that is lost does not come back within so many.
RUNAWAY_STEPS = 5


def best_of(held_out: Curve) -> tuple[int, float] | None:
    """Give the step with the lowest finite loss, the earlier of two; None: there is none."""
    finite = [point for point in held_out if math.isfinite(point[1])]
    return min(finite, key=lambda point: point[1]) if finite else None


def check_early_stop(config: TrainConfig, *, num_held_out: int) -> None:
    """Refuse early stopping without what it goes by; raises ConfigError."""
    if not config.early_stop:
        return
    asked = f"--early-stop {config.early_stop}"
    if not num_held_out:
        raise ConfigError(
            f"{asked} goes by held-out rows, and there are none; add a valid.jsonl or --val-rows"
        )
    if not config.eval_every:
        raise ConfigError(
            f"{asked} goes by losses measured during the run; say how often with --eval-every"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """`patience` in evaluations without a better loss, 0: none; `loss_factor` 0: any loss will do.

    `chance_loss` is what a mere guess costs, in nats: among all tokens, or with dpo of two answers.
    """

    patience: int
    loss_factor: float
    chance_loss: float

    @classmethod
    def of(cls, config: TrainConfig, *, vocab_size: int) -> Stopping:
        return cls(
            patience=config.early_stop,
            loss_factor=config.stop_loss,
            chance_loss=math.log(2 if config.objective == "dpo" else vocab_size),
        )

    def has_stalled(self, held_out: Curve) -> bool:
        """Tell whether the last `patience` evaluations were all no better than one before them.

        The loss before the first step counts, and one that is not finite is no better.
        """
        if not self.patience:
            return False
        best = best_of(held_out)
        since = [step for step, _ in held_out if best is None or step > best[0]]
        return len(since) >= self.patience

    def stalled_sentence(self, held_out: Curve) -> str:
        """Say what `has_stalled` found."""
        best = best_of(held_out)
        since = f"since step {best[0]} ({best[1]:.4f})" if best else "at all"
        return (
            f"stopped after step {held_out[-1][0]}: the held-out loss got no better {since} in "
            f"{self.patience} evaluations"
        )

    def wants_saved(self, step: int, held_out: Curve) -> bool:
        """Tell whether `step` must have a checkpoint, as the run may end as it was then."""
        best = best_of(held_out)
        is_best = best is not None and best[0] == step
        return bool(self.patience) and (is_best or self.has_stalled(held_out))

    def check_loss(self, metrics: StepMetrics, losses: Curve) -> None:
        """Raise NumericsError once the last losses are all far above the first, and above chance.

        The latter, as the first batch may happen to be an easy one.
        """
        first = next(((s, loss) for s, loss in losses if math.isfinite(loss)), None)
        if not self.loss_factor or first is None:
            return
        limit = max(self.loss_factor * first[1], self.chance_loss)
        last = [loss for _, loss in losses[-RUNAWAY_STEPS:]]
        if len(losses) <= RUNAWAY_STEPS or not all(loss > limit for loss in last):
            return
        raise NumericsError(
            f"step {metrics.step}: loss {metrics.loss:.4g}, learning rate {metrics.lr:.3g}, "
            f"gradient norm {metrics.grad_norm:.3g}; the loss was above {limit:.4g} in "
            f"{RUNAWAY_STEPS} steps in a row (step {first[0]}: {first[1]:.4g}, a mere guess: "
            f"{self.chance_loss:.4g}); start a new run with a lower --learning-rate or a "
            f"longer warm-up, or train on whatever comes with --stop-loss 0"
        )
