"""The profile of a block: its bytes are the planner's formula's, its arithmetic that of a clock.

Whether its times are those of real stages is a benchmark's question: `bench/block_times.py`.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import pytest

from exo_train import profiler
from exo_train.backends.memory import peak_process_bytes
from exo_train.errors import ConfigError
from exo_train.lora_config import LoraConfig
from exo_train.models.decode import decode
from exo_train.models.spec import ModelSpec
from exo_train.plan.block_times import STEADY_SLOWDOWN, BlockTimes, ProfileRequest
from exo_train.plan.memory import ModelShape, pseudo_layer_costs
from exo_train.train.profiling import WORKER_BYTES, LayerFit, StageMeasure, end_times, profile
from exo_train.train.random_tensors import RandomTensors
from exo_train.wire.tensor import DType
from tests.tiny_models import tiny_config

SEQUENCE = 128
each_backend = pytest.mark.parametrize("backend", ["torch", "mlx"])


def model(**changed: Any) -> ModelSpec:
    sizes = {
        "num_layers": 12,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_heads": 6,
        "num_kv_heads": 3,
        "vocab_size": 2048,
    }
    return ModelSpec.from_config(tiny_config(**{**sizes, **changed}), place="the test's model")


def profiled(backend: str, spec: ModelSpec | None = None, **changed: Any) -> BlockTimes:
    settings: dict[str, Any] = {
        "device": "cpu",
        "compute_dtype": DType.FP32,
        "lora": LoraConfig(),
        "microbatch_size": 1,
        "sequence": SEQUENCE,
        "checkpoint_activations": False,
        "with_ends": False,
        "budget_s": 0.8,
        "clock": time.process_time,
    }
    return profile(spec or model(), backend=backend, **{**settings, **changed})


def ticking() -> Callable[[], float]:
    """Give a clock that shows 1 ms more at each look: for what is not about time."""
    looks = itertools.count()
    return lambda: next(looks) / 1000


def _without_and_with_checkpoints(spec: ModelSpec) -> list[BlockTimes]:
    settings: dict[str, Any] = {"sequence": 512, "budget_s": 0.05, "clock": ticking()}
    return [
        profiled("torch", spec, checkpoint_activations=checkpoint, **settings)
        for checkpoint in (False, True)
    ]


def in_fresh_process(spec: ModelSpec) -> list[BlockTimes]:
    """Profile as members do: what this process gave back to its allocator would hide bytes."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_without_and_with_checkpoints, spec).result()


def test_bytes_in_flight_are_those_of_the_planner() -> None:
    spec = model(hidden_size=384, intermediate_size=1024)
    shape = ModelShape(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        tied_embeddings=True,
    )
    for checkpoint, times in zip((False, True), in_fresh_process(spec), strict=True):
        assert times.memory is not None
        planned_bytes = pseudo_layer_costs(
            shape,
            lora=LoraConfig(rank=8),
            microbatch_tokens=512,
            activation_bytes=4,
            checkpoint_activations=checkpoint,
        )[1].per_microbatch_bytes
        # Resident memory comes in pages, and the allocator rounds.
        allowed_bytes = max(0.1 * planned_bytes, 600_000)
        got_bytes = times.memory.layer_in_flight_bytes
        assert got_bytes == pytest.approx(planned_bytes, abs=allowed_bytes), checkpoint


def test_mlx_keeps_nothing_of_a_layer_in_flight_but_computes_all_layers_at_once() -> None:
    times = profiled("mlx", with_ends=True, budget_s=0.05, clock=ticking())
    assert times.memory is not None
    assert times.ends is not None
    assert times.memory.layer_in_flight_bytes == 0
    # Gate, up and their product, at least.
    assert times.memory.layer_workspace_bytes > 3 * SEQUENCE * 512 * 4
    # Logits in fp32 and their gradient.
    assert times.ends.head_workspace_bytes > 2 * SEQUENCE * 2048 * 4


