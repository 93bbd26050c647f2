"""Microbatches, strategy and split, decided together. Owns the order of these choices.

Must not know where times come from: a Problem has them, from a file or from live members.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from exo_train.config import TrainConfig
from exo_train.errors import DoesNotFitError
from exo_train.plan.memory import ModelShape, adapter_params
from exo_train.plan.microbatches import SizeCandidate, choose_size
from exo_train.plan.profiles import Household, Workload
from exo_train.plan.strategy import Verdict, compare

GRADIENT_BYTES = 4  # adapters are trained in fp32


class Problem(Protocol):
    """A run on devices whose speed and memory are known."""

    @property
    def shape(self) -> ModelShape: ...

    @property
    def config(self) -> TrainConfig: ...

    def sized(self, microbatch_size: int) -> tuple[Household, Workload]:
        """Give devices and step for microbatches of so many sequences."""
        ...

    def refusal(self, said: str) -> str:
        """Add to what was `said` when nothing fits: what would fit."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was decided, and from what. `sizes` is empty where the user gave the size."""

    verdict: Verdict
    household: Household
    workload: Workload
    microbatch_size: int
    sizes: tuple[SizeCandidate, ...]


def decide(problem: Problem, *, at_least: int = 1) -> Decision:
    """Choose the microbatch size unless it is given, then compare strategies for it.

    Raises DoesNotFitError with what would fit, and PeerError where links are missing.
    """
    try:
        sizes: tuple[SizeCandidate, ...] = ()
        size = given_size(problem.config)
        if not size:
            batch_size = problem.config.batch_size
            size, sizes = choose_size(batch_size, problem.sized, at_least=at_least)
        return decide_for_size(problem, size, sizes=sizes, at_least=at_least)
    except DoesNotFitError as error:
        raise DoesNotFitError(problem.refusal(str(error))) from None


def given_size(config: TrainConfig) -> int:
    """Give the microbatch size that the user asked for; 0: none."""
    return min(config.microbatch_size, config.batch_size)


def decide_for_size(
    problem: Problem, size: int, *, sizes: tuple[SizeCandidate, ...] = (), at_least: int = 1
) -> Decision:
    """Compare strategies for microbatches of `size` sequences."""
    household, workload = problem.sized(size)
    shape, config = problem.shape, problem.config
    num_values = shape.num_layers * adapter_params(shape, config.lora)
    verdict = compare(
        household, workload, gradient_bytes=num_values * GRADIENT_BYTES, at_least=at_least
    )
    return Decision(
        verdict=verdict,
        household=household,
        workload=workload,
        microbatch_size=size,
        sizes=sizes,
    )
