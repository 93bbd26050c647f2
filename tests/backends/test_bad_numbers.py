"""A number that is not finite is named: which device, which layer, which microbatch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch

from exo_train.backends import mlx_finite, torch_finite
from exo_train.backends.base import MicrobatchInput
from exo_train.train.blame import name_trouble
from exo_train.train.executor import StepOutcome
from exo_train.wire.tensor import DType, HostTensor
from tests.backends.executor_ring import ExecutorRing
from tests.backends.hand_ring import OPTIONS, load_ring, microbatches, rows

THREE = (0, 1, 3, 4)
RINGS = {"mlx": ["mlx"], "torch": ["torch"], "mixed": ["torch", "mlx", "torch"]}
each_ring = pytest.mark.parametrize("backends", RINGS.values(), ids=RINGS)
DTYPES = [DType.FP32, DType.BF16, DType.FP16]


def said(outcomes: Sequence[StepOutcome]) -> str:
    """Give what the run's driver would say of a step."""
    return name_trouble(
        [f"device{rank}" for rank in range(len(outcomes))],
        [outcome.trouble for outcome in outcomes],
        loss_sums=[outcome.loss_sum for outcome in outcomes],
        grad_square_sums=[outcome.grad_square_sum for outcome in outcomes],
    )


def three_steps(
    backends: Sequence[str], faults: Mapping[int, str], *, dtype: DType = DType.FP32
) -> list[StepOutcome]:
    """Run a step before the fault's, its step 2, and one after it; only step 2 may be bad."""
    options = replace(OPTIONS, compute_dtype=dtype, wire_dtype=dtype)
    ring = ExecutorRing(backends, THREE, options=options, faults=faults)
    before, bad, after = (ring.step(step) for step in (1, 2, 3))
    ring.close()
    for good in (before, after):
        assert said(good) == ""
        assert [outcome.trouble for outcome in good] == ["", "", ""]
    finite = [math.isfinite(o.loss_sum) and math.isfinite(o.grad_square_sum) for o in bad]
    assert not all(finite), "the driver must see that the step is bad"
    return bad


@each_ring
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["nan", "overflow"])
def test_an_activation(backends: list[str], dtype: DType, kind: str) -> None:
    fault = f"{kind}-activation@step=2,layer=2,microbatch=1"
    outcomes = three_steps(backends, {1: fault}, dtype=dtype)
    assert [outcome.trouble for outcome in outcomes] == [
        "gradient received from device1 (rank 1), microbatch 1",
        "activation after layer 2, microbatch 1",
        "activation received from device1 (rank 1), microbatch 1",
    ]
    assert said(outcomes) == "device1 (rank 1): activation after layer 2, microbatch 1"


@each_ring
def test_an_activation_of_the_last_layer(backends: list[str]) -> None:
    outcomes = three_steps(backends, {2: "nan-activation@step=2,layer=3,microbatch=3"})
    assert said(outcomes) == "device2 (rank 2): activation after layer 3, microbatch 3"


@each_ring
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", [0, 1, 2, 3])
def test_a_gradient(backends: list[str], dtype: DType, layer: int) -> None:
    """Layers 1 and 2 are one stage's: its upper layer came first in the backward."""
    rank = (0, 1, 1, 2)[layer]
    fault = f"nan-gradient@step=2,layer={layer},microbatch=2"
    outcomes = three_steps(backends, {rank: fault}, dtype=dtype)
    name = f"model.layers.{layer}.mlp.down_proj.lora_b"
    assert said(outcomes) == (
        f"device{rank} (rank {rank}): gradient at layer {layer}'s adapter ({name}), microbatch 2"
    )
    assert math.isfinite(outcomes[-1].loss_sum)


@each_ring
def test_a_loss(backends: list[str]) -> None:
    outcomes = three_steps(backends, {2: "nan-loss@step=2,microbatch=1"})
    assert said(outcomes) == "device2 (rank 2): loss of microbatch 1"


@each_ring
def test_gradients_too_large_for_fp16_in_earnest(backends: list[str]) -> None:
    options = replace(OPTIONS, compute_dtype=DType.FP16, wire_dtype=DType.FP16)
    ring = ExecutorRing(backends, THREE, options=options)
    outcomes = ring.step(1, loss_scale=1e7)
    ring.close()
    assert math.isfinite(outcomes[-1].loss_sum)
    assert said(outcomes).startswith("device2 (rank 2): gradient at layer 3's adapter (model.")
    assert "gradient received from device1" in outcomes[0].trouble


