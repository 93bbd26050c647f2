"""Batches of similar lengths: little padding, and still each row once and no order by length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exo_train.train.batches import PAD_MULTIPLE, POOL_BATCHES, BatchPlan, StepBatch
from exo_train.train.examples import Example
from exo_train.train.random_order import plan_epoch

MAX = 256
ALL_LENGTHS = tuple(int(n) for n in np.random.default_rng(0).permutation(np.arange(1, 201)))


def plan_of(sizes: tuple[int, ...], *, grouped: bool = True, batch_size: int = 4) -> BatchPlan:
    """Plan rows of so many positions; a row's last token is only a target."""
    rows = tuple(
        Example(tokens=(1,) * (n + 1), supervised=(False,) + (True,) * n, where="test")
        for n in sizes
    )
    return BatchPlan(examples=rows, batch_size=batch_size, seed=0, group_by_length=grouped)


def epoch_of(plan: BatchPlan, epoch: int = 0) -> list[StepBatch]:
    num_steps = plan.steps_per_epoch
    return [plan.batch_for_step(step) for step in range(epoch * num_steps, (epoch + 1) * num_steps)]


def padding_share(batches: list[StepBatch], microbatch_size: int) -> float:
    pads = sum(
        batch.num_padded_tokens(microbatch_size=microbatch_size, max_seq_length=MAX)
        for batch in batches
    )
    return pads / (pads + sum(batch.num_tokens for batch in batches))


def test_padding_is_below_a_tenth_on_lengths_from_1_to_200() -> None:
    """F18, the bound that docs/batches.md states."""
    grouped, drawn = (epoch_of(plan_of(ALL_LENGTHS, grouped=on)) for on in (True, False))
    assert padding_share(grouped, 4) < 0.1
    assert padding_share(drawn, 4) > 0.3, "as drawn it is four times as much"


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=150),
    batch_size=st.integers(1, 6),
    microbatch_size=st.integers(1, 6),
)
def test_padding_is_bounded_for_any_lengths(
    sizes: list[int], batch_size: int, microbatch_size: int
) -> None:
    """In a sorted pool the gaps between longest and shortest add up to no more than one range."""
    plan = plan_of(tuple(sizes), batch_size=batch_size)
    pads = sum(
        batch.num_padded_tokens(microbatch_size=microbatch_size, max_seq_length=MAX)
        for batch in epoch_of(plan)
    )
    num_pools = -(-len(sizes) // (POOL_BATCHES * batch_size))
    spread = num_pools * batch_size * (max(sizes) - min(sizes))
    assert pads <= spread + len(sizes) * (PAD_MULTIPLE - 1)


def test_grouped_batches_come_in_no_order_of_length() -> None:
    """Within one pool, whose batches are cut in the order of length."""
    plan = plan_of(ALL_LENGTHS[: 4 * POOL_BATCHES])
    sizes = [batch.sequences[0].num_inputs for batch in epoch_of(plan, epoch=1)]
    assert len(sizes) == POOL_BATCHES
    assert abs(np.corrcoef(np.arange(POOL_BATCHES), sizes)[0, 1]) < 0.4
    epochs = [tuple(b.row_keys for b in epoch_of(plan_of(ALL_LENGTHS), epoch)) for epoch in (1, 2)]
    assert epochs[0] != epochs[1]


def test_grouping_keeps_to_its_pool_of_rows() -> None:
    """So an epoch's order is still drawn: only rows near to each other there meet by length."""
    plan = plan_of(ALL_LENGTHS)
    order = plan_epoch(len(ALL_LENGTHS), seed=0, epoch=1)
    place = {row: number // (4 * POOL_BATCHES) for number, row in enumerate(order)}
    for batch in epoch_of(plan, epoch=1):
        assert len({place[key] for key in batch.row_keys}) == 1


def test_any_grouped_step_can_be_had_without_those_before() -> None:
    steps = (77, 0, 50, 149)
    plan = plan_of(ALL_LENGTHS)
    in_order = [plan.batch_for_step(step) for step in range(150)]
    assert [plan_of(ALL_LENGTHS).batch_for_step(step) for step in steps] == [
        in_order[step] for step in steps
    ]
    assert max(ALL_LENGTHS) == max(s.num_inputs for s in in_order[0].sequences)


@pytest.mark.parametrize("grouped", [False, True])
def test_it_is_said_how_much_is_padding(grouped: bool) -> None:
    plan = plan_of((200, 1, 199, 2, 198, 3, 197, 4), grouped=grouped, batch_size=8)
    note = plan.padding_note(microbatch_size=4, max_seq_length=MAX)
    assert note == "an epoch computes 832 positions for 804 tokens: 3% padding"
    wide = plan.padding_note(microbatch_size=8, max_seq_length=MAX)
    helps = "" if grouped else "; --packing or --group-by-length makes it less"
    assert wide == f"an epoch computes 1600 positions for 804 tokens: 50% padding{helps}"
