"""Each rule against the library that people know it from, in the arrays of each backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.optimizers
import numpy as np
import pytest
import torch
from transformers.optimization import Adafactor

from exo_train.backends.base import Arrays
from exo_train.backends.optimizers import Optimizer, state_shapes
from exo_train.errors import ConfigError
from exo_train.optimizer_config import OptimizerConfig

RATE, DECAY = 0.02, 0.1
LAYER = "model.layers.3.mlp.up_proj"
SHAPES = {f"{LAYER}.lora_a": (7, 3), f"{LAYER}.lora_b": (3, 5), f"{LAYER}.other": (6,)}
UPDATES = 6
FROM_NUMPY: dict[str, tuple[Any, Callable[[np.ndarray], Any]]] = {
    "torch": (torch, torch.from_numpy),
    "mlx": (mx, mx.array),
    "numpy": (np, np.array),
}
Originals = dict[str, torch.nn.Parameter]


def values() -> Arrays:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def gradients(update: int) -> Arrays:
    """Give gradients of very different sizes; those of LoRA's A are zero in the first update."""
    rng = np.random.default_rng(update + 1)
    drawn = {n: 10.0 ** -(update % 4) * rng.standard_normal(s) for n, s in SHAPES.items()}
    drawn[f"{LAYER}.lora_a"] *= update > 0
    return {name: array.astype(np.float32) for name, array in drawn.items()}


def original(name: str, parameters: Originals, **changes: Any) -> torch.optim.Optimizer:
    settings: dict[str, Any] = {"lr": RATE, "weight_decay": DECAY} | changes
    if name == "adamw":
        return torch.optim.AdamW(parameters.values(), betas=(0.8, 0.95), eps=1e-6, **settings)
    if name == "sgd":
        return torch.optim.SGD(parameters.values(), momentum=0.7, **settings)
    return Adafactor(
        parameters.values(), scale_parameter=False, relative_step=False, warmup_init=False,
        **settings,
    )  # fmt: skip


def trained_by_original(name: str, ratio: float = 1.0) -> Arrays:
    parameters = {n: torch.nn.Parameter(torch.from_numpy(v)) for n, v in values().items()}
    changes = {"weight_decay": 0.0} if name == "sgd" else {}  # PyTorch's goes into the gradient
    optimizer = original(name, parameters, **changes)
    faster = parameters[f"{LAYER}.lora_b"]
    if ratio != 1.0:
        (group,) = optimizer.param_groups
        group["params"] = [p for p in group["params"] if p is not faster]
        optimizer.add_param_group({"params": [faster], "lr": RATE * ratio})
    for update in range(UPDATES):
        for n, gradient in gradients(update).items():
            parameters[n].grad = torch.from_numpy(gradient)
        optimizer.step()
    return {n: p.detach().numpy() for n, p in parameters.items()}


def config(name: str, **changes: Any) -> OptimizerConfig:
    settings: dict[str, Any] = {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6, "momentum": 0.7}
    decay = 0.0 if name == "sgd" else DECAY
    return OptimizerConfig(**{"name": name, "weight_decay": decay, **settings, **changes})


def opened(rule: OptimizerConfig, library: str) -> Optimizer:
    xp, from_numpy = FROM_NUMPY[library]
    return Optimizer(rule, SHAPES, xp=xp, from_numpy=from_numpy, to_numpy=to_numpy)


def trained(optimizer: Optimizer, library: str, arrays: Arrays, updates: range) -> Arrays:
    from_numpy = FROM_NUMPY[library][1]
    adapter = {name: from_numpy(array) for name, array in arrays.items()}
    for update in updates:
        given = {name: from_numpy(array) for name, array in gradients(update).items()}
        adapter = dict(optimizer.updated(adapter, given, learning_rate=RATE))
    return {name: to_numpy(array) for name, array in adapter.items()}


def to_numpy(array: Any) -> np.ndarray:
    return np.array(array.tolist(), np.float32)


def assert_close(got: Arrays, expected: Arrays) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("library", FROM_NUMPY)
@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor"])
def test_each_rule_is_its_original(name: str, library: str) -> None:
    got = trained(opened(config(name), library), library, values(), range(UPDATES))
    assert_close(got, trained_by_original(name))


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor"])
def test_lora_plus_is_a_faster_group_of_bs(name: str) -> None:
    rule = config(name, lora_plus_ratio=4.0)
    got = trained(opened(rule, "numpy"), "numpy", values(), range(UPDATES))
    assert_close(got, trained_by_original(name, ratio=4.0))


def test_sgd_decays_apart_from_the_gradient() -> None:
    rule = config("sgd", momentum=0.0, weight_decay=DECAY)
    got = trained(opened(rule, "numpy"), "numpy", values(), range(1))
    expected = {n: v * (1 - RATE * DECAY) - RATE * gradients(0)[n] for n, v in values().items()}
    assert_close(got, expected)
    assert opened(rule, "numpy").state().keys() == {"step"}


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor"])
def test_another_backend_goes_on_with_the_state_by_name(name: str) -> None:
    first, second = opened(config(name), "torch"), opened(config(name), "mlx")
    half = trained(first, "torch", values(), range(3))
    state = first.state()
    assert state["step"] == 3
    second.load(state, layers=range(3, 4))
    assert_close(trained(second, "mlx", half, range(3, UPDATES)), trained_by_original(name))
    del state[f"{LAYER}.lora_a.{min(config(name).slots('', (7, 3)))}"]
    with pytest.raises(ConfigError, match=rf"has no '{LAYER}\.lora_a\."):
        second.load(state, layers=range(3, 4))


