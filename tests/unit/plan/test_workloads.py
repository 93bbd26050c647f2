"""What a run's options ask of devices: preference pairs are two sequences each."""

from __future__ import annotations

import dataclasses

import pytest

from exo_train.agent.planning import model_shape
from exo_train.config import TrainConfig
from exo_train.models.spec import ModelSpec
from exo_train.plan.device_memory import Processor
from exo_train.plan.workloads import run_stage_costs, run_workload
from tests.tiny_models import tiny_config

SHAPE = model_shape(ModelSpec.from_config(tiny_config(), place="tiny"))
SFT = TrainConfig(batch_size=16, max_seq_length=64)
BYTES = {"value_bytes": 4}


@pytest.mark.parametrize("objective", ["dpo", "orpo"])
def test_pairs_take_the_memory_of_twice_as_many_sequences(objective: str) -> None:
    """The reference's forward keeps nothing."""
    pairs = TrainConfig(batch_size=8, max_seq_length=64, objective=objective)
    ours = run_workload(SHAPE, pairs, microbatch_size=2, **BYTES)
    theirs = run_workload(SHAPE, SFT, microbatch_size=4, **BYTES)
    assert dataclasses.replace(ours, num_forwards=1) == theirs
    assert ours.num_forwards == (2 if objective == "dpo" else 1)
    for backend in ("torch", "mlx"):
        processor = Processor(backend=backend, device="cpu")
        costs = [
            run_stage_costs(
                SHAPE,
                config,
                processor,
                microbatch_size=size,
                sequence=64,
                wire_bytes=4,
                **BYTES,
            )
            for config, size in ((pairs, 2), (SFT, 4))
        ]
        assert costs[0] == costs[1]
