"""Which examples make a step, and a step as padded arrays.

Owns the order of an epoch, the steps and their microbatches. The rows of a step depend only on
seed, data and the options of batches. Must not know devices, schedules or frameworks.

A *row* is one example; a *sequence* is what a microbatch has B of: one row, or with packing
several, end to end. Shapes: B sequences, T positions.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from exo_train.backends.base import MicrobatchInput
from exo_train.config import TrainConfig
from exo_train.train.examples import Example
from exo_train.train.packing import pack
from exo_train.train.random_order import GROUPS, PACKS, permutation, plan_epoch

PAD_MULTIPLE = 8  # few different widths, so that few kernels are compiled and memory is reused
PAD_TOKEN = 0  # any valid id: pads are known by their position, never by their id
# With m = 4p microbatches a flushed pipeline of p stages idles (p - 1) / (m + p - 1) < 20 %.
MICROBATCHES_PER_STAGE = 4
# Grouped by length, so many batches are cut from one sorted stretch of the epoch: a sequence is
# padded by at most the lengths' range over this, and PAD_MULTIPLE - 1, on average.
POOL_BATCHES = 16
MUCH_PADDING = 0.2  # from which share of the positions on it is said what helps

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """One row or several end to end; `row_keys` are their places in the data set.

    Or with `is_pair` two that stay together: a chosen answer and the rejected one, each a sequence
    of a microbatch.
    """

    row_keys: tuple[int, ...]
    examples: tuple[Example, ...]
    is_pair: bool = False

    @property
    def num_inputs(self) -> int:
        """Count positions without padding, of a pair those of its longer answer.

        A row's last token is only a target.
        """
        counts = [_num_inputs(example) for example in self.examples]
        return max(counts) if self.is_pair else sum(counts)

    @property
    def num_answers(self) -> int:
        """Count the sequences of a microbatch that it makes."""
        return len(self.examples) if self.is_pair else 1

    def halves(self) -> tuple[TokenSequence, ...]:
        """Give these sequences."""
        if not self.is_pair:
            return (self,)
        return tuple(
            TokenSequence(row_keys=(key,), examples=(example,))
            for key, example in zip(self.row_keys, self.examples, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """The sequences of one optimizer step."""

    step: int
    epoch: int
    sequences: tuple[TokenSequence, ...]

    @property
    def row_keys(self) -> tuple[int, ...]:
        return tuple(key for sequence in self.sequences for key in sequence.row_keys)

    @property
    def examples(self) -> tuple[Example, ...]:
        return tuple(example for sequence in self.sequences for example in sequence.examples)

    @property
    def num_tokens(self) -> int:
        """Count positions computed, without padding."""
        return sum(_num_inputs(example) for example in self.examples)

    @property
    def num_supervised_tokens(self) -> int:
        return sum(example.num_supervised_tokens for example in self.examples)

    @property
    def num_losses(self) -> int:
        """Count what the step's loss is a mean over: pairs, or supervised tokens."""
        pairs = sum(sequence.is_pair for sequence in self.sequences)
        return pairs or self.num_supervised_tokens

    def num_positions(self, *, microbatch_size: int, max_seq_length: int) -> int:
        """Count positions computed once the step is cut into microbatches, padding included."""
        return sum(
            sum(sequence.num_answers for sequence in cut) * _width(cut, max_seq_length)
            for cut in _cuts(self, microbatch_size=microbatch_size)
        )

    def num_padded_tokens(self, *, microbatch_size: int, max_seq_length: int) -> int:
        """Count those of them that are padding."""
        positions = self.num_positions(
            microbatch_size=microbatch_size, max_seq_length=max_seq_length
        )
        return positions - self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Microbatch:
    """int32 `tokens_BT` and `targets_BT` (the next token), bool `mask_BT` (True: supervised).

    `row_starts` is empty where each sequence is one row; else it has the first position of each
    row of `row_keys`, counted through all sequences (sequence * T + position).
    """

    index: int
    tokens_BT: np.ndarray
    targets_BT: np.ndarray
    mask_BT: np.ndarray
    row_keys: tuple[int, ...]
    row_starts: tuple[int, ...] = ()
    row_lengths: tuple[int, ...] = ()  # positions without pads

    def to_input(self) -> MicrobatchInput:
        """Give what a stage needs that is the whole model."""
        return MicrobatchInput(
            index=self.index,
            tokens_BT=self.tokens_BT,
            targets_BT=self.targets_BT,
            mask_BT=self.mask_BT,
            row_keys=self.row_keys,
            row_starts=self.row_starts,
            row_lengths=self.row_lengths,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """All steps of a run with random access: a run resumes anywhere without replaying.

    `packed_length` is how many positions rows may share, 0: each row is a sequence. Rows are packed
    once, epochs order the packs. `group_by_length` puts sequences of similar length together. With
    `has_pairs` two examples each belong together, and what is said of sequences is so of pairs.
    """

    examples: tuple[Example, ...]
    batch_size: int
    seed: int
    packed_length: int = 0
    group_by_length: bool = False
    has_pairs: bool = False
    _sequences: tuple[TokenSequence, ...] = field(init=False, repr=False, compare=False)
    _batches: Callable[[int], tuple[tuple[int, ...], ...]] = field(
        init=False, repr=False, compare=False
    )
    _first: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows = _sequences(
            self.examples,
            packed_length=self.packed_length,
            seed=self.seed,
            has_pairs=self.has_pairs,
        )
        widths = tuple(sequence.num_inputs for sequence in rows)
        batches = functools.lru_cache(maxsize=2)(functools.partial(self._draw, widths))
        object.__setattr__(self, "_sequences", rows)
        object.__setattr__(self, "_batches", batches)
        object.__setattr__(self, "_first", _heaviest(batches(0), widths) if rows else 0)

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.num_sequences / self.batch_size)

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    @property
    def longest(self) -> TokenSequence:
        return max(self._sequences, key=lambda sequence: sequence.num_inputs)

    @property
    def notes(self) -> tuple[str, ...]:
        notes = []
        if self.packed_length:
            room = self.num_sequences * self.packed_length
            filled = sum(sequence.num_inputs for sequence in self._sequences) / room
            notes.append(
                f"{len(self.examples)} sequences are packed into {self.num_sequences} of at most "
                f"{self.packed_length} tokens, {filled:.0%} full; a batch is {self.batch_size} of "
                "these"
            )
        if self.num_sequences < self.batch_size:
            notes.append(
                f"{self.num_sequences} {'pairs' if self.has_pairs else 'sequences'} are fewer than "
                f"the batch size {self.batch_size}: "
                "each step trains on all of them"
            )
        return tuple(notes)

    def padding_note(self, *, microbatch_size: int, max_seq_length: int) -> str:
        """Say how much of what an epoch computes is padding, and what helps if it is much."""
        steps = [self.batch_for_step(step) for step in range(self.steps_per_epoch)]
        tokens = sum(step.num_tokens for step in steps)
        padded = sum(
            step.num_padded_tokens(microbatch_size=microbatch_size, max_seq_length=max_seq_length)
            for step in steps
        )
        positions = tokens + padded
        share = padded / positions
        said = f"an epoch computes {positions} positions for {tokens} tokens: {share:.0%} padding"
        if share > MUCH_PADDING and not (self.packed_length or self.group_by_length):
            ways = "--group-by-length" if self.has_pairs else "--packing or --group-by-length"
            said += f"; {ways} makes it less"
        return said

    def batch_for_step(self, step: int) -> StepBatch:
        """Give the rows of `step` (from 0); one batch of an epoch may be short.

        The run's first step has the longest sequence: where memory does not do for it, it shows at
        once, not after hours. The batch whose turn it was comes in that one's place.
        """
        epoch, index = divmod(step, self.steps_per_epoch)
        if epoch == 0 and index in (0, self._first):
            index = self._first - index
        sequences = tuple(self._sequences[number] for number in self._batches(epoch)[index])
        return StepBatch(step=step, epoch=epoch, sequences=sequences)

    def _draw(self, widths: tuple[int, ...], epoch: int) -> tuple[tuple[int, ...], ...]:
        """Give an epoch's batches as numbers of sequences."""
        order = plan_epoch(len(widths), seed=self.seed, epoch=epoch)
        if not self.group_by_length:
            return tuple(_chunks(order, self.batch_size))
        batches = [
            batch
            for pool in _chunks(order, POOL_BATCHES * self.batch_size)
            for batch in _chunks(sorted(pool, key=lambda n: -widths[n]), self.batch_size)
        ]
        places = permutation(len(batches), self.seed, epoch, GROUPS)
        return tuple(batches[place] for place in places)


