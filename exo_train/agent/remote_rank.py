"""A rank on another device (or this one), over its agent's Run stream.

Owns the stream and the two threads on it. gRPC's errors end here.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import grpc

from exo_train.agent.local_client import ERROR_METADATA
from exo_train.agent.protocol import HEARTBEAT_S, HELLO_TIMEOUT_S
from exo_train.cluster.interfaces import all_dialable
from exo_train.errors import ExoTrainError, PeerLostError, TakenOverError
from exo_train.peer import Address
from exo_train.train.ring import Event, LostRankError
from exo_train.transport.channel import open_channel
from exo_train.transport.tls import PeerTls
from exo_train.wire.pb import control_pb2 as pb
from exo_train.wire.pb.control_pb2_grpc import ControlStub

CONNECT_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 8.0


class RemoteRank:
    """Implements `RankChannel`."""

    def __init__(self, name: str, addresses: Sequence[Address], tls: PeerTls) -> None:
        self._name = name
        self._addresses = all_dialable(addresses)
        self._tls = tls
        self._outgoing: queue.SimpleQueue[pb.RunMessage | None] = queue.SimpleQueue()
        self._channel: grpc.Channel | None = None
        self._thread: threading.Thread | None = None
        self._closing = False

    def start(self, on_event: Callable[[Event], None]) -> None:
        """Connect; raises PeerLostError when the agent answers at none of its addresses."""
        self._channel = self._connect()
        stream = ControlStub(self._channel).Run(self._requests())
        self._thread = threading.Thread(
            target=self._listen, args=(stream, on_event), name=f"run-{self._name}", daemon=True
        )
        self._thread.start()

    def send(self, message: pb.RunMessage) -> None:
        self._outgoing.put(message)

    def close(self) -> None:
        self._closing = True
        self._outgoing.put(None)
        if self._thread is not None:
            self._thread.join(timeout=CLOSE_TIMEOUT_S)
        if self._channel is not None:
            self._channel.close()

    def _connect(self) -> grpc.Channel:
        for address in self._addresses:
            channel = open_channel(
                address, credentials=self._tls.credentials, tls_name=self._tls.name
            )
            try:
                timeout_s = min(CONNECT_TIMEOUT_S, 2 * HELLO_TIMEOUT_S)
                grpc.channel_ready_future(channel).result(timeout=timeout_s)
                return channel
            except grpc.FutureTimeoutError:
                channel.close()
        tried = ", ".join(str(address) for address in self._addresses) or "no address known"
        raise PeerLostError(
            f"{self._name} cannot be reached ({tried}); is `exo-train join` running there, and "
            f"does its firewall let the port in?"
        )

    def _requests(self) -> Iterator[pb.RunMessage]:
        """Give what is to be sent, and a sign of life when there is nothing."""
        while True:
            try:
                message = self._outgoing.get(timeout=HEARTBEAT_S)
            except queue.Empty:
                message = pb.RunMessage(progress=pb.Progress())
            if message is None:
                return
            yield message

    def _listen(self, stream: Iterator[pb.RunMessage], on_event: Callable[[Event], None]) -> None:
        try:
            for message in stream:
                on_event(message)
            ended: ExoTrainError = LostRankError(f"{self._name} ended its part of the run")
        except grpc.RpcError as error:
            ended = _ending(self._name, error)
        if not self._closing:
            on_event(ended)


def _ending(name: str, error: grpc.RpcError) -> ExoTrainError:
    metadata = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    if any(
        m.key == ERROR_METADATA and str(m.value) == TakenOverError.__name__ for m in metadata or ()
    ):
        return TakenOverError(error.details())
    return LostRankError(f"{name}: {_reason(error)}")


def _reason(error: grpc.RpcError) -> str:
    code = error.code() if hasattr(error, "code") else None
    details = (error.details() if hasattr(error, "details") else "") or ""
    if code is grpc.StatusCode.UNAVAILABLE:
        return "the connection to it broke (switched off, asleep, or its agent was ended?)"
    if code in (
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    ):
        return details
    return f"its agent answered {code.name if code else 'an error'} {details}".strip()
