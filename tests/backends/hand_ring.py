"""A ring driven by hand in one process: the stages of a split, one after the other.

Owns the tiny models, batches and the comparison that the backend tests share. For tests only.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from exo_train.backends.base import Arrays, MicrobatchInput, Stage, StageOptions
from exo_train.backends.registry import load_backend
from exo_train.lora_config import LoraConfig
from exo_train.models.open import open_model
from exo_train.models.spec import ModelSpec
from exo_train.models.tensors import TensorSource
from exo_train.optimizer_config import OptimizerConfig
from exo_train.plan.stages import StageSpec
from exo_train.wire.tensor import DType, HostTensor
from tests.tiny_models import make_tiny_model

NUM_LAYERS = 4
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "llama", "tied": True},
    "llama-untied-biased": {
        "architecture": "llama",
        "tied": False,
        "extra_config": {"attention_bias": True, "mlp_bias": True},
    },
    "llama3-rope": {"architecture": "llama", "tied": True, "rope_scaling": LLAMA3_ROPE},
    "mistral-window": {
        "architecture": "mistral",
        "tied": False,
        "extra_config": {"sliding_window": 8},
    },
    "qwen2": {"architecture": "qwen2", "tied": True},
    "qwen2-half-windowed": {
        "architecture": "qwen2",
        "tied": False,
        "extra_config": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    },
    "qwen3": {"architecture": "qwen3", "tied": False, "head_dim": 32},
}
ONE_STAGE = (0, NUM_LAYERS)
LORA = LoraConfig(rank=4, alpha=8.0)
OPTIONS = StageOptions(
    seed=3, compute_dtype=DType.FP32, wire_dtype=DType.FP32, adapter_init="random"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    key: int
    tokens: np.ndarray
    supervised: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run of a few steps gave; gradients are the first step's."""

    losses: list[float]
    gradients: Arrays
    adapter: Arrays
    optimizer_state: Arrays


@functools.cache
def tiny(name: str) -> tuple[ModelSpec, RememberedTensors]:
    with tempfile.TemporaryDirectory() as directory:
        spec, source = open_model(
            make_tiny_model(Path(directory), num_layers=NUM_LAYERS, **MODELS[name])
        )
        return spec, RememberedTensors(source)


class RememberedTensors:
    """A source held in memory that also keeps the names it was asked for."""

    def __init__(self, source: TensorSource) -> None:
        self.infos = source.infos
        self.names_read: list[str] = []
        self._data = {name: bytes(source.read(name)) for name in source.infos}

    def read(self, name: str) -> bytes:
        self.names_read.append(name)
        return self._data[name]


def rows(*, seed: int = 0, lengths: Sequence[int] = (24, 9, 17, 24)) -> list[Row]:
    """Rows of different lengths whose first third is not supervised, as a prompt is."""
    rng = np.random.default_rng(seed)
    return [
        Row(
            key=1000 * seed + number,
            tokens=rng.integers(0, 320, length + 1, dtype=np.int32),
            supervised=np.arange(length) >= length // 3,
        )
        for number, length in enumerate(lengths)
    ]


def microbatches(chosen: Sequence[Row], size: int) -> Iterator[MicrobatchInput]:
    """Pad `size` rows at a time on the right to their longest; the whole model's inputs."""
    for index, start in enumerate(range(0, len(chosen), size)):
        part = chosen[start : start + size]
        length = max(len(row.supervised) for row in part)
        tokens_BT = np.zeros((len(part), length), np.int32)
        targets_BT, mask_BT = np.zeros_like(tokens_BT), np.zeros(tokens_BT.shape, bool)
        for place, row in enumerate(part):
            end = len(row.supervised)
            tokens_BT[place, :end], targets_BT[place, :end] = row.tokens[:-1], row.tokens[1:]
            mask_BT[place, :end] = row.supervised
        yield MicrobatchInput(
            index=index,
            tokens_BT=tokens_BT,
            targets_BT=targets_BT,
            mask_BT=mask_BT,
            row_keys=tuple(row.key for row in part),
            row_lengths=tuple(len(row.supervised) for row in part),
        )


