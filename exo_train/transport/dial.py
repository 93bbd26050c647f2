"""The calling end of a link: rank i dials rank i + 1.

Owns the trying of addresses until a deadline, and the sentence that says why none worked. Must
not read tensors: the link does.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

import grpc

from exo_train.errors import PeerError, PeerLostError, ProtocolError
from exo_train.peer import Address
from exo_train.transport.base import LinkIdentity, LinkLimits
from exo_train.transport.channel import open_channel
from exo_train.transport.grpc_link import EXCHANGE_METHOD, GrpcLink, break_reason
from exo_train.transport.hello import check_hello, encode_hello
from exo_train.transport.stopping import Stopper

ATTEMPT_TIMEOUT_S = 3.0
RETRY_PAUSE_S = 0.1


def dial(
    addresses: Sequence[Address],
    identity: LinkIdentity,
    *,
    timeout_s: float,
    limits: LinkLimits | None = None,
    credentials: grpc.ChannelCredentials | None = None,
    tls_name: str = "",
    stopper: Stopper | None = None,
) -> GrpcLink:
    """Try the addresses in order, round after round, until the peer's hello proves one.

    Raises ProtocolError when every address refuses us for what we are, PeerLostError with the
    cause for each address when the deadline passes, and what `stopper` says when it stops.
    """
    limits = limits or LinkLimits()
    stopper = stopper or Stopper()
    deadline_s = time.monotonic() + timeout_s
    failures: dict[Address, PeerError] = {}
    while (remaining_s := deadline_s - time.monotonic()) > 0:
        for address in addresses:
            channel = open_channel(address, credentials=credentials, tls_name=tls_name)
            attempt_s = min(ATTEMPT_TIMEOUT_S, max(remaining_s, RETRY_PAUSE_S))
            try:
                return _attempt(channel, identity, limits, timeout_s=attempt_s, stopper=stopper)
            except PeerError as error:
                failures[address] = error
            stopper.check()
            remaining_s = deadline_s - time.monotonic()
        if failures and all(isinstance(error, ProtocolError) for error in failures.values()):
            raise ProtocolError(_sentence(f"{identity.peer} refused the link", failures))
        stopper.wait(RETRY_PAUSE_S)
    raise PeerLostError(
        _sentence(f"{identity.peer} could not be reached within {timeout_s:.1f} s", failures)
        + "; check that it is awake, on the same network, and that its firewall lets us in"
    )


def _attempt(
    channel: grpc.Channel,
    identity: LinkIdentity,
    limits: LinkLimits,
    *,
    timeout_s: float,
    stopper: Stopper,
) -> GrpcLink:
    link = GrpcLink(identity, limits, cancel=lambda: call.cancel())  # type: ignore[no-untyped-call]
    hello = encode_hello(identity, limits, with_token=True)
    # bytes(x) is x itself: no (de)serialiser touches the frames.
    exchange = channel.stream_stream(
        EXCHANGE_METHOD, request_serializer=bytes, response_deserializer=bytes
    )
    call = exchange(itertools.chain([hello], link.frames()))

    def ended() -> None:
        # The reader sees the end too, unless a full mailbox holds it up.
        if call.code() is not grpc.StatusCode.OK:
            link.stream_ended(break_reason(call))

    call.add_callback(ended)
    greeted: Future[None] = Future()
    threading.Thread(
        target=_read,
        args=(channel, call, link, limits, greeted),
        name=f"link to {identity.peer}",
        daemon=True,
    ).start()
    try:
        with stopper.calling(link.fail):  # the reader sees the end of the stream
            greeted.result(timeout_s)
    except FutureTimeoutError:
        silent = PeerError(f"gave no answer in {timeout_s:.1f} s; a firewall may drop it")
        link.fail(silent)
        raise silent from None
    except PeerError as error:
        link.fail(error)
        raise
    return link


def _read(
    channel: grpc.Channel,
    call: grpc.CallIterator[bytes],
    link: GrpcLink,
    limits: LinkLimits,
    greeted: Future[None],
) -> None:
    """Check the peer's hello, then receive until the stream ends."""
    messages = iter(call)
    try:
        check_hello(next(messages, b""), link.identity, limits, with_token=False)
    except ProtocolError as error:
        greeted.set_exception(error)
    except grpc.RpcError as error:
        greeted.set_exception(refusal(error))
    else:
        greeted.set_result(None)
        link.read(messages)
    channel.close()


def refusal(error: grpc.RpcError) -> PeerError:
    """Tell apart a peer that refuses us, a closed port, no route and silence."""
    assert isinstance(error, grpc.Call)
    details = error.details() or ""
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
        return ProtocolError(break_reason(error))
    lower = details.lower()
    if "connection refused" in lower or "actively refused" in lower:
        return PeerError("refused the connection: nothing listens there")
    if "unreachable" in lower or "no route" in lower:
        return PeerError("has no route from this device")
    if "timed out" in lower or "timeout" in lower:
        return PeerError("timed out; a firewall may drop it")
    return PeerError(break_reason(error))


def _sentence(what: str, failures: dict[Address, PeerError]) -> str:
    causes = "; ".join(f"{address} {error}" for address, error in failures.items())
    return f"{what} ({causes})"
