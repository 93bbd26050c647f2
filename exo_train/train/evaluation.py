"""The held-out loss of a ring, or of one device. Owns its batches and its normalisation.

The loss is a mean over supervised tokens, or over pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from exo_train.backends.base import Stage
from exo_train.config import TrainConfig
from exo_train.objective_config import ObjectiveConfig
from exo_train.train.batches import Microbatch, StepBatch, evaluation_batches, split_microbatches
from exo_train.train.examples import Example
from exo_train.train.metrics import PairMetrics
from exo_train.train.ring import Ring

EVALUATION_BATCH_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The mean loss (nats); `pairs` where the rows are preference pairs."""

    loss: float
    pairs: PairMetrics | None = None


def held_out_loss(
    ring: Ring, held_out: Sequence[Example], *, step: int, config: TrainConfig
) -> HeldOut:
    """Measure the loss after `step`, over all of `held_out`."""
    batches = evaluation_batches(
        held_out,
        batch_size=EVALUATION_BATCH_SIZE,
        packed_length=config.max_seq_length if config.packing else 0,
        has_pairs=config.learnt.has_pairs,
    )
    reports = ring.run_step(
        step,
        _microbatches(
            batches,
            microbatch_size=ring.plan.microbatch_size,
            max_seq_length=config.max_seq_length,
        ),
        loss_scale=1.0,
        evaluation=True,
        timeout_s=config.step_timeout_s * math.ceil(len(held_out) / EVALUATION_BATCH_SIZE),
        may_stop=lambda: True,
    )
    return HeldOut(
        loss=reports[-1].loss_sum / _num_losses(batches),
        pairs=PairMetrics.of(reports[-1].pairs, config.learnt),
    )


def loss_on_one_device(
    stage: Stage,
    held_out: Sequence[Example],
    *,
    microbatch_size: int,
    max_seq_length: int,
    objective: ObjectiveConfig = ObjectiveConfig(),  # noqa: B008 - frozen
) -> HeldOut:
    """Measure the same of a stage that is the whole model, loaded for that objective."""
    batches = evaluation_batches(
        held_out, batch_size=EVALUATION_BATCH_SIZE, has_pairs=objective.has_pairs
    )
    sums = []
    for microbatch in _microbatches(
        batches, microbatch_size=microbatch_size, max_seq_length=max_seq_length
    ):
        given = microbatch.to_input()
        if objective.has_reference:
            stage.refer(given)
        loss_sum = stage.evaluate(given)
        assert isinstance(loss_sum, float), "the stage has no head"
        sums.append(loss_sum)
    return HeldOut(
        loss=math.fsum(sums) / _num_losses(batches),
        pairs=PairMetrics.of(stage.take_pair_sums(), objective),
    )


def _microbatches(
    batches: Sequence[StepBatch], *, microbatch_size: int, max_seq_length: int
) -> list[Microbatch]:
    cut = [
        microbatch
        for batch in batches
        for microbatch in split_microbatches(
            batch, microbatch_size=microbatch_size, max_seq_length=max_seq_length
        )
    ]
    return [replace(microbatch, index=index) for index, microbatch in enumerate(cut)]


def _num_losses(batches: Sequence[StepBatch]) -> int:
    return sum(batch.num_losses for batch in batches)
