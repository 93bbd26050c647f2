"""Memory formulas against published sizes and a measured layer."""

from __future__ import annotations

import dataclasses

import pytest

from exo_train.config import TrainConfig
from exo_train.lora_config import ALL_TARGETS, LoraConfig
from exo_train.optimizer_config import OptimizerConfig
from exo_train.plan.chains import stage_bytes
from exo_train.plan.device_memory import Processor
from exo_train.plan.memory import (
    DENSE_BLOCK_VALUES,
    LOGITS_CHUNK_TOKENS,
    Copies,
    ModelShape,
    WeightForm,
    activation_bytes_per_token,
    adapter_params,
    boundary_cost,
    decoder_params,
    pseudo_layer_costs,
)
from exo_train.plan.memory_kinds import memory_by_kind
from exo_train.plan.partition import DeviceBudget, partition
from exo_train.plan.stages import StageSpec
from exo_train.plan.workloads import run_stage_costs, run_workload

LLAMA_8B = ModelShape(
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    tied_embeddings=False,
)
SMALL = ModelShape(
    num_layers=4,
    hidden_size=256,
    intermediate_size=704,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=128,
    tied_embeddings=True,
)


LORA, NO_ADAPTER = LoraConfig(rank=16), LoraConfig(rank=0)


def costs(shape=LLAMA_8B, **changes):
    options = {
        "lora": LORA,
        "microbatch_tokens": 512,
        "activation_bytes": 2,
        "checkpoint_activations": False,
    }
    return pseudo_layer_costs(shape, **(options | changes))


def test_parameters_are_llama_8b():
    assert decoder_params(LLAMA_8B) == 218_112_000  # as counted in transformers
    untrained = costs(lora=NO_ADAPTER)
    assert sum(cost.static_bytes for cost in untrained) == 2 * 8_030_261_248


def test_adapter_of_llama_8b_is_42_million_values():
    assert 32 * adapter_params(LLAMA_8B, LORA) == 41_943_040


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_value"),
    [
        (OptimizerConfig(), 16),
        (OptimizerConfig(name="sgd"), 12),
        (OptimizerConfig(name="sgd", momentum=0.0), 8),
        (OptimizerConfig(name="adafactor"), 8 + 4 * (1 / 16 + 14 / (2 * 8192))),
    ],
    ids=str,
)
def test_a_trained_value_has_its_gradient_and_what_the_optimizer_keeps(optimizer, bytes_per_value):
    plain, trained = costs(lora=NO_ADAPTER)[1], costs(optimizer=optimizer)[1]
    num_values = adapter_params(LLAMA_8B, LORA)
    assert trained.adapter_bytes == pytest.approx(bytes_per_value * num_values, rel=0.01)
    kept = costs(optimizer=optimizer, copies=Copies(own=1, neighbours=0))[1]
    assert kept.copies_bytes == trained.adapter_bytes - 4 * num_values
    assert trained.static_bytes - plain.static_bytes == trained.adapter_bytes


@pytest.mark.parametrize(
    ("activation_bytes", "targets", "measured"),
    [
        (4, ALL_TARGETS, 18184),
        (2, ALL_TARGETS, 10248),
        (4, ("q_proj", "v_proj"), 14184),
        (2, ("q_proj", "v_proj"), 8168),
    ],
)
def test_activations_equal_the_measured_layer(activation_bytes, targets, measured):
    """Bytes per token of a decoder layer in the PyTorch stage, rank 8 (see the docstring)."""
    found = activation_bytes_per_token(
        SMALL, lora=LoraConfig(rank=8, targets=targets), activation_bytes=activation_bytes
    )
    assert found == measured


def test_a_mask_has_keys_and_values_kept_for_each_query_head():
    """Measured in the same way, with rows packed: tests/backends/test_packed_rows.py."""
    lora = LoraConfig(rank=8)
    found = activation_bytes_per_token(SMALL, lora=lora, activation_bytes=4, masked=True)
    assert found == 19720


