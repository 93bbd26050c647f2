"""What the agent answers: Control to other devices, Local to commands of its own home.

Owns the mapping between gRPC and the agent's parts. gRPC's statuses are made here and nowhere
else in the agent.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

from exo_train.agent.meeting import Meeting
from exo_train.agent.protocol import TOKEN_METADATA
from exo_train.agent.run_session import RunSession, WorkerSettings
from exo_train.errors import ExoTrainError
from exo_train.models.open import open_model
from exo_train.peer import Address
from exo_train.train.messages import to_endpoints
from exo_train.transport.weight_server import WeightServer
from exo_train.wire.pb import control_pb2 as pb
from exo_train.wire.pb.control_pb2_grpc import ControlServicer, LocalServicer

MAX_SESSIONS = 16


class ControlService(ControlServicer):
    """Thread-safe; `settings` is asked at each run's start."""

    def __init__(self, meeting: Meeting, settings: Callable[[], WorkerSettings]) -> None:
        self._meeting = meeting
        self._settings = settings
        self._sessions: list[RunSession] = []
        self._lock = threading.Lock()

    def Hello(self, request: pb.HelloRequest, context: grpc.ServicerContext) -> pb.HelloReply:
        try:
            return self._meeting.hello(request)
        except ExoTrainError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    def Goodbye(self, request: pb.GoodbyeRequest, context: grpc.ServicerContext) -> pb.GoodbyeReply:
        self._meeting.goodbye(request)
        return pb.GoodbyeReply()

    def Run(
        self, request_iterator: Iterator[pb.RunMessage], context: grpc.ServicerContext
    ) -> Iterator[pb.RunMessage]:
        first = next(request_iterator, None)
        if first is None:
            return
        session = self._open(first, context)
        try:
            yield from session.serve(request_iterator, context)
        finally:
            with self._lock:
                self._sessions.remove(session)

    def run_status(self) -> dict[str, Any] | None:
        """Give the newest run this device takes part in, or None."""
        with self._lock:
            if not self._sessions:
                return None
            session = self._sessions[-1]
        return {
            "id": session.run_id,
            "generation": session.generation,
            "rank": session.rank,
            "phase": session.phase,
            "worker_pid": session.worker_pid,
        }

    def close(self) -> None:
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            session.stop()

    def _open(self, first: pb.RunMessage, context: grpc.ServicerContext) -> RunSession:
        with self._lock:
            if len(self._sessions) >= MAX_SESSIONS:
                context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED, f"takes part in {MAX_SESSIONS} runs already"
                )
            try:
                session = RunSession(self._settings(), first)
            except ExoTrainError as error:
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            self._sessions.append(session)
            return session


class LocalService(LocalServicer):
    """Refuses callers that do not know the token of the home's agent.json."""

    def __init__(
        self,
        *,
        token: str,
        status: Callable[[], str],
        weights: WeightServer,
        weights_addresses: Callable[[], tuple[Address, ...]],
    ) -> None:
        self._token = token
        self._status = status
        self._weights = weights
        self._weights_addresses = weights_addresses
        self._tokens: dict[str, str] = {}  # by run id
        self._paths: dict[str, str] = {}  # by run id

    def own_models(self) -> dict[str, str]:
        """Give the path of each model served from here, by run id."""
        return dict(self._paths)

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
        self._check(context)
        return pb.StatusReply(json=self._status())

    def ServeModel(
        self, request: pb.ServeModelRequest, context: grpc.ServicerContext
    ) -> pb.ServeModelReply:
        self._check(context)
        try:
            _, source = open_model(Path(request.path))
        except ExoTrainError as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        self._weights.register(request.token, source)
        self._tokens[request.run_id] = request.token
        self._paths[request.run_id] = request.path
        return pb.ServeModelReply(endpoints=to_endpoints(self._weights_addresses()))

    def StopServing(
        self, request: pb.StopServingRequest, context: grpc.ServicerContext
    ) -> pb.StopServingReply:
        self._check(context)
        self._paths.pop(request.run_id, None)
        token = self._tokens.pop(request.run_id, None)
        if token is not None:
            self._weights.unregister(token)
        return pb.StopServingReply()

    def _check(self, context: grpc.ServicerContext) -> None:
        given = dict(context.invocation_metadata()).get(TOKEN_METADATA, "")
        if not secrets.compare_digest(str(given).encode(), self._token.encode()):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is not this agent's")
