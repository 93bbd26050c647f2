"""What a stage takes on one device: its backend, its number format, its process.

Owns how a backend's memory differs from `memory`'s formulas, and which of the formula and a
device's own measurement counts. Pure. Must not decide who gets what.

Measured on Linux, torch 2.13 and MLX 0.32 on CPUs, with `bench/memory.py`. Stated, never tried:
CUDA and Metal.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from exo_train.lora_config import LoraConfig, trains_ends
from exo_train.optimizer_config import OptimizerConfig
from exo_train.plan.block_times import BlockMemory
from exo_train.plan.memory import (
    ADAMW,
    NO_COPIES,
    Copies,
    LayerCost,
    ModelShape,
    boundary_cost,
    pseudo_layer_costs,
)
from exo_train.plan.profiles import StageCosts

MB = 1_000_000
# A worker before it holds a model: interpreter, gRPC, framework, model classes, one tiny step.
TORCH_PROCESS_BYTES = 400 * MB
MLX_PROCESS_BYTES = 365 * MB
# Not measured: a guess at what CUDA's context takes of a GPU.
CUDA_CONTEXT_BYTES = 500 * MB
# Matrix products of real sizes make the libraries keep packed blocks; MLX keeps 32 MiB of freed
# buffers. Measured: 5 to 34 MB and 20 to 38 MB.
TORCH_LIBRARY_BYTES = 25 * MB
MLX_LIBRARY_BYTES = 27 * MB
# glibc's heap over what is live in it: activations that stay lie between temporaries that go, and
# the holes are kept. Measured: 1.3 to 1.75. A fixed threshold above which tensors get pages of
# their own makes it 1.0, and costs 25 to 50 % more processor time (h = 576 and 256).
HEAP_FACTOR = 1.5
# Adapters compute in fp32: of a 16-bit layer, the backward of one of the wide projections holds
# its input, its gradient and its input's gradient a second time (derived).
FP32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """What computes a stage; `process_bytes` is measured, 0: not.

    `value_bytes` are of the format that it computes in, 0: not known.
    """

    backend: str
    device: str
    process_bytes: int = 0
    value_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a profile counted with microbatches of `size` sequences of `sequence` positions."""

    memory: BlockMemory
    size: int
    sequence: int

    def scaled(self, size: int, sequence: int, *, scores_per_position: int) -> BlockMemory:
        """Give it for another shape: all grows with the tokens, attention scores with T² too.

        `scores_per_position` are a layer's bytes for a pair of positions, 0 where scores are never
        there in full.
        """
        tokens, factor = size * sequence, size * sequence / (self.size * self.sequence)
        then_bytes = scores_per_position * self.size * self.sequence**2
        rest_bytes = max(0, self.memory.layer_workspace_bytes - then_bytes)
        scores_bytes = scores_per_position * tokens * sequence if rest_bytes else 0
        layer_bytes = round(factor * rest_bytes) + scores_bytes
        return BlockMemory(
            layer_in_flight_bytes=round(factor * self.memory.layer_in_flight_bytes),
            layer_workspace_bytes=max(
                layer_bytes, round(factor * self.memory.layer_workspace_bytes)
            ),
            workspace_bytes=round(factor * self.memory.workspace_bytes),
        )


def counts_process(backend: str, device: str) -> bool:
    """Tell whether a stage's own report is its process' size: on CPUs, not on GPUs."""
    return not is_gpu(backend, device)


def is_gpu(backend: str, device: str) -> bool:
    return device == "gpu" if backend == "mlx" else device.startswith("cuda")


def default_process_bytes(backend: str, device: str) -> int:
    """Give what a worker takes of the device's memory without a model, where nobody measured."""
    if backend == "mlx":
        return MLX_PROCESS_BYTES
    return CUDA_CONTEXT_BYTES if is_gpu(backend, device) else TORCH_PROCESS_BYTES


def stage_costs(
    shape: ModelShape,
    *,
    processor: Processor,
    value_bytes: int,
    wire_bytes: int,
    lora: LoraConfig,
    microbatch_size: int,
    sequence: int,
    checkpoint_activations: bool,
    packed: bool = False,
    copies: Copies = NO_COPIES,
    optimizer: OptimizerConfig = ADAMW,
    measured: Measured | None = None,
) -> StageCosts:
    """Give a stage's costs on a device, from formulas and from its profile where that is more.

    `measured` is scaled to this shape; `copies` lie in the computer's memory, no graphics card's.
    """
    tokens, backend, device = microbatch_size * sequence, processor.backend, processor.device
    embedding, layer, *_, head = pseudo_layer_costs(
        shape,
        lora=lora,
        microbatch_tokens=tokens,
        activation_bytes=value_bytes,
        checkpoint_activations=False,
        masked=packed and backend == "torch",
        copies=NO_COPIES if backend == "torch" and is_gpu(backend, device) else copies,
        optimizer=optimizer,
    )
    scores = 2 * shape.num_heads * value_bytes * (backend == "mlx")  # for each position looked at
    memory = _scaled(measured, microbatch_size, sequence, scores_per_position=scores)
    factor, library_bytes = _beyond_tensors(backend, device)
    if backend == "mlx":
        layer = _mlx_layer(layer, scores * tokens * sequence, memory)
        head = _mlx_head(head, shape, value_bytes, on_cpu=not is_gpu(backend, device))
        if trains_ends(lora, shape.num_layers):
            # The head's gradient in fp32: of a chunk, of all before, and scaled (derived).
            matrix_bytes = 3 * FP32_BYTES * shape.vocab_size * shape.hidden_size
            head = dataclasses.replace(head, workspace_bytes=head.workspace_bytes + matrix_bytes)
    else:
        on_cpu = not is_gpu(backend, device)
        if checkpoint_activations:
            input_bytes = tokens * shape.hidden_size * value_bytes
            layer = _checkpointed(layer, input_bytes, keeps_recomputed=on_cpu)
        wide_values = 3 * tokens * shape.intermediate_size * (value_bytes < FP32_BYTES)
        layer = _in_heap(_torch_layer(layer, wide_values, memory), factor)
    boundary = boundary_cost(
        hidden_size=shape.hidden_size,
        microbatch_tokens=tokens,
        wire_bytes=wire_bytes,
        mask_bytes=tokens * sequence * value_bytes * (packed and backend == "torch"),
    )
    return StageCosts(
        embedding=embedding,
        layer=layer,
        head=_in_heap(head, factor),
        per_stage=_with_process(_in_heap(boundary, factor), processor, library_bytes),
    )


