"""Asks a process of its own how long one block of a model takes on this device.

Owns the wait for its answer. Must not import a framework: the process holds it, ends with it, and
takes nobody down.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from pathlib import Path

from exo_train.agent.worker_process import WorkerProcess
from exo_train.errors import ExoTrainError, ProtocolError, error_class
from exo_train.plan.block_times import MAX_ANSWER_CHARS, BlockTimes, ProfileRequest
from exo_train.plan.fields import parse_json

MODULE = "exo_train.profiler"
PLACE = "the profiler's answer"
MAX_MESSAGE_CHARS = 500
LOOK_S = 0.1  # how often it is asked whether the answer is still wanted


class NotWantedError(ExoTrainError):
    """Nobody waits for the answer any more."""


def run_profiler(
    request: ProfileRequest,
    *,
    timeout_s: float,
    log_path: Path,
    module: str = MODULE,
    is_wanted: Callable[[], bool] = lambda: True,
) -> BlockTimes:
    """Start the process, wait for its answer, end it; blocks for `timeout_s` at most.

    Raises what the process says, with the device named, ExoTrainError when it says nothing, and
    NotWantedError soon after `is_wanted` became false. The process has ended in every case.
    """
    place = f"timing a layer on {request.backend} {request.device}"
    # Its answer, and why it ended, in their order.
    events: queue.SimpleQueue[bytes | str] = queue.SimpleQueue()
    process = WorkerProcess(
        [], log_path=log_path, on_message=events.put, on_exit=events.put, module=module
    )
    try:
        process.send(request.to_json().encode())
        event = _wait(events, place, timeout_s=timeout_s, is_wanted=is_wanted)
    except queue.Empty:
        raise ExoTrainError(
            f"{place} took longer than its limit of {timeout_s:g} s; use a smaller microbatch or "
            f"sequence length, or leave the device out; log: {log_path}"
        ) from None
    finally:
        process.stop()
    if isinstance(event, str):
        raise ExoTrainError(f"{place} gave no answer: {event or f'it ended; log: {log_path}'}")
    return _read_answer(event, place)


def _wait(
    events: queue.SimpleQueue[bytes | str],
    place: str,
    *,
    timeout_s: float,
    is_wanted: Callable[[], bool],
) -> bytes | str:
    """Give the first event; raises queue.Empty at the deadline."""
    until_s = time.monotonic() + timeout_s
    while True:
        left_s = until_s - time.monotonic()
        try:
            return events.get(timeout=max(0.0, min(LOOK_S, left_s)))
        except queue.Empty:
            if left_s <= LOOK_S:
                raise
        if not is_wanted():
            raise NotWantedError(f"{place} was ended: nobody waits for it any more")


def _read_answer(answer: bytes, place: str) -> BlockTimes:
    try:
        text = answer.decode("utf-8")
    except UnicodeDecodeError:
        raise ProtocolError(f"{PLACE} is not UTF-8") from None
    value = parse_json(text, place=PLACE, max_chars=MAX_ANSWER_CHARS)
    if isinstance(value, dict) and isinstance(value.get("failure"), dict):
        failure = value["failure"]
        message = str(failure.get("message"))[:MAX_MESSAGE_CHARS]
        raise error_class(str(failure.get("kind")))(f"{place}: {message}")
    if not isinstance(value, dict):
        raise ProtocolError(f"{PLACE} must be an object")
    return BlockTimes.from_fields(value.get("times"), place=PLACE)