def test_checkpointing_keeps_only_the_layer_input():
    plain, checkpointed = costs()[1], costs(checkpoint_activations=True)[1]
    assert checkpointed.per_microbatch_bytes == 512 * 4096 * 2
    assert checkpointed.per_microbatch_bytes < plain.per_microbatch_bytes / 20
    assert checkpointed.workspace_bytes > plain.per_microbatch_bytes


def test_logits_are_bounded_by_the_chunk():
    long, longer = costs(microbatch_tokens=4096)[-1], costs(microbatch_tokens=8192)[-1]
    assert long.workspace_bytes == longer.workspace_bytes
    assert long.workspace_bytes == LOGITS_CHUNK_TOKENS * 128256 * 12


FOUR_BITS = WeightForm.packed(bits=4, group_size=64)
QUANTISED_8B = dataclasses.replace(LLAMA_8B, layer_weights=FOUR_BITS)


def test_packed_layers_take_codes_and_the_numbers_of_their_groups():
    embedding, layer, *_, head = costs(QUANTISED_8B, lora=NO_ADAPTER)
    assert embedding.static_bytes == 128256 * 4096 * 2
    assert layer.static_bytes == (218_112_000 - 8192) * 4.5 / 8 + 8192 * 2
    in_fp32 = costs(QUANTISED_8B, lora=NO_ADAPTER, activation_bytes=4)[1]
    assert in_fp32.static_bytes == (218_112_000 - 8192) * 5 / 8 + 8192 * 4
    assert head.static_bytes == 128256 * 4096 * 2 + 8192


def test_a_packed_vocabulary_is_made_dense_a_block_at_a_time():
    packed = dataclasses.replace(LLAMA_8B, vocabulary_weights=FOUR_BITS)
    embedding, *_, head = costs(packed)
    assert embedding.static_bytes == 128256 * 4096 * 4.5 / 8
    assert head.workspace_bytes - costs()[-1].workspace_bytes == DENSE_BLOCK_VALUES * 5


def test_head_shares_a_tied_matrix():
    assert costs()[-1].tied_bytes == 0
    assert costs(SMALL)[-1].tied_bytes == 128 * 256 * 2


def test_boundary_holds_what_came_and_what_goes():
    cost = boundary_cost(hidden_size=4096, microbatch_tokens=512, wire_bytes=2)
    assert cost.per_microbatch_bytes == 2 * 512 * 4096 * 2


# Peak memory of one GPU that torchtune's README published (September 2024): Llama 3.1 8B, batch 2
# packed to 2048 tokens, rank 8 on all linear layers, activation checkpointing, chunked loss.
# It is what PyTorch's allocator counts, so the process's own share, left out here too, is 0.
TORCHTUNE_GIB = {LLAMA_8B: 16.2, QUANTISED_8B: 7.4}
PROCESS_BYTES = 0


@pytest.mark.parametrize("shape", TORCHTUNE_GIB, ids=["LoRA", "QLoRA"])
def test_peak_is_what_torchtune_measured(shape):
    """10 % and 15 % above; it trains adapters in bf16, and compiles."""
    found = costs(
        shape,
        lora=LoraConfig(rank=8),
        microbatch_tokens=2 * 2048,
        checkpoint_activations=True,
    )
    needed_bytes = sum(cost.static_bytes + cost.per_microbatch_bytes for cost in found)
    needed_bytes += max(cost.workspace_bytes for cost in found) + PROCESS_BYTES
    assert needed_bytes / 2**30 == pytest.approx(TORCHTUNE_GIB[shape], rel=0.16)


def test_adapters_are_told_from_frozen_weights():
    with_adapters, without = costs()[1], costs(lora=NO_ADAPTER)[1]
    assert with_adapters.adapter_bytes == with_adapters.static_bytes - without.static_bytes
    assert with_adapters.adapter_bytes == 16 * 41_943_040 // 32
    assert without.adapter_bytes == costs()[-1].adapter_bytes == 0


