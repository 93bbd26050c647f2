"""What the meeting noticed on the way: clocks, calls in vain, and what was said already.

Owns these memories and their caps. Nothing here decides anything.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from exo_train.agent.saying import skew_sentence
from exo_train.cluster.whom_to_ask import Failure
from exo_train.peer import Address, NodeId

MAX_SAID = 64
MAX_FAILURES = 64
MAX_SKEWS = 64
SKEW_WARNING_S = 5.0


@contextlib.contextmanager
def going_on(log: logging.Logger) -> Iterator[None]:
    """Keep a fault of one turn from ending a thread that the membership hangs on."""
    try:
        yield
    except Exception as error:
        log.error("a fault, gone on from: %s: %s", type(error).__name__, error)
        log.debug("where it came from", exc_info=error)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotMet:
    """An address where a device was expected, and what came of the last call to it."""

    node_id: NodeId | None
    address: Address
    failure: Failure
    failed_s: float


class Noticing:
    """Thread-safe."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[str] = set()
        self._skews_s: dict[NodeId, float] = {}
        self._failures: dict[Address, NotMet] = {}
        self._lock = threading.Lock()

    def say_once(self, sentence: str, *, key: str = "") -> None:
        with self._lock:
            if (key or sentence) in self._said or len(self._said) >= MAX_SAID:
                return
            self._said.add(key or sentence)
        self._say(sentence)

    def answered(self, address: Address) -> None:
        with self._lock:
            self._failures.pop(address, None)

    def failed(self, address: Address, node_id: NodeId | None, how: Failure) -> None:
        with self._lock:
            if address not in self._failures and len(self._failures) >= MAX_FAILURES:
                self._failures.pop(next(iter(self._failures)))
            self._failures[address] = NotMet(
                node_id=node_id, address=address, failure=how, failed_s=time.monotonic()
            )

    def clock(self, node_id: NodeId, name: str, skew_s: float) -> None:
        """Take in how far a member's clock is ahead of ours; a large difference is said once."""
        with self._lock:
            if node_id not in self._skews_s and len(self._skews_s) >= MAX_SKEWS:
                self._skews_s.pop(next(iter(self._skews_s)))
            self._skews_s[node_id] = skew_s
        if abs(skew_s) > SKEW_WARNING_S:
            self.say_once(skew_sentence(name, skew_s), key=f"clock of {node_id}")

    def skews_s(self) -> dict[NodeId, float]:
        with self._lock:
            return dict(self._skews_s)

    def not_met(self) -> list[NotMet]:
        with self._lock:
            return list(self._failures.values())
