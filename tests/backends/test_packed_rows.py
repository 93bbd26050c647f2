"""Rows end to end in one sequence: each is computed as if it were alone, in both backends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from exo_train.agent.planning import model_shape
from exo_train.backends.base import Arrays, MicrobatchInput, Stage
from exo_train.config import LoraConfig
from exo_train.plan.memory import activation_bytes_per_token
from exo_train.wire.tensor import DType
from tests.backends.hand_ring import (
    LORA,
    MODELS,
    NUM_LAYERS,
    OPTIONS,
    Row,
    load_ring,
    merged,
    microbatches,
    relative_error,
    rows,
    tiny,
)
from tests.tiny_models import make_tiny_model

WIDTH = 48
PACKS = ((24, 15, 9), (8, 37), (48,))  # the middle one is padded, the last is alone
LENGTHS = tuple(length for pack in PACKS for length in pack)
TOLERANCE = 1e-4
DROPOUT = replace(LORA, dropout=0.2)
BACKENDS = ("mlx", "torch")
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def packed(chosen: Sequence[Row]) -> MicrobatchInput:
    """Lay rows of `LENGTHS` into the sequences of `PACKS`."""
    tokens_BT = np.zeros((len(PACKS), WIDTH), np.int32)
    targets_BT, mask_BT = np.zeros_like(tokens_BT), np.zeros(tokens_BT.shape, bool)
    starts, left = [], list(chosen)
    for sequence, pack in enumerate(PACKS):
        start = 0
        for length in pack:
            row, end = left.pop(0), start + length
            tokens_BT[sequence, start:end] = row.tokens[:-1]
            targets_BT[sequence, start:end] = row.tokens[1:]
            mask_BT[sequence, start:end] = row.supervised
            starts.append(sequence * WIDTH + start)
            start = end
    return MicrobatchInput(
        index=0,
        tokens_BT=tokens_BT,
        targets_BT=targets_BT,
        mask_BT=mask_BT,
        row_keys=tuple(row.key for row in chosen),
        row_starts=tuple(starts),
    )


def computed(stages: Sequence[Stage], given: Sequence[MicrobatchInput]) -> tuple[float, Arrays]:
    """Give the summed loss and all gradients of one step."""
    for stage in stages:
        stage.begin_step(step=3, loss_scale=0.01)
    for microbatch in given:
        carried = None
        for stage in stages:
            carried = stage.forward(replace(microbatch, hidden_BTD=carried))
        grad = None
        for stage in reversed(stages):
            grad = stage.backward(microbatch.index, grad)
    return stages[-1].loss_sum(), merged(stage.gradients() for stage in stages)


@each_backend
@pytest.mark.parametrize("model", MODELS)
def test_packed_equals_one_row_at_a_time(backend: str, model: str) -> None:
    """Also for windowed layers and scaled rope, and with dropout, which goes by row and place."""
    chosen = rows(lengths=LENGTHS)
    lora = DROPOUT if model == "llama" else LORA
    (stage,) = load_ring(model, [backend], lora=lora)
    loss, gradients = computed([stage], list(microbatches(chosen, 1)))
    packed_loss, packed_gradients = computed([stage], [packed(chosen)])
    assert packed_loss == pytest.approx(loss, rel=1e-5)
    assert relative_error(packed_gradients, gradients) < TOLERANCE


@pytest.mark.parametrize("model", ["llama3-rope", "qwen2-half-windowed"])
@pytest.mark.parametrize("lora", [LORA, DROPOUT], ids=["plain", "dropout"])
def test_a_mixed_ring_packs_as_one_device_does_not(model: str, lora: LoraConfig) -> None:
    chosen = rows(lengths=LENGTHS)
    one = computed(load_ring(model, ["torch"], lora=lora), list(microbatches(chosen, 2)))
    options = replace(OPTIONS, checkpoint_activations=True)
    ring = load_ring(model, ["mlx", "torch", "mlx"], (0, 1, 3, 4), lora=lora, options=options)
    loss, gradients = computed(ring, [packed(chosen)])
    assert loss == pytest.approx(one[0], rel=1e-5)
    assert relative_error(gradients, one[1]) < TOLERANCE


def row_losses(stage: Stage, chosen: Sequence[Row]) -> list[float]:
    """Measure each row's loss where all are packed."""
    losses = []
    for number in range(len(chosen)):
        only = [
            replace(row, supervised=row.supervised & (place == number))
            for place, row in enumerate(chosen)
        ]
        loss = stage.evaluate(packed(only))
        assert isinstance(loss, float)
        losses.append(loss)
    return losses


@each_backend
def test_a_row_s_loss_does_not_know_its_neighbours(backend: str) -> None:
    """Every row's loss is that of the row alone; another first row changes its own only."""
    (stage,) = load_ring("llama", [backend])
    chosen = rows(lengths=LENGTHS)
    alone = [stage.evaluate(batch) for batch in microbatches(chosen, 1)]
    together = row_losses(stage, chosen)
    assert together == pytest.approx(alone, rel=TOLERANCE)
    other = replace(chosen[0], tokens=(chosen[0].tokens + 7) % 320)
    changed = row_losses(stage, [other, *chosen[1:]])
    assert changed[1:] == together[1:], "to the last digit"
    assert abs(changed[0] - together[0]) > 1e-3


