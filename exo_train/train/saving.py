"""Saving a run's state: when, in which order, on which devices, and what is kept of it.

Owns the order of a save: space, files, replica, publication, pruning. Must not know how another
device is reached, nor what the arrays are.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exo_train.errors import PeerError
from exo_train.train.checkpoint import (
    MARGIN_BYTES,
    Arrays,
    Checkpoint,
    checkpoint_steps,
    prune,
    publish_checkpoint,
    steps_to_keep,
    write_checkpoint,
)
from exo_train.train.disk_pause import DiskPause
from exo_train.train.durable import require_free_bytes
from exo_train.train.fault_points import point

# Copies a checkpoint's folder to another device and confirms it, or raises PeerError:
# (folder, its step, the other steps that the run keeps).
Replicate = Callable[[Path, int, Sequence[int]], None]


def check_space(run_dir: Path, *, checkpoint_bytes: int, num_checkpoints: int) -> None:
    """Refuse a run whose disk cannot hold what it will save; raises DiskError.

    `num_checkpoints` that lie there at once: those kept, the best, and the newest while older ones
    still stay; no more than the run will save. The adapters of the end take one more at most.
    """
    require_free_bytes(
        run_dir,
        needed_bytes=(num_checkpoints + 1) * checkpoint_bytes + MARGIN_BYTES,
        what=f"room for {num_checkpoints} checkpoints and the adapters",
    )


class SaveTimer:
    """Says when to save: every so many steps or minutes, whichever comes first; 0: not by these."""

    def __init__(
        self,
        *,
        every_steps: int,
        every_minutes: float,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every_steps = every_steps
        self._every_s = 60 * every_minutes
        self._clock_s = clock_s
        self._saved_s = clock_s()

    def is_due(self, step: int) -> bool:
        """Tell whether to save after `step`."""
        by_steps = self._every_steps > 0 and step % self._every_steps == 0
        by_time = self._every_s > 0 and self._clock_s() - self._saved_s >= self._every_s
        return by_steps or by_time

    def saved(self) -> None:
        """Let the minutes begin anew."""
        self._saved_s = self._clock_s()


@dataclass(frozen=True, slots=True)
class Best:
    """The step with the lowest metric so far."""

    step: int
    metric: float

    def to_fields(self) -> dict[str, Any]:
        return {"step": self.step, "metric": self.metric}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Best | None:
        """Give what a checkpoint's state says; None: nothing was measured until then."""
        stored = state.get("best")
        return cls(int(stored["step"]), float(stored["metric"])) if stored else None

    @classmethod
    def after(cls, best: Best | None, step: int, metric: float | None) -> Best | None:
        """Give the best once `step` is measured, or was not (None), or not finite."""
        if metric is None or not math.isfinite(metric):
            return best
        if best is not None and best.step != step and best.metric <= metric:
            return best
        return cls(step, metric)


class Saver:
    """Saves a run's state; the state of a resumed run is told with `resumed`.

    `replicate` is None where no copy on another device is wanted.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        keep: int,
        pause: DiskPause,
        replicate: Replicate | None = None,
        resumed: Checkpoint | None = None,
    ) -> None:
        self.best = Best.of(resumed.state) if resumed else None
        self._run_dir = run_dir
        self._keep = keep
        self._pause = pause
        self._replicate = replicate
        # Written and read back, or read: they need not be read again when older ones go.
        self._verified = {resumed.path} if resumed else set()
        self._said: set[str] = set()

    def save(
        self,
        step: int,
        adapter: Arrays,
        optimizer: Arrays,
        state: Mapping[str, Any],
        metric: float | None = None,
    ) -> Path:
        """Save what there is after `step`, and give the checkpoint's folder.

        `metric`: the lower the better; None where it was not measured. A disk that is full or
        read-only is waited for; raises InterruptedRunError when the user ends that.
        """
        best = Best.after(self.best, step, metric)
        told = {**state, "best": best.to_fields() if best else None}

        def write() -> Path:
            return write_checkpoint(
                self._run_dir, step=step, adapter=adapter, optimizer=optimizer, state=told
            )

        temp = self._pause.pausing(write)
        self._copy(temp, step, best)
        point("checkpoint-publish", step=step)
        final = self._pause.pausing(lambda: publish_checkpoint(temp))
        self.best = best
        self._verified.add(final)
        self._pause.pausing(self._prune)
        return final

    def _copy(self, folder: Path, step: int, best: Best | None) -> None:
        """Have the checkpoint on another device too; without one it counts all the same."""
        if self._replicate is None:
            return
        steps = steps_to_keep(
            {*checkpoint_steps(self._run_dir), step},
            keep=self._keep,
            best_step=best.step if best else None,
        )
        try:
            self._replicate(folder, step, [other for other in steps if other != step])
        except PeerError as error:
            reason = re.sub(r"\d+", "", str(error))  # the same reason may come with other numbers
            if reason not in self._said:
                self._said.add(reason)
                self._pause.say(f"the checkpoints are on {self._pause.device} only: {error}")

    def _prune(self) -> None:
        best_step = self.best.step if self.best else None
        prune(self._run_dir, keep=self._keep, verified=self._verified, best_step=best_step)
