"""What the agent answers to commands of its own home, on loopback.

Owns the check of the home's token and the mapping to the agent's actions.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

import grpc

from exo_train.agent.local_client import ERROR_METADATA
from exo_train.agent.protocol import TOKEN_METADATA
from exo_train.errors import ExoTrainError
from exo_train.models.open import open_model
from exo_train.peer import Address
from exo_train.train.messages import to_endpoints
from exo_train.transport.weight_server import WeightServer
from exo_train.wire.pb import control_pb2 as pb
from exo_train.wire.pb.control_pb2_grpc import LocalServicer

Reply = TypeVar("Reply")


class Actions(Protocol):
    """What commands may ask of the agent; answers are what the messages carry."""

    def status_json(self) -> str: ...

    def examine_json(self) -> str: ...

    def invite(self) -> pb.InviteReply: ...

    def remove(self, device: str) -> pb.RemoveReply: ...

    def leave(self) -> pb.LeaveReply: ...


class LocalService(LocalServicer):
    """Refuses callers that do not know the token of the home's agent.json."""

    def __init__(
        self,
        *,
        token: str,
        actions: Actions,
        weights: WeightServer,
        weights_addresses: Callable[[], tuple[Address, ...]],
    ) -> None:
        self._token = token
        self._actions = actions
        self._weights = weights
        self._weights_addresses = weights_addresses
        self._tokens: dict[str, str] = {}  # by run id
        self._paths: dict[str, str] = {}  # by run id

    def own_models(self) -> dict[str, str]:
        """Give the path of each model served from here, by run id."""
        return dict(self._paths)

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
        return self._act(context, lambda: pb.StatusReply(json=self._actions.status_json()))

    def Examine(self, request: pb.ExamineRequest, context: grpc.ServicerContext) -> pb.ExamineReply:
        return self._act(context, lambda: pb.ExamineReply(json=self._actions.examine_json()))

    def Invite(self, request: pb.InviteRequest, context: grpc.ServicerContext) -> pb.InviteReply:
        return self._act(context, self._actions.invite)

    def Remove(self, request: pb.RemoveRequest, context: grpc.ServicerContext) -> pb.RemoveReply:
        return self._act(context, lambda: self._actions.remove(request.device))

    def Leave(self, request: pb.LeaveRequest, context: grpc.ServicerContext) -> pb.LeaveReply:
        return self._act(context, self._actions.leave)

    def ServeModel(
        self, request: pb.ServeModelRequest, context: grpc.ServicerContext
    ) -> pb.ServeModelReply:
        self._check(context)
        try:
            _, source = open_model(Path(request.path))
        except ExoTrainError as error:
            _refuse(context, error)
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

    def _act(self, context: grpc.ServicerContext, action: Callable[[], Reply]) -> Reply:
        self._check(context)
        try:
            return action()
        except ExoTrainError as error:
            _refuse(context, error)

    def _check(self, context: grpc.ServicerContext) -> None:
        given = dict(context.invocation_metadata()).get(TOKEN_METADATA, "")
        if not secrets.compare_digest(str(given).encode(), self._token.encode()):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is not this agent's")


def _refuse(context: grpc.ServicerContext, error: ExoTrainError) -> NoReturn:
    """End the call with the sentence and its kind, which decides the command's exit code."""
    # The class that a command can know: those of other modules may not be loaded there.
    kinds = (kind for kind in type(error).__mro__ if kind.__module__ == ExoTrainError.__module__)
    context.set_trailing_metadata(((ERROR_METADATA, next(kinds).__name__),))
    context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
