"""Which examples make a step, and a step as padded arrays.

Owns the order of an epoch, the steps and their microbatches. The rows of a step depend only on
seed, data and batch size. Must not know devices, schedules or frameworks.

Shapes: B sequences, T positions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from exo_train.errors import ConfigError
from exo_train.train.examples import Example

PAD_MULTIPLE = 8  # few different widths, so that few kernels are compiled and memory is reused
PAD_TOKEN = 0  # any valid id: pads are known by their position, never by their id
# With m = 4p microbatches a flushed pipeline of p stages idles (p - 1) / (m + p - 1) < 20 %.
MICROBATCHES_PER_STAGE = 4

_EPOCHS, _VALIDATION, _WEIGHTS = 0, 1, 2  # separate random streams of one seed
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """The sequences of one optimizer step; `row_keys` are their places in the data set."""

    step: int
    epoch: int
    examples: tuple[Example, ...]
    row_keys: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Count positions computed, without padding; a row's last token is only a target."""
        return sum(_num_inputs(example) for example in self.examples)

    @property
    def num_supervised_tokens(self) -> int:
        return sum(example.num_supervised_tokens for example in self.examples)

    def num_positions(self, *, microbatch_size: int, max_seq_length: int) -> int:
        """Count positions computed once the step is cut into microbatches, padding included."""
        return sum(
            len(cut) * _width(cut, max_seq_length)
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
    """int32 `tokens_BT` and `targets_BT` (the next token), bool `mask_BT` (True: supervised)."""

    index: int
    tokens_BT: np.ndarray
    targets_BT: np.ndarray
    mask_BT: np.ndarray
    row_keys: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """All steps of a run with random access: a run resumes anywhere without replaying."""

    examples: tuple[Example, ...]
    batch_size: int
    seed: int
    _first: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        first = _heaviest(self.examples, self.batch_size, seed=self.seed) if self.examples else 0
        object.__setattr__(self, "_first", first)

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(len(self.examples) / self.batch_size)

    @property
    def notes(self) -> tuple[str, ...]:
        if len(self.examples) >= self.batch_size:
            return ()
        return (
            f"{len(self.examples)} sequences are fewer than the batch size {self.batch_size}: "
            "each step trains on all of them",
        )

    def batch_for_step(self, step: int) -> StepBatch:
        """Give the rows of `step` (from 0); an epoch's last batch may be short.

        The run's first step has the longest row: where memory does not do for it, it shows at
        once, not after hours. The batch whose turn it was comes in that one's place.
        """
        epoch, index = divmod(step, self.steps_per_epoch)
        if epoch == 0 and index in (0, self._first):
            index = self._first - index
        order = plan_epoch(len(self.examples), seed=self.seed, epoch=epoch)
        keys = order[index * self.batch_size : (index + 1) * self.batch_size]
        examples = tuple(self.examples[key] for key in keys)
        return StepBatch(step=step, epoch=epoch, examples=examples, row_keys=keys)


@functools.lru_cache(maxsize=2)
def plan_epoch(num_rows: int, *, seed: int, epoch: int) -> tuple[int, ...]:
    """Give the order of one epoch, a permutation of `range(num_rows)`."""
    return _permutation(num_rows, seed, epoch, _EPOCHS)


def evaluation_batches(examples: Sequence[Example], *, batch_size: int) -> list[StepBatch]:
    """Cut validation examples in their order; the last batch may be short."""
    return [
        StepBatch(
            step=index,
            epoch=0,
            examples=tuple(examples[start : start + batch_size]),
            row_keys=tuple(range(len(examples))[start : start + batch_size]),
        )
        for index, start in enumerate(range(0, len(examples), batch_size))
    ]


def split_validation(
    items: Sequence[Item], *, val_rows: int, seed: int
) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """Take a fixed `val_rows` out of the training items; both parts keep the file's order.

    Best given rows, before encoding: a row may become several examples, which belong together.
    """
    if val_rows >= len(items):
        raise ConfigError(
            f"{val_rows} rows held out of {len(items)} leave nothing to train on; hold out at most "
            f"{len(items) - 1} ('val_rows' or 'val_split')"
        )
    chosen = set(_permutation(len(items), seed, 0, _VALIDATION)[:val_rows])
    train = tuple(item for index, item in enumerate(items) if index not in chosen)
    return train, tuple(items[index] for index in sorted(chosen))


def repeat_items(
    items: Sequence[Item], *, times: float, seed: int, source: int
) -> tuple[Item, ...]:
    """Give the items `times` times; the fraction is a fixed part of them, in their order.

    `source` keeps equal files from having equal parts. At least one item is left.
    """
    whole = int(times)
    num_more = round((times - whole) * len(items))
    if items and not whole and not num_more:
        num_more = 1
    chosen = sorted(_permutation(len(items), seed, source, _WEIGHTS)[:num_more])
    return tuple(items) * whole + tuple(items[index] for index in chosen)


def choose_microbatch_size(batch_size: int, *, num_stages: int) -> int:
    """Give the largest size that still makes enough microbatches to fill the pipeline."""
    return max(1, batch_size // (MICROBATCHES_PER_STAGE * num_stages))


def _heaviest(examples: Sequence[Example], batch_size: int, *, seed: int) -> int:
    """Give the batch of the first epoch with the longest row, and of those the largest.

    What memory a step needs depends on its longest rows, however it is cut into microbatches.
    """
    lengths = np.fromiter((len(example.tokens) for example in examples), np.int64, len(examples))
    order = np.array(plan_epoch(len(examples), seed=seed, epoch=0))
    starts = range(0, len(examples), batch_size)
    longest = np.maximum.reduceat(lengths[order], starts)
    totals = np.add.reduceat(lengths[order], starts)
    return int(np.lexsort((-np.arange(len(starts)), totals, longest))[-1])


def split_microbatches(
    batch: StepBatch, *, microbatch_size: int, max_seq_length: int
) -> list[Microbatch]:
    """Cut a step into padded arrays, longest rows first: if memory is short, it shows at once."""
    return [
        _microbatch(index, batch, cut, max_seq_length)
        for index, cut in enumerate(_cuts(batch, microbatch_size=microbatch_size))
    ]


def _microbatch(
    index: int, batch: StepBatch, cut: list[tuple[int, Example]], max_seq_length: int
) -> Microbatch:
    shape = (len(cut), _width(cut, max_seq_length))
    tokens_BT = np.full(shape, PAD_TOKEN, np.int32)
    targets_BT = np.full(shape, PAD_TOKEN, np.int32)
    mask_BT = np.zeros(shape, np.bool_)
    for row, (_, example) in enumerate(cut):
        end = _num_inputs(example)
        tokens_BT[row, :end] = example.tokens[:-1]
        targets_BT[row, :end] = example.tokens[1:]
        mask_BT[row, :end] = example.supervised[1:]
    return Microbatch(
        index=index,
        tokens_BT=tokens_BT,
        targets_BT=targets_BT,
        mask_BT=mask_BT,
        row_keys=tuple(key for key, _ in cut),
    )


def _cuts(batch: StepBatch, *, microbatch_size: int) -> list[list[tuple[int, Example]]]:
    """Sort by length before cutting, so that a row meets rows of its own length."""
    pairs = zip(batch.row_keys, batch.examples, strict=True)
    ordered = sorted(pairs, key=lambda pair: (-len(pair[1].tokens), pair[0]))
    return [ordered[i : i + microbatch_size] for i in range(0, len(ordered), microbatch_size)]


def _width(cut: Iterable[tuple[int, Example]], max_seq_length: int) -> int:
    longest = max(_num_inputs(example) for _, example in cut)
    return min(math.ceil(longest / PAD_MULTIPLE) * PAD_MULTIPLE, max_seq_length)


def _num_inputs(example: Example) -> int:
    return len(example.tokens) - 1


def _permutation(num_items: int, *entropy: int) -> tuple[int, ...]:
    """Shuffle by sorting raw PCG64 words.

    NumPy keeps a bit generator's stream the same in all versions, but not `Generator.permutation`
    (NEP 19); a run must be able to resume after an upgrade.
    """
    words = np.random.PCG64(entropy).random_raw(num_items)
    return tuple(np.argsort(words, kind="stable").tolist())
