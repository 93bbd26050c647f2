"""The end of a generation of the ring: it wakes all who wait for something of it, and stays.

Owns who is woken and why. Must not know what they wait for.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from exo_train.errors import ExoTrainError

EVERY_GENERATION = 1 << 32  # a generation's number has 32 bits: all are before this

OnStop = Callable[[ExoTrainError], object]


class Stopper:
    """Ends the waits of one generation, from any thread; the first reason stays."""

    def __init__(self) -> None:
        self._reason: ExoTrainError | None = None
        self._callbacks: dict[object, OnStop] = {}
        self._stopped = threading.Event()
        self._lock = threading.Lock()

    def stop(self, reason: ExoTrainError) -> None:
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
            callbacks = list(self._callbacks.values())
            self._callbacks.clear()
        self._stopped.set()
        for callback in callbacks:
            callback(reason)

    def check(self) -> None:
        """Raise an error like the reason when all is over."""
        if self._reason is not None:
            raise type(self._reason)(str(self._reason))

    def wait(self, timeout_s: float) -> None:
        """Pause for `timeout_s`, or raise as `check` as soon as all is over."""
        self._stopped.wait(timeout_s)
        self.check()

    def on_stop(self, callback: OnStop) -> None:
        """Call back once when all is over, in the stopping thread; at once when it is already."""
        self._add(object(), callback)

    @contextlib.contextmanager
    def calling(self, callback: OnStop) -> Iterator[None]:
        """Call back as `on_stop`, but only while the block runs."""
        key = object()
        self._add(key, callback)
        try:
            yield
        finally:
            with self._lock:
                self._callbacks.pop(key, None)

    def _add(self, key: object, callback: OnStop) -> None:
        with self._lock:
            reason = self._reason
            if reason is None:
                self._callbacks[key] = callback
        if reason is not None:
            callback(reason)


class Generations:
    """Stoppers by generation. The end of one is the end of those before it, and of no later one."""

    def __init__(self) -> None:
        self._first = 0  # that is not over
        self._reason: ExoTrainError | None = None
        self._stoppers: dict[int, Stopper] = {}
        self._lock = threading.Lock()

    def stopper(self, generation: int) -> Stopper:
        """Give the generation's; it has stopped already when the generation is over."""
        with self._lock:
            if generation >= self._first:
                return self._stoppers.setdefault(generation, Stopper())
            reason = self._reason
        assert reason is not None
        over = Stopper()
        over.stop(reason)
        return over

    def end_before(self, generation: int, reason: ExoTrainError) -> None:
        """End all generations before this one; ending an earlier one afterwards does nothing."""
        with self._lock:
            if generation <= self._first:
                return
            self._first, self._reason = generation, reason
            ended = [self._stoppers.pop(old) for old in sorted(self._stoppers) if old < generation]
        for stopper in ended:
            stopper.stop(reason)
