"""What a run is about to do, in numbers: model, rows, updates, rate, and what is trained.

Owns the names of these facts in the `begin` event. Pure; must not decide any of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from exo_train.backends.lora import adapter_sentence, count_trainable
from exo_train.config import TrainConfig
from exo_train.models.spec import ModelSpec
from exo_train.train.loop import Data


@dataclass(frozen=True, slots=True, kw_only=True)
class RateCurve:
    """Learning rates of the first and the last update, and where the peak is first reached.

    `peak_update` counts from 1, as steps do.
    """

    first: float
    peak: float
    peak_update: int
    last: float

    @classmethod
    def of(cls, rates: Sequence[float]) -> RateCurve:
        peak = max(rates)
        return cls(first=rates[0], peak=peak, peak_update=rates.index(peak) + 1, last=rates[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """Tokens are those of one epoch; `adapter` says what is trained, in words, also where that is
    no adapter, whose `rank` is 0 then; `parameters` are all of the model's, tied ones once.

    `steps` are all updates of the run, `steps_done` those that a resumed run begins after.
    """

    model: str
    architecture: str
    num_layers: int
    data: str
    run_dir: str
    rows: int
    held_out_rows: int
    tokens: int
    supervised_tokens: int
    max_seq_length: int
    batch_size: int
    steps: int
    steps_done: int
    steps_per_epoch: int
    lr_schedule: str
    learning_rate: RateCurve
    packing: bool
    objective: str
    adapter: str
    rank: int
    alpha: float
    targets: tuple[str, ...]
    dtype: str
    seed: int
    parameters: int
    trainable_parameters: int

    @property
    def epochs(self) -> float:
        return self.steps / self.steps_per_epoch

    @property
    def supervised_share(self) -> float:
        return self.supervised_tokens / self.tokens

    @property
    def trainable_share(self) -> float:
        return self.trainable_parameters / self.parameters

    def to_dict(self) -> dict[str, Any]:
        shares = ("epochs", "supervised_share", "trainable_share")
        plain = dataclasses.asdict(self) | {"targets": list(self.targets)}
        return plain | {name: getattr(self, name) for name in shares}


def beginning_of(
    config: TrainConfig,
    spec: ModelSpec,
    data: Data,
    *,
    rates: Sequence[float],
    run_dir: str,
    steps_done: int = 0,
) -> Beginning:
    """Give the facts of a run of `len(rates)` updates."""
    examples = data.batches.examples
    trainable = count_trainable(spec, config.lora)
    return Beginning(
        model=config.model,
        architecture=spec.architecture,
        num_layers=spec.num_layers,
        data=config.data,
        run_dir=run_dir,
        rows=len(examples) // config.learnt.answers_per_row,
        held_out_rows=len(data.held_out) // config.learnt.answers_per_row,
        tokens=sum(len(example.tokens) for example in examples),
        supervised_tokens=sum(example.num_supervised_tokens for example in examples),
        max_seq_length=config.max_seq_length,
        batch_size=config.batch_size,
        steps=len(rates),
        steps_done=steps_done,
        steps_per_epoch=data.batches.steps_per_epoch,
        lr_schedule=config.lr_schedule,
        learning_rate=RateCurve.of(rates),
        packing=config.packing,
        objective=config.objective,
        adapter=adapter_sentence(spec, config.lora) + _without_copies(config),
        rank=0 if config.full else config.rank,
        alpha=0.0 if config.full else config.lora.alpha,
        targets=trainable.targets,
        dtype=config.dtype,
        seed=config.seed,
        parameters=trainable.num_model_values,
        trainable_parameters=trainable.num_values,
    )


def _without_copies(config: TrainConfig) -> str:
    """Say what a loss of a device costs where nobody asked for it to be so."""
    if config.shadow == config.copies:
        return ""
    return (
        "; of so much state no copies are made: a device that is lost takes the run back to its "
        "last checkpoint (--shadow makes them)"
    )
