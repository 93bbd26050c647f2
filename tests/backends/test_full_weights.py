"""All weights trained, without an adapter: against plain transformers, and as a ring of stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from exo_train.agent.planning import model_shape
from exo_train.backends.base import MicrobatchInput, Stage
from exo_train.backends.torch_stage import TorchStage
from exo_train.lora_config import LoraConfig
from exo_train.models.spec import EMBEDDING, LM_HEAD
from exo_train.objective_config import ObjectiveConfig
from exo_train.optimizer_config import OptimizerConfig
from exo_train.plan.memory import activation_bytes_per_token
from exo_train.wire.tensor import DType
from tests.backends.hand_ring import (
    MODELS,
    NUM_LAYERS,
    OPTIONS,
    Result,
    accumulate,
    assert_same_run,
    load_ring,
    merged,
    relative_error,
    rows,
    tiny,
)
from tests.tiny_models import make_tiny_model

FULL = LoraConfig(full=True)
SMOOTHED = ObjectiveConfig(label_smoothing=0.1)
LAST_TWO = LoraConfig(full=True, layers=("last:2",))
WEIGHT_DECAY, LEARNING_RATE = 0.1, 1e-3
# A value whose gradient is nearly nothing would be moved by the sign of its rounding.
EPSILON = 1e-6
OPTIMIZER = OptimizerConfig(weight_decay=WEIGHT_DECAY, epsilon=EPSILON)
SHORT = (24, 9, 17, 24)
LONG = (450, 400, 300, 500)  # more supervised tokens than one chunk of the head
each_backend = pytest.mark.parametrize("backend", ["torch", "mlx"])


def plain(directory: Path, name: str) -> transformers.PreTrainedModel:
    path = make_tiny_model(directory / name, num_layers=NUM_LAYERS, **MODELS[name])
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.train()


def plain_loss(model: transformers.PreTrainedModel, chosen: Sequence) -> torch.Tensor:
    """Mean over supervised tokens in the plainest way: one row at a time, all logits."""
    total, num_supervised = torch.zeros(()), 0
    for row in chosen:
        logits_BTV = model(torch.from_numpy(row.tokens[None, :-1].astype(np.int64))).logits
        losses_T = torch.nn.functional.cross_entropy(
            logits_BTV[0], torch.from_numpy(row.tokens[1:].astype(np.int64)), reduction="none"
        )
        total = total + losses_T[torch.from_numpy(row.supervised)].sum()
        num_supervised += int(row.supervised.sum())
    return total / num_supervised


def tie(stages: Sequence[Stage]) -> None:
    """What the ranks of a ring do for the matrix that the first and the last one have."""
    first, last = stages[0], stages[-1]
    if len(stages) > 1 and EMBEDDING in last.adapter():
        total = first.gradient_of(EMBEDDING) + last.gradient_of(EMBEDDING)
        first.set_gradient(EMBEDDING, total)
        last.set_gradient(EMBEDDING, total)


def train(stages: Sequence[Stage], *, steps: int = 3, lengths: Sequence[int] = SHORT) -> Result:
    losses, gradients = [], {}
    for step in range(steps):
        losses.append(accumulate(stages, rows(seed=step, lengths=lengths), step=step))
        tie(stages)
        gradients = gradients or merged(stage.gradients() for stage in stages)
        norm = sum(stage.grad_square_sum() for stage in stages) ** 0.5
        for stage in stages:
            stage.apply(learning_rate=LEARNING_RATE, grad_scale=min(1.0, 1.0 / norm))
    return Result(
        losses=losses,
        gradients=gradients,
        adapter=merged(stage.adapter() for stage in stages),
        optimizer_state=merged(stage.optimizer_state() for stage in stages),
    )


@each_backend
@pytest.mark.parametrize("model", MODELS)
def test_every_weight_moves_as_in_a_plain_loop(model: str, backend: str, tmp_path: Path) -> None:
    (stage,) = load_ring(model, [backend], lora=FULL, optimizer=OPTIMIZER)
    oracle = plain(tmp_path, model)
    parameters = dict(oracle.named_parameters())
    is_plain = {name: name.endswith(("norm.weight", ".bias")) for name in parameters}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in parameters.items() if is_plain[n]], "weight_decay": 0.0},
            {"params": [p for n, p in parameters.items() if not is_plain[n]]},
        ],
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        eps=EPSILON,
    )
    for step in range(3):
        chosen = rows(seed=step, lengths=LONG if model == "llama3-rope" and step == 0 else SHORT)
        loss = accumulate([stage], chosen, step=step)
        expected = plain_loss(oracle, chosen)
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        optimizer.zero_grad()
        expected.backward()
        if step == 0:
            gradients = {name: p.grad.numpy() for name, p in parameters.items()}
            assert relative_error(stage.gradients(), gradients) < 2e-5
        optimizer.step()
        stage.apply(learning_rate=LEARNING_RATE, grad_scale=1.0)
    for name, value in stage.adapter().items():
        expected_array = parameters[name].detach().numpy()
        np.testing.assert_allclose(value, expected_array, atol=1e-4, rtol=0, err_msg=name)


@pytest.mark.parametrize("lora", [FULL, LAST_TWO], ids=["all", "last two"])
@pytest.mark.parametrize("model", ["llama", "llama-untied-biased", "qwen3"])
@pytest.mark.parametrize(
    ("backends", "bounds"),
    [
        (["torch"], (0, 2, 4)),
        (["mlx", "torch", "mlx"], (0, 1, 3, 4)),
        (["torch", "mlx"], (0, 3, 4)),
    ],
    ids=["torch 2", "mixed 3", "mixed 2"],
)
def test_stages_train_as_one(
    backends: list[str], bounds: tuple[int, ...], model: str, lora: LoraConfig
) -> None:
    one = train(load_ring(model, ["torch"], lora=lora, optimizer=OPTIMIZER))
    ring = train(load_ring(model, backends, bounds, lora=lora, optimizer=OPTIMIZER))
    assert_same_run(ring, one, loss=1e-5, gradients=2e-5, adapter=1e-4)
    assert len(one.adapter) == len(
        {n for n in tiny(model)[0].all_tensor_shapes() if lora is FULL or ".2." in n or ".3." in n}
    )


def test_negative_control_a_tied_matrix_that_is_not_summed_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = train(load_ring("llama", ["torch"], lora=FULL))
    monkeypatch.setitem(globals(), "tie", lambda stages: None)
    ring = train(load_ring("llama", ["torch"], (0, 2, 4), lora=FULL))
    with pytest.raises(AssertionError):
        assert_same_run(ring, one, loss=1e-5, gradients=2e-5, adapter=1e-4)


@each_backend
@pytest.mark.parametrize(
    "changes",
    [
        {"checkpoint_activations": True},
        {"neftune_alpha": 5.0},
        {"objective": ObjectiveConfig(label_smoothing=0.1)},
    ],
    ids=str,
)
def test_options_of_a_step_hold(changes: dict, backend: str) -> None:
    options = replace(OPTIONS, **changes)
    one = train(load_ring("llama", ["torch"], lora=FULL, optimizer=OPTIMIZER, options=options))
    ring = train(
        load_ring("llama", [backend], (0, 2, 4), lora=FULL, optimizer=OPTIMIZER, options=options)
    )
    assert_same_run(ring, one, loss=1e-5, gradients=2e-5, adapter=1e-4)
    if "checkpoint_activations" not in changes:
        usual = train(load_ring("llama", ["torch"], lora=FULL))
        assert relative_error(one.gradients, usual.gradients) > 1e-3


@each_backend
@pytest.mark.parametrize("bounds", [(0, 4), (0, 2, 4)], ids=len)
def test_sixteen_bits_compute_and_float32_is_kept(backend: str, bounds: tuple[int, ...]) -> None:
    """Updates far below a bf16 value's precision add up."""
    options = replace(OPTIONS, compute_dtype=DType.BF16)
    stages = load_ring("llama", [backend], bounds, lora=FULL, optimizer=OPTIMIZER, options=options)
    before = merged(stage.adapter() for stage in stages)
    exact = merged(s.adapter() for s in load_ring("llama", ["torch"], lora=FULL))
    assert all(np.array_equal(before[name], value) for name, value in exact.items())
    losses = []
    for step in range(8):
        losses.append(accumulate(stages, rows(seed=0), step=step))
        tie(stages)
        for stage in stages:
            stage.apply(learning_rate=1e-4, grad_scale=1.0)
    after = merged(stage.adapter() for stage in stages)
    moved = np.abs(after[EMBEDDING] - before[EMBEDDING]).max()
    assert 4e-4 < moved < 1.2e-3
    assert losses[-1] < losses[0]


