"""From a model's files to a stage in PyTorch: what of it is trained.

Owns no arrays: `torch_stage` has them.
"""

from __future__ import annotations

import torch

from exo_train.backends.base import Stage, StageOptions
from exo_train.backends.full import head_name, shared_weights, weight_shapes
from exo_train.backends.lora import initial_adapter, stage_placements
from exo_train.backends.memory import memory_errors_named
from exo_train.backends.torch_full import train_weights
from exo_train.backends.torch_lora import DropoutSlot, attach, magnitudes
from exo_train.backends.torch_model import (
    TORCH_DTYPES,
    load_base_model,
    to_torch,
)
from exo_train.backends.torch_stage import TorchStage
from exo_train.errors import ConfigError
from exo_train.lora_config import LoraConfig
from exo_train.models.spec import ModelSpec
from exo_train.models.tensors import TensorSource
from exo_train.optimizer_config import OptimizerConfig
from exo_train.plan.stages import StageSpec
from exo_train.wire.tensor import HostTensor


def load_stage(
    spec: ModelSpec,
    stage: StageSpec,
    tensors: TensorSource,
    *,
    device: str,
    lora: LoraConfig,
    optimizer: OptimizerConfig,
    options: StageOptions,
) -> Stage:
    """Read this stage's tensors, and no others, and make it ready to train on `device`."""
    torch_device = _checked_device(device)
    with memory_errors_named(
        stage, device, doing="loading", checkpointed=options.checkpoint_activations
    ):
        slot = DropoutSlot(dtype=TORCH_DTYPES[options.compute_dtype])
        names = weight_shapes(spec, stage, lora) if lora.full else {}
        exact: dict[str, torch.Tensor] = {}

        def keep_exact(name: str, tensor: HostTensor) -> None:
            if name in names and slot.dtype != torch.float32:
                exact[name] = to_torch(tensor, device=torch_device, dtype=torch.float32)

        model = load_base_model(
            spec, stage, tensors, device=torch_device, options=options, on_read=keep_exact
        )
        placements = stage_placements(spec, stage, lora)
        arrays = initial_adapter(spec, stage, lora, seed=options.seed, init=options.adapter_init)
        if lora.dora:
            arrays |= magnitudes(model, stage, placements)
        adapter = {
            name: torch.nn.Parameter(torch.from_numpy(array).to(torch_device))
            for name, array in arrays.items()
        }
        attach(model, stage, placements, adapter, slot)
        weights, refresh = train_weights(model, spec, stage, names, exact)
        return TorchStage(
            stage,
            model,
            adapter | weights,
            head_name=head_name(spec),
            shared=shared_weights(spec, stage, lora),
            refresh=refresh,
            slot=slot,
            device=torch_device,
            lora=lora,
            optimizer=optimizer,
            options=options,
        )


def _checked_device(device: str) -> torch.device:
    try:
        value = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"PyTorch knows no device '{device}'; use cpu or cuda:0.") from None
    if value.type == "cuda" and (value.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"Device '{device}' was asked for and PyTorch sees {torch.cuda.device_count()} CUDA "
            "devices; install the NVIDIA driver and a CUDA build of torch, or use --device cpu."
        )
    return value
