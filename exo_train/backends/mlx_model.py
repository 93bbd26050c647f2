"""One stage's frozen base model in MLX, and arrays in and out of the framework.

Owns building the mlx_lm model and loading it tensor by tensor, so that a stage is never held
twice. Must not know adapters or training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from exo_train.backends.base import StageOptions
from exo_train.backends.mlx_packed import PackedEmbedding, PackedLinear
from exo_train.backends.stage_model import global_name, read_weight
from exo_train.errors import ConfigError
from exo_train.models.packed import PackedMatrix
from exo_train.models.spec import ModelSpec
from exo_train.models.tensors import TensorSource
from exo_train.plan.stages import StageSpec
from exo_train.wire.tensor import DType, HostTensor

MLX_DTYPES = {
    DType.FP32: mx.float32,
    DType.FP16: mx.float16,
    DType.BF16: mx.bfloat16,
    DType.INT32: mx.int32,
}


def checked_device(device: str) -> mx.Device:
    """Give the device called `device`; raises ConfigError when there is none."""
    if device not in ("cpu", "gpu"):
        raise ConfigError(f"MLX knows no device '{device}'; use gpu or cpu")
    value = mx.Device(mx.gpu if device == "gpu" else mx.cpu)
    if not mx.is_available(value):
        raise ConfigError("MLX finds no GPU on this device; use --device cpu")
    return value


def load_base_model(
    spec: ModelSpec,
    stage: StageSpec,
    tensors: TensorSource,
    *,
    device: str,
    options: StageOptions,
    on_read: Callable[[str, HostTensor], None] = lambda name, tensor: None,
) -> Any:
    """Give an mlx_lm model with only this stage's modules, weights frozen and in memory.

    `on_read` is shown each dense weight as the files have it, by its global name.
    """
    dtype = MLX_DTYPES[options.compute_dtype]
    config = {**spec.explicit_config(), "num_hidden_layers": stage.num_layers}
    model_class, args_class = _get_classes(config)
    # Its random first values are lazy: replaced before they are ever computed.
    model = model_class(args_class.from_dict(config))
    _keep_owned(model, stage, tied=spec.tied_embeddings)
    for local_name, _ in tree_flatten(model.parameters()):
        read = read_weight(tensors, global_name(local_name, stage), options)
        if isinstance(read, PackedMatrix):
            _put_packed(model, local_name, read, dtype=dtype, fused=device == "gpu")
            continue
        on_read(global_name(local_name, stage), read)
        array = to_mlx(read, dtype)
        mx.eval(array)
        model.load_weights([(local_name, array)], strict=False)
    model.freeze()
    # Rope frequencies too: what stays lazy belongs to this thread, and another one may train.
    mx.eval(model.state)
    return model


def _keep_owned(model: Any, stage: StageSpec, *, tied: bool) -> None:
    """Drop the ends the stage does not have; a tied head is the embedding matrix."""
    if not (stage.embedding or (stage.head and tied)):
        del model.model.embed_tokens
    if not stage.head:
        model.model.norm = nn.Identity()
        if not tied:
            del model.lm_head


def _put_packed(
    model: Any, local_name: str, matrix: PackedMatrix, *, dtype: mx.Dtype, fused: bool
) -> None:
    """Put a packed module in the place of the one whose weight is called `local_name`."""
    *path, leaf, _ = local_name.split(".")
    parent = model
    for part in path:
        parent = parent[int(part)] if part.isdecimal() else parent[part]
    if isinstance(parent[leaf], nn.Embedding):
        packed: Any = PackedEmbedding(matrix, dtype=dtype, fused=fused)
    else:
        packed = PackedLinear(matrix, dtype=dtype, fused=fused)
        if "bias" in parent[leaf]:
            packed.bias = parent[leaf].bias  # its values come by its own name
    mx.eval(packed.parameters())
    parent[leaf] = packed


def head_logits(model: Any, hidden: mx.array) -> mx.array:
    """Apply the head, tied or not, to hidden states after the final norm."""
    head = model.lm_head if "lm_head" in model else model.model.embed_tokens.as_linear
    logits: mx.array = head(hidden)
    return logits


def to_mlx(tensor: HostTensor, dtype: mx.Dtype) -> mx.array:
    """Copy a host tensor into the framework."""
    if tensor.dtype is DType.BF16:
        bits = np.frombuffer(tensor.data, "<u2").reshape(tensor.shape)
        return mx.array(bits).view(mx.bfloat16).astype(dtype)
    return mx.array(tensor.to_numpy()).astype(dtype)


def to_host(value: mx.array, dtype: DType) -> HostTensor:
    """Evaluate an array and copy it out of the framework, cast to the wire's dtype."""
    value = value.astype(MLX_DTYPES[dtype])
    bits = value.view(mx.uint16) if dtype is DType.BF16 else value
    return HostTensor(dtype, tuple(value.shape), np.array(bits).reshape(-1).view(np.uint8).data)