# Muon, which is for matrices of the model.

WIDE, TALL = f"{LAYER}.weight", "model.layers.3.self_attn.q_proj.weight"
MATRICES = {WIDE: (5, 12), TALL: (14, 6)}
OTHERS = {
    "model.embed_tokens.weight": (9, 4),
    "lm_head.weight": (9, 4),
    "model.norm.weight": (4,),
    "model.layers.3.input_layernorm.weight": (4,),
    "model.layers.3.self_attn.q_proj.bias": (6,),
    f"{LAYER}.lora_a": (7, 3),
}


def moved(rule: OptimizerConfig, library: str, shapes: dict[str, tuple[int, ...]]) -> Arrays:
    """Take some updates of arrays of these shapes from gradients of different sizes."""
    xp, from_numpy = FROM_NUMPY[library]
    optimizer = Optimizer(rule, shapes, xp=xp, from_numpy=from_numpy)
    arrays = {name: from_numpy(array) for name, array in drawn(shapes, 0).items()}
    for update in range(UPDATES):
        given = {n: from_numpy(array) for n, array in drawn(shapes, update + 1).items()}
        arrays = dict(optimizer.updated(arrays, given, learning_rate=RATE))
    return {name: to_numpy(array) for name, array in arrays.items()}


def drawn(shapes: dict[str, tuple[int, ...]], seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    size = np.float32(10.0 ** -(seed % 4))
    return {n: size * rng.standard_normal(shape, np.float32) for n, shape in shapes.items()}


@pytest.mark.parametrize("library", FROM_NUMPY)
def test_muon_is_that_of_mlx(library: str) -> None:
    """Without decay, which goes into the gradient there."""
    rule = OptimizerConfig(name="muon", muon_momentum=0.9, muon_rate="original")
    original = mlx.optimizers.Muon(RATE, momentum=0.9, weight_decay=0.0)
    expected = {name: mx.array(array) for name, array in drawn(MATRICES, 0).items()}
    for update in range(UPDATES):
        given = {n: mx.array(array) for n, array in drawn(MATRICES, update + 1).items()}
        expected = original.apply_gradients(given, expected)
    found = {name: to_numpy(array) for name, array in expected.items()}
    assert_close(moved(rule, library, MATRICES), found)


@pytest.mark.parametrize("library", FROM_NUMPY)
@pytest.mark.parametrize("rate", ["original", "match_rms_adamw"])
def test_muon_is_that_of_torch(rate: str, library: str) -> None:
    """As near as its bfloat16 lets it come: a hundredth of what the updates changed."""
    rule = OptimizerConfig(name="muon", muon_momentum=0.9, muon_rate=rate, weight_decay=DECAY)
    before = drawn(MATRICES, 0)
    parameters = {n: torch.nn.Parameter(torch.from_numpy(v.copy())) for n, v in before.items()}
    original = torch.optim.Muon(
        parameters.values(), lr=RATE, momentum=0.9, weight_decay=DECAY, adjust_lr_fn=rate
    )
    for update in range(UPDATES):
        for name, gradient in drawn(MATRICES, update + 1).items():
            parameters[name].grad = torch.from_numpy(gradient)
        original.step()
    for name, value in moved(rule, library, MATRICES).items():
        expected = parameters[name].detach().numpy()
        change = np.linalg.norm(expected - before[name])
        assert np.linalg.norm(value - expected) < 0.015 * change, name


@pytest.mark.parametrize("library", FROM_NUMPY)
def test_muon_leaves_what_is_no_hidden_matrix_to_adamw(library: str) -> None:
    numbers = {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6, "weight_decay": DECAY}
    muon = OptimizerConfig(name="muon", **numbers)
    assert_close(moved(muon, library, OTHERS), moved(OptimizerConfig(**numbers), "numpy", OTHERS))
    assert {name: muon.rule_of(name, shape) for name, shape in OTHERS.items()} == dict.fromkeys(
        OTHERS, "adamw"
    )
    assert {muon.rule_of(name, shape) for name, shape in MATRICES.items()} == {"muon"}


def test_muon_keeps_half_of_what_adamw_does_by_name() -> None:
    muon = OptimizerConfig(name="muon")
    assert state_shapes(muon, {WIDE: (5, 12), "model.norm.weight": (4,)}) == {
        f"{WIDE}.momentum": (5, 12),
        "model.norm.weight.exp_avg": (4,),
        "model.norm.weight.exp_avg_sq": (4,),
    }


def test_another_backend_goes_on_with_muons_state() -> None:
    rule, shapes = OptimizerConfig(name="muon"), {**MATRICES, **OTHERS}
    first = Optimizer(rule, shapes, xp=torch, from_numpy=torch.from_numpy, to_numpy=to_numpy)
    arrays: dict[str, Any] = {n: torch.from_numpy(v) for n, v in drawn(shapes, 0).items()}
    for update in range(UPDATES):
        if update == 3:
            second = Optimizer(rule, shapes, xp=mx, from_numpy=mx.array)
            second.load(first.state(), layers=range(3, 4))
            arrays = {name: mx.array(to_numpy(array)) for name, array in arrays.items()}
        optimizer, from_numpy = (first, torch.from_numpy) if update < 3 else (second, mx.array)
        given = {n: from_numpy(array) for n, array in drawn(shapes, update + 1).items()}
        arrays = dict(optimizer.updated(arrays, given, learning_rate=RATE))
    expected = moved(rule, "numpy", shapes)
    assert_close({name: to_numpy(array) for name, array in arrays.items()}, expected)
