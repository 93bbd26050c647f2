"""What a step's reports come to: loss, gradient norm, and whether all ranks apply it.

Owns dynamic loss scaling for fp16 (Micikevicius et al. 2017, arXiv:1710.03740, section 3.2):
gradients are made of the loss times a scale, so that small ones are not lost, and divided by it in
the commit. Pure. The scale belongs to the run's progress, so a resumed run has it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exo_train.plan.plan import Plan
from exo_train.train.learning_rate import clip_scale
from exo_train.wire.pb import control_pb2 as pb

FIRST_SCALE, MAX_SCALE = 2.0**12, 2.0**24
STEPS_TO_GROW = 200  # finite ones in a row, after which twice as much is tried


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """A power of two, and how many steps in a row were finite with it."""

    value: float = FIRST_SCALE
    num_good: int = 0

    def after(self, *, overflowed: bool) -> LossScale:
        if overflowed:
            return LossScale(value=max(1.0, self.value / 2))
        if self.num_good + 1 < STEPS_TO_GROW:
            return LossScale(value=self.value, num_good=self.num_good + 1)
        return LossScale(value=min(MAX_SCALE, 2 * self.value))


FIRST = LossScale()


def scale_of(state: Mapping[str, Any]) -> LossScale:
    """Give the scale that a checkpoint's state has; the first where it has none."""
    return LossScale(**state["loss_scale"]) if "loss_scale" in state else FIRST


def needs_scaling(plan: Plan) -> bool:
    """Tell whether gradients pass through fp16, whose smallest normal number is 6e-5."""
    return "fp16" in {plan.wire_dtype, *(rank.compute_dtype for rank in plan.ranks)}


def overflow_sentence(step: int, scale: float) -> str:
    return (
        f"step {step}: a gradient is too large for fp16 at loss scale {scale:g}; the step is "
        f"dropped on all devices, the next one has {scale / 2:g}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNumbers:
    """`overflowed`: the loss is finite and a gradient is not, which a smaller scale may cure."""

    loss: float
    grad_norm: float
    finite: bool
    overflowed: bool
    grad_scale: float

    @classmethod
    def of(
        cls,
        reports: Sequence[pb.StepReport],
        num_losses: int,
        scale: float,
        max_grad_norm: float,
    ) -> StepNumbers:
        """Read the ranks' reports of a step whose gradients are of `scale` times the mean loss.

        That is a mean over `num_losses` supervised tokens or pairs.
        """
        loss = reports[-1].loss_sum / num_losses
        grad_norm = math.sqrt(math.fsum(report.grad_square_sum for report in reports)) / scale
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        return cls(
            loss=loss,
            grad_norm=grad_norm,
            finite=finite,
            overflowed=math.isfinite(loss) and not finite and scale > 1,
            grad_scale=clip_scale(grad_norm, max_grad_norm) / scale if finite else 0.0,
        )
