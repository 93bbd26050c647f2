"""Against code that is not ours: transformers with PEFT, and mlx_lm's LoRA layers and loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn
import mlx_lm.utils
import numpy as np
import peft
import pytest
import torch
import transformers
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.trainer import default_loss

from exo_train.backends.base import Arrays
from exo_train.objective_config import ObjectiveConfig
from exo_train.optimizer_config import OptimizerConfig
from tests.backends.hand_ring import (
    LORA,
    MODELS,
    NUM_LAYERS,
    OPTIONS,
    Row,
    accumulate,
    load_ring,
    microbatches,
    relative_error,
    rows,
)
from tests.tiny_models import make_tiny_model

LEARNING_RATE = 2e-4
WEIGHT_DECAY = 0.01
SHORT = (24, 9, 17, 24)
LONG = (450, 400, 300, 500)  # more supervised tokens than one chunk of the head
OPTIMIZER = OptimizerConfig(weight_decay=WEIGHT_DECAY)


def model_directory(tmp_path: Path, model: str) -> Path:
    return make_tiny_model(tmp_path / model, num_layers=NUM_LAYERS, **MODELS[model])


def peft_model(directory: Path, adapter: Arrays) -> Any:
    """Load with transformers, wrap with PEFT, copy the adapter in."""
    base = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = peft.LoraConfig(
        r=LORA.rank, lora_alpha=LORA.alpha, target_modules=list(LORA.targets), lora_dropout=0.0
    )
    model = peft.get_peft_model(base, config)
    with torch.no_grad():
        for name, value in adapter.items():
            peft_parameter(model, name).copy_(torch.from_numpy(value.T))
    return model


def peft_parameter(model: Any, name: str) -> torch.nn.Parameter:
    module, _, leaf = name.rpartition(".")
    letter = leaf[-1].upper()
    return model.get_parameter(f"base_model.model.{module}.lora_{letter}.default.weight")


def plain_loss(model: Any, chosen: Sequence[Row], **loss: Any) -> torch.Tensor:
    """Mean over supervised tokens in the plainest way: one row at a time, all logits."""
    total, num_supervised = torch.zeros(()), 0
    for row in chosen:
        logits_BTV = model(torch.from_numpy(row.tokens[None, :-1].astype(np.int64))).logits
        losses_T = torch.nn.functional.cross_entropy(
            logits_BTV[0],
            torch.from_numpy(row.tokens[1:].astype(np.int64)),
            reduction="none",
            **loss,
        )
        total = total + losses_T[torch.from_numpy(row.supervised)].sum()
        num_supervised += int(row.supervised.sum())
    return total / num_supervised


# PEFT asks transformers in its old words.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
@pytest.mark.parametrize("model", MODELS)
def test_torch_equals_a_plain_peft_loop(tmp_path: Path, model: str) -> None:
    (stage,) = load_ring(model, ["torch"], optimizer=OPTIMIZER)
    oracle = peft_model(model_directory(tmp_path, model), stage.adapter())
    parameters = [p for p in oracle.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    for step in range(5):
        chosen = rows(seed=step, lengths=LONG if model == "llama3-rope" and step == 0 else SHORT)
        loss = accumulate([stage], chosen, step=step, microbatch_size=4)
        expected = plain_loss(oracle, chosen)
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        optimizer.zero_grad()
        expected.backward()
        if step == 0:  # later ones start from adapters that rounding has moved apart
            gradients = {
                name: peft_parameter(oracle, name).grad.numpy().T for name in stage.gradients()
            }
            assert relative_error(stage.gradients(), gradients) < 1e-5
        optimizer.step()
        stage.apply(learning_rate=LEARNING_RATE, grad_scale=1.0)
    for name, value in stage.adapter().items():
        expected_array = peft_parameter(oracle, name).detach().numpy().T
        np.testing.assert_allclose(value, expected_array, atol=1e-5, rtol=0, err_msg=name)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_label_smoothing_is_that_of_torch_in_training_alone(tmp_path: Path, backend: str) -> None:
    options = replace(OPTIONS, objective=ObjectiveConfig(label_smoothing=0.2))
    (stage,) = load_ring("llama3-rope", [backend], options=options)
    oracle = peft_model(model_directory(tmp_path, "llama3-rope"), stage.adapter())
    chosen = rows(lengths=LONG)
    expected = plain_loss(oracle, chosen, label_smoothing=0.2)
    assert accumulate([stage], chosen, microbatch_size=4) == pytest.approx(
        expected.item(), rel=1e-6
    )
    expected.backward()
    gradients = {name: peft_parameter(oracle, name).grad.numpy().T for name in stage.gradients()}
    assert relative_error(stage.gradients(), gradients) < 1e-5
    num_supervised = sum(int(row.supervised.sum()) for row in chosen)
    plain = sum(float(stage.evaluate(batch)) for batch in microbatches(chosen, 4))  # type: ignore[arg-type]
    with torch.no_grad():
        expected = plain_loss(oracle, chosen)
    assert plain / num_supervised == pytest.approx(expected.item(), rel=1e-6)


def mlx_lm_model(directory: Path, adapter: Arrays) -> Any:
    """Load with mlx_lm, put its LoRA layers in, copy the adapter in."""
    model, _ = mlx_lm.utils.load_model(directory)
    model.freeze()
    for layer in model.layers:
        for target in LORA.targets:
            parent = layer.self_attn if target in layer.self_attn else layer.mlp
            linear = getattr(parent, target)
            setattr(parent, target, LoRALinear.from_base(linear, r=LORA.rank, scale=LORA.scale))
    model.load_weights([(name, mx.array(value)) for name, value in adapter.items()], strict=False)
    return model


@pytest.mark.parametrize("model", ["llama-untied-biased", "llama3-rope", "qwen3"])
def test_mlx_equals_mlx_lm_layers_and_loss(tmp_path: Path, model: str) -> None:
    (stage,) = load_ring(model, ["mlx"], optimizer=OPTIMIZER)
    oracle = mlx_lm_model(model_directory(tmp_path, model), stage.adapter())
    chosen = rows(lengths=LONG if model == "llama3-rope" else SHORT)
    padded = np.zeros((4, max(len(row.tokens) for row in chosen)), np.int32)
    for place, row in enumerate(chosen):
        padded[place, : len(row.tokens)] = row.tokens
    spans = mx.array([[len(r.supervised) // 3 + 1, len(r.supervised)] for r in chosen])
    (expected, num_tokens), gradients = mlx.nn.value_and_grad(oracle, default_loss)(
        oracle, mx.array(padded), spans
    )
    assert int(num_tokens) == sum(int(row.supervised.sum()) for row in chosen)
    loss = accumulate([stage], chosen, microbatch_size=4)
    assert loss == pytest.approx(float(expected), rel=1e-6)
    flat = {name: np.array(value) for name, value in tree_flatten(gradients)}
    assert relative_error(stage.gradients(), flat) < 1e-5


def test_both_adamw_take_the_same_steps() -> None:
    """On the same gradients, so that only the optimizers can differ."""
    stages = [load_ring("llama", [name], optimizer=OPTIMIZER)[0] for name in ("mlx", "torch")]
    for step in range(5):
        for stage in stages:
            accumulate([stage], rows(seed=step), step=step)
            stage.apply(learning_rate=LEARNING_RATE, grad_scale=0.5)
        stages[0].load_adapter(stages[1].adapter())
    for name, value in stages[1].optimizer_state().items():
        got = stages[0].optimizer_state()[name]
        np.testing.assert_allclose(got, value, atol=1e-6, rtol=1e-4, err_msg=name)
