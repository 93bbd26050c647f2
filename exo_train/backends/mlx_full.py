"""An MLX stage's own weights as what it trains: handed to its modules for each trace.

Must not decide which weights these are (`full` does), or keep their float32 values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from exo_train.backends.stage_model import global_name
from exo_train.plan.stages import StageSpec

# An update is evaluated in parts of so many bytes of new values.
UPDATE_BYTES = 64 << 20


def weight_places(
    model: Any, stage: StageSpec, names: Collection[str]
) -> Callable[[Mapping[str, mx.array]], None]:
    """Give what puts weights, in the dtype of computing, into their modules by global name."""
    places: dict[str, tuple[Any, str]] = {}
    for local_name, _ in tree_flatten(model.parameters()):
        if (name := global_name(local_name, stage)) in names:
            *path, leaf = local_name.split(".")
            module = model
            for part in path:
                module = module[int(part)] if part.isdecimal() else module[part]
            places[name] = module, leaf

    def put(weights: Mapping[str, mx.array]) -> None:
        for name, weight in weights.items():
            module, leaf = places[name]
            module[leaf] = weight

    return put


def in_parts(updated: Iterable[tuple[str, mx.array]]) -> Iterator[dict[str, mx.array]]:
    """Yield new values, some at a time: what was before goes once what comes after is there."""
    part: dict[str, mx.array] = {}
    for name, value in updated:
        part[name] = value
        if sum(each.nbytes for each in part.values()) > UPDATE_BYTES:
            yield part
            part = {}
    yield part


def rows_added(total_VD: mx.array, tokens_BT: np.ndarray, grad_BTD: mx.array) -> mx.array:
    """Add each position's gradient to its token's row."""
    tokens_N = mx.array(tokens_BT.reshape(-1))
    return total_VD.at[tokens_N].add(grad_BTD.flatten(0, 1).astype(mx.float32))
