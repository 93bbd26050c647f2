"""How commands talk to the agent of their own home, starting one when none runs.

Owns the loopback channel and the life of an agent that a command started.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from exo_train.agent.protocol import TOKEN_METADATA
from exo_train.cluster.home import AgentEndpoint, Home
from exo_train.errors import PeerError, error_class
from exo_train.peer import Address
from exo_train.train.messages import from_endpoints
from exo_train.transport.channel import open_channel
from exo_train.wire.pb import control_pb2 as pb
from exo_train.wire.pb.control_pb2_grpc import LocalStub

CALL_TIMEOUT_S = 30.0
START_TIMEOUT_S = 30.0
ERROR_METADATA = "exo-train-error"  # names the kind of what could not be done
GENTLE_END_S = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """A code, how long it lives, and where its pairing port is open."""

    code: str
    expires_s: float
    addresses: tuple[Address, ...]


class LocalClient:
    """Context manager around the channel to this home's agent."""

    def __init__(self, endpoint: AgentEndpoint) -> None:
        self._channel = open_channel(Address("127.0.0.1", endpoint.local_port))
        self._stub = LocalStub(self._channel)
        self._metadata = ((TOKEN_METADATA, endpoint.token),)

    def __enter__(self) -> LocalClient:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._channel.close()

    def status(self) -> dict[str, Any]:
        reply = self._call(self._stub.Status, pb.StatusRequest())
        content = json.loads(reply.json)
        assert isinstance(content, dict)
        return content

    def examine(self) -> dict[str, Any]:
        """Give what `exo-train doctor` needs to know of the running agent."""
        content = json.loads(self._call(self._stub.Examine, pb.ExamineRequest()).json)
        assert isinstance(content, dict)
        return content

    def invite(self) -> Invitation:
        reply = self._call(self._stub.Invite, pb.InviteRequest())
        return Invitation(
            code=reply.code,
            expires_s=reply.expires_s,
            addresses=from_endpoints(reply.endpoints),
        )

    def remove(self, device: str) -> tuple[str, tuple[str, ...]]:
        """End a member's membership; gives its name, and the names of those it had invited."""
        reply = self._call(self._stub.Remove, pb.RemoveRequest(device=device))
        return reply.name, tuple(reply.invited)

    def leave(self) -> tuple[str, ...]:
        """End this device's membership and its agent; gives the names of those who know."""
        return tuple(self._call(self._stub.Leave, pb.LeaveRequest()).told)

    def serve_model(self, *, run_id: str, token: str, path: str) -> tuple[Address, ...]:
        request = pb.ServeModelRequest(run_id=run_id, token=token, path=path)
        return from_endpoints(self._call(self._stub.ServeModel, request).endpoints)

    def stop_serving(self, run_id: str) -> None:
        with contextlib.suppress(PeerError):
            self._call(self._stub.StopServing, pb.StopServingRequest(run_id=run_id))

    def _call(self, method: Any, request: Any) -> Any:
        try:
            return method(request, timeout=CALL_TIMEOUT_S, metadata=self._metadata)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                kinds = (m.value for m in error.trailing_metadata() if m.key == ERROR_METADATA)
                raise error_class(str(next(kinds, "")))(error.details()) from None
            raise PeerError(
                f"this home's agent does not answer ({error.code().name}); start it again with "
                f"`exo-train join`"
            ) from None
        except ValueError:  # gRPC's own, for a channel that another thread has closed
            raise PeerError(
                "the connection to this home's agent was closed; start the agent again with "
                "`exo-train join`"
            ) from None


@contextlib.contextmanager
def own_agent(home: Home) -> Iterator[LocalClient]:
    """Give a client to the home's agent; one that had to be started ends with the context."""
    endpoint = home.agent()
    started = None
    if endpoint is None:
        started, endpoint = _start(home)
    try:
        with LocalClient(endpoint) as client:
            yield client
    finally:
        if started is not None:
            stop_process(started)


def stop_process(process: subprocess.Popen[bytes]) -> None:
    """Ask an agent to end, then insist."""
    if process.stdin is not None:
        process.stdin.close()  # a tied agent ends by this; on Windows nothing else is gentle
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GENTLE_END_S)
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _start(home: Home) -> tuple[subprocess.Popen[bytes], AgentEndpoint]:
    home.logs.mkdir(parents=True, exist_ok=True)
    log_path = home.logs / "agent.log"
    with log_path.open("ab") as log_file:
        process = subprocess.Popen(
            [sys.executable, "-m", "exo_train", "join", "--headless", "--tied"],
            stdin=subprocess.PIPE,  # closes when this process ends, however it ends
            stdout=log_file,
            stderr=log_file,
            env=os.environ | {"EXO_TRAIN_HOME": str(home.path)},
            # Its own session: Ctrl-C on `train` is for `train`, which ends this agent afterwards.
            start_new_session=True,
        )
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        endpoint = home.agent()
        if endpoint is not None:
            return process, endpoint
        if process.poll() is not None:
            break
        time.sleep(0.1)
    stop_process(process)
    raise PeerError(f"an agent for this home could not be started; see {log_path}")
