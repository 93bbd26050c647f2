"""From a run's options to what one step of it asks of devices. Owns that translation.

Pure. Must not know devices or choose anything.
"""

from __future__ import annotations

import dataclasses

from exo_train.config import TrainConfig
from exo_train.plan.device_memory import Measured, Processor, stage_costs
from exo_train.plan.memory import Copies, ModelShape, boundary_cost, pseudo_layer_costs
from exo_train.plan.profiles import StageCosts, Workload

# At the last point that all ranks are known to have reached, and at the one that they are about to.
POINTS_KEPT = 2


def run_copies(config: TrainConfig) -> Copies:
    """Give the copies of trained state that a stage keeps, in a ring of several."""
    return Copies(own=POINTS_KEPT, neighbours=0 if config.shadow == "off" else POINTS_KEPT)


def run_workload(
    shape: ModelShape,
    config: TrainConfig,
    *,
    microbatch_size: int,
    value_bytes: int,
    weight_bytes_per_param: float | None = None,
    process_bytes: int = 0,
) -> Workload:
    """Give the step's memory, messages and microbatches.

    `value_bytes` are of one activation, on a device and between two; weights take as many unless
    `weight_bytes_per_param` says otherwise (4.5 / 8 for 4-bit groups of 64). `process_bytes` are
    what a stage's process takes before it holds a model.
    """
    tokens = microbatch_size * config.max_seq_length
    return Workload(
        costs=pseudo_layer_costs(
            shape,
            weight_bytes_per_param=(
                value_bytes if weight_bytes_per_param is None else weight_bytes_per_param
            ),
            lora_rank=config.rank,
            targets=config.targets,
            microbatch_tokens=tokens,
            activation_bytes=value_bytes,
            checkpoint_activations=config.checkpoint_activations,
            masked=config.packing,
            copies=run_copies(config),
            optimizer=config.optimizer_rule,
        ),
        boundary_bytes=tokens * shape.hidden_size * value_bytes,
        num_microbatches=-(-config.batch_size // microbatch_size),
        schedule="1f1b" if config.pipeline_schedule == "1f1b" else "gpipe",
        per_stage=dataclasses.replace(
            boundary_cost(
                hidden_size=shape.hidden_size, microbatch_tokens=tokens, wire_bytes=value_bytes
            ),
            static_bytes=process_bytes,
        ),
    )


def run_stage_costs(
    shape: ModelShape,
    config: TrainConfig,
    processor: Processor,
    *,
    microbatch_size: int,
    sequence: int,
    value_bytes: int,
    wire_bytes: int,
    weight_bytes_per_param: float | None = None,
    measured: Measured | None = None,
) -> StageCosts:
    """Give what a stage of the run takes on one processor, for rows of `sequence` positions."""
    return stage_costs(
        shape,
        processor=processor,
        value_bytes=value_bytes,
        weight_bytes_per_param=(
            value_bytes if weight_bytes_per_param is None else weight_bytes_per_param
        ),
        wire_bytes=wire_bytes,
        lora_rank=config.rank,
        targets=config.targets,
        microbatch_size=microbatch_size,
        sequence=sequence,
        checkpoint_activations=config.checkpoint_activations,
        packed=config.packing,
        copies=run_copies(config),
        optimizer=config.optimizer_rule,
        measured=measured,
    )
