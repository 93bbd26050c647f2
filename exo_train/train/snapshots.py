"""Trainable state that a worker keeps in memory: its own at the last marks, and its neighbour's.

Owns which points of the history are kept, and the metrics that go with them. Must not know devices,
messages or frameworks. A snapshot's arrays are a stage's adapter and optimizer state in one
dictionary, by global name; both have `step`, the number of updates, only once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from exo_train.backends.base import Arrays
from exo_train.plan.history import Holding, StepId


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """The state of layers [start, end) at one point; nobody changes its arrays."""

    at: StepId
    start: int
    end: int
    arrays: Arrays

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


MAX_METRICS_LINES = 4096
MAX_METRICS_BYTES = 8 << 20

# Of each range of layers: the safe point, the last mark, and what was committed after that.
MAX_POINTS = 3


class SnapshotStore:
    """Thread-safe: the computing thread marks, the server's threads bring neighbours' copies.

    Of each range of layers MAX_POINTS points are kept at most: while copies fail, what lies between
    the oldest, which is safe, and the newest is dropped.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[tuple[StepId, int, int], Snapshot] = {}

    def put(self, snapshot: Snapshot) -> None:
        """Keep it, in place of one of the same layers at the same point."""
        key = snapshot.at, snapshot.start, snapshot.end
        with self._lock:
            self._kept[key] = snapshot
            points = sorted(k for k in self._kept if k[1:] == key[1:])
            for middle in points[1 : len(points) + 1 - MAX_POINTS]:
                del self._kept[middle]

    def find(self, at: StepId, start: int, end: int) -> Snapshot | None:
        with self._lock:
            return self._kept.get((at, start, end))

    def holdings(self) -> list[Holding]:
        with self._lock:
            return [Holding(at=s.at, start=s.start, end=s.end) for s in self._kept.values()]

    def arrays(self, at: StepId) -> Arrays:
        """Give all that is held of one point; empty: nothing is."""
        merged: Arrays = {}
        with self._lock:
            for snapshot in self._kept.values():
                if snapshot.at == at:
                    merged.update(snapshot.arrays)
        return merged

    def forget_before(self, safe: StepId) -> None:
        """Drop what is older: all layers' states of `safe` are kept twice."""
        with self._lock:
            self._kept = {key: s for key, s in self._kept.items() if s.at >= safe}

    def forget_after(self, at: StepId) -> None:
        """Drop what came after the point that the run went back to: it is another history."""
        with self._lock:
            self._kept = {key: s for key, s in self._kept.items() if s.at <= at}


class MetricsTail:
    """What came with the marks, for a driver that takes the run over: the newest lines of text.

    Bounded by MAX_METRICS_LINES and MAX_METRICS_BYTES; the oldest go first.
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[int, str]] = deque(maxlen=MAX_METRICS_LINES)
        self._num_bytes = 0

    def keep(self, step: int, lines: Iterable[str]) -> None:
        """Keep lines that came with the mark of `step`."""
        for line in lines:
            if len(self._kept) == MAX_METRICS_LINES:
                self._drop_oldest()
            self._kept.append((step, line))
            self._num_bytes += len(line)
        while self._num_bytes > MAX_METRICS_BYTES:
            self._drop_oldest()

    def forget_after(self, step: int) -> None:
        """Drop what came after the step that the run went back to."""
        kept = [(at, line) for at, line in self._kept if at <= step]
        self._kept.clear()
        self._num_bytes = 0
        for at, line in kept:
            self.keep(at, [line])

    def lines(self) -> list[str]:
        return [line for _, line in self._kept]

    def _drop_oldest(self) -> None:
        self._num_bytes -= len(self._kept.popleft()[1])
