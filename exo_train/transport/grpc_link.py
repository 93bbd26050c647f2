"""A link over one bidirectional gRPC stream, kept open for the run.

Owns how tensors get on and off the stream, and the telling apart of a clean close and a break.
Must not dial or listen: `dial.py` and `data_server.py` give it a stream. No gRPC exception leaves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import grpc

from exo_train.errors import ExoTrainError, PeerLostError, ProtocolError
from exo_train.transport.base import (
    CLOSE_TIMEOUT_S,
    LinkIdentity,
    LinkLimits,
    Tag,
    check_sendable,
)
from exo_train.transport.mailbox import Mailbox
from exo_train.transport.outbox import Outbox
from exo_train.wire.codec import Assembler, encode_tensor
from exo_train.wire.tensor import HostTensor

EXCHANGE_METHOD = "/exo_train.wire.Data/Exchange"
# The end of a stream alone proves nothing: gRPC shows a server the same end when a peer dies.
GOODBYE = b""
# A peer may say anything in its status.
MAX_DETAILS_CHARS = 300


class GrpcLink:
    """One end of a stream, dialled or accepted: gRPC drains `frames`, a thread runs `read`."""

    def __init__(
        self, identity: LinkIdentity, limits: LinkLimits, *, cancel: Callable[[], object]
    ) -> None:
        self._identity = identity
        self._limits = limits
        self._cancel = cancel
        self._outbox = Outbox(
            kind=identity.outgoing.kind,
            peer=identity.peer,
            capacity_tensors=limits.outbox_tensors,
        )
        self._mailbox = Mailbox(
            kind=identity.incoming.kind,
            peer=identity.peer,
            capacity_tensors=limits.mailbox_tensors,
        )
        self._sent_bytes = 0
        self._received_bytes = 0
        self._failure: ExoTrainError | None = None
        self._closing = False
        self._peer_closed = False
        self._lock = threading.Lock()
        self._finished = threading.Event()

    @property
    def identity(self) -> LinkIdentity:
        return self._identity

    @property
    def peer_name(self) -> str:
        return self._identity.peer_name

    @property
    def sent_bytes(self) -> int:
        return self._sent_bytes

    @property
    def received_bytes(self) -> int:
        return self._received_bytes

    @property
    def failure(self) -> ExoTrainError | None:
        """Why the link is broken; None while it works and after a clean close."""
        return self._failure

    def send(self, tag: Tag, tensor: HostTensor) -> None:
        check_sendable(self._identity, self._limits, tag, tensor)
        self._outbox.put(tag, tensor, timeout_s=self._limits.send_timeout_s)
        with self._lock:
            self._sent_bytes += tensor.num_bytes

    def wait_recv(self, tag: Tag, *, timeout_s: float) -> HostTensor:
        return self._mailbox.wait(tag, timeout_s=timeout_s)

    def fail(self, error: ExoTrainError) -> None:
        with self._lock:
            if self._failure is not None or self._finished.is_set():
                return
            self._failure = error
        self._outbox.fail(error)
        self._mailbox.fail(error)
        self._cancel()

    def close(self) -> None:
        reason = PeerLostError(f"The link to {self._identity.peer} was closed here")
        with self._lock:
            self._closing = True
        self._outbox.end(reason)
        # What still comes in is dropped, so that the peer is not held up by a full mailbox.
        self._mailbox.fail(reason)
        if not self._finished.wait(CLOSE_TIMEOUT_S):
            self._cancel()
        self._outbox.fail(reason)

    def frames(self) -> Iterator[bytes]:
        """Give the frames to send until the link ends, then the goodbye; gRPC iterates this."""
        while (item := self._outbox.wait_next()) is not None:
            tag, tensor = item
            stream, chunk_bytes = self._identity.outgoing, self._limits.chunk_bytes
            for frame in encode_tensor(stream, tag, tensor, chunk_bytes=chunk_bytes):
                if self._failure is not None:
                    return
                yield frame
        if self._failure is None:
            yield GOODBYE

    def read(self, messages: Iterator[bytes]) -> None:
        """Receive until the goodbye, then wait for the end of the stream."""
        assembler = Assembler(
            self._identity.incoming, max_tensor_bytes=self._limits.max_tensor_bytes
        )
        try:
            for message in messages:
                if message == GOODBYE:
                    self._said_goodbye()
                else:
                    self._receive(assembler, message)
        except ProtocolError as error:
            self.fail(ProtocolError(f"{self._identity.peer} broke the protocol: {error}"))
        except grpc.RpcError as error:
            self.stream_ended(break_reason(error))
        else:
            self.stream_ended("connection lost")

    def _receive(self, assembler: Assembler, message: bytes) -> None:
        before_bytes = assembler.num_received_bytes
        done = assembler.feed(message)
        if done is None:
            self._received_bytes += assembler.num_received_bytes - before_bytes
            return
        tag, tensor = done
        self._received_bytes += tensor.num_bytes - before_bytes
        self._mailbox.put(tag, tensor)

    def stream_ended(self, reason: str) -> None:
        """Take note that nothing moves any more; without a goodbye before, the link broke."""
        if not self._closing and not self._peer_closed:
            self.fail(
                PeerLostError(
                    f"The connection to {self._identity.peer} broke ({reason}); check that it is "
                    "awake and on the network"
                )
            )
        self._finished.set()

    def _said_goodbye(self) -> None:
        """The peer has sent all it had: what arrived can be taken, our own queue still goes out."""
        self._peer_closed = True
        gone = PeerLostError(
            f"{self._identity.peer} closed the link: it finished or was stopped on purpose"
        )
        self._mailbox.end(gone)
        self._outbox.end(gone)


def break_reason(call: grpc.RpcError | grpc.Call) -> str:
    """Say in a few words why a call ended; the server side of gRPC never knows."""
    if not isinstance(call, grpc.Call):
        return "connection lost"
    details = (call.details() or "").splitlines()
    code = call.code().name.lower().replace("_", " ")
    return f"{code}: {details[0][:MAX_DETAILS_CHARS]}" if details else code
