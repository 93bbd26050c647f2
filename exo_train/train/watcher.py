"""What a run tells while it goes on, and how it is asked to stop. Owns these callbacks' names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from exo_train.train.metrics import PairMetrics, StepMetrics
from exo_train.train.ring import Ring


class OnEvaluation(Protocol):
    def __call__(self, step: int, loss: float, pairs: PairMetrics | None = None) -> None:
        """Take in the held-out loss after `step`, and what held-out pairs came to."""


@dataclass(frozen=True, slots=True)
class Watcher:
    """Callbacks of a run: for the screen, and to stop it."""

    on_step: Callable[[StepMetrics, float | None], None] = lambda metrics, remaining_s: None
    on_evaluation: OnEvaluation = lambda step, loss, pairs=None: None
    on_note: Callable[[str], None] = lambda note: None
    wants_stop: Callable[[], bool] = lambda: False
    on_ring: Callable[[Ring], None] = lambda ring: None
