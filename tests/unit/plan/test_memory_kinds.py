"""A stage's memory by kind: Llama 3.1 8B, reckoned by hand."""

from __future__ import annotations

import dataclasses

import pytest

from exo_train.config import TrainConfig
from exo_train.lora_config import LoraConfig
from exo_train.plan.chains import stage_bytes
from exo_train.plan.memory import activation_bytes_per_token
from exo_train.plan.memory_kinds import memory_by_kind
from exo_train.plan.stages import StageSpec
from exo_train.plan.workloads import run_workload
from tests.unit.plan.test_plan_memory import LLAMA_8B, SMALL

CONFIG = TrainConfig(batch_size=8, max_seq_length=2048, rank=16, checkpoint_activations=True)
WORKLOAD = run_workload(LLAMA_8B, CONFIG, microbatch_size=2, value_bytes=2)
HIDDEN_BYTES = 2 * 2048 * 4096 * 2  # one tensor between layers


def test_the_whole_model_on_one_device():
    whole = StageSpec(start=0, end=32, embedding=True, head=True)
    kinds = memory_by_kind(WORKLOAD.stage_costs, whole, in_flight=1)
    assert kinds.weights_bytes == 2 * 8_030_261_248
    assert kinds.adapters_bytes == 16 * 41_943_040
    # A layer input each, what came and what goes, the head's input thrice (16 bit and fp32).
    assert kinds.activations_bytes == HIDDEN_BYTES * (32 + 2 + 3)
    # The loss over 1024 tokens (1.6 GB) takes more than a recomputed layer (1.1 GB).
    assert (kinds.logits_bytes, kinds.workspace_bytes) == (1024 * 128256 * 12, 0)


def test_a_recomputed_layer_counts_where_it_is_larger():
    workload = run_workload(LLAMA_8B, CONFIG, microbatch_size=4, value_bytes=2)
    last = StageSpec(start=30, end=32, embedding=False, head=True)
    kinds = memory_by_kind(workload.stage_costs, last, in_flight=1)
    gradients = 3 * 4 * 2048 * 14336 * 2
    activations = activation_bytes_per_token(LLAMA_8B, lora=LoraConfig(rank=16), activation_bytes=2)
    assert kinds.workspace_bytes == gradients + 4 * 2048 * activations
    assert kinds.logits_bytes == 0


@pytest.mark.parametrize("embedding", [True, False])
def test_tied_weights_are_there_once_on_a_stage(embedding):
    workload = run_workload(SMALL, TrainConfig(), microbatch_size=1, value_bytes=4)
    stage = StageSpec(start=0, end=4, embedding=embedding, head=True)
    layers = StageSpec(start=0, end=4, embedding=False, head=False)
    costs = workload.stage_costs
    kinds = [memory_by_kind(costs, s, in_flight=1).weights_bytes for s in (stage, layers)]
    assert kinds[0] - kinds[1] == 4 * 128 * 256 + 4 * 256  # and the final norm


@pytest.mark.parametrize(
    ("shadow", "own", "others"),
    [("auto", 2, 2), ("5", 2, 2), ("off", 1, 0)],
    ids=["auto", "thinner", "off"],
)
def test_copies_of_trained_state_are_a_kind_of_their_own(shadow, own, others):
    """fp32 parameter and two moments: 12 bytes a value, two of one's own and two of another's."""
    config = dataclasses.replace(CONFIG, shadow=shadow)
    costs = run_workload(LLAMA_8B, config, microbatch_size=2, value_bytes=2).stage_costs
    values_of_a_layer = 41_943_040 // 32
    quarter = StageSpec(start=8, end=16, embedding=False, head=False)
    kinds = memory_by_kind(costs, quarter, in_flight=1)
    assert kinds.copies_bytes == (own + others) * 12 * 8 * values_of_a_layer
    assert kinds.adapters_bytes == 16 * 8 * values_of_a_layer
    assert kinds.weights_bytes == 2 * 8 * 218_112_000, "what the layers' weights take, no more"
    whole = StageSpec(start=0, end=32, embedding=True, head=True)
    alone = memory_by_kind(costs, whole, in_flight=1)
    assert alone.copies_bytes == own * 12 * 41_943_040, "alone there is no neighbour to keep"
    assert alone.weights_bytes == 2 * 8_030_261_248


def test_the_planner_knows_that_one_device_alone_keeps_its_own_copies_only():
    for in_flight_microbatches in (1, 4):
        config = dataclasses.replace(CONFIG, batch_size=2 * in_flight_microbatches)
        workload = run_workload(LLAMA_8B, config, microbatch_size=2, value_bytes=2)
        fixed, layer = stage_bytes(workload, workload.stage_costs, 0, 1)
        whole = StageSpec(start=0, end=32, embedding=True, head=True)
        kinds = memory_by_kind(workload.stage_costs, whole, in_flight=1)
        assert fixed + 32 * layer == kinds.total_bytes


def test_what_the_process_takes_is_a_kind_of_its_own():
    stage = StageSpec(start=0, end=4, embedding=True, head=False)
    with_process = run_workload(
        SMALL, TrainConfig(), microbatch_size=1, value_bytes=4, process_bytes=300_000_000
    )
    without = run_workload(SMALL, TrainConfig(), microbatch_size=1, value_bytes=4)
    kinds = memory_by_kind(with_process.stage_costs, stage, in_flight=2)
    others = memory_by_kind(without.stage_costs, stage, in_flight=2)
    assert kinds.process_bytes == 300_000_000
    assert others.process_bytes == 0
    assert kinds.workspace_bytes == others.workspace_bytes
    assert kinds.total_bytes == others.total_bytes + 300_000_000
