"""Order of rows, steps and padded arrays: who is trained when, and nothing lost on the way."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exo_train.errors import ConfigError
from exo_train.train.batches import (
    BatchPlan,
    Microbatch,
    StepBatch,
    TokenSequence,
    choose_microbatch_size,
    evaluation_batches,
    split_microbatches,
)
from exo_train.train.examples import Example
from exo_train.train.random_order import plan_epoch, split_validation

MAX = 256


def example(*tokens: int, supervised: tuple[bool, ...] | None = None) -> Example:
    everything = (False,) + (True,) * (len(tokens) - 1)
    return Example(tokens=tokens, supervised=supervised or everything, where="test")


def examples_of_lengths(lengths: list[int]) -> tuple[Example, ...]:
    """Each token id is unique over all rows, so a lost or doubled token shows."""
    ends = np.cumsum(lengths).tolist()
    return tuple(
        example(*range(end - length + 1, end + 1))
        for end, length in zip(ends, lengths, strict=True)
    )


def step_of(*examples: Example) -> StepBatch:
    sequences = tuple(
        TokenSequence(row_keys=(key,), examples=(row,)) for key, row in enumerate(examples)
    )
    return StepBatch(step=0, epoch=0, sequences=sequences)


def split(batch: StepBatch, size: int, max_seq_length: int = MAX) -> list[Microbatch]:
    return split_microbatches(batch, microbatch_size=size, max_seq_length=max_seq_length)


def test_epoch_order_never_changes_between_versions() -> None:
    # Written down once: a run must resume with the same rows after any upgrade.
    assert plan_epoch(10, seed=0, epoch=0) == (3, 2, 1, 8, 6, 0, 7, 4, 5, 9)
    assert plan_epoch(10, seed=0, epoch=1) != plan_epoch(10, seed=0, epoch=0)
    assert plan_epoch(10, seed=1, epoch=0) != plan_epoch(10, seed=0, epoch=0)


@pytest.mark.parametrize("group_by_length", [False, True])
@pytest.mark.parametrize("packed_length", [0, 32])
@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 33), min_size=1, max_size=40),
    batch_size=st.integers(1, 50),
    num_epochs=st.integers(1, 3),
    seed=st.integers(0, 2**40),
)
def test_every_row_is_trained_exactly_once_per_epoch(
    group_by_length: bool,
    packed_length: int,
    lengths: list[int],
    batch_size: int,
    num_epochs: int,
    seed: int,
) -> None:
    """F17: however rows are ordered and laid together."""
    num_rows = len(lengths)
    plan = BatchPlan(
        examples=examples_of_lengths(lengths),
        batch_size=batch_size,
        seed=seed,
        packed_length=packed_length,
        group_by_length=group_by_length,
    )
    for epoch in range(num_epochs):
        steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
        batches = [plan.batch_for_step(step) for step in steps]
        assert {batch.epoch for batch in batches} == {epoch}
        counts = Counter(key for batch in batches for key in batch.row_keys)
        assert counts == dict.fromkeys(range(num_rows), 1)
        for batch in batches:
            assert [plan.examples[key] for key in batch.row_keys] == list(batch.examples)


def test_last_rows_of_an_epoch_make_a_short_batch() -> None:
    plan = BatchPlan(examples=examples_of_lengths([3] * 10), batch_size=4, seed=0)
    assert [len(plan.batch_for_step(step).row_keys) for step in range(6)] == [4, 4, 2, 4, 4, 2]


def test_each_epoch_has_its_own_order() -> None:
    plan = BatchPlan(examples=examples_of_lengths([3] * 10), batch_size=10, seed=0)
    orders = {plan.batch_for_step(epoch).row_keys for epoch in range(4)}
    assert len(orders) == 4


def test_fewer_rows_than_the_batch_train_together_and_it_is_said() -> None:
    plan = BatchPlan(examples=examples_of_lengths([3] * 3), batch_size=4, seed=0)
    assert sorted(plan.batch_for_step(5).row_keys) == [0, 1, 2]
    assert plan.notes == (
        "3 sequences are fewer than the batch size 4: each step trains on all of them",
    )
    assert BatchPlan(examples=plan.examples, batch_size=3, seed=0).notes == ()


def test_any_step_can_be_had_without_those_before() -> None:
    plan = BatchPlan(examples=examples_of_lengths([3] * 10), batch_size=4, seed=7)
    in_order = [plan.batch_for_step(step) for step in range(9)]
    fresh = BatchPlan(examples=plan.examples, batch_size=4, seed=7)
    assert [fresh.batch_for_step(step) for step in (8, 0, 5)] == [
        in_order[step] for step in (8, 0, 5)
    ]


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(2, 60), min_size=1, max_size=12),
    microbatch_size=st.integers(1, 13),
)
def test_splitting_keeps_every_row_target_and_key(lengths: list[int], microbatch_size: int) -> None:
    batch = step_of(*examples_of_lengths(lengths))
    microbatches = split(batch, microbatch_size)
    assert [m.index for m in microbatches] == list(range(len(microbatches)))
    assert all(len(m.row_keys) <= microbatch_size for m in microbatches)
    assert sum(int(m.mask_BT.sum()) for m in microbatches) == batch.num_supervised_tokens
    positions = sum(m.tokens_BT.size for m in microbatches)
    pads = batch.num_padded_tokens(microbatch_size=microbatch_size, max_seq_length=MAX)
    assert positions == batch.num_tokens + pads
    assert positions == batch.num_positions(microbatch_size=microbatch_size, max_seq_length=MAX)
    seen = {}
    for microbatch in microbatches:
        for row, key in enumerate(microbatch.row_keys):
            inputs = microbatch.tokens_BT[row][microbatch.mask_BT[row]].tolist()
            targets = microbatch.targets_BT[row][microbatch.mask_BT[row]].tolist()
            seen[key] = (*inputs[:1], *targets)
            assert inputs[1:] == targets[:-1]
    assert seen == {key: row.tokens for key, row in enumerate(batch.examples)}


def test_arrays_are_shifted_padded_and_masked() -> None:
    short = example(7, 8, 9, supervised=(False, False, True))
    (microbatch,) = split(step_of(short, example(1, 2, 3, 4)), 2)
    pads = [0] * 5
    assert microbatch.row_keys == (1, 0)
    assert microbatch.tokens_BT.tolist() == [[1, 2, 3, *pads], [7, 8, 0, *pads]]
    assert microbatch.targets_BT.tolist() == [[2, 3, 4, *pads], [8, 9, 0, *pads]]
    no = [False] * 5
    assert microbatch.mask_BT.tolist() == [[True, True, True, *no], [False, True, False, *no]]
    assert (microbatch.tokens_BT.dtype, microbatch.targets_BT.dtype) == (np.int32, np.int32)
    assert microbatch.mask_BT.dtype == np.bool_


@pytest.mark.parametrize("length", [2, 8, 9, 10, 64])
def test_a_row_of_l_tokens_has_l_minus_1_targets(length: int) -> None:
    batch = step_of(example(*range(1, length + 1)))
    (microbatch,) = split(batch, 1)
    assert int(microbatch.mask_BT.sum()) == batch.num_supervised_tokens == length - 1


@pytest.mark.parametrize(("length", "width"), [(2, 8), (9, 8), (10, 16), (20, 20)])
def test_width_is_a_multiple_of_eight_within_the_limit(length: int, width: int) -> None:
    (microbatch,) = split(step_of(example(*range(length))), 1, max_seq_length=20)
    assert microbatch.tokens_BT.shape == (1, width)


def test_pads_are_few_when_lengths_differ() -> None:
    lengths = np.random.default_rng(0).permutation(np.arange(2, 201)).tolist()
    plan = BatchPlan(examples=examples_of_lengths(lengths), batch_size=32, seed=0)
    batches = [plan.batch_for_step(step) for step in range(plan.steps_per_epoch)]
    pads = sum(b.num_padded_tokens(microbatch_size=4, max_seq_length=MAX) for b in batches)
    real = sum(batch.num_tokens for batch in batches)
    assert pads / (pads + real) < 0.15  # 0.38 when rows are not sorted by length


@pytest.mark.parametrize(
    ("batch_size", "num_stages", "size"),
    [(8, 1, 2), (8, 2, 1), (32, 2, 4), (64, 3, 5), (1, 1, 1), (4, 5, 1)],
)
def test_chosen_microbatches_fill_the_pipeline(batch_size: int, num_stages: int, size: int) -> None:
    assert choose_microbatch_size(batch_size, num_stages=num_stages) == size


def test_validation_rows_are_taken_out_of_training() -> None:
    items = tuple(range(20))
    train, valid = split_validation(items, val_rows=6, seed=3)
    assert len(valid) == 6
    assert sorted(train + valid) == list(items)
    assert (train, valid) == split_validation(items, val_rows=6, seed=3)
    assert valid != split_validation(items, val_rows=6, seed=4)[1]
    assert split_validation(items, val_rows=0, seed=3) == (items, ())


def test_validation_must_leave_rows_to_train_on() -> None:
    with pytest.raises(ConfigError, match=r"5 rows held out of 5 leave nothing.*at most 4"):
        split_validation(tuple(range(5)), val_rows=5, seed=0)


def test_evaluation_takes_every_row_once_in_order() -> None:
    batches = evaluation_batches(examples_of_lengths([2, 3, 4, 5, 6]), batch_size=2)
    assert [batch.row_keys for batch in batches] == [(0, 1), (2, 3), (4,)]
    assert [len(e.tokens) for batch in batches for e in batch.examples] == [2, 3, 4, 5, 6]


@given(
    lengths=st.lists(st.integers(2, 41), min_size=1, max_size=30),
    batch_size=st.integers(1, 12),
    seed=st.integers(0, 5),
)
@settings(deadline=None)
def test_the_first_step_has_the_longest_row_and_no_row_is_lost(
    lengths: list[int], batch_size: int, seed: int
) -> None:
    plan = BatchPlan(examples=examples_of_lengths(lengths), batch_size=batch_size, seed=seed)
    batches = [plan.batch_for_step(step) for step in range(plan.steps_per_epoch)]
    weights = [
        (max(len(e.tokens) for e in batch.examples), sum(len(e.tokens) for e in batch.examples))
        for batch in batches
    ]
    assert weights[0] == max(weights)
    keys = [key for batch in batches for key in batch.row_keys]
    assert sorted(keys) == list(range(len(lengths)))


def test_only_the_two_batches_change_places() -> None:
    lengths = [9] * 40
    lengths[23] = 200
    plan = BatchPlan(examples=examples_of_lengths(lengths), batch_size=8, seed=0)
    order = plan_epoch(40, seed=0, epoch=0)
    place = order.index(23) // 8
    assert place > 0, "the seed must not put it first by chance"
    cut = [order[start : start + 8] for start in range(0, 40, 8)]
    cut[0], cut[place] = cut[place], cut[0]
    assert [plan.batch_for_step(step).row_keys for step in range(5)] == cut
    # Later epochs are as they were drawn.
    later = plan_epoch(40, seed=0, epoch=1)
    assert plan.batch_for_step(5).row_keys == later[:8]
