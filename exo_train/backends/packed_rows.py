"""Rows that lie end to end in one sequence: which position belongs to which row, and where in it.

Owns the layout that masks, rope positions and dropout follow in both backends. Must not import a
framework.

Shapes: B sequences, T positions.
"""

from __future__ import annotations

import numpy as np


def row_places(row_starts: tuple[int, ...], shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Give, for each position, the number of its row in the microbatch, and its place in that row.

    Both int32 (B, T). `row_starts` as in `MicrobatchInput`; pads belong to the row before them.
    """
    num_sequences, num_positions = shape
    starts = np.array(row_starts or range(0, num_sequences * num_positions, num_positions))
    flat = np.arange(num_sequences * num_positions)
    rows = np.searchsorted(starts, flat, side="right") - 1
    places = flat - starts[rows]
    return rows.astype(np.int32).reshape(shape), places.astype(np.int32).reshape(shape)
