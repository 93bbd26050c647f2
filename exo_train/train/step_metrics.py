"""From the ranks' reports of a step to its line of numbers. Must not decide or write anything."""

from __future__ import annotations

from collections.abc import Sequence

from exo_train.plan.plan import Plan
from exo_train.train.metrics import PairMetrics, RankMetrics, StepMetrics
from exo_train.wire.pb import control_pb2 as pb


def step_metrics(
    plan: Plan,
    reports: Sequence[pb.StepReport],
    *,
    step: int,
    epoch: float,
    loss: float,
    lr: float,
    grad_norm: float,
    tokens: int,
    supervised_tokens: int,
    positions: int,
    step_s: float,
) -> StepMetrics:
    """Join what the driver knows of a committed step with the `reports`, by rank."""
    return StepMetrics(
        step=step,
        epoch=epoch,
        loss=loss,
        lr=lr,
        grad_norm=grad_norm,
        tokens=tokens,
        supervised_tokens=supervised_tokens,
        positions=positions,
        tokens_per_s=tokens / step_s,
        step_s=step_s,
        period_s=reports[0].period_s,
        generation=plan.generation,
        ranks=tuple(
            RankMetrics(
                rank=rank.rank,
                name=rank.name,
                busy_s=report.busy_s,
                bubble_fraction=max(0.0, 1.0 - report.busy_s / step_s),
                sent_bytes=report.sent_bytes,
                peak_memory_bytes=report.peak_memory_bytes,
            )
            for rank, report in zip(plan.ranks, reports, strict=True)
        ),
        pairs=PairMetrics.of(reports[-1].pairs, plan.objective),
    )
