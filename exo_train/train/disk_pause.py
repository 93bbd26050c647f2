"""Waiting for a disk that is full or read-only, so that a night's work does not end with it.

Owns when it is tried again and what is said. Must not know what is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from exo_train.errors import InterruptedRunError
from exo_train.train.durable import DiskError

RETRY_S = 5.0
STOP_POLL_S = 0.25

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskPause:
    """Keeps a run from ending over its own disk; `device` is the name that people know."""

    device: str
    say: Callable[[str], None]
    wants_stop: Callable[[], bool] = lambda: False
    clock_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def pausing(self, write: Callable[[], _T]) -> _T:
        """Call `write` until it raises no DiskError, and give its result.

        A failed `write` must leave nothing behind that stands in its own way. There is no
        deadline: a full disk may wait for its owner to wake up. Raises InterruptedRunError when
        the user stops the run meanwhile.
        """
        began_s = self.clock_s()
        has_said = False
        while True:
            try:
                done = write()
            except DiskError as error:
                if not has_said:
                    self.say(f"the disk of {self.device} {error.obstacle}; the run waits")
                    has_said = True
                self._wait(error)
                continue
            if has_said:
                waited_s = self.clock_s() - began_s
                self.say(
                    f"the disk of {self.device} takes files again after {waited_s:.0f} s; "
                    f"the run goes on"
                )
            return done

    def _wait(self, error: DiskError) -> None:
        again_s = self.clock_s() + RETRY_S
        while True:
            if self.wants_stop():
                raise InterruptedRunError(
                    f"stopped while the disk of {self.device} {error.obstacle}; what is saved is "
                    f"the state of the last checkpoint"
                )
            left_s = again_s - self.clock_s()
            if left_s <= 0:
                return
            self.sleep(min(left_s, STOP_POLL_S))
