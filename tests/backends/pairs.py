"""Preference pairs for stages driven by hand, and a plain oracle of the losses. For tests only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from exo_train.backends.base import MicrobatchInput, Stage
from exo_train.backends.preference import PairSums
from exo_train.objective_config import ObjectiveConfig
from exo_train.wire.tensor import HostTensor
from tests.backends.hand_ring import Row, microbatches

Pair = tuple[Row, Row]
# (prompt, chosen, rejected), in tokens: answers of very different lengths.
LENGTHS = ((5, 12, 3), (2, 4, 9), (9, 1, 2), (3, 20, 18))
LONG = ((50, 400, 300), (20, 350, 420))  # more supervised tokens than one chunk of the head


def pairs(lengths: Sequence[tuple[int, int, int]] = LENGTHS, *, seed: int = 0) -> list[Pair]:
    rng = np.random.default_rng(seed)
    made = []
    for number, (prompt, *answers) in enumerate(lengths):
        before = rng.integers(0, 320, prompt, dtype=np.int32)
        halves = [
            Row(
                key=2 * number + half,
                tokens=np.concatenate([before, rng.integers(0, 320, length, dtype=np.int32)]),
                supervised=np.arange(1, prompt + length) >= prompt,
            )
            for half, length in enumerate(answers)
        ]
        made.append((halves[0], halves[1]))
    return made


def pair_microbatches(chosen: Sequence[Pair], size: int) -> Iterator[MicrobatchInput]:
    for index, start in enumerate(range(0, len(chosen), size)):
        part = chosen[start : start + size]
        rows = [pair[half] for half in (0, 1) for pair in part]
        (microbatch,) = microbatches(rows, len(rows))
        yield replace(microbatch, index=index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    loss: float
    sums: PairSums


def accumulate_pairs(
    stages: Sequence[Stage],
    chosen: Sequence[Pair],
    objective: ObjectiveConfig,
    *,
    size: int = 2,
    step: int = 0,
) -> Numbers:
    """Do a step's forwards, the base's before each, and its backwards."""
    batches = list(pair_microbatches(chosen, size))
    for stage in stages:
        stage.begin_step(step=step, loss_scale=1 / len(chosen))
    for batch in batches:
        if objective.has_reference:
            _up([stage.refer for stage in stages], batch)
        _up([stage.forward for stage in stages], batch)
    for batch in batches:
        grad: HostTensor | None = None
        for stage in reversed(stages):
            grad = stage.backward(batch.index, grad)
    return Numbers(loss=stages[-1].loss_sum() / len(chosen), sums=stages[-1].take_pair_sums())


def evaluate_pairs(
    stages: Sequence[Stage], chosen: Sequence[Pair], objective: ObjectiveConfig, *, size: int = 2
) -> Numbers:
    loss_sum = 0.0
    for batch in pair_microbatches(chosen, size):
        if objective.has_reference:
            _up([stage.refer for stage in stages], batch)
        loss_sum += _up([stage.evaluate for stage in stages], batch)
    return Numbers(loss=loss_sum / len(chosen), sums=stages[-1].take_pair_sums())


def _up(calls: Sequence[Any], batch: MicrobatchInput) -> Any:
    carried = None
    for call in calls:
        carried = call(replace(batch, hidden_BTD=carried))
    return carried


def oracle_loss(model: Any, chosen: Sequence[Pair], objective: ObjectiveConfig) -> torch.Tensor:
    """The papers' formulas, row by row without padding, by autograd; `model` is PEFT's."""
    losses = []
    for pair in chosen:
        logs = [_log_prob(model, row) for row in pair]
        if objective.name == "dpo":
            with torch.no_grad(), model.disable_adapter():
                bases = [_log_prob(model, row) for row in pair]
            margin = objective.beta * ((logs[0] - bases[0]) - (logs[1] - bases[1]))
            share = objective.label_smoothing
            right, wrong = (-torch.nn.functional.logsigmoid(m) for m in (margin, -margin))
            losses.append((1 - share) * right + share * wrong)
        else:
            means = [log / int(row.supervised.sum()) for log, row in zip(logs, pair, strict=True)]
            odds = [mean - torch.log1p(-torch.exp(mean)) for mean in means]
            ratio = torch.nn.functional.logsigmoid(odds[0] - odds[1])
            losses.append(-means[0] - objective.beta * ratio)
    return torch.stack(losses).mean()


def _log_prob(model: Any, row: Row) -> torch.Tensor:
    tokens = torch.from_numpy(row.tokens.astype(np.int64))
    logits = model(input_ids=tokens[None, :-1], use_cache=False).logits[0]
    logs = torch.log_softmax(logits.double(), dim=-1)
    picked = logs[torch.arange(len(tokens) - 1), tokens[1:]]
    return picked[torch.from_numpy(row.supervised)].sum()