def load_ring(
    model: str,
    backends: Sequence[str],
    bounds: Sequence[int] = ONE_STAGE,
    *,
    lora: LoraConfig = LORA,
    optimizer: OptimizerConfig = OptimizerConfig(weight_decay=0.01),  # noqa: B008 - frozen
    options: StageOptions = OPTIONS,
    device: str = "cpu",
) -> list[Stage]:
    """Load stage i, layers bounds[i]..bounds[i+1], on backends[i] (the last one repeats)."""
    spec, source = tiny(model)
    stages = []
    for rank, (start, end) in enumerate(itertools.pairwise(bounds)):
        backend = load_backend(backends[min(rank, len(backends) - 1)])
        stage = StageSpec(start=start, end=end, embedding=start == 0, head=end == NUM_LAYERS)
        stages.append(
            backend.load_stage(
                spec,
                stage,
                source,
                device=device,
                lora=lora,
                optimizer=optimizer,
                options=options,
            )
        )
    return stages


def accumulate(
    stages: Sequence[Stage],
    chosen: Sequence[Row],
    *,
    step: int = 0,
    microbatch_size: int = 2,
    grad_fault: float = 1.0,
) -> float:
    """Run all forwards of a step, then all backwards; give the mean loss."""
    num_supervised = sum(int(row.supervised.sum()) for row in chosen)
    for stage in stages:
        stage.begin_step(step=step, loss_scale=1 / num_supervised)
    batches = list(microbatches(chosen, microbatch_size))
    for batch in batches:
        carried: HostTensor | None = None
        for stage in stages:
            carried = stage.forward(replace(batch, hidden_BTD=carried))
        assert carried is None
    for batch in batches:
        grad: HostTensor | None = None
        for stage in reversed(stages):
            if grad is not None and grad_fault != 1.0:
                grad = HostTensor.from_numpy(grad.to_numpy() * np.float32(grad_fault))
            grad = stage.backward(batch.index, grad)
        assert grad is None
    return sum(stage.loss_sum() for stage in stages) / num_supervised


def train(
    stages: Sequence[Stage], *, steps: int = 5, first_step: int = 0, **settings: Any
) -> Result:
    losses, gradients = [], {}
    for step in range(first_step, first_step + steps):
        losses.append(accumulate(stages, rows(seed=step), step=step, **settings))
        gradients = gradients or merged(stage.gradients() for stage in stages)
        norm = sum(stage.grad_square_sum() for stage in stages) ** 0.5
        for stage in stages:
            stage.apply(learning_rate=2e-4, grad_scale=min(1.0, 1.0 / norm))
    return Result(
        losses=losses,
        gradients=gradients,
        adapter=merged(stage.adapter() for stage in stages),
        optimizer_state=merged(stage.optimizer_state() for stage in stages),
    )


@functools.cache
def one_stage_run(model: str, backend: str) -> Result:
    return train(load_ring(model, [backend]))


def merged(parts: Iterator[Arrays]) -> Arrays:
    whole: Arrays = {}
    for part in parts:
        whole.update(part)
    return whole


def relative_error(got: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """Give the largest difference over arrays, each measured against its largest value."""
    assert set(got) == set(expected)
    return max(
        float(np.abs(got[name] - value).max() / (np.abs(value).max() + 1e-12))
        for name, value in expected.items()
    )


def assert_same_run(
    got: Result,
    expected: Result,
    *,
    loss: float = 1e-6,
    gradients: float = 1e-5,
    adapter: float = 1e-5,
) -> None:
    """Compare losses (relative), gradients (relative) and the adapter (absolute)."""
    np.testing.assert_allclose(got.losses, expected.losses, rtol=loss)
    assert relative_error(got.gradients, expected.gradients) <= gradients
    for name, value in expected.adapter.items():
        np.testing.assert_allclose(got.adapter[name], value, atol=adapter, rtol=0, err_msg=name)
