"""From a run's options to what one step of it asks of devices. Owns that translation.

Pure. Must not know devices or choose anything.
"""

from __future__ import annotations

import dataclasses

from exo_train.config import TrainConfig
from exo_train.plan.device_memory import Measured, Processor, is_gpu, stage_costs
from exo_train.plan.memory import (
    DENSE,
    Copies,
    ModelShape,
    WeightForm,
    boundary_cost,
    decoder_params,
    pseudo_layer_costs,
)
from exo_train.plan.profiles import StageCosts, Workload

# At the last point that all ranks are known to have reached, and at the one that they are about to.
POINTS_KEPT = 2
# Of a CPU's usable memory, what a whole model may take to be held dense though it is quantised.
DENSE_SHARE = 0.25


def run_copies(config: TrainConfig) -> Copies:
    """Give the copies of trained state that a stage keeps, in a ring of several.

    Without copies for a neighbour there is the own one that a rewind makes.
    """
    if config.copies == "off":
        return Copies(own=1, neighbours=0)
    return Copies(own=POINTS_KEPT, neighbours=POINTS_KEPT)


def weights_held(
    shape: ModelShape,
    processor: Processor,
    *,
    wanted: str,
    quantize: int,
    usable_bytes: int,
    value_bytes: int,
) -> str:
    """Say how a device holds quantised weights, "packed" or "dense", unless the user does.

    Packed ones make a step a third slower on a CPU (measured: `bench/packed_bases.py`). So where
    the whole model has room in a share of its memory, a CPU holds it dense; not so when the run
    itself quantises, which is done for memory.
    """
    if wanted != "auto":
        return wanted
    is_packed = shape.layer_weights.is_packed or shape.vocabulary_weights.is_packed
    if quantize or not is_packed or is_gpu(processor.backend, processor.device):
        return "packed"
    vocabulary = shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2)
    num_values = shape.num_layers * decoder_params(shape) + vocabulary
    return "dense" if num_values * value_bytes <= DENSE_SHARE * usable_bytes else "packed"


def held_shape(shape: ModelShape, *, quantize: int, base_weights: str) -> ModelShape:
    """Give the model as a run holds it: quantised by the run, or dense though it is packed."""
    if base_weights == "dense":
        return dataclasses.replace(shape, layer_weights=DENSE, vocabulary_weights=DENSE)
    if not quantize or shape.layer_weights.is_packed:
        return shape
    columns = (shape.hidden_size, shape.attention_size, shape.intermediate_size)
    group_size = 64 if all(size % 64 == 0 for size in columns) else 32
    form = WeightForm.packed(bits=quantize, group_size=group_size)
    return dataclasses.replace(shape, layer_weights=form)


def run_workload(
    shape: ModelShape,
    config: TrainConfig,
    *,
    microbatch_size: int,
    value_bytes: int,
    process_bytes: int = 0,
) -> Workload:
    """Give the step's memory, messages and microbatches.

    `microbatch_size` is in rows of the data, of which a pair makes two sequences. The reference's
    forward keeps nothing, so it needs no memory of its own.
    `value_bytes` are of one activation, on a device and between two, and of a weight that is not
    packed. `process_bytes` are what a stage's process takes before it holds a model.
    """
    tokens = config.learnt.answers_per_row * microbatch_size * config.max_seq_length
    return Workload(
        costs=pseudo_layer_costs(
            held_shape(shape, quantize=config.quantize, base_weights=config.base_weights),
            lora=config.lora,
            microbatch_tokens=tokens,
            activation_bytes=value_bytes,
            checkpoint_activations=config.checkpoint_activations,
            masked=config.packing,
            copies=run_copies(config),
            optimizer=config.optimizer_rule,
        ),
        boundary_bytes=tokens * shape.hidden_size * value_bytes,
        num_microbatches=-(-config.batch_size // microbatch_size),
        num_forwards=config.learnt.num_forwards,
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
    measured: Measured | None = None,
) -> StageCosts:
    """Give what a stage of the run takes on one processor, for sequences of so many positions."""
    return stage_costs(
        held_shape(shape, quantize=config.quantize, base_weights=config.base_weights),
        processor=processor,
        value_bytes=value_bytes,
        wire_bytes=wire_bytes,
        lora=config.lora,
        microbatch_size=config.learnt.answers_per_row * microbatch_size,
        sequence=sequence,
        checkpoint_activations=config.checkpoint_activations,
        packed=config.packing,
        copies=run_copies(config),
        optimizer=config.optimizer_rule,
        measured=measured,
    )