@each_backend
def test_without_time_two_calls_are_believed(backend: str) -> None:
    times = profiled(backend, with_ends=True, budget_s=0.0)
    assert times.num_repetitions == 2
    assert times.layer_s > 0
    assert times.overhead_s == 0
    assert times.memory is None
    assert times.ends is not None
    assert times.ends.head_s > 0
    assert not times.is_steady


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
@each_backend
def test_any_model_can_be_profiled_even_of_one_layer(backend: str, architecture: str) -> None:
    for num_layers in (1, 500):
        spec = model(
            architecture=architecture,
            num_layers=num_layers,
            hidden_size=48,
            intermediate_size=64,
            vocab_size=320,
            tied=num_layers == 1,
        )
        times = profiled(backend, spec, sequence=16, with_ends=True, budget_s=0.1)
        assert times.layer_forward_s > 0
        assert times.layer_backward_s > 0
        assert times.ends is not None


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
@each_backend
def test_sixteen_bits_halve_what_is_in_the_air(backend: str, dtype: DType) -> None:
    times = profiled(backend, compute_dtype=dtype, sequence=64, budget_s=0.3)
    assert times.layer_s > 0
    source = RandomTensors(model(), dtype)
    name = "model.layers.7.mlp.up_proj.weight"
    weight = decode(source.infos[name], source.read(name))
    values = weight.to_numpy().astype(np.float32)
    assert weight.dtype is dtype
    assert values.std() * np.sqrt(192) == pytest.approx(1, abs=0.02)


def test_a_frameworks_error_of_several_lines_is_told_in_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> BlockTimes:
        raise RuntimeError("no kernel\n  for this\tdevice\n")

    monkeypatch.setattr(profiler, "profile", fail)
    request = ProfileRequest(
        config_json=json.dumps(tiny_config()),
        backend="torch",
        device="cpu",
        compute_dtype="fp32",
        lora=LoraConfig(),
        microbatch_size=1,
        sequence=8,
        checkpoint_activations=False,
        with_ends=False,
    )
    failure = json.loads(profiler.answer(request.to_json().encode()))["failure"]
    assert failure["message"] == "RuntimeError: no kernel for this device"


@pytest.mark.parametrize(
    ("share", "fault", "is_busy"),
    [(0.7, "", True), (0.9, "", False), (7.5, "", False), (0.7, "sleep_ms:0", False)],
    ids=["others compute", "quiet", "many threads", "asleep for a test"],
)
def test_a_cpu_that_others_use_all_the_time_is_not_steady(
    monkeypatch: pytest.MonkeyPatch, share: float, fault: str, is_busy: bool
) -> None:
    monkeypatch.setenv("EXO_TRAIN_TEST_FAULT", fault)
    num_looks = itertools.count()

    def clock() -> float:
        return next(num_looks) / 1000

    times = profiled("torch", budget_s=0.1, clock=clock, processor_clock=lambda: share * clock())
    assert (times.slowdown > STEADY_SLOWDOWN) == is_busy
    assert times.layer_s < 0.003, "the times are as they were"


def test_a_sequence_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="512 positions"):
        profiled("torch", sequence=513)


def measure(**changed: Any) -> StageMeasure:
    values: dict[str, Any] = {
        "forward_s": 1.0,
        "backward_s": 2.0,
        "update_s": 0.0,
        "slowdown": 1.0,
        "num_repetitions": 9,
        "in_flight_bytes": 0,
        "workspace_bytes": 0,
    }
    return StageMeasure(**{**values, **changed})


def test_layer_and_overhead_are_told_apart() -> None:
    one = measure(
        forward_s=1.25, backward_s=2.5, update_s=0.3, in_flight_bytes=110, workspace_bytes=50
    )
    two = measure(
        forward_s=2.25,
        backward_s=4.5,
        update_s=0.5,
        slowdown=1.2,
        in_flight_bytes=210,
        workspace_bytes=65,
    )
    times = LayerFit.of(one, two).block_times(None)
    assert times.layer_forward_s == pytest.approx(1.2 * 1.0)
    assert times.layer_backward_s == pytest.approx(1.2 * 2.0)
    assert times.overhead_s == pytest.approx(1.2 * 0.75)
    assert times.layer_update_s == pytest.approx(1.2 * 0.2)
    assert times.stage_s(10) == pytest.approx(1.2 * 30.75)
    assert times.memory is not None
    assert times.memory.layer_in_flight_bytes == 100
    assert times.memory.layer_workspace_bytes == 15
    assert times.memory.workspace_bytes == 35


