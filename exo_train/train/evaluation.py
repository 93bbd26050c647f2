"""The held-out loss of the ring as it is now. Owns its batches and its normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from exo_train.config import TrainConfig
from exo_train.train.batches import evaluation_batches, split_microbatches
from exo_train.train.examples import Example
from exo_train.train.ring import Ring

EVALUATION_BATCH_SIZE = 16


def held_out_loss(
    ring: Ring, held_out: Sequence[Example], *, step: int, config: TrainConfig
) -> float:
    """Measure the mean loss in nats a supervised token after `step`, over all of `held_out`."""
    batches = evaluation_batches(
        held_out,
        batch_size=EVALUATION_BATCH_SIZE,
        packed_length=config.max_seq_length if config.packing else 0,
    )
    microbatches = [
        microbatch
        for batch in batches
        for microbatch in split_microbatches(
            batch,
            microbatch_size=ring.plan.microbatch_size,
            max_seq_length=config.max_seq_length,
        )
    ]
    reports = ring.run_step(
        step,
        [replace(microbatch, index=index) for index, microbatch in enumerate(microbatches)],
        loss_scale=1.0,
        evaluation=True,
        timeout_s=config.step_timeout_s * len(batches),
        may_stop=lambda: True,
    )
    return reports[-1].loss_sum / sum(batch.num_supervised_tokens for batch in batches)
