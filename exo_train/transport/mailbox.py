"""Tensors that arrived and were not taken yet.

Owns waiting for a tag with a deadline, and the refusal of tags that cannot be right. Must not
know what carries the tensors.
"""

from __future__ import annotations

import threading
import time

from exo_train.errors import ExoTrainError, PeerLostError, ProtocolError
from exo_train.wire.codec import Kind, Tag
from exo_train.wire.tensor import HostTensor

# How far a neighbour may run ahead of the step that is being received.
MAX_STEPS_AHEAD = 64
# Python on Windows handles Ctrl-C only between waits.
WAIT_SLICE_S = 0.25


class Mailbox:
    """A capped shelf of tensors by tag; `peer` names the sender in messages."""

    def __init__(self, *, kind: Kind, peer: str, capacity_tensors: int) -> None:
        self._kind = kind
        self._peer = peer
        self._capacity_tensors = capacity_tensors
        self._tensors: dict[Tag, HostTensor] = {}
        self._step: int | None = None  # newest step asked for
        self._taken: set[Tag] = set()  # of that step
        self._end: ExoTrainError | None = None  # no more will come
        self._failure: ExoTrainError | None = None
        self._changed = threading.Condition()

    def put(self, tag: Tag, tensor: HostTensor) -> bool:
        """Shelve a tensor, blocking while the shelf is full; False when nobody will take it.

        The wait has no deadline of its own: it is the back-pressure that the sender's has.
        """
        with self._changed:
            self._check(tag)
            while len(self._tensors) >= self._capacity_tensors and self._failure is None:
                self._changed.wait()
            if self._failure is not None:
                return False
            self._check(tag)
            self._tensors[tag] = tensor
            self._changed.notify_all()
            return True

    def wait(self, tag: Tag, *, timeout_s: float) -> HostTensor:
        """Take the tensor with this tag; see `Link.wait_recv` for the errors."""
        start_s = time.monotonic()
        with self._changed:
            self._advance(tag.step)
            while True:
                waited_s = time.monotonic() - start_s
                what = f"the {self._kind} from {self._peer}, {tag}"
                if self._failure is not None:
                    raise _with_place(self._failure, f"waited {waited_s:.1f} s for {what}")
                if tag in self._tensors:
                    break
                if self._end is not None:
                    raise _with_place(self._end, f"waited {waited_s:.1f} s for {what}")
                if waited_s >= timeout_s:
                    raise PeerLostError(self._deadline_sentence(what, waited_s))
                self._changed.wait(min(timeout_s - waited_s, WAIT_SLICE_S))
            self._taken.add(tag)
            self._changed.notify_all()
            return self._tensors.pop(tag)

    def end(self, reason: ExoTrainError) -> None:
        """Say that no more will come; what is here can still be taken."""
        with self._changed:
            self._end = self._end or reason
            self._changed.notify_all()

    def fail(self, reason: ExoTrainError) -> None:
        """Drop everything and wake all waiters; the first reason stays."""
        with self._changed:
            self._failure = self._failure or reason
            self._tensors.clear()
            self._changed.notify_all()

    def _advance(self, step: int) -> None:
        if self._step is None or step > self._step:
            self._step = step
            self._taken.clear()

    def _check(self, tag: Tag) -> None:
        if tag in self._tensors or tag in self._taken:
            raise ProtocolError(f"{self._peer} sent the {self._kind} of {tag} twice")
        if self._step is None:
            return
        if not self._step <= tag.step <= self._step + MAX_STEPS_AHEAD:
            raise ProtocolError(
                f"{self._peer} sent the {self._kind} of {tag}, but step {self._step} is running "
                f"and at most {MAX_STEPS_AHEAD} steps ahead are taken"
            )

    def _deadline_sentence(self, what: str, waited_s: float) -> str:
        here = f"{len(self._tensors)} of {self._capacity_tensors} places hold other tensors"
        if self._tensors:
            here += f", the oldest {min(self._tensors)}"
        return (
            f"Waited {waited_s:.1f} s for {what}, and it did not come ({here}); "
            f"check that {self._peer} is awake and not swapping"
        )


def _with_place(reason: ExoTrainError, place: str) -> ExoTrainError:
    """Copy the error, since each waiting thread raises its own, and add where it hit."""
    return type(reason)(f"{reason} ({place})")
