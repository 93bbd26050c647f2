"""What the planner is told of the data: lengths as they are computed, padding included."""

from __future__ import annotations

from dataclasses import replace

import pytest

from exo_train.config import TrainConfig
from exo_train.train.batches import BatchPlan, plan_batches
from exo_train.train.examples import Example
from exo_train.train.step_shapes import full_steps, padding_note, steps_of

CONFIG = TrainConfig(batch_size=4, max_seq_length=64)


def rows(*lengths: int) -> tuple[Example, ...]:
    """Rows with that many inputs: a row's last token is only a target."""
    return tuple(
        Example(tokens=(1,) * (n + 1), supervised=(False,) + (True,) * n, where="test")
        for n in lengths
    )


def test_without_data_every_sequence_is_full() -> None:
    shape = full_steps(CONFIG)(2)
    assert (shape.num_sequences, shape.mean_width, shape.longest) == (4, 64.0, 64)
    assert shape.positions == 256


def test_a_sequence_is_as_wide_as_the_longest_of_its_microbatch() -> None:
    """Widths are multiples of 8: alone 8, 16, 24, 40; in pairs 16, 16, 40, 40."""
    steps = steps_of(BatchPlan(examples=rows(5, 9, 20, 33), batch_size=4, seed=0), CONFIG)
    assert steps(1).mean_width == (8 + 16 + 24 + 40) / 4
    assert steps(2).mean_width == (16 + 16 + 40 + 40) / 4
    assert steps(4).mean_width == 40
    assert steps(2).positions == 112
    assert {steps(size).longest for size in (1, 2, 4)} == {40}


def test_what_is_cut_is_not_counted() -> None:
    steps = steps_of(BatchPlan(examples=rows(500), batch_size=4, seed=0), CONFIG)
    assert steps(1).longest == 64
    assert steps(1).num_sequences == 1, "fewer rows than the batch wants"


def test_a_long_epoch_is_looked_at_in_parts() -> None:
    examples = rows(*([8, 16] * 2000))
    config = replace(CONFIG, batch_size=2)
    steps = steps_of(BatchPlan(examples=examples, batch_size=2, seed=0), config)
    assert steps(1).mean_width == pytest.approx(12, rel=0.1)


@pytest.mark.parametrize("grouped", [False, True])
def test_it_is_said_how_much_is_padding(grouped: bool) -> None:
    config = TrainConfig(batch_size=8, max_seq_length=256, group_by_length=grouped)
    examples = rows(200, 1, 199, 2, 198, 3, 197, 4)
    steps = steps_of(plan_batches(examples, config), config)
    if grouped:
        note = "3% of the 832 positions of a step are padding"
        assert padding_note(steps(4), config) == note
    helps = "" if grouped else "; --packing or --group-by-length makes it less"
    wide = padding_note(steps(8), config)
    assert wide == f"50% of the 1600 positions of a step are padding{helps}"
