"""Bases that stay quantised: equal numbers in both backends, in any ring, and in mlx_lm itself."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from exo_train.backends.base import Stage, StageOptions
from exo_train.backends.mlx_packed import PackedLinear
from exo_train.backends.registry import load_backend
from exo_train.config import OptimizerConfig
from exo_train.models.open import open_model
from exo_train.models.packed import BITS, GROUP_SIZES, Packing, quantised
from exo_train.plan.stages import StageSpec
from tests.backends.hand_ring import (
    LORA,
    OPTIONS,
    Result,
    relative_error,
    train,
)
from tests.packed_models import SIZES, dense_model, make_packed_model
from tests.tiny_models import make_tiny_model

NUM_LAYERS = 2
BACKENDS = ("mlx", "torch")
DENSE = dataclasses.replace(OPTIONS, base_weights="dense")


def load(
    model: Path,
    backends: Sequence[str],
    *,
    bounds: Sequence[int] | None = None,
    options: StageOptions = OPTIONS,
) -> list[Stage]:
    spec, source = open_model(model)
    bounds = bounds or (0, spec.num_layers)
    return [
        load_backend(backend).load_stage(
            spec,
            StageSpec(start=start, end=end, embedding=start == 0, head=end == spec.num_layers),
            source,
            device="cpu",
            lora=LORA,
            optimizer=OptimizerConfig(),
            options=options,
        )
        for backend, (start, end) in zip(backends, itertools.pairwise(bounds), strict=True)
    ]


def assert_same_numbers(got: Result, expected: Result) -> None:
    """Not the adapter: AdamW turns a gradient that is nearly zero into a whole step either way."""
    np.testing.assert_allclose(got.losses, expected.losses, rtol=1e-6)
    assert relative_error(got.gradients, expected.gradients) <= 1e-5


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_both_backends_train_as_on_the_numbers_in_full(
    tmp_path: Path, bits: int, group_size: int
) -> None:
    packing = Packing(bits=bits, group_size=group_size)
    tied = bits == 4  # where the packed embedding is the head too
    packed = make_packed_model(tmp_path / "packed", packing, num_layers=NUM_LAYERS, tied=tied)
    expected = train(load(dense_model(tmp_path / "dense", packed), ["torch"]), steps=2)
    for backend in BACKENDS:
        assert_same_numbers(train(load(packed, [backend]), steps=2), expected)
        held_in_full = train(load(packed, [backend], options=DENSE), steps=2)
        assert_same_numbers(held_in_full, expected)


@pytest.mark.parametrize("backends", [("torch", "mlx"), ("mlx", "torch", "mlx")])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_mixed_ring_is_one_device(
    uneven: Path, backends: tuple[str, ...], checkpointed: bool
) -> None:
    options = dataclasses.replace(OPTIONS, checkpoint_activations=checkpointed)
    expected = train(load(uneven, ["torch"]), steps=2)
    bounds = (0, 1, 3) if len(backends) == 2 else (0, 1, 2, 3)
    ring = load(uneven, backends, bounds=bounds, options=options)
    assert_same_numbers(train(ring, steps=2), expected)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with biases, and matrices of several packings and none."""
    return make_packed_model(
        tmp_path_factory.mktemp("uneven") / "model",
        Packing(bits=4, group_size=64),
        num_layers=3,
        tied=False,
        architecture="qwen2",
        overrides={
            "model.layers.0.mlp.down_proj": Packing(bits=8, group_size=32),
            "model.layers.1.self_attn.q_proj": None,
            "lm_head": None,
        },
    )


def test_torch_makes_large_matrices_dense_in_blocks(
    uneven: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(load(uneven, ["torch"]), steps=1)
    monkeypatch.setattr("exo_train.backends.torch_packed.DENSE_BLOCK_VALUES", 128 * 50)
    assert_same_numbers(train(load(uneven, ["torch"]), steps=1), expected)


def test_mlx_multiplies_the_same_with_its_gpu_kernel() -> None:
    """Which it has for CPUs too, only slower; here it is at least once computed with."""
    rng = np.random.default_rng(0)
    matrix = quantised(rng.standard_normal((48, 128), np.float32), Packing(bits=4, group_size=64))
    x, cotangent = (mx.array(rng.standard_normal(size, np.float32)) for size in ((5, 128), (5, 48)))
    expected = np.array(x) @ matrix.dense().T, np.array(cotangent) @ matrix.dense()
    with mx.stream(mx.cpu):
        for fused in (True, False):
            linear = PackedLinear(matrix, dtype=mx.float32, fused=fused)
            got = [array for (array,) in mx.vjp(linear, [x], [cotangent])]
            for one, other in zip(got, expected, strict=True):
                np.testing.assert_allclose(np.array(one), other, atol=2e-5)


@pytest.mark.parametrize("quantise_embedding", [True, False])
def test_a_model_that_mlx_lm_quantised_answers_as_in_mlx_lm(
    tmp_path: Path, quantise_embedding: bool
) -> None:
    """The files are mlx_lm's own, and so is the greedy continuation that both must give."""
    plain = make_tiny_model(tmp_path / "plain", num_layers=NUM_LAYERS, **SIZES)
    model, config = mlx_lm.utils.load_model(plain)

    def predicate(path: str, module: Any) -> bool | dict[str, int]:
        if "embed" in path:
            return quantise_embedding
        return {"bits": 8, "group_size": 32} if "layers.1.mlp" in path else True

    model, config = mlx_lm.utils.quantize_model(
        model, config, group_size=64, bits=4, quant_predicate=predicate
    )
    packed = tmp_path / "packed"
    packed.mkdir()
    mlx_lm.utils.save_model(packed, model)
    mlx_lm.utils.save_config(config, packed / "config.json")
    prompt = [5, 9, 200, 31]
    with mx.stream(mx.cpu):
        logits = np.array(model(mx.array([prompt]))[0, -1])
        steps = generate_step(mx.array(prompt), model, max_tokens=12)
        expected = [int(token) for token, _ in steps]
    for backend in BACKENDS:
        (stage,) = load(
            packed, [backend], options=dataclasses.replace(OPTIONS, adapter_init="zero")
        )
        np.testing.assert_allclose(stage.start_decoding()(prompt), logits, atol=1e-4)
        tokens = load_backend(backend).generate(
            stage, prompt, max_tokens=12, temperature=0.0, seed=0, stop_ids=set()
        )
        assert list(tokens) == expected
