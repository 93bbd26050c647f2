"""Kinds of adapters and where they attach: any ring equals one stage, and PEFT's numbers."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers

from exo_train.backends.base import Arrays
from exo_train.backends.lora import adapter_sentence, count_trainable, is_adapter
from exo_train.lora_config import LoraConfig, placements
from exo_train.optimizer_config import OptimizerConfig
from exo_train.plan.stages import StageSpec
from exo_train.train.state_copies import state_layout
from exo_train.wire.tensor import DType
from tests.backends.hand_ring import (
    LORA,
    NUM_LAYERS,
    OPTIONS,
    Result,
    accumulate,
    assert_same_run,
    load_ring,
    relative_error,
    rows,
    tiny,
    train,
)
from tests.backends.test_oracles import model_directory, plain_loss

RANKS = (("q_proj", 6), ("model.layers.2.mlp.down_proj", 2))
KINDS = {
    "rslora": replace(LORA, rslora=True),
    "patterns": replace(LORA, rank_pattern=RANKS, alpha_pattern=(("v_proj", 24.0),)),
    "dora": replace(LORA, dora=True),
    "upper layers": replace(LORA, layers=("last:2",)),
    "one module": replace(LORA, targets=("model.layers.0.mlp.up_proj",)),
    "all of it": LoraConfig(
        rank=4,
        alpha=6.0,
        targets=("self_attn.q_proj", "down_proj", "model.layers.3.mlp.up_proj"),
        layers=("0", "2-3"),
        rslora=True,
        dora=True,
        rank_pattern=RANKS,
        alpha_pattern=(("down_proj", 3.0),),
    ),
}
BIASED = "llama-untied-biased"
RATE = 2e-4  # AdamW moves by it even where a gradient is hardly more than rounding


@functools.cache
def one_stage(kind: str) -> Result:
    return train(load_ring(BIASED, ["torch"], lora=KINDS[kind]), steps=3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("backends", "bounds"),
    [(["mlx"], (0, 4)), (["torch", "mlx"], (0, 1, 4)), (["mlx", "torch", "mlx"], (0, 1, 2, 4))],
    ids=["mlx", "mixed 2", "mixed 3"],
)
def test_any_ring_equals_one_stage(kind: str, backends: list[str], bounds: tuple[int, ...]) -> None:
    """Ranks without a trained array are among them."""
    got = train(load_ring(BIASED, backends, bounds, lora=KINDS[kind]), steps=3)
    assert_same_run(got, one_stage(kind), adapter=2 * RATE)


def test_kinds_differ() -> None:
    """The comparison above would not see an option that does nothing."""
    losses = [one_stage(kind).losses[1] for kind in KINDS]
    assert len({round(loss, 5) for loss in losses}) == len(KINDS)


def test_each_kind_trains_just_its_arrays() -> None:
    adapter = one_stage("all of it").adapter
    prefixes = {name.rpartition(".")[0] for name in adapter}
    expected = {p.prefix: p.rank for p in placements(KINDS["all of it"], NUM_LAYERS)}
    assert prefixes == set(expected)
    assert len(expected) == 3 * 2 + 1
    for prefix, rank in expected.items():
        assert adapter[f"{prefix}.lora_a"].shape[1] == rank
        assert adapter[f"{prefix}.dora_m"].shape == adapter[f"{prefix}.lora_b"].shape[1:]
    assert set(one_stage("one module").adapter) == {
        f"model.layers.0.mlp.up_proj.lora_{part}" for part in "ab"
    }


@pytest.mark.parametrize("kind", KINDS)
def test_what_ranks_may_send_is_what_they_have(kind: str) -> None:
    """Anything else is refused by whoever collects it or holds a copy."""
    run = one_stage(kind)
    spec, _ = tiny(BIASED)
    whole = StageSpec(start=0, end=NUM_LAYERS, embedding=True, head=True)
    layout = state_layout(spec, KINDS[kind], OptimizerConfig(), whole)
    held = {**run.adapter, **run.optimizer_state}
    assert {name: shape for name, (_, shape) in layout.items()} == {
        name: array.shape for name, array in held.items()
    }
    assert {name for name in layout if is_adapter(name)} == run.adapter.keys()
    trainable = count_trainable(spec, KINDS[kind])
    assert trainable.num_values == sum(array.size for array in run.adapter.values())
    assert f"{trainable.num_values:,} of" in adapter_sentence(spec, KINDS[kind])


@pytest.mark.parametrize("backend", ["mlx", "torch"])
def test_dora_starts_as_the_base(backend: str) -> None:
    """B is zero, and each row has the length it had."""
    options = replace(OPTIONS, adapter_init="zero")
    plain, dora = (
        load_ring(BIASED, [backend], lora=lora, options=options)[0]
        for lora in (LORA, KINDS["dora"])
    )
    losses = [accumulate([stage], rows()) for stage in (plain, dora)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("backend", ["mlx", "torch"])
def test_dora_in_16_bit_stays_close(backend: str) -> None:
    options = replace(OPTIONS, compute_dtype=DType.BF16, wire_dtype=DType.BF16)
    got = train(load_ring(BIASED, [backend], lora=KINDS["dora"], options=options), steps=2)
    np.testing.assert_allclose(got.losses, one_stage("dora").losses[:2], rtol=1e-2)
    assert relative_error(got.gradients, one_stage("dora").gradients) < 0.2


def peft_model(directory: Path, kind: str) -> Any:
    """Let PEFT put its own layers in, by its own words."""
    lora = KINDS[kind]
    layers = {"upper layers": [2, 3], "dora": None, "rslora": None, "patterns": None}
    base = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(lora.targets),
        lora_dropout=0.0,
        layers_to_transform=layers[kind],
        rank_pattern=dict(lora.rank_pattern),
        alpha_pattern=dict(lora.alpha_pattern),
        use_rslora=lora.rslora,
        use_dora=lora.dora,
    )
    return peft.get_peft_model(base, config)


def peft_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """Give PEFT's trained parameters by our names; matrices are transposed there."""
    found = {}
    for name, value in model.named_parameters():
        if value.requires_grad:
            ours = name.removeprefix("base_model.model.").replace(".default", "")
            ours = ours.replace(".weight", "").replace("lora_magnitude_vector", "dora_m")
            found[ours.replace("lora_A", "lora_a").replace("lora_B", "lora_b")] = value
    return found