@each_ring
@pytest.mark.parametrize(
    ("fault", "trouble"),
    [
        ("forward:1e9", "activation too large for fp16 on its way to device2 (rank 2)"),
        ("backward:1e9", "gradient not finite as fp16 on its way to device0 (rank 0)"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered")  # NumPy, where the fault is made
def test_a_tensor_that_only_the_wire_cannot_hold(
    backends: list[str], fault: str, trouble: str
) -> None:
    options = replace(OPTIONS, wire_dtype=DType.FP16)
    ring = ExecutorRing(backends, THREE, options=options, faults={1: fault})
    outcomes = ring.step(1)
    ring.close()
    assert said(outcomes) == f"device1 (rank 1): {trouble}, microbatch 0"


@each_ring
@pytest.mark.parametrize(
    ("rank", "fault", "trouble"),
    [
        (1, "overflow-activation@layer=1,microbatch=2,phase=evaluate", "activation after layer 1"),
        (2, "nan-loss@microbatch=2,phase=evaluate", "loss of microbatch 2"),
    ],
)
def test_an_evaluation(backends: list[str], rank: int, fault: str, trouble: str) -> None:
    ring = ExecutorRing(backends, THREE, faults={rank: fault})
    assert said(ring.step(1)) == ""
    outcomes = ring.evaluate(1)
    assert said(ring.step(2)) == ""
    ring.close()
    assert said(outcomes).startswith(f"device{rank} (rank {rank}): {trouble}")
    assert math.isnan(outcomes[-1].loss_sum)


@pytest.mark.parametrize("backend", ["mlx", "torch"])
def test_one_device_alone(backend: str) -> None:
    for kind, place in [
        ("nan-activation", "activation after layer 2"),
        ("nan-gradient", "gradient at layer 2's adapter (model.layers.2.mlp.down_proj.lora_b)"),
    ]:
        ring = ExecutorRing([backend], (0, 4), faults={0: f"{kind}@layer=2,microbatch=3"})
        assert said(ring.step(1)) == f"device0 (rank 0): {place}, microbatch 3"


@pytest.mark.parametrize("backend", ["mlx", "torch"])
@pytest.mark.parametrize(
    ("module", "place"), [("embed_tokens", "the embedding"), ("norm", "the final norm")]
)
def test_weights_that_are_bad(backend: str, module: str, place: str) -> None:
    stage: Any = load_ring("llama-untied-biased", [backend])[0]
    (batch,) = microbatches(rows(), 4)
    assert stage.find_bad_activation(batch) == ""
    spoiled = getattr(stage._model.model, module)
    weight = spoiled.weight * math.nan
    if backend == "torch":
        spoiled.weight.data = weight.data
    else:
        spoiled.weight = weight
    assert stage.find_bad_activation(batch) == place
    assert stage.find_bad_activation(batch, evaluation=True) == place


@pytest.mark.parametrize("backend", ["mlx", "torch"])
def test_looking_leaves_the_step_alone(backend: str) -> None:
    (stage,) = load_ring("llama", [backend])
    (batch,) = microbatches(rows(), 4)
    results = []
    for looks in (False, True):
        stage.begin_step(step=1, loss_scale=0.1)
        stage.forward(batch)
        if looks:
            assert stage.find_bad_activation(batch) == ""
        stage.backward(0, None)
        assert stage.find_bad_gradient() == ""
        results.append((stage.loss_sum(), stage.grad_square_sum()))
    assert results[0] == results[1]


def test_large_gradients_are_not_bad_ones() -> None:
    large = np.full((4, 4), 3e38, np.float32)
    assert torch_finite.first_bad_gradient({"a": torch.from_numpy(large)}) == ""
    assert mlx_finite.first_bad_gradient({"a": mx.array(large)}) == ""
    bad = large.copy()
    bad[2, 1] = -np.inf
    assert torch_finite.first_bad_gradient({"a": torch.from_numpy(bad)}) == "a"
    assert mlx_finite.first_bad_gradient({"a": mx.array(bad)}) == "a"


@pytest.mark.parametrize("backend", ["mlx", "torch"])
def test_what_the_wire_could_hold_and_the_stage_cannot(backend: str) -> None:
    options = replace(OPTIONS, compute_dtype=DType.FP16)
    upper = load_ring("llama", [backend], (0, 2, 4), options=options)[1]
    hidden_BTD = HostTensor.from_numpy(np.full((1, 8, 64), 1e5, np.float32))
    assert upper.find_bad_activation(MicrobatchInput(index=0, hidden_BTD=hidden_BTD)) == (
        "the cast to fp16"
    )
