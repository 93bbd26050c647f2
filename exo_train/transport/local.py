"""Links between two ranks of one process.

Owns the in-process transport of one-process rings, examples and tests. Must not copy or encode
tensors: the receiver gets the sender's object.
"""

from __future__ import annotations

import threading

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
from exo_train.wire.tensor import HostTensor


class LocalLink:
    """One end of `local_link_pair`; a thread moves tensors from its outbox to the other end."""

    def __init__(self, identity: LinkIdentity, limits: LinkLimits) -> None:
        self._identity = identity
        self._limits = limits
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
        self._thread: threading.Thread | None = None
        self._other: LocalLink | None = None

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

    def send(self, tag: Tag, tensor: HostTensor) -> None:
        check_sendable(self._identity, self._limits, tag, tensor)
        self._outbox.put(tag, tensor, timeout_s=self._limits.send_timeout_s)
        self._sent_bytes += tensor.num_bytes

    def wait_recv(self, tag: Tag, *, timeout_s: float) -> HostTensor:
        return self._mailbox.wait(tag, timeout_s=timeout_s)

    def fail(self, error: ExoTrainError) -> None:
        self._break(error)
        if self._other is not None:
            us = self._other.identity.peer
            self._other._break(PeerLostError(f"{us} broke the link: {error}"))

    def close(self) -> None:
        reason = PeerLostError(f"The link to {self._identity.peer} was closed here")
        self._outbox.end(reason)
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
        self._break(reason)

    def _break(self, error: ExoTrainError) -> None:
        self._outbox.fail(error)
        self._mailbox.fail(error)

    def _connect(self, other: LocalLink) -> None:
        self._other = other
        self._thread = threading.Thread(
            target=self._pump, args=(other,), name=f"link to {self._identity.peer}", daemon=True
        )
        self._thread.start()

    def _pump(self, other: LocalLink) -> None:
        while (item := self._outbox.wait_next()) is not None:
            tag, tensor = item
            other._received_bytes += tensor.num_bytes
            try:
                other._mailbox.put(tag, tensor)
            except ProtocolError as error:
                other.fail(error)
        gone = PeerLostError(f"{other._identity.peer} closed the link")
        other._mailbox.end(gone)
        other._outbox.end(gone)


def local_link_pair(
    lower: LinkIdentity, upper: LinkIdentity, *, limits: LinkLimits | None = None
) -> tuple[LocalLink, LocalLink]:
    """Connect two ranks of this process; `lower` is the one with the smaller rank."""
    if lower.outgoing != upper.incoming or (lower.rank, lower.peer_rank) != (
        upper.peer_rank,
        upper.rank,
    ):
        raise ProtocolError(
            f"{upper.peer} and {lower.peer} are not the two ends of one link: "
            f"one sends {lower.outgoing}, the other expects {upper.incoming}"
        )
    limits = limits or LinkLimits()
    ends = LocalLink(lower, limits), LocalLink(upper, limits)
    ends[0]._connect(ends[1])
    ends[1]._connect(ends[0])
    return ends
