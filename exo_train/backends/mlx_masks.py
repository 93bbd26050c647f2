"""Attention masks for mlx_lm's layers. Owns no weights.

Shapes: B sequences, T positions, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask, create_causal_mask

from exo_train.backends.packed_rows import row_places


def layer_masks(
    hidden_BTD: mx.array,
    windows: Sequence[int | None],
    row_starts: tuple[int, ...],
    caches: Sequence[Any] | None,
) -> Iterator[Any]:
    """Give each layer's mask; where sequences hold several rows, a row sees itself alone.

    Its rope positions go on from the row before, because mlx_lm's layers know one offset for all.
    Only differences of positions count within a row (Su et al. 2021, arXiv:2104.09864, section
    3.2.2), for every kind of frequencies that does not change with the length, as all of
    `models.rope` are.
    """
    if not row_starts:
        for index, window in enumerate(windows):
            cache = caches[index] if caches else None
            yield create_attention_mask(hidden_BTD, cache, window_size=window)
        return
    num_sequences, num_positions, _ = hidden_BTD.shape
    row_BT = mx.array(row_places(row_starts, (num_sequences, num_positions))[0])
    same_BTT = row_BT[:, :, None] == row_BT[:, None, :]
    masks = {
        window: (same_BTT & create_causal_mask(num_positions, window_size=window))[:, None]
        for window in set(windows)
    }
    yield from (masks[window] for window in windows)
