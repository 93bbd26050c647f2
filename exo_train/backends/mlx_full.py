"""An MLX stage's own weights as what it trains: handed to its modules for each trace.

Must not decide which weights these are (`full` does), or keep their float32 values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from exo_train.backends.stage_model import global_name
from exo_train.plan.stages import StageSpec


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
