"""One rank of a run on this device: the driver's stream on one side, a worker on the other.

Owns the relay between them, the signs of life, and the end of the worker when the driver goes.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from exo_train.agent.protocol import HEARTBEAT_S
from exo_train.agent.worker_process import WorkerProcess
from exo_train.errors import ProtocolError
from exo_train.peer import NodeId
from exo_train.train.conversation import LostRankError
from exo_train.train.messages import to_failure
from exo_train.wire.pb import control_pb2 as pb

MAX_QUEUED_MESSAGES = 4096
MAX_RUN_ID_CHARS = 64

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


class RunSession:
    """Serves one Run stream; `messages` is what the stream answers.

    `generation` and `rank` are those of the newest plan that the driver has sent.
    """

    def __init__(self, settings: WorkerSettings, first: pb.RunMessage, driver: NodeId) -> None:
        check_prepare(settings, first)
        self.driver = driver
        self.run_id, self.generation, self.rank = first.run_id, first.generation, first.rank
        self.phase, self.phase_limit_s = "starting", 0.0
        self._phase_since_s = self._heard_s = time.monotonic()
        self._name = settings.name
        self._out: queue.Queue[pb.RunMessage | None] = queue.Queue(MAX_QUEUED_MESSAGES)
        self._worker = WorkerProcess(
            _arguments(settings, first),
            log_path=settings.logs / f"worker-{first.run_id}-rank{first.rank}.log",
            on_message=self._from_worker,
            on_exit=self._worker_ended,
        )
        self._worker.send(first.SerializeToString())

    @property
    def phase_age_s(self) -> float:
        return time.monotonic() - self._phase_since_s

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
        """Relay until worker or driver ends; the worker is gone when this returns."""
        threading.Thread(target=self._from_driver, args=(requests,), daemon=True).start()
        try:
            yield from self._messages(context)
        finally:
            self._worker.stop()

    def stop(self) -> None:
        """End this rank because the agent ends; the driver is told that it is no accident."""
        error = LostRankError(f"{self._name} (rank {self.rank}) left the run: its agent was ended")
        self._out.put(self._message(failure=to_failure(error)))
        self._out.put(None)
        self._worker.stop()

    def _messages(self, context: grpc.ServicerContext) -> Iterator[pb.RunMessage]:
        beat_at_s = time.monotonic() + HEARTBEAT_S
        while context.is_active():
            try:
                message = self._out.get(timeout=max(0.01, beat_at_s - time.monotonic()))
            except queue.Empty:
                beat_at_s = time.monotonic() + HEARTBEAT_S
                yield self._progress()
                continue
            if message is None:
                return
            yield message

    def _from_driver(self, requests: Iterator[pb.RunMessage]) -> None:
        try:
            for message in requests:
                self._follow(message)
                self._worker.send(message.SerializeToString())
        except grpc.RpcError:
            log.info("run %s: the driver's stream broke", self.run_id)
        self._worker.stop()
        self._out.put(None)

    def _follow(self, message: pb.RunMessage) -> None:
        """Take over the generation that the driver begins, and the rank that it gives then."""
        self.generation = max(self.generation, message.generation)
        if message.WhichOneof("body") == "load":
            self.rank = message.rank

    def _from_worker(self, raw: bytes) -> None:
        self._heard_s = time.monotonic()
        message = pb.RunMessage.FromString(raw)
        if message.WhichOneof("body") == "progress":
            if message.progress.phase != self.phase:
                self._phase_since_s = time.monotonic()
            self.phase = message.progress.phase
            self.phase_limit_s = message.progress.phase_limit_s
            return
        self._out.put(message)

    def _worker_ended(self, reason: str) -> None:
        if reason:
            error = LostRankError(f"{self._name} (rank {self.rank}): {reason}")
            self._out.put(self._message(failure=to_failure(error)))
        self._out.put(None)

    def _progress(self) -> pb.RunMessage:
        return self._message(
            progress=pb.Progress(
                phase=self.phase,
                phase_age_s=self.phase_age_s,
                phase_limit_s=self.phase_limit_s,
                silent_s=self.silent_s,
            )
        )

    def _message(self, **body: Any) -> pb.RunMessage:
        return pb.RunMessage(run_id=self.run_id, generation=self.generation, rank=self.rank, **body)


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
