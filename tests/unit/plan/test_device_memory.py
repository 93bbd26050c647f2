"""What backend, device and profile change in a stage's memory."""

from __future__ import annotations

from typing import Any

import pytest

from exo_train.lora_config import LoraConfig
from exo_train.plan.block_times import BlockMemory
from exo_train.plan.device_memory import (
    CUDA_CONTEXT_BYTES,
    HEAP_FACTOR,
    MLX_LIBRARY_BYTES,
    TORCH_LIBRARY_BYTES,
    TORCH_PROCESS_BYTES,
    Measured,
    Processor,
    counts_process,
    default_process_bytes,
    stage_costs,
)
from exo_train.plan.memory import (
    Copies,
    LayerCost,
    ModelShape,
    adapter_params,
    boundary_cost,
    pseudo_layer_costs,
)
from exo_train.plan.profiles import StageCosts

TOKENS = 512
SHAPE = ModelShape(
    num_layers=12,
    hidden_size=384,
    intermediate_size=1024,
    num_heads=6,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=16384,
    tied_embeddings=True,
)


LORA = LoraConfig(rank=8)


def costs(backend: str, device: str, *, process_bytes: int = 0, **changed: Any) -> StageCosts:
    options: dict[str, Any] = {
        "value_bytes": 4,
        "wire_bytes": 4,
        "lora": LORA,
        "microbatch_size": 1,
        "sequence": TOKENS,
        "checkpoint_activations": False,
    }
    processor = Processor(backend=backend, device=device, process_bytes=process_bytes)
    return stage_costs(SHAPE, processor=processor, **{**options, **changed})


def formula(*, checkpoint: bool = False, value_bytes: int = 4) -> tuple[LayerCost, ...]:
    return pseudo_layer_costs(
        SHAPE,
        lora=LORA,
        microbatch_tokens=TOKENS,
        activation_bytes=value_bytes,
        checkpoint_activations=checkpoint,
    )


def test_packed_rows_cost_pytorch_a_mask_and_repeated_heads() -> None:
    """MLX has attention scores in full anyway, and computes a layer's activations again."""
    packed, plain = (costs("torch", "cuda:0", packed=on) for on in (True, False))
    mask_bytes = packed.per_stage.per_microbatch_bytes - plain.per_stage.per_microbatch_bytes
    assert mask_bytes == TOKENS * TOKENS * 4
    more_bytes = packed.layer.per_microbatch_bytes - plain.layer.per_microbatch_bytes
    assert more_bytes == 2 * TOKENS * 4 * (SHAPE.attention_size - SHAPE.kv_size) > 0
    assert costs("mlx", "gpu", packed=True) == costs("mlx", "gpu")


@pytest.mark.parametrize("checkpoint", [False, True])
def test_cuda_takes_what_the_formula_says_and_a_context(checkpoint: bool) -> None:
    embedding, layer, *_, head = formula(checkpoint=checkpoint)
    found = costs("torch", "cuda:0", checkpoint_activations=checkpoint)
    assert (found.embedding, found.layer, found.head) == (embedding, layer, head)
    assert found.per_stage.static_bytes == CUDA_CONTEXT_BYTES
    boundary = boundary_cost(hidden_size=384, microbatch_tokens=TOKENS, wire_bytes=4)
    assert found.per_stage.per_microbatch_bytes == boundary.per_microbatch_bytes


def test_a_heap_holds_more_than_what_is_live_but_not_of_weights() -> None:
    embedding, layer, *_, head = formula()
    found = costs("torch", "cpu")
    assert found.embedding == embedding
    assert found.layer.static_bytes == layer.static_bytes
    assert found.layer.per_microbatch_bytes == HEAP_FACTOR * layer.per_microbatch_bytes
    assert found.head.workspace_bytes == HEAP_FACTOR * head.workspace_bytes
    assert found.head.tied_bytes == head.tied_bytes
    assert found.per_stage.static_bytes == TORCH_PROCESS_BYTES + TORCH_LIBRARY_BYTES


def test_checkpointing_saves_in_flight_but_a_heap_keeps_each_layers_recomputed_values() -> None:
    plain, checkpointed = costs("torch", "cpu"), costs("torch", "cpu", checkpoint_activations=True)
    layer_input_bytes = TOKENS * 384 * 4
    assert checkpointed.layer.per_microbatch_bytes == HEAP_FACTOR * layer_input_bytes
    kept_bytes = checkpointed.layer.static_bytes - plain.layer.static_bytes
    assert kept_bytes == plain.layer.per_microbatch_bytes
    four_in_flight = [c.layer.static_bytes + 4 * c.layer.per_microbatch_bytes
                      for c in (checkpointed, plain)]  # fmt: skip
    assert four_in_flight[0] < four_in_flight[1] / 2


