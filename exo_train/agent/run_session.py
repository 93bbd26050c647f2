"""One rank of a run on this device: the driver's stream on one side, a worker on the other.

Owns the relay between them, the signs of life, and how long a worker outlives a driver that is
lost. Must not decide who may lead a run: `sessions` does.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from exo_train.agent.protocol import HEARTBEAT_S
from exo_train.agent.worker_process import WorkerProcess
from exo_train.errors import ProtocolError
from exo_train.peer import NodeId
from exo_train.train.conversation import LeftRankError, LostRankError
from exo_train.train.messages import to_failure
from exo_train.wire.pb import control_pb2 as pb

MAX_QUEUED_MESSAGES = 4096
MAX_RUN_ID_CHARS = 64
# A worker whose driver was lost keeps all it has in memory for so long.
LEASE_S = 120.0
STANDS_STILL_S = 5.0  # a worker that was not heard for so long is not asked to end, but killed
BREAK_TOLD_S = 1.0
BREAK_POLL_S = 0.02
LEASE_VARIABLE = "EXO_TRAIN_TEST_LEASE_S"  # another one, for tests
# A driver gives a sign of life every two seconds; one that stands still keeps its stream open.
DRIVER_SILENCE_S = 30.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What a worker on this device is started with."""

    node_id: NodeId
    name: str
    cluster: str
    listen_hosts: tuple[str, ...]  # where its data server listens
    hosts: tuple[str, ...]  # where others reach it
    home: Path
    logs: Path
    backends: tuple[str, ...]
    devices: Mapping[str, bool]  # by name: whether the user said how much memory it gives
    own_models: Mapping[str, str]  # by run id: path of the model, when it lies on this device


@dataclass(slots=True, eq=False)
class _Stream:
    """A driver's stream; `released`: the driver has ended the worker itself."""

    out: queue.Queue[pb.RunMessage | None] = field(
        default_factory=lambda: queue.Queue(MAX_QUEUED_MESSAGES)
    )
    released: bool = False
    kept: bool = False
    beats: bool = False  # this driver gives signs of life
    num_missed: int = 0  # beats of ours since it was heard


