"""Each rule against the library that people know it from, in the arrays of each backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from transformers.optimization import Adafactor

from exo_train.backends.base import Arrays
from exo_train.backends.optimizers import Optimizer
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
    del state[f"{LAYER}.lora_a.{min(config(name).slots((7, 3)))}"]
    with pytest.raises(ConfigError, match=rf"has no '{LAYER}\.lora_a\."):
        second.load(state, layers=range(3, 4))
