"""How often the state of all stages is copied, and which point of the history is safe.

Owns the rhythm: as often as links afford, at most one copy on its way. Must not know messages or
devices: the Ring has those.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from exo_train.backends.base import Arrays
from exo_train.plan.history import StepId
from exo_train.train.awaited_copies import LateCopy
from exo_train.train.ring import START, Ring

COPY_TIMEOUT_S = 30.0
# A copy may hold a step up by this share of its time; else copies are made less often.
AFFORDED_SHARE = 0.1
MAX_EVERY = 64


class Shadowing:
    """Copies go from each rank to its neighbour; in a ring on one computer, to the driver."""

    def __init__(
        self,
        setting: str,
        *,
        on_note: Callable[[str], None] = lambda note: None,
        clock_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._is_auto = setting == "auto"
        self.every = 0 if setting == "off" else 1 if self._is_auto else int(setting)
        self._on_note = on_note
        self._clock_s = clock_s
        self.safe = self._marked = START
        self.held: tuple[StepId, Arrays] | None = None
        self._pending: StepId | None = None
        self._told: set[tuple[str, str, str]] = set()  # whose copy does not come to whom, and why

    def begin(self, ring: Ring, at: StepId, state: Arrays, *, saved_step: int = -1) -> None:
        """Start anew in a ring that was just given the state of `at`; empty: as at the start.

        `saved_step` is that of the newest checkpoint, where there is one.
        """
        self.safe = self._marked = at
        self.held = (at, state) if state else None
        self._pending = None
        self._told.clear()
        if state and self.every and ring.has_shadows:
            ring.mark(at, safe=at)
            self._pending = at
        self.saved(saved_step)

    def saved(self, step: int) -> None:
        """Let the state go that the driver holds, if no copies take its place: it is on the disk.

        `step` is that of a checkpoint. Of all weights it is many times the model's size.
        """
        if not self.every and self.held is not None and self.held[0].step <= step:
            self.held = None

    def before_commit(self, ring: Ring, *, step_s: float) -> None:
        """Have the copies of the step before in place: no more than one step can be lost then."""
        if self._pending is None:
            return
        started_s = self._clock_s()
        late = ring.wait_shadowed(self._pending, timeout_s=COPY_TIMEOUT_S)
        if late:
            self._pending = None
            self._try_later(late)
            return
        self.safe, self.held, self._pending = self._pending, None, None
        self._adapt(self._clock_s() - started_s, step_s)

    def after_commit(self, ring: Ring, at: StepId, *, step_s: float) -> None:
        """Copy the state of `at`, which all ranks have committed, when it is time to."""
        if not self.every or at.step < self._marked.step + self.every:
            return
        self._marked = at
        if ring.has_shadows:
            ring.mark(at, safe=self.safe)
            self._pending = at
            return
        started_s = self._clock_s()
        self.held = at, ring.collect_state()
        self.safe = at
        self._adapt(self._clock_s() - started_s, step_s)

    def _try_later(self, late: list[LateCopy]) -> None:
        """Go on with the last copies that all came; say so once per reason in a ring."""
        if self._is_auto:
            self.every = min(MAX_EVERY, 2 * self.every)
        for copy in late:
            said = copy.rank.name, copy.holder.name, type(copy.error).__name__
            if said in self._told:
                continue
            self._told.add(said)
            steps = "step" if self.every == 1 else f"{self.every} steps"
            self._on_note(
                f"the copy of {copy.rank.name}'s state does not arrive at {copy.holder.name} "
                f"({copy.error}): a device that is lost may cost all steps since step "
                f"{self.safe.step}; it is tried again every {steps}"
            )

    def _adapt(self, delay_s: float, step_s: float) -> None:
        """Copy as often as the delay is worth it; a first slow copy may be chance."""
        if not self._is_auto or step_s <= 0:
            return
        wanted = min(MAX_EVERY, max(1, math.ceil(delay_s / (AFFORDED_SHARE * step_s))))
        before, self.every = self.every, min(wanted, 2 * self.every) if wanted > 1 else 1
        if before < 4 <= self.every:
            self._on_note(
                f"copying the state takes {delay_s:.1f} s, a step {step_s:.1f} s: it is done every "
                f"{self.every} steps, so that a device that is lost costs up to {self.every} steps"
            )
