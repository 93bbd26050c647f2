"""Answers how long a layer of a model takes on this device: from its cache, or by measuring.

Owns the turn of those who ask, since two measurements at once would each find a slow device, and
the bounds of it. Must not measure itself: a process of its own does. Must not know gRPC.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from exo_train.agent.profiler_process import NotWantedError, run_profiler
from exo_train.cluster.profile_cache import ProfileCache, profile_key
from exo_train.errors import ConfigError, ExoTrainError, PeerError
from exo_train.peer import DeviceFacts
from exo_train.plan.block_times import BlockTimes, ProfileRequest

# Loading a framework from a cold disk takes some ten seconds, and a slow device takes a dozen
# layers' times whatever the budget is.
MEASURE_TIMEOUT_S = 120.0  # and the request's budget
MAX_WAITING = 4  # beside the one that is measured: each holds a thread of the control server
TURN_TIMEOUT_S = 180.0
TURN_LOOK_S = 0.1
# More in one microbatch fits no device; the memory for it must not be tried out.
MAX_MICROBATCH_POSITIONS = 1 << 20
END_TIMEOUT_S = 3.0

log = logging.getLogger(__name__)


class Measure(Protocol):
    """Takes the time; raises NotWantedError when nobody waits any more, and leaves nothing."""

    def __call__(
        self,
        request: ProfileRequest,
        *,
        timeout_s: float,
        log_path: Path,
        is_wanted: Callable[[], bool],
    ) -> BlockTimes: ...


class Profiles:
    """Thread-safe. `facts` are asked at each request: they say what this device offers now."""

    def __init__(
        self,
        facts: Callable[[], DeviceFacts],
        *,
        cache: ProfileCache,
        log_path: Path,
        measure: Measure = run_profiler,
        turn_timeout_s: float = TURN_TIMEOUT_S,
    ) -> None:
        self._facts = facts
        self._cache = cache
        self._log_path = log_path
        self._measure = measure
        self._turn_timeout_s = turn_timeout_s
        self._turn = threading.Lock()
        self._waiting = threading.Semaphore(MAX_WAITING + 1)
        self._closing = threading.Event()

    def answer(
        self, request: ProfileRequest, *, fresh: bool, is_wanted: Callable[[], bool]
    ) -> tuple[BlockTimes, bool]:
        """Give the times, and whether they were measured before; `fresh`: not before this call.

        Raises an ExoTrainError that names this device: what it does not offer, no room, no answer,
        too many who ask.
        """
        facts = self._facts()
        try:
            chip = _offered_chip(facts, request)
            return self._answer(request, chip, fresh=fresh, is_wanted=is_wanted)
        except ExoTrainError as error:
            log.info("%s", error)
            raise type(error)(f"{facts.name}: {error}") from None

    def close(self) -> None:
        """End the measurement that runs, and refuse others; returns when its process is gone."""
        self._closing.set()
        if self._turn.acquire(timeout=END_TIMEOUT_S):
            self._turn.release()

    def _answer(
        self,
        request: ProfileRequest,
        chip: str,
        *,
        fresh: bool,
        is_wanted: Callable[[], bool],
    ) -> tuple[BlockTimes, bool]:
        key = profile_key(request, chip=chip)
        since_s = time.time() if fresh else 0.0

        def known() -> BlockTimes | None:
            return self._cache.get(
                key, with_ends=request.with_ends, now_s=time.time(), since_s=since_s
            )

        def is_still_wanted() -> bool:
            return is_wanted() and not self._closing.is_set()

        if (times := known()) is not None:
            return times, True
        with self._my_turn(is_still_wanted):
            if (times := known()) is not None:  # who was before us asked the same
                return times, True
            times = self._measure(
                request,
                timeout_s=MEASURE_TIMEOUT_S + request.budget_s,
                log_path=self._log_path,
                is_wanted=is_still_wanted,
            )
            self._cache.put(key, times, now_s=time.time())
            return times, False

    @contextlib.contextmanager
    def _my_turn(self, is_wanted: Callable[[], bool]) -> Iterator[None]:
        """Hold the one turn; raises PeerError when it does not come, NotWantedError meanwhile."""
        if not self._waiting.acquire(blocking=False):
            raise PeerError(
                f"{MAX_WAITING} others wait already to have a layer timed here, which is the "
                f"limit; try again in a minute"
            )
        try:
            until_s = time.monotonic() + self._turn_timeout_s
            while not self._turn.acquire(timeout=TURN_LOOK_S):
                if not is_wanted():
                    raise NotWantedError("nobody waits for the time of a layer any more")
                if time.monotonic() >= until_s:
                    raise PeerError(
                        f"others had a layer timed here for {self._turn_timeout_s:g} s, which is "
                        f"the limit of a wait for one's turn; try again in a minute"
                    )
            try:
                if not is_wanted():
                    raise NotWantedError("its agent ends, or nobody waits any more")
                yield
            finally:
                self._turn.release()
        finally:
            self._waiting.release()


def _offered_chip(facts: DeviceFacts, request: ProfileRequest) -> str:
    """Give the chip of the processor that is asked about; raises ConfigError for none of ours."""
    positions = request.microbatch_size * request.sequence
    if positions > MAX_MICROBATCH_POSITIONS:
        raise ConfigError(
            f"a microbatch of {request.microbatch_size} x {request.sequence} positions has more "
            f"than {MAX_MICROBATCH_POSITIONS}; use a smaller --microbatch-size"
        )
    chips = {facts.device: facts.chip, **{d.device: d.chip for d in facts.more_devices}}
    if request.backend != facts.backend or request.device not in chips:
        raise ConfigError(
            f"it offers {facts.backend} on {', '.join(chips)}, not {request.backend} on "
            f"{request.device}; look at `exo-train status` and start again"
        )
    return chips[request.device]
