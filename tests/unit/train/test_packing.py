"""Rows laid end to end: none lost, none mixed, few sequences; and what crosses the network."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exo_train.config import TrainConfig
from exo_train.errors import ProtocolError
from exo_train.train.batches import (
    BatchPlan,
    Microbatch,
    evaluation_batches,
    plan_batches,
    split_microbatches,
)
from exo_train.train.examples import Example
from exo_train.train.messages import from_microbatch_data, to_microbatch_data
from exo_train.train.packing import pack
from exo_train.train.step_shapes import steps_of
from exo_train.wire.pb import control_pb2 as pb

ROOM = 32
CONFIG = TrainConfig(batch_size=3, max_seq_length=ROOM, packing=True)
lengths = st.lists(st.integers(2, ROOM + 1), min_size=1, max_size=40)


def rows(sizes: list[int]) -> tuple[Example, ...]:
    """Give rows whose tokens count up, each from its own hundred; the first half is no target."""
    return tuple(
        Example(
            tokens=tuple(range(100 * number + 1, 100 * number + size + 1)),
            supervised=tuple(place >= max(1, size // 2) for place in range(size)),
            where="test",
        )
        for number, size in enumerate(sizes)
    )


def epoch_of(plan: BatchPlan, microbatch_size: int = 2) -> list[Microbatch]:
    return [
        microbatch
        for step in range(plan.steps_per_epoch)
        for microbatch in split_microbatches(
            plan.batch_for_step(step), microbatch_size=microbatch_size, max_seq_length=ROOM
        )
    ]


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, ROOM), max_size=60))
def test_packs_hold_every_row_once_and_are_well_filled(sizes: list[int]) -> None:
    packs = pack(sizes, range(len(sizes)), room=ROOM)
    assert Counter(row for rows in packs for row in rows) == Counter(range(len(sizes)))
    filled = [sum(sizes[row] for row in rows) for rows in packs]
    assert all(0 < size <= ROOM for size in filled)
    # Were two at most half full, the later one's rows would have gone into the other.
    assert sum(size <= ROOM // 2 for size in filled) <= 1


def test_the_fullest_pack_with_room_is_taken() -> None:
    assert pack([6, 5, 4, 3, 2], [0, 1, 2, 3, 4], room=10) == ((0, 2), (1, 3, 4))
    assert pack([5, 5, 5], [2, 0, 1], room=10) == ((2, 0), (1,))
    assert pack([], [], room=10) == ()


def test_packs_never_change_between_versions_and_the_seed_decides() -> None:
    # Written down once: a run must resume with the same packs after any upgrade.
    made = rows([5, 17, 9, 9, 30, 3, 9])
    config = replace(CONFIG, batch_size=2)
    plan = plan_batches(made, config)
    steps = [plan.batch_for_step(step).sequences for step in range(2)]
    assert [[s.row_keys for s in step] for step in steps] == [[(2, 0), (1, 6, 3)], [(4, 5)]]
    assert plan.batch_for_step(1) == plan_batches(made, config).batch_for_step(1)
    others = [plan_batches(made, replace(CONFIG, seed=seed)) for seed in range(1, 9)]
    packs = {frozenset(other.batch_for_step(0).sequences) for other in others}
    assert len(packs) > 1


def test_arrays_of_a_pack_are_shifted_within_each_row() -> None:
    (microbatch,) = epoch_of(plan_batches(rows([4, 3, 5]), CONFIG))
    assert microbatch.row_keys == (2, 0, 1)
    assert microbatch.row_starts == (0, 4, 7)
    pads = [0] * 7
    assert microbatch.tokens_BT.tolist() == [[201, 202, 203, 204, 1, 2, 3, 101, 102, *pads]]
    assert microbatch.targets_BT.tolist() == [[202, 203, 204, 205, 2, 3, 4, 102, 103, *pads]]


@settings(max_examples=60, deadline=None)
@given(sizes=lengths, microbatch_size=st.integers(1, 4), seed=st.integers(0, 9))
def test_every_row_s_tokens_and_masks_come_once_and_together(
    sizes: list[int], microbatch_size: int, seed: int
) -> None:
    made = rows(sizes)
    plan = plan_batches(made, replace(CONFIG, seed=seed))
    seen: dict[int, tuple[int, ...]] = {}
    for microbatch in epoch_of(plan, microbatch_size):
        num_positions = microbatch.tokens_BT.shape[1]
        assert num_positions <= ROOM
        starts = microbatch.row_starts or range(0, microbatch.tokens_BT.size, num_positions)
        for key, start in zip(microbatch.row_keys, starts, strict=True):
            here = slice(start, start + len(made[key].tokens) - 1)
            assert start // num_positions == (here.stop - 1) // num_positions, "not over an end"
            assert key not in seen
            seen[key] = (microbatch.tokens_BT.flat[start], *microbatch.targets_BT.flat[here])
            assert tuple(microbatch.tokens_BT.flat[here]) == made[key].tokens[:-1]
            assert tuple(microbatch.mask_BT.flat[here]) == made[key].supervised[1:]
    assert seen == {key: row.tokens for key, row in enumerate(made)}


@settings(max_examples=40, deadline=None)
@given(sizes=lengths, batch_size=st.integers(1, 6))
def test_the_first_step_has_the_longest_pack_and_the_planner_is_told_of_it(
    sizes: list[int], batch_size: int
) -> None:
    config = replace(CONFIG, batch_size=batch_size)
    plan = plan_batches(rows(sizes), config)
    steps = [plan.batch_for_step(step) for step in range(plan.steps_per_epoch)]
    widest = [max(s.num_inputs for s in step.sequences) for step in steps]
    assert widest[0] == max(widest)
    shape = steps_of(plan, config)(1)
    assert shape.num_sequences == min(batch_size, plan.num_sequences)
    assert widest[0] <= shape.longest == max(m.tokens_BT.shape[1] for m in epoch_of(plan, 1))
    assert shape.longest <= ROOM
    tokens = sum(step.num_tokens for step in steps)
    assert shape.mean_width >= tokens / plan.num_sequences


def test_it_is_said_how_full_the_packs_are() -> None:
    plan = plan_batches(rows([17, 17, 9, 9]), CONFIG)
    assert plan.notes == (
        "4 sequences are packed into 2 of at most 32 tokens, 75% full; a batch is 3 of these",
        "2 sequences are fewer than the batch size 3: each step trains on all of them",
    )


def test_held_out_rows_are_packed_too_and_none_is_lost() -> None:
    made = rows([9, 20, 33, 5, 12, 2])
    batches = evaluation_batches(made, batch_size=2, packed_length=ROOM)
    assert sorted(key for batch in batches for key in batch.row_keys) == list(range(6))
    assert sum(len(batch.sequences) for batch in batches) == 3
    supervised = sum(batch.num_supervised_tokens for batch in batches)
    assert supervised == sum(row.num_supervised_tokens for row in made)


def test_rows_of_a_pack_cross_the_network() -> None:
    (microbatch,) = epoch_of(plan_batches(rows([9, 9, 20, 30]), CONFIG), microbatch_size=3)
    data = to_microbatch_data(microbatch, with_tokens=True, with_targets=False)
    data = pb.MicrobatchData.FromString(data.SerializeToString())
    received = from_microbatch_data(0, data, vocab_size=999)
    assert received.row_keys == microbatch.row_keys
    assert received.row_starts == microbatch.row_starts
    assert len(received.row_starts) == 4
    assert received.row_lengths == microbatch.row_lengths
    assert received.row_lengths == (29, 19, 8, 8), "a row's last token is no position"


@pytest.mark.parametrize(
    "starts",
    [(0, 8), (0, 8, 64), (8, 16, 40), (0, 16, 8, 32), (0, 8, 8, 32), (0, 8, 24), (1, 32, 40)],
    ids=str,
)
def test_rows_that_do_not_lie_end_to_end_are_refused(starts: tuple[int, ...]) -> None:
    """They come from the network; two sequences of 32 positions, which begin at 0 and 32."""
    keys = list(range(len(starts)))
    data = pb.MicrobatchData(num_sequences=2, num_positions=32, row_keys=keys, row_starts=starts)
    with pytest.raises(ProtocolError, match=r"microbatch 4: its rows do not lie end to end"):
        from_microbatch_data(4, data, vocab_size=99)
    good = pb.MicrobatchData(
        num_sequences=2, num_positions=32, row_keys=[7, 8, 9], row_starts=(0, 8, 32)
    )
    assert from_microbatch_data(4, good, vocab_size=99).row_starts == (0, 8, 32)
    good.row_lengths.extend((8, 20, 33))
    with pytest.raises(ProtocolError, match="row lengths that do not fit"):
        from_microbatch_data(4, good, vocab_size=99)
    del good.row_lengths[:]
    good.row_keys.append(10)
    with pytest.raises(ProtocolError, match="4 row keys"):
        from_microbatch_data(4, good, vocab_size=99)


def test_an_empty_microbatch_has_no_rows() -> None:
    data = pb.MicrobatchData(num_sequences=1, num_positions=0, row_keys=[1], row_starts=[0])
    with pytest.raises(ProtocolError, match="end to end"):
        from_microbatch_data(0, data, vocab_size=99)