def plan_batches(examples: tuple[Example, ...], config: TrainConfig) -> BatchPlan:
    """Give the steps that a run's options make of its training rows."""
    return BatchPlan(
        examples=examples,
        batch_size=config.batch_size,
        seed=config.seed,
        packed_length=config.max_seq_length if config.packing else 0,
        group_by_length=config.group_by_length,
        has_pairs=config.learnt.has_pairs,
    )


def evaluation_batches(
    examples: Sequence[Example],
    *,
    batch_size: int,
    packed_length: int = 0,
    has_pairs: bool = False,
) -> list[StepBatch]:
    """Cut validation examples in their order, or as packed; the last batch may be short."""
    sequences = _sequences(examples, packed_length=packed_length, seed=0, has_pairs=has_pairs)
    return [
        StepBatch(step=index, epoch=0, sequences=part)
        for index, part in enumerate(_chunks(sequences, batch_size))
    ]


def choose_microbatch_size(batch_size: int, *, num_stages: int) -> int:
    """Give the largest size that still makes enough microbatches to fill the pipeline."""
    return max(1, batch_size // (MICROBATCHES_PER_STAGE * num_stages))


def _sequences(
    examples: Sequence[Example], *, packed_length: int, seed: int, has_pairs: bool
) -> tuple[TokenSequence, ...]:
    """Make a sequence of each row, or pack rows into sequences of at most so many positions."""
    rows = range(len(examples))
    packs: Iterable[tuple[int, ...]] = ((row,) for row in rows)
    if has_pairs:
        packs = zip(rows[::2], rows[1::2], strict=True)
    if packed_length:
        order = permutation(len(examples), seed, 0, PACKS)
        packs = pack([_num_inputs(e) for e in examples], order, room=packed_length)
    return tuple(
        TokenSequence(
            row_keys=keys, examples=tuple(examples[key] for key in keys), is_pair=has_pairs
        )
        for keys in packs
    )


def _heaviest(batches: Sequence[Sequence[int]], widths: Sequence[int]) -> int:
    """Give the batch with the longest sequence, of those the largest, of those the first.

    What memory a step needs depends on its longest sequences, however it is cut into microbatches.
    """
    weights = [(max(widths[n] for n in batch), sum(widths[n] for n in batch)) for batch in batches]
    return weights.index(max(weights))


def split_microbatches(
    batch: StepBatch, *, microbatch_size: int, max_seq_length: int
) -> list[Microbatch]:
    """Cut a step into padded arrays, the longest first: if memory is short, it shows at once."""
    return [
        _microbatch(index, cut, max_seq_length)
        for index, cut in enumerate(_cuts(batch, microbatch_size=microbatch_size))
    ]


def _microbatch(index: int, cut: Sequence[TokenSequence], max_seq_length: int) -> Microbatch:
    # Of pairs all chosen answers first.
    cut = list(itertools.chain(*zip(*(sequence.halves() for sequence in cut), strict=True)))
    shape = (len(cut), _width(cut, max_seq_length))
    tokens_BT = np.full(shape, PAD_TOKEN, np.int32)
    targets_BT = np.full(shape, PAD_TOKEN, np.int32)
    mask_BT = np.zeros(shape, np.bool_)
    row_starts = []
    for number, sequence in enumerate(cut):
        start = 0
        for example in sequence.examples:
            end = start + _num_inputs(example)
            tokens_BT[number, start:end] = example.tokens[:-1]
            targets_BT[number, start:end] = example.tokens[1:]
            mask_BT[number, start:end] = example.supervised[1:]
            row_starts.append(number * shape[1] + start)
            start = end
    return Microbatch(
        index=index,
        tokens_BT=tokens_BT,
        targets_BT=targets_BT,
        mask_BT=mask_BT,
        row_keys=tuple(key for sequence in cut for key in sequence.row_keys),
        row_starts=tuple(row_starts) if len(row_starts) > len(cut) else (),
        row_lengths=tuple(_num_inputs(e) for sequence in cut for e in sequence.examples),
    )


def _cuts(batch: StepBatch, *, microbatch_size: int) -> list[tuple[TokenSequence, ...]]:
    """Sort by length before cutting, so that a sequence meets others of its own length."""
    ordered = sorted(batch.sequences, key=lambda s: (-s.num_inputs, s.row_keys))
    return list(_chunks(ordered, microbatch_size))


def _chunks(items: Sequence[Item], size: int) -> Iterator[tuple[Item, ...]]:
    for start in range(0, len(items), size):
        yield tuple(items[start : start + size])


def _width(cut: Iterable[TokenSequence], max_seq_length: int) -> int:
    longest = max(sequence.num_inputs for sequence in cut)
    return min(math.ceil(longest / PAD_MULTIPLE) * PAD_MULTIPLE, max_seq_length)


def _num_inputs(example: Example) -> int:
    return len(example.tokens) - 1
