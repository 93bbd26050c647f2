"""Messages that stop coming: a slow stream is fine, a silent one is not.

Owns the watch on one stream. Must not know what it carries.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType


class StallGuard:
    """Cancels a call when no message comes for a while, however long the whole takes."""

    def __init__(self, cancel: Callable[[], object], *, timeout_s: float) -> None:
        self.stalled = False
        self._cancel = cancel
        self._timeout_s = timeout_s
        self._last_s = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()

    def watched(self, messages: Iterator[bytes]) -> Iterator[bytes]:
        for message in messages:
            self._last_s = math.inf  # a slow disk is not a silent peer
            yield message
            self._last_s = time.monotonic()

    def _watch(self) -> None:
        remaining_s = self._timeout_s
        while not self._done.wait(remaining_s):
            silent_since_s = min(self._last_s, time.monotonic())
            remaining_s = silent_since_s + self._timeout_s - time.monotonic()
            if remaining_s <= 0:
                self.stalled = True
                self._cancel()
                return
