"""Which rows share a sequence. Owns packing; must not know tokens, batches or what a row costs.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def pack(sizes: Sequence[int], order: Iterable[int], *, room: int) -> tuple[tuple[int, ...], ...]:
    """Lay every row into one of few sequences of at most `room` positions.

    `sizes[row]` are positions, from 1 to `room`. Best fit decreasing: the largest row first, each
    into the fullest sequence that still has room for it (at most 11/9 of the fewest possible
    sequences and 4; Johnson et al. 1974, doi:10.1137/0203025). Rows of one size come in `order`.
    """
    packs: list[list[int]] = []
    by_space: dict[int, list[int]] = {}  # the packs with so much room left
    spaces = 0  # bit n: there is a pack with room for n more
    for row in sorted(order, key=lambda row: -sizes[row]):
        size = sizes[row]
        assert 0 < size <= room
        enough = spaces >> size
        if enough:
            space = size + (enough & -enough).bit_length() - 1
            index = by_space[space].pop()
            if not by_space[space]:
                spaces ^= 1 << space
        else:
            space, index = room, len(packs)
            packs.append([])
        packs[index].append(row)
        left = space - size
        by_space.setdefault(left, []).append(index)
        spaces |= 1 << left
    return tuple(tuple(rows) for rows in packs)
