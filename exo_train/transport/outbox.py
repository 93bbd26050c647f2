"""Tensors that wait to be sent.

Owns back-pressure on the sender, with its deadline. Must not know what carries the tensors.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from exo_train.errors import ExoTrainError, PeerLostError
from exo_train.transport.mailbox import WAIT_SLICE_S
from exo_train.wire.codec import Kind, Tag
from exo_train.wire.tensor import HostTensor


class Outbox:
    """A bounded queue between the threads that send and the one that writes."""

    def __init__(self, *, kind: Kind, peer: str, capacity_tensors: int) -> None:
        self._kind = kind
        self._peer = peer
        self._capacity_tensors = capacity_tensors
        self._queue: deque[tuple[Tag, HostTensor]] = deque()
        self._end: ExoTrainError | None = None
        self._changed = threading.Condition()

    def put(self, tag: Tag, tensor: HostTensor, *, timeout_s: float) -> None:
        """Queue a tensor; see `Link.send` for the errors."""
        start_s = time.monotonic()
        with self._changed:
            while True:
                if self._end is not None:
                    raise type(self._end)(f"{self._end} (sending the {self._kind} of {tag})")
                if len(self._queue) < self._capacity_tensors:
                    break
                waited_s = time.monotonic() - start_s
                if waited_s >= timeout_s:
                    raise PeerLostError(
                        f"{self._peer} took nothing for {waited_s:.1f} s while "
                        f"{len(self._queue)} tensors wait, so the {self._kind} of {tag} cannot be "
                        "sent; check that it is awake and its network is up"
                    )
                self._changed.wait(min(timeout_s - waited_s, WAIT_SLICE_S))
            self._queue.append((tag, tensor))
            self._changed.notify_all()

    def wait_next(self) -> tuple[Tag, HostTensor] | None:
        """Take the oldest tensor, blocking until there is one; None when the queue has ended."""
        with self._changed:
            # An idle link may wait for hours; `end` and `fail` are what wakes it.
            while not self._queue and self._end is None:
                self._changed.wait()
            if not self._queue:
                return None
            item = self._queue.popleft()
            self._changed.notify_all()
            return item

    def end(self, reason: ExoTrainError) -> None:
        """Take no more; what is queued still goes out."""
        with self._changed:
            self._end = self._end or reason
            self._changed.notify_all()

    def fail(self, reason: ExoTrainError) -> None:
        """Take no more and drop what is queued."""
        with self._changed:
            self._end = self._end or reason
            self._queue.clear()
            self._changed.notify_all()
