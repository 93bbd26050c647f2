"""How large the steps of a run are. Owns what the planner is told of the data.

Must not know devices. Widths are in positions: tokens and padding, which is computed too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from exo_train.config import TrainConfig
from exo_train.train.batches import BatchPlan, StepBatch

MAX_LOOKED_AT_STEPS = 200  # spread over the first epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """A step: `mean_width` decides its time, `longest` (of any sequence) its memory.

    Of pairs there are `num_sequences`, and `mean_width` is that of both answers together.
    """

    num_sequences: int
    mean_width: float
    longest: int

    @property
    def positions(self) -> int:
        return round(self.num_sequences * self.mean_width)


# By microbatch size: a sequence is padded to the longest of its microbatch.
StepShapes = Callable[[int], StepShape]


def full_steps(config: TrainConfig) -> StepShapes:
    """Give steps of full length: nothing is known of the data."""
    shape = StepShape(
        num_sequences=config.batch_size,
        mean_width=float(config.learnt.answers_per_row * config.max_seq_length),
        longest=config.max_seq_length,
    )
    return lambda microbatch_size: shape


def steps_of(batches: BatchPlan, config: TrainConfig) -> StepShapes:
    """Give steps as `batches` make them: the mean of the first epoch, all of it or a part."""
    count = batches.steps_per_epoch
    stride = -(-count // MAX_LOOKED_AT_STEPS)
    steps = [batches.batch_for_step(step) for step in range(0, count, stride)]
    num_sequences = min(config.batch_size, batches.num_sequences)
    alone = StepBatch(step=0, epoch=0, sequences=(batches.longest,))
    longest_width = _positions(alone, 1, config) // config.learnt.answers_per_row

    @functools.cache  # asked again and again, and each time all these steps are cut
    def shape(microbatch_size: int) -> StepShape:
        positions = sum(_positions(step, microbatch_size, config) for step in steps)
        return StepShape(
            num_sequences=num_sequences,
            mean_width=positions / sum(len(step.sequences) for step in steps),
            longest=longest_width,
        )

    return shape


def _positions(step: StepBatch, microbatch_size: int, config: TrainConfig) -> int:
    return step.num_positions(microbatch_size=microbatch_size, max_seq_length=config.max_seq_length)