def as_ours(values: dict[str, torch.Tensor]) -> Arrays:
    return {name: value.detach().numpy().T for name, value in values.items()}


# PEFT asks transformers in its old words.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
@pytest.mark.parametrize("kind", ["rslora", "patterns", "dora", "upper layers"])
def test_peft_s_own_layers_give_the_same_numbers(kind: str, tmp_path: Path) -> None:
    (stage,) = load_ring(BIASED, ["torch"], lora=KINDS[kind])
    oracle = peft_model(model_directory(tmp_path, BIASED), kind)
    parameters = peft_parameters(oracle)
    assert parameters.keys() == stage.adapter().keys()
    with torch.no_grad():
        for name, value in stage.adapter().items():
            parameters[name].copy_(torch.from_numpy(value.T))
    optimizer = torch.optim.AdamW(parameters.values(), lr=RATE, weight_decay=0.01)
    for step in range(3):
        chosen = rows(seed=step)
        loss = accumulate([stage], chosen, step=step, microbatch_size=4)
        expected = plain_loss(oracle, chosen)
        assert loss == pytest.approx(expected.item(), rel=1e-6 if step == 0 else 1e-5)
        optimizer.zero_grad()
        expected.backward()
        if step == 0:
            gradients = as_ours({name: p.grad for name, p in parameters.items()})
            assert relative_error(stage.gradients(), gradients) < 1e-5
        optimizer.step()
        stage.apply(learning_rate=RATE, grad_scale=1.0)
    for name, array in as_ours(parameters).items():
        np.testing.assert_allclose(stage.adapter()[name], array, atol=2 * RATE, rtol=0)