@each_backend
def test_without_a_mask_the_comparison_is_red(backend: str) -> None:
    """The negative control: the same sequences as if each were one row."""
    chosen = rows(lengths=LENGTHS)
    (stage,) = load_ring("llama", [backend])
    loss, _ = computed([stage], [packed(chosen)])
    leaking = replace(packed(chosen), row_starts=())
    assert abs(computed([stage], [leaking])[0] / loss - 1) > 10 * TOLERANCE


@each_backend
def test_packed_rows_stay_close_in_16_bit(backend: str) -> None:
    """A row's rope positions begin anew in PyTorch and go on in MLX, which rotates in float32."""
    options = replace(OPTIONS, compute_dtype=DType.BF16)
    chosen = rows(lengths=LENGTHS)
    (stage,) = load_ring("llama3-rope", [backend], options=options)
    (exact,) = load_ring("llama3-rope", [backend])
    want, _ = computed([exact], list(microbatches(chosen, 1)))
    got, _ = computed([stage], [packed(chosen)])
    unpacked, _ = computed([stage], list(microbatches(chosen, 1)))
    assert abs(got / want - 1) < 2 * max(abs(unpacked / want - 1), 1e-3)


@each_backend
def test_a_bad_value_in_a_packed_microbatch_is_found(backend: str) -> None:
    stages = load_ring("llama", [backend], (0, 2, 4))
    given = packed(rows(lengths=LENGTHS))
    assert stages[0].find_bad_activation(given) == ""


def kept_bytes(stage: Stage, given: MicrobatchInput) -> int:
    """Give what PyTorch keeps of a forward for its backward, weights and adapters left out."""
    kept: list[torch.Tensor] = []

    def remember(value: torch.Tensor) -> torch.Tensor:
        kept.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda value: value):
        stage.forward(given)
    storages = [value.untyped_storage() for value in kept if not value.is_leaf]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_transformers_keeps_what_the_planner_counts() -> None:
    """A mask costs repeated keys and values in each layer; the mask itself is there once."""
    given = MicrobatchInput(
        index=0,
        tokens_BT=np.ones((2, 64), np.int32),
        row_keys=(0, 1, 2, 3),
        row_starts=(0, 20, 64, 90),
    )
    plain = replace(given, row_keys=(0, 1), row_starts=())
    stages = [load_ring("llama", ["torch"], (0, end))[0] for end in (1, 2)]
    packed_bytes, plain_bytes = (
        (kept_bytes(stages[1], batch) - kept_bytes(stages[0], batch)) / (2 * 64)
        for batch in (given, plain)
    )
    values = {"lora_rank": LORA.rank, "targets": LORA.targets, "activation_bytes": 4}
    layer = model_shape(tiny("llama")[0])
    expected = [activation_bytes_per_token(layer, masked=on, **values) for on in (True, False)]
    assert packed_bytes - plain_bytes == expected[0] - expected[1] == 2 * (64 - 32) * 4


def transformers_model(directory: Path, model: str) -> Any:
    path = make_tiny_model(directory, num_layers=NUM_LAYERS, **MODELS[model])
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def alone_in_transformers(oracle: Any, chosen: Sequence[Row]) -> float:
    """Sum the loss of one row at a time, with labels in the library's own form."""
    total = 0.0
    for row in chosen:
        labels_T = np.where(np.concatenate([[False], row.supervised]), row.tokens, -100)
        ids_BT, labels_BT = (
            torch.from_numpy(values[None].astype(np.int64)) for values in (row.tokens, labels_T)
        )
        loss = oracle(input_ids=ids_BT, labels=labels_BT).loss.item()
        total += loss * int(row.supervised.sum())
    return total


def packed_in_transformers(oracle: Any, given: MicrobatchInput) -> float:
    """Sum the loss of packs as TRL's collator gives them: positions that begin anew part rows."""
    places = [[n for length in pack for n in range(length)] for pack in PACKS]
    place_BT = torch.tensor([[*row, *range(WIDTH - len(row))] for row in places])
    assert given.tokens_BT is not None
    targets_BT, mask_BT = (torch.from_numpy(values) for values in given.supervision())
    ids_BT = torch.from_numpy(given.tokens_BT)
    logits_BTV = oracle(input_ids=ids_BT, position_ids=place_BT, use_cache=False).logits
    losses_N = torch.nn.functional.cross_entropy(
        logits_BTV[mask_BT], targets_BT[mask_BT].long(), reduction="none"
    )
    return float(losses_N.sum())


@pytest.mark.parametrize("model", ["llama", "mistral-window", "qwen2-half-windowed"])
def test_packed_loss_equals_plain_transformers(model: str, tmp_path: Path) -> None:
    """Against code that is not ours: rows one at a time, and packed in the library's own way."""
    oracle, chosen = transformers_model(tmp_path, model), rows(lengths=LENGTHS)
    options = replace(OPTIONS, adapter_init="zero")
    with torch.no_grad():
        expected = alone_in_transformers(oracle, chosen)
        theirs = packed_in_transformers(oracle, packed(chosen))
    assert theirs == pytest.approx(expected, rel=1e-5)
    for backend in BACKENDS:
        (stage,) = load_ring(model, [backend], options=options)
        assert stage.evaluate(packed(chosen)) == pytest.approx(expected, rel=1e-5), backend
