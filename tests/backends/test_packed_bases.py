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
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from safetensors.numpy import load_file, save_file

from exo_train.backends.base import Stage, StageOptions
from exo_train.backends.mlx_packed import PackedLinear
from exo_train.backends.registry import load_backend
from exo_train.backends.sampling import generate_tokens
from exo_train.lora_config import LoraConfig
from exo_train.models.open import open_model
from exo_train.models.packed import BITS, GROUP_SIZES, Packing, quantised
from exo_train.optimizer_config import OptimizerConfig
from exo_train.plan.stages import StageSpec
from tests.backends.hand_ring import (
    LORA,
    OPTIONS,
    Result,
    relative_error,
    train,
)
from tests.packed_models import SIZES, dense_model, make_packed_model
from tests.tiny_models import make_tiny_gguf, make_tiny_model

NUM_LAYERS = 2
BACKENDS = ("mlx", "torch")
DENSE = dataclasses.replace(OPTIONS, base_weights="dense")


def load(
    model: Path,
    backends: Sequence[str],
    *,
    bounds: Sequence[int] | None = None,
    options: StageOptions = OPTIONS,
    lora: LoraConfig = LORA,
) -> list[Stage]:
    spec, source = open_model(model)
    bounds = bounds or (0, spec.num_layers)
    return [
        load_backend(backend).load_stage(
            spec,
            StageSpec(start=start, end=end, embedding=start == 0, head=end == spec.num_layers),
            source,
            device="cpu",
            lora=lora,
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
        tokens = generate_tokens(
            stage.start_decoding(), prompt, max_tokens=12, temperature=0.0, seed=0, stop_ids=set()
        )
        assert list(tokens) == expected


@pytest.mark.parametrize("stored", ["Q4_0", "Q4_1", "Q8_0", "Q5_0"])
def test_a_gguf_trains_the_same_packed_and_dense(tmp_path: Path, stored: str) -> None:
    """Rows of q and k lie in another order there; a Q5_0 has no packed form and becomes dense."""
    model = make_tiny_gguf(tmp_path / "m.gguf", encoding=stored, num_layers=NUM_LAYERS, **SIZES)
    expected = train(load(model, ["torch"], options=DENSE), steps=2)
    for backend in BACKENDS:
        assert_same_numbers(train(load(model, [backend]), steps=2), expected)


@pytest.mark.parametrize("bits", BITS)
def test_a_base_quantised_by_the_run_is_the_one_mlx_would_make(tmp_path: Path, bits: int) -> None:
    """Its projections only, in groups of 32 where 64 do not divide; in a ring as on one device."""
    sizes = {"hidden_size": 128, "intermediate_size": 96}
    plain = make_tiny_model(tmp_path / "plain", num_layers=NUM_LAYERS, **sizes)
    weights = load_file(plain / "model.safetensors")
    with mx.stream(mx.cpu):
        for name, weight in weights.items():
            if name.endswith("_proj.weight"):
                how = {"group_size": 32 if "down" in name else 64, "bits": bits}
                parts = mx.quantize(mx.array(weight), **how)
                weights[name] = np.array(mx.dequantize(*parts, **how))
    rounded = make_tiny_model(tmp_path / "rounded", num_layers=NUM_LAYERS, **sizes)
    save_file(weights, rounded / "model.safetensors", {"format": "pt"})
    expected = train(load(rounded, ["torch"]), steps=2)
    packed = dataclasses.replace(OPTIONS, quantize=bits)
    for backend in BACKENDS:
        assert_same_numbers(train(load(plain, [backend], options=packed), steps=2), expected)
    ring = load(plain, ["mlx", "torch"], bounds=(0, 1, 2), options=packed)
    assert_same_numbers(train(ring, steps=2), expected)
    in_full = train(load(plain, ["torch"]), steps=2)
    with pytest.raises(AssertionError):  # the comparison can fail
        assert_same_numbers(in_full, expected)


@pytest.mark.parametrize("backend", ["mlx", "torch"])
@pytest.mark.parametrize("bits", BITS)
def test_dora_measures_packed_rows(tmp_path: Path, backend: str, bits: int) -> None:
    packed = make_packed_model(
        tmp_path / "packed", Packing(bits=bits, group_size=64), num_layers=NUM_LAYERS
    )
    dora = dataclasses.replace(LORA, dora=True)
    dense = load(dense_model(tmp_path / "dense", packed), ["torch"], lora=dora)
    assert_same_numbers(train(load(packed, [backend], lora=dora), steps=2), train(dense, steps=2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_packed_stage_holds_no_dense_projection(uneven: Path, backend: str) -> None:
    """By every array of the model: words, scales, norms, and what was left unquantised."""
    (stage,) = load(uneven, [backend])
    model = stage._model  # type: ignore[attr-defined]
    if backend == "torch":
        arrays = [value for _, value in (*model.named_parameters(), *model.named_buffers())]
        num_bytes = sum(array.numel() * array.element_size() for array in arrays)
    else:
        num_bytes = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    _, source = open_model(uneven)
    stored = sum(info.num_bytes for info in source.infos.values())
    adapter = sum(array.nbytes for array in stage.adapter().values())
    rope = 4096
    assert stored <= num_bytes <= stored + adapter + rope
