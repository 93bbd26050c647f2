"""Channels to other agents, each proven: whose certificate, which version, no copy of ourselves.

Owns the channels of the control plane and the frozen handshake that comes first on each. Must not
decide whom to call.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import grpc

import exo_train
from exo_train.agent.admissions import Admissions
from exo_train.agent.protocol import HELLO_TIMEOUT_S, PROTOCOL_VERSION, greeting
from exo_train.errors import PeerError, ProtocolError
from exo_train.peer import Address, NodeId, has_control_characters, short_id
from exo_train.transport.channel import open_channel
from exo_train.transport.tls import PeerTls
from exo_train.wire.pb import handshake_pb2
from exo_train.wire.pb.control_pb2_grpc import ControlStub
from exo_train.wire.pb.handshake_pb2_grpc import HandshakeStub

MAX_CHANNELS = 256
MAX_DETAILS_CHARS = 300


class VersionError(ProtocolError):
    """Two protocols; the sentence has both sides' versions."""


class NotTheDeviceError(ProtocolError):
    """Somebody answers, but not a member, or not the one that was meant."""


class RemovedHereError(NotTheDeviceError):
    """The answerer says that this device was removed from the cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """A channel whose other end is `node_id`.

    `control` is made with it: gRPC crashes where a stub is made of a channel that another thread is
    closing, while calls on one just raise.
    """

    node_id: NodeId
    instance: str
    channel: grpc.Channel
    control: ControlStub


class Dialling:
    """Thread-safe; one channel per address is kept."""

    def __init__(self, admissions: Admissions, *, instance: str) -> None:
        self._admissions = admissions
        self._greeting = greeting(
            node_id=admissions.identity.node_id,
            instance=instance,
            certificate=admissions.identity.certificate,
        )
        self._proven: dict[Address, Proven] = {}
        self._lock = threading.Lock()

    def to(self, address: Address, node_id: NodeId | None) -> Proven:
        """Give a proven channel; `node_id` None means: whoever of this cluster is there.

        Raises VersionError, NotTheDeviceError, and PeerError when nobody answers.
        """
        with self._lock:
            known = self._proven.get(address)
        if known is not None and node_id in (None, known.node_id):
            return known
        if node_id is None or self._admissions.certificate(node_id) is None:
            node_id = self._ask_who(address, node_id)
        proven = self._open(address, node_id)
        with self._lock:
            if len(self._proven) >= MAX_CHANNELS:
                self._proven.pop(next(iter(self._proven))).channel.close()
            replaced = self._proven.pop(address, None)
            self._proven[address] = proven
        if replaced is not None:
            replaced.channel.close()
        return proven

    def drop(self, address: Address) -> None:
        """Let the next call connect anew: after a cut, or from an address this device had before,
        the old connection waits out TCP's growing retransmission time.
        """
        with self._lock:
            known = self._proven.pop(address, None)
        if known is not None:
            known.channel.close()

    def drop_all_of(self, node_id: NodeId) -> None:
        """Close the channels to a device that is no longer a member."""
        with self._lock:
            addresses = [a for a, proven in self._proven.items() if proven.node_id == node_id]
        for address in addresses:
            self.drop(address)

    def close(self) -> None:
        with self._lock:
            addresses = list(self._proven)
        for address in addresses:
            self.drop(address)

    def _ask_who(self, address: Address, expected: NodeId | None) -> NodeId:
        """Learn who is there from its certificate, which tells also whether it may be."""
        channel = _channel(address, self._admissions.tls.to_any())
        try:
            answer = self._greet(channel, address)
        except RemovedHereError as error:
            # Any former member could say that here; it counts from one whose certificate we know.
            raise NotTheDeviceError(str(error)) from None
        finally:
            channel.close()
        try:
            node_id = self._admissions.admit(answer.certificate)
        except ProtocolError as error:
            raise NotTheDeviceError(f"{address}: {error}") from None
        if expected is not None and node_id != expected:
            raise NotTheDeviceError(
                f"{address} is device {short_id(node_id)}, not {short_id(expected)}"
            )
        return node_id

    def _open(self, address: Address, node_id: NodeId) -> Proven:
        channel = _channel(address, self._admissions.tls.to(node_id))
        try:
            answer = self._greet(channel, address)
            if answer.node_id != node_id:
                raise NotTheDeviceError(f"{address} claims to be another than it proves to be")
        except BaseException:
            channel.close()
            raise
        return Proven(
            node_id=node_id,
            instance=answer.instance,
            channel=channel,
            control=ControlStub(channel),
        )

    def _greet(self, channel: grpc.Channel, address: Address) -> handshake_pb2.Greeting:
        try:
            answer: handshake_pb2.Greeting = HandshakeStub(channel).Greet(
                self._greeting, timeout=HELLO_TIMEOUT_S
            )
        except grpc.RpcError as error:
            raise refusal_of(error, address) from None
        if answer.protocol != PROTOCOL_VERSION:
            raise VersionError(
                f"{address} runs exo-train {answer.build[:40]!r} with protocol {answer.protocol}, "
                f"this device {exo_train.__version__} with {PROTOCOL_VERSION}; install the same "
                f"version on both"
            )
        return answer


@contextlib.contextmanager
def calling(address: Address) -> Iterator[None]:
    """Turn what a call on a proven channel raises into PeerError and its kinds."""
    try:
        yield
    except grpc.RpcError as error:
        raise refusal_of(error, address) from None
    except ValueError:  # gRPC's word for a channel that another thread has closed meanwhile
        raise PeerError(f"the channel to {address} was closed") from None


def refusal_of(error: grpc.RpcError, address: Address) -> PeerError:
    """Tell a device that is not the one meant, or refuses us, from silence."""
    assert isinstance(error, grpc.Call)
    details = (error.details() or "")[:MAX_DETAILS_CHARS]
    if has_control_characters(details):  # a peer says there what it likes, and people read it
        details = "it gives no reason that can be shown"
    if error.code() is grpc.StatusCode.PERMISSION_DENIED:
        return RemovedHereError(f"{address}: {details}")
    if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INVALID_ARGUMENT):
        return NotTheDeviceError(f"{address}: {details}")
    if "CERTIFICATE_VERIFY_FAILED" in details or "handshake failed" in details.lower():
        return NotTheDeviceError(
            f"{address} answers with a certificate of another device or cluster"
        )
    return PeerError(f"{address}: {error.code().name.lower()} {details}")


def _channel(address: Address, tls: PeerTls) -> grpc.Channel:
    return open_channel(address, credentials=tls.credentials, tls_name=tls.name)
