"""What a transformers decoder is told of rows that lie end to end. Owns no weights.

Shapes: B sequences, T positions.
"""

from __future__ import annotations

from typing import Any

import torch

from exo_train.backends.packed_rows import row_places


def attention_arguments(
    row_starts: tuple[int, ...], input_BTD: torch.Tensor, *, config: Any
) -> dict[str, Any]:
    """Give the decoder's arguments: none where each sequence is one row.

    A row sees itself alone, and its positions count from 0, as if it were not packed. Positions
    alone would not do: they part no rows. The mask is one to add, in the dtype of computing: of
    one of booleans PyTorch makes such a copy in each layer, and keeps it (measured).
    """
    if not row_starts:
        return {}
    num_sequences, num_positions, _ = input_BTD.shape
    row_BT, place_BT = (
        torch.from_numpy(values).to(input_BTD.device)
        for values in row_places(row_starts, (num_sequences, num_positions))
    )
    order_T = torch.arange(num_positions, device=input_BTD.device)
    distance_TT = order_T[:, None] - order_T
    seen_BTT = (row_BT[:, :, None] == row_BT[:, None, :]) & (distance_TT >= 0)
    full = windowed = _to_add(seen_BTT, input_BTD.dtype)
    window = getattr(config, "sliding_window", None)
    if window is not None and window < num_positions:
        windowed = _to_add(seen_BTT & (distance_TT < window), input_BTD.dtype)
    mask: Any = windowed
    if getattr(config, "layer_types", None) is not None:  # Qwen's layers choose among masks
        mask = {"full_attention": full, "sliding_attention": windowed}
    return {"attention_mask": mask, "position_ids": place_BT.long()}


def _to_add(seen_BTT: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    mask_BTT = torch.zeros(seen_BTT.shape, dtype=dtype, device=seen_BTT.device)
    return mask_BTT.masked_fill_(~seen_BTT, -torch.inf)[:, None]
