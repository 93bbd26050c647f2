"""The transport seam: one neighbour in the ring, whatever carries the bytes.

Owns the `Link` protocol and the values that cross it. Must not know gRPC or open a socket.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from exo_train.errors import ExoTrainError, ProtocolError
from exo_train.peer import NodeId
from exo_train.wire.codec import CHUNK_BYTES, Kind, StreamId, Tag
from exo_train.wire.tensor import HostTensor

__all__ = [
    "Kind",
    "Link",
    "LinkIdentity",
    "LinkLimits",
    "PeerIdentity",
    "StreamId",
    "Tag",
    "check_sendable",
]

MAX_TENSOR_BYTES = 4 << 30
# Together they bound what waits in one direction. A 1F1B ring with fewer microbatches in flight
# than twice their sum cannot block itself by sending both ways at once; with DPO, where two
# tensors of each go up, than one and a half times.
OUTBOX_TENSORS = 4
MAILBOX_TENSORS = 8
NO_ONE = NodeId("")
SEND_TIMEOUT_S = 600.0
CLOSE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerIdentity:
    """Who two ranks of a run are, seen from one of them; `token` is the run's secret."""

    cluster: str
    run: str
    generation: int
    rank: int
    name: str
    peer_rank: int
    peer_name: str
    token: str = field(repr=False)
    peer_id: NodeId = NO_ONE  # that the peer's certificate must prove, where there is TLS

    @property
    def peer(self) -> str:
        """Give the peer as messages call it."""
        return f"{self.peer_name} (rank {self.peer_rank})"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkIdentity(PeerIdentity):
    """Who the two ends of a link are: ring neighbours."""

    def __post_init__(self) -> None:
        if abs(self.rank - self.peer_rank) != 1:
            raise ValueError(f"ranks {self.rank} and {self.peer_rank} are not neighbours")

    @property
    def outgoing(self) -> StreamId:
        return self._stream(Kind.ACTIVATION if self.peer_rank > self.rank else Kind.GRADIENT)

    @property
    def incoming(self) -> StreamId:
        return self._stream(Kind.GRADIENT if self.peer_rank > self.rank else Kind.ACTIVATION)

    def _stream(self, kind: Kind) -> StreamId:
        return StreamId(cluster=self.cluster, run=self.run, generation=self.generation, kind=kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """Caps of one link; `max_tensor_bytes` must be equal on both ends."""

    max_tensor_bytes: int = MAX_TENSOR_BYTES
    chunk_bytes: int = CHUNK_BYTES
    outbox_tensors: int = OUTBOX_TENSORS
    mailbox_tensors: int = MAILBOX_TENSORS
    send_timeout_s: float = SEND_TIMEOUT_S


class Link(Protocol):
    """One neighbour: activations go to the higher rank, gradients to the lower one.

    Tags are unique per direction, and steps do not go back: a pass that is no training step
    (evaluation) needs microbatch numbers of its own, also when it is repeated within a
    step. Safe to use from several threads.
    """

    @property
    def identity(self) -> LinkIdentity: ...

    @property
    def peer_name(self) -> str: ...

    @property
    def sent_bytes(self) -> int:
        """Payload bytes that `send` accepted so far."""
        ...

    @property
    def received_bytes(self) -> int:
        """Payload bytes taken from the network so far, unfinished tensors included."""
        ...

    def send(self, tag: Tag, tensor: HostTensor) -> None:
        """Queue a tensor, whose data must not change afterwards; block while the queue is full.

        Raises PeerLostError when the link is down or the queue stays full for `send_timeout_s`,
        ProtocolError when the tensor is above `max_tensor_bytes`.
        """
        ...

    def wait_recv(self, tag: Tag, *, timeout_s: float) -> HostTensor:
        """Take the tensor with this tag.

        Raises PeerLostError, naming peer, tag and time waited, at the deadline or when the link
        goes down; the class given to `fail` when that was called.
        """
        ...

    def fail(self, error: ExoTrainError) -> None:
        """Break the link: everyone who waits on it now or later gets an error like this one."""
        ...

    def close(self) -> None:
        """Send what is queued, then end cleanly; waits at most CLOSE_TIMEOUT_S."""
        ...


def check_sendable(
    identity: LinkIdentity, limits: LinkLimits, tag: Tag, tensor: HostTensor
) -> None:
    """Refuse here, with the cause, what the peer would refuse."""
    if tensor.num_bytes > limits.max_tensor_bytes:
        raise ProtocolError(
            f"The {identity.outgoing.kind} of {tag} for {identity.peer} has {tensor.num_bytes} "
            f"bytes (limit {limits.max_tensor_bytes} on this link); use a smaller microbatch"
        )