def test_all_weights_cost_their_values_gradients_and_moments():
    """8B in bf16: 2 bytes to compute with, and 16 in float32, of layers, embedding and head."""
    full = LoraConfig(full=True)
    embedding, layer, *_, head = costs(lora=full)
    assert layer.static_bytes == 18 * 218_112_000
    assert layer.adapter_bytes == 16 * 218_112_000
    vocabulary = 128256 * 4096
    assert embedding.static_bytes == 18 * vocabulary
    assert head.static_bytes == 18 * vocabulary + 2 * 4096
    assert head.workspace_bytes - costs()[-1].workspace_bytes == 2 * vocabulary
    fp32 = costs(lora=full, activation_bytes=4)
    assert (fp32[0].static_bytes, fp32[1].static_bytes) == (
        4 * vocabulary + 12 * vocabulary,
        16 * 218_112_000,
    )
    some = costs(lora=LoraConfig(full=True, layers=("last:2",)))
    assert some[0].static_bytes == 2 * vocabulary


@pytest.mark.parametrize(
    ("optimizer", "of_layer", "of_vocabulary"),
    [("adamw", 6.0, 6.0), ("adafactor", 5.1, 5.1), ("sgd", 4.0, 4.0), ("muon", 7.0, 6.0)],
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_large_matrix_is_moved_in_a_workspace_of_its_own(
    optimizer, of_layer, of_vocabulary, tied
):
    """On one device and on several, instead of the computing one where that is smaller."""
    rule = OptimizerConfig(name=optimizer)
    shape = dataclasses.replace(LLAMA_8B, tied_embeddings=tied)
    embedding, layer, *_, head = costs(shape, lora=LoraConfig(full=True), optimizer=rule)
    vocabulary_bytes = pytest.approx(of_vocabulary * 4 * 128256 * 4096)
    assert embedding.transient_bytes == vocabulary_bytes
    assert head.transient_bytes == vocabulary_bytes
    assert head.workspace_bytes < head.update_bytes
    assert layer.transient_bytes == pytest.approx(of_layer * 4 * 14336 * 4096)
    assert all(cost.update_bytes == 0 for cost in costs(shape))


def test_the_update_is_in_what_a_stage_needs():
    """On a split by memory, by time, and by kind: 6 matrices in fp32, no heap's holes in them."""
    config = TrainConfig(full=True, max_seq_length=64, batch_size=1)
    processor = Processor(backend="torch", device="cpu")
    sizes = {"microbatch_size": 1, "value_bytes": 4}
    found = run_stage_costs(LLAMA_8B, config, processor, sequence=64, wire_bytes=4, **sizes)
    update_bytes = 24 * 128256 * 4096
    assert found.head.update_bytes == update_bytes
    whole = StageSpec(start=0, end=32, embedding=True, head=True)
    kinds = memory_by_kind(found, whole, in_flight=1)
    assert (kinds.workspace_bytes, kinds.logits_bytes) == (update_bytes, 0)
    workload = run_workload(LLAMA_8B, config, **sizes)
    before, each = stage_bytes(workload, found, 0, 1)
    assert before + 32 * each == kinds.total_bytes
    parts = (found.embedding, *[found.layer] * 32, found.head)
    (alone,) = partition(
        parts,
        [DeviceBudget(name="one", weight=1.0, usable_bytes=10**12)],
        in_flight=lambda rank, num_ranks: 1,
        per_stage=found.per_stage,
    )
    assert alone.needed_bytes == kinds.total_bytes


def test_a_tied_matrix_is_counted_once_where_one_stage_has_it():
    def alone(lora):
        embedding, *_, head = costs(SMALL, lora=lora, copies=Copies(own=1, neighbours=2))
        return embedding.static_bytes + head.static_bytes - head.tied_bytes

    values = SMALL.vocab_size * SMALL.hidden_size
    difference = alone(LoraConfig(full=True)) - alone(LORA)
    layers = 2 * 12 * SMALL.num_layers * (decoder_params(SMALL) - adapter_params(SMALL, LORA))
    # Its neighbours' copies are none there; the head has those of the layers, which differ too.
    assert difference + layers == 16 * values + 12 * values