@each_backend
def test_state_is_taken_up_exactly(backend: str) -> None:
    ours = load_ring("qwen3", [backend], (0, 2, 4), lora=FULL)
    train(ours, steps=2)
    state = [merged(s.adapter() for s in ours), merged(s.optimizer_state() for s in ours)]
    theirs = load_ring("qwen3", [backend], (0, 2, 4), lora=FULL)
    for stage in theirs:
        stage.load_adapter(state[0])
        stage.load_optimizer_state(state[1])
    ends = [merged(s.adapter() for s in ring) for ring in (ours, theirs) if train(ring, steps=1)]
    assert all(np.array_equal(ends[0][name], value) for name, value in ends[1].items())
    assert LM_HEAD in ends[0]


def kept_bytes(stage: TorchStage, given: MicrobatchInput) -> int:
    """Give what PyTorch keeps of a forward for its backward, weights left out."""
    weights = {value.untyped_storage().data_ptr() for value in stage._model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def remember(value: torch.Tensor) -> torch.Tensor:
        if not value.is_leaf and value.untyped_storage().data_ptr() not in weights:
            kept[value.untyped_storage().data_ptr()] = value.untyped_storage()
        return value

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda value: value):
        stage.forward(given)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
def test_pytorch_keeps_what_the_planner_counts(dtype: DType) -> None:
    """Of a layer's activations, by position; attention on CPUs hides its sums from hooks."""
    options = replace(OPTIONS, compute_dtype=dtype)
    given = MicrobatchInput(index=0, tokens_BT=np.ones((2, 64), np.int32), row_keys=(0, 1))
    kept = [
        kept_bytes(load_ring("llama", ["torch"], (0, end), lora=FULL, options=options)[0], given)
        for end in (1, 2)
    ]
    shape = model_shape(tiny("llama")[0])
    counted = activation_bytes_per_token(shape, lora=FULL, activation_bytes=dtype.num_bytes)
    assert (kept[1] - kept[0]) / (2 * 64) == counted - 4 * shape.num_heads
