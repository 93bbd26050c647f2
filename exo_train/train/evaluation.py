"""The held-out loss of a ring, or of one device. Owns its batches and its normalisation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from exo_train.backends.base import Stage
from exo_train.config import TrainConfig
from exo_train.train.batches import Microbatch, evaluation_batches, split_microbatches
from exo_train.train.examples import Example
from exo_train.train.ring import Ring

EVALUATION_BATCH_SIZE = 16


def held_out_loss(
    ring: Ring, held_out: Sequence[Example], *, step: int, config: TrainConfig
) -> float:
    """Measure the mean loss in nats a supervised token after `step`, over all of `held_out`."""
    microbatches = _microbatches(
        held_out,
        microbatch_size=ring.plan.microbatch_size,
        max_seq_length=config.max_seq_length,
        packed=config.packing,
    )
    reports = ring.run_step(
        step,
        microbatches,
        loss_scale=1.0,
        evaluation=True,
        timeout_s=config.step_timeout_s * math.ceil(len(held_out) / EVALUATION_BATCH_SIZE),
        may_stop=lambda: True,
    )
    return reports[-1].loss_sum / _num_supervised(held_out)


def loss_on_one_device(
    stage: Stage, held_out: Sequence[Example], *, microbatch_size: int, max_seq_length: int
) -> float:
    """Measure the same mean of a stage that is the whole model."""
    sums = []
    for microbatch in _microbatches(
        held_out, microbatch_size=microbatch_size, max_seq_length=max_seq_length
    ):
        loss_sum = stage.evaluate(microbatch.to_input())
        assert isinstance(loss_sum, float), "the stage has no head"
        sums.append(loss_sum)
    return math.fsum(sums) / _num_supervised(held_out)


def _microbatches(
    held_out: Sequence[Example], *, microbatch_size: int, max_seq_length: int, packed: bool = False
) -> list[Microbatch]:
    batches = evaluation_batches(
        held_out,
        batch_size=EVALUATION_BATCH_SIZE,
        packed_length=max_seq_length if packed else 0,
    )
    cut = [
        microbatch
        for batch in batches
        for microbatch in split_microbatches(
            batch, microbatch_size=microbatch_size, max_seq_length=max_seq_length
        )
    ]
    return [replace(microbatch, index=index) for index, microbatch in enumerate(cut)]


def _num_supervised(held_out: Sequence[Example]) -> int:
    return sum(example.num_supervised_tokens for example in held_out)
