"""Answers how long a layer of a model takes on this device: from its cache, or by measuring.

Owns the turn of those who ask, since two measurements at once would each find a slow device, and
the bounds of it: time, memory, and that a run has the device for itself. Must not measure itself: a
process of its own does. Must not know gRPC.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from exo_train.agent.planning import DTYPE_BYTES, model_shape
from exo_train.agent.profiler_process import NotWantedError, run_profiler
from exo_train.cluster.profile_cache import ProfileCache, profile_key
from exo_train.errors import ConfigError, DoesNotFitError, ExoTrainError, PeerError
from exo_train.models.spec import ModelSpec
from exo_train.peer import ComputeDevice, DeviceFacts
from exo_train.plan.block_times import BlockTimes, ProfileRequest
from exo_train.plan.device_memory import Processor, stage_costs
from exo_train.plan.memory_kinds import memory_by_kind
from exo_train.plan.partition import gigabytes
from exo_train.plan.stages import StageSpec
from exo_train.plan.workloads import held_shape

# Loading a framework from a cold disk takes some ten seconds, and a slow device takes a dozen
# layers' times whatever the budget is.
MEASURE_TIMEOUT_S = 120.0  # and the request's budget
MAX_WAITING = 4  # beside the one that is measured: each holds a thread of the control server
TURN_TIMEOUT_S = 180.0
TURN_LOOK_S = 0.1
# More in one microbatch fits no device; the memory for it must not be tried out.
MAX_MICROBATCH_POSITIONS = 1 << 20
MICROBATCHES_HELD = 2  # by the profiler, when it counts bytes
RUN_END_TIMEOUT_S = 3.0  # a run that was just stopped has its worker for so long
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
    """Thread-safe. `facts` are asked at each request: they say what this device offers now.

    `run_id` gives the run that this device takes part in, or nothing.
    """

    def __init__(
        self,
        facts: Callable[[], DeviceFacts],
        *,
        cache: ProfileCache,
        log_path: Path,
        run_id: Callable[[], str] = lambda: "",
        measure: Measure = run_profiler,
        turn_timeout_s: float = TURN_TIMEOUT_S,
    ) -> None:
        self._facts = facts
        self._cache = cache
        self._log_path = log_path
        self._run_id = run_id
        self._measure = measure
        self._turn_timeout_s = turn_timeout_s
        self._turn = threading.Lock()
        self._waiting = threading.Semaphore(MAX_WAITING + 1)
        self._closing = threading.Event()

    def answer(
        self, request: ProfileRequest, *, fresh: bool, is_wanted: Callable[[], bool]
    ) -> tuple[BlockTimes, bool]:
        """Give the times, and whether they were measured before; `fresh`: not before this call.

        Raises an ExoTrainError that names this device, in one line: what it does not offer, no
        room, a run that goes on, no answer, too many who ask.
        """
        facts = self._facts()
        try:
            chip = _offered_chip(facts, request)
            return self._answer(request, chip, fresh=fresh, is_wanted=is_wanted)
        except ExoTrainError as error:
            message = " ".join(str(error).split())  # frameworks say theirs in several lines
            if not message.startswith(facts.name):
                message = f"{facts.name}: {message}"
            log.info("%s", message)
            raise type(error)(message) from None

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

        def may_go_on() -> bool:
            return is_still_wanted() and not self._run_id()

        if (times := known()) is not None:
            return times, True
        with self._my_turn(is_still_wanted):
            if (times := known()) is not None:  # who was before us asked the same
                return times, True
            self._wait_no_run(RUN_END_TIMEOUT_S, is_still_wanted)
            check_room(self._facts(), request)
            try:
                times = self._measure(
                    request,
                    timeout_s=MEASURE_TIMEOUT_S + request.budget_s,
                    log_path=self._log_path,
                    is_wanted=may_go_on,
                )
            except NotWantedError:
                self._wait_no_run(0.0, is_still_wanted)  # was it a run that began?
                raise
            self._cache.put(key, times, now_s=time.time())
            return times, False

    def _wait_no_run(self, timeout_s: float, is_wanted: Callable[[], bool]) -> None:
        """Raises PeerError: timing would slow a run, take its room, and find a slow device."""
        until_s = time.monotonic() + timeout_s
        while run_id := self._run_id():
            if time.monotonic() >= until_s or not is_wanted():
                raise PeerError(
                    f"{self._facts().name} is training now (run {run_id}); a layer cannot be timed "
                    f"there until that ends"
                )
            time.sleep(TURN_LOOK_S)

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


def check_room(facts: DeviceFacts, request: ProfileRequest) -> None:
    """Raises DoesNotFitError where the profiler would take more than a run may."""
    devices: list[DeviceFacts | ComputeDevice] = [facts, *facts.more_devices]
    (usable_bytes,) = (d.usable_memory_bytes for d in devices if d.device == request.device)
    needed_bytes = profiler_bytes(request)
    if needed_bytes > usable_bytes:
        name = f"{facts.name} {request.device}" if facts.more_devices else facts.name
        raise DoesNotFitError(
            f"timing two layers of this model there needs {gigabytes(needed_bytes)}, more than the "
            f"{gigabytes(usable_bytes)} of {name}; use a smaller --max-seq-length or "
            f"--microbatch-size, close programs there, or leave it out with --devices"
        )


def profiler_bytes(request: ProfileRequest) -> int:
    """Reckon the largest of the stages that the profiler loads, one after the other."""
    spec = ModelSpec.from_config(json.loads(request.config_json), place="the model's config")
    value_bytes = DTYPE_BYTES[request.compute_dtype]
    costs = stage_costs(
        held_shape(model_shape(spec), quantize=request.quantize, base_weights=request.base_weights),
        processor=Processor(backend=request.backend, device=request.device),
        value_bytes=value_bytes,
        wire_bytes=value_bytes,
        lora=request.lora,
        microbatch_size=request.microbatch_size,
        sequence=request.sequence,
        checkpoint_activations=request.checkpoint_activations,
    )
    stages = [StageSpec(start=0, end=2, embedding=False, head=False)]
    if request.with_ends:
        stages.append(StageSpec(start=0, end=1, embedding=False, head=True))
        stages.append(StageSpec(start=0, end=1, embedding=True, head=False))
    return max(memory_by_kind(costs, s, in_flight=MICROBATCHES_HELD).total_bytes for s in stages)
