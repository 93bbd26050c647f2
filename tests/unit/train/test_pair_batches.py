"""Pairs in batches and above the length limit: never parted, none lost, none twice."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exo_train.config import TrainConfig
from exo_train.errors import DataError, ProtocolError
from exo_train.train.batches import (
    BatchPlan,
    evaluation_batches,
    plan_batches,
    split_microbatches,
)
from exo_train.train.examples import Example
from exo_train.train.messages import from_microbatch_data, to_microbatch_data
from exo_train.train.pair_lengths import fit_pairs
from exo_train.train.step_shapes import full_steps, steps_of

MAX = 64


def example(prompt: int, answer: int, *, first: int = 0) -> Example:
    tokens = tuple(range(first, first + prompt + answer))
    supervised = (False,) * prompt + (True,) * answer
    return Example(tokens=tokens, supervised=supervised, where=f"row {first}")


def pairs_of(answers: list[tuple[int, int]], prompt: int = 3) -> tuple[Example, ...]:
    """Each row's first token is its number, so that halves can be told."""
    return tuple(
        example(prompt, length, first=100 * row + 50 * half)
        for row, lengths in enumerate(answers)
        for half, length in enumerate(lengths)
    )


lengths = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=12)


@given(lengths, st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_each_pair_comes_once_an_epoch_and_stays_together(
    answers: list[tuple[int, int]], batch_size: int, size: int, grouped: bool
) -> None:
    plan = BatchPlan(
        examples=pairs_of(answers),
        batch_size=batch_size,
        seed=1,
        group_by_length=grouped,
        has_pairs=True,
    )
    assert plan.num_sequences == len(answers)
    seen: Counter[int] = Counter()
    for step in range(plan.steps_per_epoch):
        batch = plan.batch_for_step(step)
        assert 1 <= batch.num_losses <= batch_size
        cut = split_microbatches(batch, microbatch_size=size, max_seq_length=MAX)
        for microbatch in cut:
            firsts = microbatch.tokens_BT[:, 0]
            chosen, rejected = np.split(firsts, 2)
            assert (rejected == chosen + 50).all()
            keys = np.split(np.array(microbatch.row_keys), 2)
            assert (keys[1] == keys[0] + 1).all()
            assert len(chosen) <= size
            assert microbatch.row_starts == ()
            seen.update(chosen.tolist())
        positions = sum(microbatch.tokens_BT.size for microbatch in cut)
        assert batch.num_positions(microbatch_size=size, max_seq_length=MAX) == positions
        tokens = sum(sum(microbatch.row_lengths) for microbatch in cut)
        assert batch.num_tokens == tokens
    assert seen == Counter(100 * row for row in range(len(answers)))


def test_a_batch_counts_pairs() -> None:
    config = TrainConfig(objective="dpo", batch_size=2, max_seq_length=MAX)
    plan = plan_batches(pairs_of([(2, 3), (4, 5), (9, 1)]), config)
    assert plan.steps_per_epoch == 2
    assert "3 pairs are fewer than the batch size 4" in " ".join(
        plan_batches(plan.examples, TrainConfig(objective="dpo", batch_size=4)).notes
    )
    held_out = evaluation_batches(plan.examples, batch_size=2, has_pairs=True)
    assert [batch.num_losses for batch in held_out] == [2, 1]


def test_what_the_planner_is_told() -> None:
    """A pair is one of the batch; its width is that of both answers, its longest that of one."""
    config = TrainConfig(objective="dpo", batch_size=2, max_seq_length=MAX)
    shape = steps_of(plan_batches(pairs_of([(2, 3), (4, 30)]), config), config)(1)
    assert (shape.num_sequences, shape.mean_width, shape.longest) == (2, (2 * 8 + 2 * 32) / 2, 32)
    assert shape.positions == 80
    assert full_steps(config)(1).positions == 2 * 2 * MAX


def test_pairs_over_the_wire_are_checked() -> None:
    plan = BatchPlan(examples=pairs_of([(2, 3)]), batch_size=1, seed=0, has_pairs=True)
    (microbatch,) = split_microbatches(
        plan.batch_for_step(0), microbatch_size=1, max_seq_length=MAX
    )
    data = to_microbatch_data(microbatch, with_tokens=True, with_targets=True)
    got = from_microbatch_data(0, data, vocab_size=900, has_pairs=True)
    assert np.array_equal(got.supervision()[1], microbatch.mask_BT)
    unlearnt = type(data).FromString(data.SerializeToString())
    unlearnt.mask = bytes(8) + data.mask[8:]
    with pytest.raises(ProtocolError, match="an answer of a pair has no supervised position"):
        from_microbatch_data(0, unlearnt, vocab_size=900, has_pairs=True)
    odd = type(data)(num_sequences=1, num_positions=8, row_keys=[1], row_lengths=[4])
    with pytest.raises(ProtocolError, match="are no pairs"):
        from_microbatch_data(0, odd, vocab_size=900, has_pairs=True)


def test_prompts_are_cut_alike_and_answers_stay_whole() -> None:
    examples = (example(10, 4), example(10, 9, first=50))
    found = fit_pairs(examples, max_seq_length=15, on_long="truncate")
    assert [e.tokens for e in found.examples] == [
        (0, *range(5, 14)),
        (50, *range(55, 69)),
    ]
    assert [e.num_supervised_tokens for e in found.examples] == [4, 9]
    assert found.notes == (
        "1 of 1 pairs are longer than 15 tokens (the longest: 19): of 1 the prompt is cut at its "
        "beginning",
    )


def test_a_pair_goes_as_a_whole() -> None:
    short, long = (example(2, 3), example(2, 4, first=50)), (example(2, 3), example(2, 30))
    for on_long, fate in (
        ("drop", "1 are left out"),
        ("truncate", "1 are left out, as an answer does not fit whole"),
        ("split", "1 are left out, as an answer does not fit whole"),
    ):
        found = fit_pairs((*long, *short), max_seq_length=10, on_long=on_long)
        assert found.examples == short
        assert found.num_left_out == 1
        assert found.notes[0].endswith(f": {fate}")
    with pytest.raises(DataError, match="an answer of the pair has 32 tokens with its prompt"):
        fit_pairs((*long, *short), max_seq_length=10, on_long="error")


@given(lengths, st.integers(1, 12), st.integers(2, 50))
def test_what_fits_is_pairs_with_whole_answers(
    answers: list[tuple[int, int]], prompt: int, limit: int
) -> None:
    examples = pairs_of(answers, prompt)
    found = fit_pairs(examples, max_seq_length=limit, on_long="truncate")
    before = {e.where: e.num_supervised_tokens for e in examples}
    for chosen, rejected in zip(found.examples[::2], found.examples[1::2], strict=True):
        assert rejected.tokens[0] == chosen.tokens[0] + 50
        assert chosen.supervised.index(True) == rejected.supervised.index(True) >= 1
        for half in (chosen, rejected):
            assert len(half.tokens) <= limit
            assert half.num_supervised_tokens == before[half.where]
    assert len(found.examples) // 2 + found.num_left_out == len(answers)
