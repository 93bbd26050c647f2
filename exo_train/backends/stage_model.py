"""One stage's part of a model: its config and its tensors, before any framework sees them.

Transformers normalises old and new config spellings (`rope_theta`, `rope_parameters`, layer
types), so both frameworks are built from the same facts. Must not import a tensor framework.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import AutoConfig

from exo_train.backends.base import StageOptions
from exo_train.errors import ModelError
from exo_train.models.decode import decode, decode_packed, packing_of
from exo_train.models.packed import PackedMatrix, packing_for, quantised
from exo_train.models.spec import ModelSpec, is_projection
from exo_train.models.tensors import TensorSource
from exo_train.plan.stages import StageSpec
from exo_train.wire.tensor import HostTensor


def stage_config(spec: ModelSpec, stage: StageSpec) -> Any:
    """Give a transformers config with this stage's layers only and no dropout of its own."""
    config = _whole_config(spec)
    config.num_hidden_layers = stage.num_layers
    if getattr(config, "layer_types", None) is not None:
        # Layers index this list by their position in the stage.
        config.layer_types = config.layer_types[stage.start : stage.end]
    config.attention_dropout = 0.0
    config.use_cache = False
    return config


def layer_windows(spec: ModelSpec, stage: StageSpec) -> list[int | None]:
    """Give the sliding attention window of each of the stage's layers; None: full attention."""
    layer_types = getattr(_whole_config(spec), "layer_types", None)
    if layer_types is None:
        return [spec.sliding_window] * stage.num_layers
    kinds = layer_types[stage.start : stage.end]
    return [spec.sliding_window if kind == "sliding_attention" else None for kind in kinds]


def input_name(stage: StageSpec, options: StageOptions) -> str:
    """Name what makes the first layer's input, in the words of `Stage.find_bad_activation`."""
    if stage.embedding:
        return "the embedding"
    return f"the cast to {options.compute_dtype.name.lower()}"


def global_name(local_name: str, stage: StageSpec) -> str:
    """Turn a parameter name of the stage's model into the whole model's."""
    parts = local_name.split(".")
    if parts[:2] == ["model", "layers"]:
        parts[2] = str(int(parts[2]) + stage.start)
    return ".".join(parts)


def _whole_config(spec: ModelSpec) -> Any:
    values = spec.explicit_config()
    return AutoConfig.for_model(values.pop("model_type"), **values)


def read_weight(
    tensors: TensorSource, name: str, options: StageOptions
) -> HostTensor | PackedMatrix:
    """Read one tensor by its global name, as the stage is to hold it.

    A matrix that is stored packed stays so; any other projection of a layer is quantised here
    when the run asks for it, so that no more than one is ever there in full. Where weights are to
    be dense, the numbers are those of the packed ones.
    """
    info = tensors.infos.get(name)
    if info is None:
        raise ModelError(f"no tensor is called '{name}' in this model; fetch the model again")
    raw = tensors.read(name)
    if len(info.shape) == 2 and packing_of(info.encoding):
        matrix = decode_packed(info, raw)
    elif options.quantize and is_projection(name):
        packing = packing_for(info.shape[-1], options.quantize, place=f"tensor '{name}'")
        matrix = quantised(decode(info, raw).to_numpy().astype(np.float32), packing)
    else:
        return decode(info, raw)
    if options.base_weights == "dense":
        return HostTensor.from_numpy(matrix.dense())
    return matrix
