"""The seam between the loop and who forms the ring anew when a device is lost or taken in.

Owns what is asked and what comes back. Must not know how devices are found or plans are made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from exo_train.backends.base import Arrays
from exo_train.errors import ExoTrainError
from exo_train.plan.drift import Drift
from exo_train.plan.history import StepId
from exo_train.plan.prediction import Prediction
from exo_train.train.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What the loop knows of the state: the newest committed point, and what it holds itself."""

    up_to: StepId
    held: tuple[StepId, Arrays] | None
    newest_checkpoint: Callable[[], Checkpoint | None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Restored:
    """A point that the run goes on after; `state` is empty where that is the run's start.

    `checkpoint` is where it comes from, if not from the memory of devices.
    """

    at: StepId
    state: Arrays
    checkpoint: Checkpoint | None = None


def from_checkpoint(checkpoint: Checkpoint, *, generation: int) -> Restored:
    """Give a checkpoint as a point of the history that `generation` goes on from."""
    return Restored(
        at=StepId(generation=generation, step=checkpoint.step),
        state={**checkpoint.adapter, **checkpoint.optimizer},
        checkpoint=checkpoint,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Regrouped:
    """The ring is formed anew, with `restored` on its ranks."""

    restored: Restored
    lost: tuple[str, ...]
    joined: tuple[str, ...]
    prediction: Prediction | None = None
    advise: Callable[[Drift], str] | None = None


class Regrouping(Protocol):
    def wanted(self, *, steps_left: int, step_s: float) -> str:
        """Say at a step boundary why the ring should be formed anew; empty: it should not."""
        ...

    def form_anew(
        self,
        reason: ExoTrainError | str,
        known: Known,
        *,
        on_pause: Callable[[Restored], None],
    ) -> Regrouped:
        """Go back to the newest whole state, plan over who is here, and bring the state there.

        While nothing fits, the run waits; `on_pause` is to save the state first. Raises `reason`
        where going on would not help, InterruptedRunError when a stop is wanted meanwhile.
        """
        ...


class NoRegrouping:
    """Implements Regrouping for rings that end with their first failure."""

    def wanted(self, *, steps_left: int, step_s: float) -> str:
        return ""

    def form_anew(
        self,
        reason: ExoTrainError | str,
        known: Known,
        *,
        on_pause: Callable[[Restored], None],
    ) -> Regrouped:
        assert isinstance(reason, ExoTrainError)
        raise reason