@pytest.mark.parametrize("checkpoint", [False, True])
def test_mlx_needs_its_layers_values_and_scores_once_and_none_in_flight(checkpoint: bool) -> None:
    layer = formula()[1]
    found = costs("mlx", "cpu", checkpoint_activations=checkpoint)
    scores_bytes = 6 * TOKENS * TOKENS * 4
    grown_bytes = found.layer.static_bytes - layer.static_bytes
    assert grown_bytes == layer.per_microbatch_bytes + 2 * scores_bytes
    assert found.layer.per_microbatch_bytes == found.head.per_microbatch_bytes == 0
    assert found.layer.adapter_bytes == layer.adapter_bytes


@pytest.mark.parametrize(
    ("backend", "device"), [("torch", "cpu"), ("mlx", "cpu"), ("mlx", "gpu"), ("torch", "cuda:0")]
)
def test_copies_lie_in_the_computers_memory_which_is_not_a_cards(backend: str, device: str) -> None:
    plain, kept = costs(backend, device), costs(backend, device, copies=Copies(own=2, neighbours=2))
    copies_bytes = 0 if device == "cuda:0" else 4 * 12 * adapter_params(SHAPE, LORA)
    assert kept.layer.static_bytes - plain.layer.static_bytes == copies_bytes
    assert kept.layer.copies_bytes == copies_bytes
    assert kept.layer.computing_bytes == plain.layer.computing_bytes


def test_a_profile_replaces_the_guess_for_mlx_and_is_scaled_to_the_microbatch() -> None:
    memory = BlockMemory(
        layer_in_flight_bytes=0, layer_workspace_bytes=5_000_000, workspace_bytes=3_000_000
    )
    half = Measured(memory=memory, size=1, sequence=TOKENS // 2)
    found = costs("mlx", "cpu", process_bytes=300_000_000, measured=half)
    # Of the 5 MB 3,145,728 are scores (2 x 6 heads x 256² x 4 bytes), which grow fourfold.
    layer_bytes = 2 * (5_000_000 - 3_145_728) + 4 * 3_145_728
    assert found.layer.static_bytes == formula()[1].static_bytes + layer_bytes
    assert found.layer.workspace_bytes == 6_000_000
    assert found.per_stage.static_bytes == 300_000_000 + MLX_LIBRARY_BYTES


def test_a_profile_that_counts_less_than_the_formula_is_not_believed() -> None:
    planned_bytes = formula()[1].per_microbatch_bytes
    for counted_bytes, expected_bytes in ((1, planned_bytes), (planned_bytes * 2,) * 2):
        memory = BlockMemory(
            layer_in_flight_bytes=counted_bytes, layer_workspace_bytes=0, workspace_bytes=0
        )
        whole = Measured(memory=memory, size=1, sequence=TOKENS)
        found = costs("torch", "cuda:0", measured=whole)
        assert found.layer.per_microbatch_bytes == expected_bytes


def test_sixteen_bits_halve_weights_on_the_device_that_uses_them() -> None:
    wide, narrow = (costs("torch", "cpu", value_bytes=size) for size in (4, 2))
    assert narrow.embedding.static_bytes * 2 == wide.embedding.static_bytes
    assert narrow.per_stage == wide.per_stage, "the wire has one format for all"


def test_adapters_in_16_bit_layers_hold_their_inputs_and_gradients_in_fp32_too() -> None:
    narrow = costs("torch", "cuda:0", value_bytes=2)
    wide_bytes = narrow.layer.workspace_bytes - formula(value_bytes=2)[1].workspace_bytes
    assert wide_bytes == 3 * TOKENS * 1024 * 4


def test_only_reports_of_cpus_have_the_process_in_them() -> None:
    assert counts_process("torch", "cpu")
    assert counts_process("mlx", "cpu")
    assert not counts_process("torch", "cuda:1")
    assert not counts_process("mlx", "gpu")
    assert default_process_bytes("torch", "cuda:1") == CUDA_CONTEXT_BYTES
    assert 200e6 < default_process_bytes("mlx", "gpu") < 600e6


def test_scores_of_several_sequences_grow_with_their_number_and_not_its_square() -> None:
    one, four = costs("mlx", "cpu"), costs("mlx", "cpu", microbatch_size=4)
    growth_bytes = four.layer.static_bytes - one.layer.static_bytes
    layer = pseudo_layer_costs(
        SHAPE,
        lora=LORA,
        microbatch_tokens=TOKENS,
        activation_bytes=4,
        checkpoint_activations=False,
    )[1]
    scores_bytes = 2 * SHAPE.num_heads * TOKENS**2 * 4
    assert growth_bytes == 3 * (layer.per_microbatch_bytes + scores_bytes)