def _beyond_tensors(backend: str, device: str) -> tuple[float, int]:
    """Give what an allocator makes of a byte, and what a backend's libraries take."""
    if backend == "mlx":
        return 1.0, MLX_LIBRARY_BYTES
    return (1.0, 0) if is_gpu(backend, device) else (HEAP_FACTOR, TORCH_LIBRARY_BYTES)


def _scaled(
    measured: Measured | None, size: int, sequence: int, *, scores_per_position: int
) -> BlockMemory | None:
    if measured is None:
        return None
    return measured.scaled(size, sequence, scores_per_position=scores_per_position)


def _with_process(boundary: LayerCost, processor: Processor, library_bytes: int) -> LayerCost:
    process_bytes = processor.process_bytes or default_process_bytes(
        processor.backend, processor.device
    )
    return dataclasses.replace(boundary, static_bytes=process_bytes + library_bytes)


def _torch_layer(layer: LayerCost, wide_values: int, memory: BlockMemory | None) -> LayerCost:
    """Add the fp32 copies that adapters make of 16-bit values; a profile's count may be more."""
    in_flight_bytes = layer.per_microbatch_bytes
    if memory is not None:
        in_flight_bytes = max(in_flight_bytes, memory.layer_in_flight_bytes)
    return dataclasses.replace(
        layer,
        per_microbatch_bytes=in_flight_bytes,
        workspace_bytes=layer.workspace_bytes + FP32_BYTES * wide_values,
    )


def _mlx_layer(layer: LayerCost, scores_bytes: int, memory: BlockMemory | None) -> LayerCost:
    """MLX keeps nothing in flight; its backward holds all layers of the stage at once.

    Attention scores are there in full, twice (scores and their softmax; derived, and measured
    within 10 %). Checkpointing does not change that (measured). So what a layer needs to compute
    grows with the layers, as its weights do. A profile has counted it exactly.
    """
    layer_bytes = layer.per_microbatch_bytes + scores_bytes
    workspace_bytes = layer.workspace_bytes
    if memory is not None:
        layer_bytes, workspace_bytes = memory.layer_workspace_bytes, memory.workspace_bytes
    return dataclasses.replace(
        layer,
        static_bytes=layer.static_bytes + layer_bytes,
        computing_bytes=layer_bytes,
        per_microbatch_bytes=0,
        workspace_bytes=workspace_bytes,
    )


def _mlx_head(head: LayerCost, shape: ModelShape, value_bytes: int, *, on_cpu: bool) -> LayerCost:
    """Only the boundary tensors stay in flight; the head's gradient is one of them.

    A packed head is made dense as a whole on a CPU; on a GPU kernels multiply with packed words.
    """
    dense_bytes = 0
    if shape.vocabulary_weights.is_packed and on_cpu:
        dense_bytes = shape.vocab_size * shape.hidden_size * value_bytes
    return dataclasses.replace(
        head, per_microbatch_bytes=0, workspace_bytes=head.workspace_bytes + dense_bytes
    )


def _checkpointed(layer: LayerCost, input_bytes: int, *, keeps_recomputed: bool) -> LayerCost:
    """Keep a layer's input, and recompute the rest.

    In glibc's heap the recomputed values of one layer do not reuse the room of the one before
    (measured: stages of 4 and of 10 layers grew by all their layers' values, once).
    """
    recomputed_bytes = layer.per_microbatch_bytes
    if keeps_recomputed:
        kept_bytes = round(HEAP_FACTOR * recomputed_bytes)
        return dataclasses.replace(
            layer,
            static_bytes=layer.static_bytes + kept_bytes,
            computing_bytes=kept_bytes,
            per_microbatch_bytes=input_bytes,
        )
    return dataclasses.replace(
        layer,
        per_microbatch_bytes=input_bytes,
        workspace_bytes=layer.workspace_bytes + recomputed_bytes,
    )


def _in_heap(cost: LayerCost, factor: float) -> LayerCost:
    """Weights are large and stay, and what is made to update them is large: no holes are left."""
    return dataclasses.replace(
        cost,
        per_microbatch_bytes=round(factor * cost.per_microbatch_bytes),
        workspace_bytes=round(factor * cost.workspace_bytes),
    )