def test_noise_makes_no_layer_free_and_no_overhead_negative() -> None:
    disturbed = LayerFit.of(measure(forward_s=5.0), measure(forward_s=2.0, backward_s=4.0))
    assert disturbed.forward_s == pytest.approx(0.4)
    assert disturbed.backward_s == pytest.approx(2.0)
    quick = LayerFit.of(measure(forward_s=0.1), measure(forward_s=2.0, backward_s=4.0))
    assert quick.forward_s == pytest.approx(1.0)
    assert quick.overhead_s == pytest.approx(0.0)


def test_ends_are_what_is_left_of_their_stages() -> None:
    layer = LayerFit.of(
        measure(forward_s=1.5, backward_s=2.5), measure(forward_s=2.5, backward_s=4.5)
    )
    head = measure(forward_s=5.0, backward_s=2.0, workspace_bytes=700)
    ends = end_times(layer, head, measure(forward_s=1.75, backward_s=2.5))
    assert ends.head_s == pytest.approx(5 + 2 - 3 - 1)
    assert ends.embedding_s == pytest.approx(4.25 - 4.0)
    assert ends.head_layer_s == pytest.approx(3.0)
    assert ends.head_workspace_bytes == 700
    all_in_forward = end_times(layer, measure(forward_s=8.0, backward_s=1e-5), None)
    assert all_in_forward.head_layer_s == pytest.approx(2.0)
    assert all_in_forward.head_s == pytest.approx(8 - 2 - 1, abs=1e-4)
    assert all_in_forward.embedding_s == 0
    assert end_times(layer, head, measure(forward_s=0.5, backward_s=1.0)).embedding_s == 0


@each_backend
def test_what_the_process_takes_without_a_model_is_measured(backend: str) -> None:
    times = profiled(backend, budget_s=0.0, clock=ticking())
    # Interpreter and framework; far less than this test's process may have used before.
    assert 100e6 < times.process_bytes <= peak_process_bytes() + WORKER_BYTES


def test_a_process_does_not_inherit_the_peak_of_the_one_that_started_it() -> None:
    ballast = np.ones(100_000_000)  # 800 MB, so that this process is larger than its child
    code = "from exo_train.backends.memory import peak_process_bytes; print(peak_process_bytes())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert int(done.stdout) < ballast.nbytes / 2


NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@each_backend
@pytest.mark.parametrize(
    ("quantisation", "encodings"),
    [
        ({"bits": 8, "group_size": 64}, ("AFFINE:8:64:F32", "AFFINE:8:64:F32")),
        (NF4, ("NF4", "F32")),
        (None, ("AFFINE:8:64:F32", "F32")),
    ],
    ids=["MLX's", "NF4", "by the run"],
)
def test_a_quantised_base_is_timed_with_packed_weights(
    backend: str, quantisation: dict[str, Any] | None, encodings: tuple[str, str]
) -> None:
    quantize = 0 if quantisation else 8
    config = json.loads(model(tied=False).config_json) | {"quantization_config": quantisation}
    spec = ModelSpec.from_config(config, place="a quantised model")
    source = RandomTensors(spec, DType.FP32, quantize=quantize)
    name = "model.layers.1.mlp.down_proj.weight"
    values = decode(source.infos[name], source.read(name)).to_numpy()
    assert source.infos[name].encoding == encodings[0]
    # As large as those of a real model, so that nothing grows or vanishes from layer to layer.
    assert 0.5 < values.std() * 512**0.5 < 2
    assert source.infos["lm_head.weight"].encoding == encodings[1]
    settings: dict[str, Any] = {"with_ends": True, "budget_s": 0.05, "clock": ticking()}
    times = profiled(backend, spec, quantize=quantize, **settings)
    assert times.layer_s > 0
