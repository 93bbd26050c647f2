"""From a model's files to a stage in MLX: what of it is trained.

Owns no arrays: `mlx_stage` has them.
"""

from __future__ import annotations

import mlx.core as mx

from exo_train.backends.base import Stage, StageOptions
from exo_train.backends.full import head_name, shared_weights, weight_shapes
from exo_train.backends.lora import initial_adapter, stage_placements
from exo_train.backends.memory import memory_errors_named
from exo_train.backends.mlx_full import weight_places
from exo_train.backends.mlx_lora import Adapter, Slot, attach, magnitudes
from exo_train.backends.mlx_model import (
    MLX_DTYPES,
    checked_device,
    load_base_model,
    to_mlx,
)
from exo_train.backends.mlx_stage import MlxStage
from exo_train.backends.stage_model import layer_windows
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
    named = memory_errors_named(
        stage, device, doing="loading", checkpointed=options.checkpoint_activations
    )
    with mx.stream(checked_device(device)), named:
        slot = Slot(dtype=MLX_DTYPES[options.compute_dtype])
        names = weight_shapes(spec, stage, lora) if lora.full else {}
        weights: Adapter = {}

        def keep_exact(name: str, tensor: HostTensor) -> None:
            if name in names:
                weights[name] = to_mlx(tensor, mx.float32)
                mx.eval(weights[name])

        model = load_base_model(
            spec, stage, tensors, device=device, options=options, on_read=keep_exact
        )
        placements = stage_placements(spec, stage, lora)
        arrays = initial_adapter(spec, stage, lora, seed=options.seed, init=options.adapter_init)
        if lora.dora:
            arrays |= magnitudes(model, stage, placements)
        attach(model, stage, placements, arrays, slot)
        adapter = {name: mx.array(array) for name, array in arrays.items()}
        return MlxStage(
            stage,
            model,
            adapter | {name: weights[name] for name in names},
            put=weight_places(model, stage, names) if names else slot.put,
            head_name=head_name(spec),
            shared=shared_weights(spec, stage, lora),
            slot=slot,
            device=device,
            windows=layer_windows(spec, stage),
            lora=lora,
            optimizer=optimizer,
            options=options,
        )
