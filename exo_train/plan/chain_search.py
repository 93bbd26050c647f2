"""Which chains of devices are tried. Owns full enumeration and, for many devices, a beam search.

Pure and deterministic. Must not judge chains: that is `chains`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from exo_train.plan.chains import Chains, Ints

# Every ordered choice of 8 devices is 109,600 chains, of 9 already 986,409.
MAX_DEVICES_FOR_ALL = 8
# Measured against full enumeration on 60 random households of 6 and 7 devices: the same step in
# all; a quarter of the width missed one by 4 %. 16 devices x 130 pseudo-layers take 2 s.
BEAM_WIDTH = 32
MAX_ROUNDS = 8


def chains_by_length(chains: Chains, *, seed: Ints) -> Iterator[Ints]:
    """Give, for each number of devices, the chains worth judging: all of them up to 8 devices.

    Beyond, they are what a beam search finds; `seed`, a chain that is known to fit, is among them.
    """
    size = len(chains.devices)
    longest = min(size, chains.num_layers)
    if size > MAX_DEVICES_FOR_ALL:
        yield from beam(chains, longest, seed=seed)
        return
    for length in range(1, longest + 1):
        yield _rows(itertools.permutations(range(size), length), length)


def beam(chains: Chains, longest: int, *, seed: Ints) -> Iterator[Ints]:
    """Grow chains by a device at a time, keep the best, and improve them by single changes."""
    size = len(chains.devices)
    kept = np.zeros((1, 0), dtype=np.int64)
    for length in range(1, longest + 1):
        grown = _changed(kept, _insertions, size)
        if len(seed) == length:
            grown = np.vstack([grown, seed[None, :]])
        kept = _best(chains, grown)
        for _ in range(MAX_ROUNDS):
            leader = kept[0]
            kept = _best(chains, np.vstack([kept, _changed(kept, _neighbours, size)]))
            if (kept[0] == leader).all():
                break
        yield kept


def _best(chains: Chains, candidates: Ints) -> Ints:
    unique = np.unique(candidates, axis=0)
    return unique[chains.estimate(unique).better_first()[:BEAM_WIDTH]]


Change = Callable[[tuple[int, ...], list[int]], Iterator[tuple[int, ...]]]


def _changed(kept: Ints, change: Change, size: int) -> Ints:
    rows = [tuple(row) for row in kept.tolist()]
    new = [c for row in rows for c in change(row, sorted(set(range(size)) - set(row)))]
    return _rows(iter(new), len(new[0]) if new else kept.shape[1])


def _insertions(chain: tuple[int, ...], unused: list[int]) -> Iterator[tuple[int, ...]]:
    for place in range(len(chain) + 1):
        for device in unused:
            yield (*chain[:place], device, *chain[place:])


def _neighbours(chain: tuple[int, ...], unused: list[int]) -> Iterator[tuple[int, ...]]:
    """Put another device in a place, swap two, or move one."""
    for place in range(len(chain)):
        without = chain[:place] + chain[place + 1 :]
        for device in unused:
            yield (*chain[:place], device, *chain[place + 1 :])
        for other in range(place):
            swapped = list(chain)
            swapped[place], swapped[other] = chain[other], chain[place]
            yield tuple(swapped)
        for other in range(len(chain)):
            if other != place:
                yield (*without[:other], chain[place], *without[other:])


def _rows(chains: Iterator[tuple[int, ...]], length: int) -> Ints:
    flat = np.fromiter(itertools.chain.from_iterable(chains), dtype=np.int64)
    return flat.reshape(-1, length)
