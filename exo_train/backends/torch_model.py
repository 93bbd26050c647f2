"""One stage's frozen base model in PyTorch, and tensors in and out of the framework.

Owns building on the meta device and loading tensor by tensor, so that a stage is never held
twice. Must not know adapters or training.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from exo_train.backends.base import StageOptions
from exo_train.backends.stage_model import global_name, read_weight, stage_config
from exo_train.backends.torch_packed import PackedEmbedding, PackedLinear, TiedHead
from exo_train.errors import ModelError
from exo_train.models.packed import PackedMatrix
from exo_train.models.spec import EMBEDDING, LM_HEAD, ModelSpec
from exo_train.models.tensors import TensorSource
from exo_train.plan.stages import StageSpec
from exo_train.wire.tensor import DType, HostTensor

TORCH_DTYPES = {
    DType.FP32: torch.float32,
    DType.FP16: torch.float16,
    DType.BF16: torch.bfloat16,
}


def load_base_model(
    spec: ModelSpec,
    stage: StageSpec,
    tensors: TensorSource,
    *,
    device: torch.device,
    options: StageOptions,
    on_read: Callable[[str, HostTensor], None] = lambda name, tensor: None,
) -> Any:
    """Give a transformers causal model with only this stage's modules, weights frozen.

    `on_read` is shown each dense weight as the files have it, by its global name.
    """
    dtype = TORCH_DTYPES[options.compute_dtype]
    config = stage_config(spec, stage)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    _keep_owned(model, stage)
    # Made again off the meta device, where its frequencies have no values.
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    model.eval().requires_grad_(False)
    for local_name, _ in list(model.named_parameters()):
        name = model_name(local_name, spec, stage)
        read = read_weight(tensors, name, options)
        if isinstance(read, PackedMatrix):
            _put_packed(model, local_name, read, device=device, dtype=dtype)
        else:
            on_read(name, read)
            weight = to_torch(read, device=device, dtype=dtype)
            model.load_state_dict({local_name: weight}, strict=False, assign=True)
            del weight
        del read
    if stage.embedding and stage.head and spec.tied_embeddings:
        embedding = model.model.embed_tokens
        if isinstance(embedding, PackedEmbedding):
            model.lm_head = TiedHead(embedding)
        else:
            model.lm_head.weight = embedding.weight
    for name, value in itertools.chain(model.named_parameters(), model.named_buffers()):
        if value.is_meta:
            raise ModelError(f"{name} got no value from the model's files; use another model")
    return model


def model_name(local_name: str, spec: ModelSpec, stage: StageSpec) -> str:
    """Give the name in the model's files of one of the stage's parameters."""
    name = global_name(local_name, stage)
    return EMBEDDING if name == LM_HEAD and spec.tied_embeddings else name


def _put_packed(
    model: Any, local_name: str, matrix: PackedMatrix, *, device: torch.device, dtype: torch.dtype
) -> None:
    """Put a packed module in the place of the one whose weight is called `local_name`."""
    path = local_name.removesuffix(".weight")
    old = model.get_submodule(path)
    if isinstance(old, torch.nn.Embedding):
        model.set_submodule(path, PackedEmbedding(matrix, device=device, dtype=dtype))
        return
    packed = PackedLinear(matrix, device=device, dtype=dtype)
    packed.bias = old.bias  # its values come by its own name
    model.set_submodule(path, packed)


def _keep_owned(model: Any, stage: StageSpec) -> None:
    if not stage.embedding:
        model.model.embed_tokens = None
    if not stage.head:
        model.model.norm = torch.nn.Identity()
        model.lm_head = None


def to_torch(
    tensor: HostTensor, *, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Copy a host tensor into the framework."""
    is_bf16 = tensor.dtype is DType.BF16
    numpy_dtype = {DType.FP32: "<f4", DType.FP16: "<f2", DType.BF16: "<i2", DType.INT32: "<i4"}
    # A bytearray is a writable copy, as PyTorch wants its memory.
    array = np.frombuffer(bytearray(tensor.data), numpy_dtype[tensor.dtype]).reshape(tensor.shape)
    value = torch.from_numpy(array)
    value = value.view(torch.bfloat16) if is_bf16 else value
    return value.to(device=device, dtype=dtype)


def to_host(value: torch.Tensor, dtype: DType) -> HostTensor:
    """Copy a tensor out of the framework, cast to the wire's dtype."""
    value = value.detach().to(TORCH_DTYPES[dtype]).contiguous().cpu()
    bits = value.view(torch.int16) if dtype is DType.BF16 else value
    return HostTensor(dtype, tuple(value.shape), bits.numpy().reshape(-1).view(np.uint8).data)