class RunSession:
    """A worker, and the Run stream that it is driven by; thread-safe.

    A driver that ends its stream, or says `finish` or `failure`, ends the worker. When the stream
    breaks instead, the session is orphaned: the worker is left as it is for `lease_s`, and another
    driver may adopt it. `generation` and `rank` are those of the newest plan that a driver has
    sent. `on_over` is called when the worker is gone.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        first: pb.RunMessage,
        driver: NodeId,
        *,
        lease_s: float = LEASE_S,
        on_over: Callable[[RunSession], None] = lambda session: None,
    ) -> None:
        check_prepare(settings, first)
        self.driver = driver
        self.device = first.prepare.device
        self.run_id, self.generation, self.rank = first.run_id, first.generation, first.rank
        self._phase, self._phase_limit_s = "starting", 0.0
        self._phase_since_s = self._heard_s = time.monotonic()
        self._name = settings.name
        self._lease_s = lease_s
        self._on_over = on_over
        self._lock = threading.Lock()
        self._stream: _Stream | None = _Stream()
        self._prepared: pb.Prepared | None = None
        self._lease: threading.Timer | None = None
        self._orphaned_s: float | None = None
        self._is_over = False
        self.is_ended = False  # the whole run, by its driver
        self._worker = WorkerProcess(
            _arguments(settings, first),
            log_path=settings.logs / f"worker-{first.run_id}-rank{first.rank}.log",
            on_message=self._from_worker,
            on_exit=self._worker_ended,
        )
        self._worker.send(first.SerializeToString())

    @property
    def is_orphaned(self) -> bool:
        return self._orphaned_s is not None

    @property
    def is_over(self) -> bool:
        """Tell whether the worker is gone, or is being ended."""
        return self._is_over

    @property
    def phase(self) -> str:
        orphaned_s = self._orphaned_s
        if orphaned_s is None:
            return self._phase
        left_s = max(0.0, orphaned_s + self._lease_s - time.monotonic())
        return f"its coordinator is gone; kept for {left_s:.0f} s more"

    @property
    def phase_limit_s(self) -> float:
        return self._phase_limit_s if self._orphaned_s is None else self._lease_s

    @property
    def phase_age_s(self) -> float:
        return time.monotonic() - (self._orphaned_s or self._phase_since_s)

    @property
    def silent_s(self) -> float:
        """Give the seconds since the worker was heard; it reports every second, come what may."""
        return time.monotonic() - self._heard_s

    @property
    def worker_pid(self) -> int:
        return self._worker.pid

    def serve(
        self, requests: Iterator[pb.RunMessage], context: grpc.ServicerContext
    ) -> Iterator[pb.RunMessage]:
        """Relay until worker or driver ends; the worker is gone then, unless it is orphaned."""
        stream = self._stream
        if stream is None:  # ended before it began
            return
        threading.Thread(
            target=self._from_driver, args=(requests, stream, context), daemon=True
        ).start()
        try:
            yield from self._messages(context, stream)
        finally:
            self._let_go(stream)
            if not stream.kept:
                self._end_worker()

    def adopt(self, first: pb.RunMessage, driver: NodeId) -> None:
        """Go on under another driver, whose stream `serve` gets next: `prepared` is answered.

        Raises ProtocolError when the worker is not orphaned (any more).
        """
        with self._lock:
            if self._orphaned_s is None or self._prepared is None or self._lease is None:
                raise ProtocolError(f"{self._name} has no worker of run {self.run_id} to adopt")
            self._lease.cancel()
            self._orphaned_s = None
            self.driver, self.generation, self.rank = driver, first.generation, first.rank
            self._stream = stream = _Stream()
            stream.out.put(self._message(prepared=self._prepared))

    def stop(self) -> None:
        """End this rank because the agent ends; the driver is told that it is no accident."""
        self._is_over = True
        error = LeftRankError(f"{self._name} (rank {self.rank}) left the run: its agent was ended")
        self._say(self._message(failure=to_failure(error)))
        self._say(None)
        self._end_worker()

    def _messages(self, context: grpc.ServicerContext, stream: _Stream) -> Iterator[pb.RunMessage]:
        beat_at_s = time.monotonic() + HEARTBEAT_S
        while context.is_active():
            try:
                message = stream.out.get(timeout=max(0.01, beat_at_s - time.monotonic()))
            except queue.Empty:
                beat_at_s = time.monotonic() + HEARTBEAT_S
                # Beats are counted, not seconds: while this device sleeps it hears nobody.
                stream.num_missed += 1
                if stream.beats and stream.num_missed > DRIVER_SILENCE_S / HEARTBEAT_S:
                    log.info("run %s: its driver is silent", self.run_id)
                    return
                yield self._progress()
                continue
            if message is None:
                return
            yield message

    def _from_driver(
        self,
        requests: Iterator[pb.RunMessage],
        stream: _Stream,
        context: grpc.ServicerContext,
    ) -> None:
        try:
            for message in requests:
                stream.num_missed = 0
                kind = message.WhichOneof("body")
                if stream is not self._stream:
                    return  # what it still had to say before it was given up
                if kind == "progress":
                    stream.beats = True
                    continue
                self._follow(message)
                stream.released = stream.released or kind in ("finish", "failure")
                self.is_ended |= kind == "failure" or message.finish.is_over
                self._worker.send(message.SerializeToString())
            # gRPC may give the end of a broken stream as one that the driver has ended; it is
            # active for a moment then.
            until_s = time.monotonic() + BREAK_TOLD_S
            while not stream.released and context.is_active() and time.monotonic() < until_s:
                time.sleep(BREAK_POLL_S)
            stream.released = stream.released or context.is_active()
        except grpc.RpcError:
            log.info("run %s: the driver's stream broke", self.run_id)
        self._let_go(stream)
        stream.out.put(None)

    def _let_go(self, stream: _Stream) -> None:
        """End the worker with its stream, or keep it for another driver; once for each stream."""
        with self._lock:
            if self._stream is not stream:
                return
            self._stream = None
            stream.kept = not (stream.released or self._is_over) and self._prepared is not None
            if stream.kept:
                self._orphaned_s = time.monotonic()
                self._lease = threading.Timer(self._lease_s, self._end_lease)
                self._lease.daemon = True
                self._lease.start()
            else:
                self._is_over = True
        if stream.kept:
            log.warning(
                "run %s: its coordinator is gone; its state is kept for %.0f s",
                self.run_id,
                self._lease_s,
            )
        else:
            self._end_worker()

    def _end_lease(self) -> None:
        with self._lock:
            if self._orphaned_s is None:
                return
            self._orphaned_s = None
            self._is_over = True
        log.warning(
            "run %s: nobody took it over within %.0f s, so its worker is ended; go on from the "
            "newest checkpoint with `exo-train train --resume DIR` on the device that has the "
            "run or a copy of it",
            self.run_id,
            self._lease_s,
        )
        self._end_worker()

    def _end_worker(self) -> None:
        self._worker.stop(at_once=self.silent_s > STANDS_STILL_S)

    def _follow(self, message: pb.RunMessage) -> None:
        """Take over the generation that the driver begins, and the rank that it gives then."""
        self.generation = max(self.generation, message.generation)
        if message.WhichOneof("body") == "load":
            self.rank = message.rank

    def _from_worker(self, raw: bytes) -> None:
        self._heard_s = time.monotonic()
        message = pb.RunMessage.FromString(raw)
        match message.WhichOneof("body"):
            case "progress":
                if message.progress.phase != self._phase:
                    self._phase_since_s = time.monotonic()
                self._phase = message.progress.phase
                self._phase_limit_s = message.progress.phase_limit_s
                return
            case "prepared":
                self._prepared = message.prepared
        self._say(message)

    def _worker_ended(self, reason: str) -> None:
        if reason:
            error = LostRankError(f"{self._name} (rank {self.rank}): {reason}")
            self._say(self._message(failure=to_failure(error)))
        with self._lock:
            self._is_over = True
            self._orphaned_s = None
            if self._lease is not None:
                self._lease.cancel()
        self._say(None)
        self._on_over(self)

    def _say(self, message: pb.RunMessage | None) -> None:
        """Say it to the driver; while there is none it goes unsaid. None ends the stream."""
        stream = self._stream
        if stream is not None:
            stream.out.put(message)

    def _progress(self) -> pb.RunMessage:
        return self._message(
            progress=pb.Progress(
                phase=self._phase,
                phase_age_s=self.phase_age_s,
                phase_limit_s=self._phase_limit_s,
                silent_s=self.silent_s,
            )
        )

    def _message(self, **body: Any) -> pb.RunMessage:
        return pb.RunMessage(run_id=self.run_id, generation=self.generation, rank=self.rank, **body)


def lease_s() -> float:
    return float(os.environ.get(LEASE_VARIABLE, LEASE_S))


def check_prepare(settings: WorkerSettings, first: pb.RunMessage) -> None:
    """Refuse a stream that does not start as it must; what it names becomes part of a path."""
    if first.WhichOneof("body") != "prepare":
        raise ProtocolError("a run's stream must start with 'prepare'")
    is_plain = first.run_id.isascii() and first.run_id.isalnum()
    if not is_plain or len(first.run_id) > MAX_RUN_ID_CHARS:
        raise ProtocolError("the run's id must be letters and digits")
    if first.prepare.cluster != settings.cluster:
        raise ProtocolError(f"{settings.name} is in another cluster")
    if first.prepare.node_id != settings.node_id:
        raise ProtocolError(f"{settings.name} is not the device that the plan means")
    if first.prepare.backend not in settings.backends:
        raise ProtocolError(f"{settings.name} has no backend '{first.prepare.backend}'")
    if first.prepare.device not in settings.devices:
        raise ProtocolError(
            f"{settings.name} has no device '{first.prepare.device}'; it offers "
            f"{', '.join(settings.devices)}"
        )


def _arguments(settings: WorkerSettings, first: pb.RunMessage) -> list[str]:
    arguments = ["--home", str(settings.home)]
    if first.run_id in settings.own_models:
        arguments += ["--model", settings.own_models[first.run_id]]
    if settings.devices[first.prepare.device]:
        arguments.append("--trust-memory")
    for host in settings.listen_hosts:
        arguments += ["--listen", host]
    for host in settings.hosts:
        arguments += ["--host", host]
    return arguments
