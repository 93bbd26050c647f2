"""Random orders and choices of rows, from a seed alone: the same on every machine and for years.

Owns the streams of a seed. Pure. Must not know what rows are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from exo_train.errors import ConfigError

# Separate random streams of one seed.
_EPOCHS, _VALIDATION, _WEIGHTS, GROUPS, PACKS = range(5)
Item = TypeVar("Item")


@functools.lru_cache(maxsize=2)
def plan_epoch(num_rows: int, *, seed: int, epoch: int) -> tuple[int, ...]:
    """Give the order of one epoch, a permutation of `range(num_rows)`."""
    return permutation(num_rows, seed, epoch, _EPOCHS)


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
    chosen = set(permutation(len(items), seed, 0, _VALIDATION)[:val_rows])
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
    chosen = sorted(permutation(len(items), seed, source, _WEIGHTS)[:num_more])
    return tuple(items) * whole + tuple(items[index] for index in chosen)


def permutation(num_items: int, *entropy: int) -> tuple[int, ...]:
    """Shuffle by sorting raw PCG64 words.

    NumPy keeps a bit generator's stream the same in all versions, but not `Generator.permutation`
    (NEP 19); a run must be able to resume after an upgrade.
    """
    words = np.random.PCG64(entropy).random_raw(num_items)
    return tuple(np.argsort(words, kind="stable").tolist())
