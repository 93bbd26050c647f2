"""What a run tells while it goes on, and how it is asked to stop. Owns these callbacks' names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from exo_train.train.metrics import StepMetrics
from exo_train.train.ring import Ring


@dataclass(frozen=True, slots=True)
class Watcher:
    """Callbacks of a run: for the screen, and to stop it."""

    on_step: Callable[[StepMetrics, float | None], None] = lambda metrics, remaining_s: None
    on_evaluation: Callable[[int, float], None] = lambda step, loss: None
    on_note: Callable[[str], None] = lambda note: None
    wants_stop: Callable[[], bool] = lambda: False
    on_ring: Callable[[Ring], None] = lambda ring: None
