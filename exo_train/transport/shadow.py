"""Copies of a rank's trainable state, sent to the rank that holds its shadow.

Owns both ends of the Shadow method: whose copies are let in, that none outlives its generation,
and every deadline. Must not know what a copy consists of: `take` does.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import grpc

from exo_train.errors import PeerError, PeerLostError, ProtocolError
from exo_train.peer import Address
from exo_train.transport.base import PeerIdentity
from exo_train.transport.channel import open_channel
from exo_train.transport.dial import refusal
from exo_train.transport.grpc_link import MAX_DETAILS_CHARS
from exo_train.transport.hello import check_copy_hello, encode_copy_hello, read_hello
from exo_train.transport.stalling import StallGuard
from exo_train.transport.stopping import Stopper
from exo_train.transport.tls import caller_id

SHADOW_METHOD = "/exo_train.wire.Data/Shadow"
# A slow link is fine, a silent one is not.
STALL_TIMEOUT_S = 30.0
# Wi-Fi at its worst; a copy that takes longer is given up, and so is one that takes ten minutes.
SLOWEST_BYTES_PER_S = 100_000
LONGEST_COPY_S = 600.0

Messages = Iterator[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowSource:
    """One rank whose copies are taken; `num_bytes` is what the arrays of a whole copy have.

    `take` reads all messages after the Hello, raises ProtocolError for what they must not be, and
    gives what stores the copy.
    """

    identity: PeerIdentity
    num_bytes: int
    take: Callable[[Messages], Callable[[], None]]


class ShadowDesk:
    """The holder's end: serves the Shadow method for the ranks of one generation."""

    def __init__(self, *, is_secure: bool) -> None:
        self._is_secure = is_secure
        self._first_generation = 0
        self._sources: dict[int, ShadowSource] = {}
        self._calls: dict[int, grpc.ServicerContext] = {}
        self._lock = threading.Lock()

    def expect(self, sources: Sequence[ShadowSource]) -> None:
        """Take these ranks' copies from now on, and nobody else's."""
        with self._lock:
            if all(s.identity.generation >= self._first_generation for s in sources):
                self._sources = {source.identity.peer_rank: source for source in sources}

    def end_before(self, generation: int) -> None:
        """Store nothing of earlier generations any more; what is under way is cut."""
        with self._lock:
            self._first_generation = max(self._first_generation, generation)
            over = {r for r, s in self._sources.items() if s.identity.generation < generation}
            cut = [self._calls.pop(rank) for rank in over & self._calls.keys()]
            for rank in over:
                del self._sources[rank]
        for context in cut:
            context.cancel()  # type: ignore[no-untyped-call]

    def serve(self, requests: Messages, first: bytes, context: grpc.ServicerContext) -> bytes:
        """Answer one call whose first message has come; nothing is stored unless all is right."""
        source = self._admit(first, context)
        guard = StallGuard(context.cancel, timeout_s=STALL_TIMEOUT_S)
        try:
            with guard:
                keep = source.take(guard.watched(requests))
            self._finish(source, context, keep)
        except ProtocolError as error:
            sentence = str(error)[:MAX_DETAILS_CHARS]
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, sentence)
        finally:
            self._leave(source, context)
        return encode_copy_hello(source.identity, source.num_bytes, with_token=False)

    def _admit(self, first: bytes, context: grpc.ServicerContext) -> ShadowSource:
        with self._lock:
            if not self._sources:
                context.abort(grpc.StatusCode.UNAVAILABLE, "no copies are taken here now")
            try:
                rank = read_hello(first).rank
                source = self._sources.get(rank)
                if source is None:
                    raise ProtocolError("no copies of this rank are taken here")
                if self._is_secure and caller_id(context) != source.identity.peer_id:
                    raise ProtocolError("the caller's certificate is not that rank's")
                check_copy_hello(first, source.identity, source.num_bytes, with_token=True)
            except PeerError as error:
                sentence = str(error)[:MAX_DETAILS_CHARS]
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, sentence)
            older = self._calls.pop(rank, None)
            self._calls[rank] = context
        if older is not None:
            older.cancel()  # type: ignore[no-untyped-call]
        return source

    def _finish(
        self, source: ShadowSource, context: grpc.ServicerContext, keep: Callable[[], None]
    ) -> None:
        """Store under the lock: once `end_before` has returned, nothing comes in any more."""
        rank = source.identity.peer_rank
        with self._lock:
            if self._sources.get(rank) is not source or self._calls.get(rank) is not context:
                raise ProtocolError("a newer copy or another generation has begun")
            keep()

    def _leave(self, source: ShadowSource, context: grpc.ServicerContext) -> None:
        with self._lock:
            if self._calls.get(source.identity.peer_rank) is context:
                del self._calls[source.identity.peer_rank]


def send_shadow(
    addresses: Sequence[Address],
    identity: PeerIdentity,
    messages: Callable[[], Messages],
    *,
    num_bytes: int,
    stopper: Stopper,
    credentials: grpc.ChannelCredentials | None = None,
    tls_name: str = "",
) -> None:
    """Send a copy and return when the holder has stored it; `messages` gives those after the Hello.

    Tries the addresses in order. Raises PeerLostError with the cause for each, and what `stopper`
    says when it stops.
    """
    failures: dict[Address, PeerError] = {}
    for address in addresses:
        stopper.check()
        with open_channel(address, credentials=credentials, tls_name=tls_name) as channel:
            try:
                _send(channel, identity, messages(), num_bytes, stopper)
                return
            except PeerError as error:
                stopper.check()
                failures[address] = error
    causes = "; ".join(f"{address} {error}" for address, error in failures.items())
    raise PeerLostError(
        f"{identity.peer} did not take a copy of this rank's state ({num_bytes} bytes; {causes}); "
        "it is sent again after a later step"
    )


def _send(
    channel: grpc.Channel,
    identity: PeerIdentity,
    messages: Messages,
    num_bytes: int,
    stopper: Stopper,
) -> None:
    hello = encode_copy_hello(identity, num_bytes, with_token=True)
    method = channel.stream_unary(
        SHADOW_METHOD, request_serializer=bytes, response_deserializer=bytes
    )
    timeout_s = min(STALL_TIMEOUT_S + num_bytes / SLOWEST_BYTES_PER_S, LONGEST_COPY_S)
    future = method.future(itertools.chain([hello], messages), timeout=timeout_s)
    with stopper.calling(lambda reason: future.cancel()):  # type: ignore[no-untyped-call]
        try:
            answer = future.result()
        except grpc.FutureCancelledError:
            raise PeerError("ended the copying") from None
        except grpc.RpcError as error:
            raise refusal(error) from None
    check_copy_hello(answer, identity, num_bytes, with_token=False)
