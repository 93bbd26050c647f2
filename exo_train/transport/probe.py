"""How good the way to a peer's address is: round trip, jitter, speed both ways, MTU black holes.

Owns both ends of the Probe service and its bounds. Must not choose among ways or decide when to
measure: the cluster's link table does.

One call of `/exo_train.wire.Probe/Exchange` is a stream of messages each way; the first byte tells
the kind. A byte counts when the program at the other end has it: sent ones are answered one by
one, so that no buffer on the way flatters the speed.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn

import grpc

from exo_train.errors import PeerError, ProtocolError
from exo_train.peer import Address
from exo_train.transport.channel import open_channel
from exo_train.transport.grpc_link import break_reason

PROBE_METHOD = "/exo_train.wire.Probe/Exchange"

ECHO = b"\x01"  # either way: comes back as it is
DATA = b"\x02"  # either way: filling
ARRIVED = b"\x03"  # the answer to each DATA of the caller
SEND = b"\x04"  # a caller's wish: how many DATA messages, of how many bytes each
_SEND_WISH = struct.Struct("<II")

# The answering end's bounds.
MAX_PROBES = 2  # calls at once; more would measure each other
MAX_CALL_S = 5.0
MAX_CALL_BYTES = 16 << 20  # each way
MAX_ECHO_BYTES = 64
MAX_MESSAGE_BYTES = 256 << 10
MAX_WISHED_MESSAGES = 64

# The measuring end's plan.
NUM_ECHOES = 20
CONNECT_SHARE = 0.4  # of the budget, for the connection and the echoes
ECHO_SHARE = 0.2  # of the budget, after which the echoes had so far must do
# More than two packets on an Ethernet, and a few hundred ms on the slowest of links.
FIRST_ROUND_BYTES = 4 << 10
MIN_MESSAGE_BYTES = 1 << 10
ROUND_MESSAGES = 16  # small ones, so that a slow link shows progress too
ROUND_GROWTH = 4
ROUND_S = 0.2  # what a round is to last, by the speed of the one before
LONG_ENOUGH_S = 0.1  # a round of this length beside the round trip is believed,
AGREEING_SHARE = 0.7  # unless it is slower than this share of the one before: then see again
DIRECTION_BYTES = 8 << 20
DIRECTION_S = 0.4  # no round starts later
STALL_S = 0.3  # of silence at the end of a direction: a stall, not slowness
END_MARGIN_S = 0.05  # for closing, inside the budget
MAX_BYTES_PER_S = 1e11  # beyond any network at home: a clock that stood still


class ProbeBusyError(PeerError):
    """The other end measures already; it says nothing about the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """`jitter_s` is the 95th percentile of round trips less the median; 0 bytes/s: none passed.

    A speed is what this program's own connections get, so on very fast links (above some
    1 GB/s) it is bounded by the two processors. `trouble` is a sentence, or empty.
    """

    rtt_s: float
    jitter_s: float
    to_peer_bytes_per_s: float
    from_peer_bytes_per_s: float
    trouble: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flow:
    """One direction's result; `stalled_s`: how long nothing came at its end, 0 if all came."""

    bytes_per_s: float
    passed_bytes: int
    stalled_s: float = 0.0
    is_finished: bool = True


def probe_handler() -> grpc.GenericRpcHandler[bytes, bytes]:
    """Give the answering end, for a server that has checked who calls."""
    slots = threading.BoundedSemaphore(MAX_PROBES)

    def exchange(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        if not slots.acquire(blocking=False):
            _refuse(context, f"{MAX_PROBES} probes run here already (limit {MAX_PROBES})")
        limit = threading.Timer(MAX_CALL_S, context.cancel)
        limit.daemon = True
        limit.start()
        try:
            yield from _answers(requests, context)
        finally:
            limit.cancel()
            slots.release()

    service, method = PROBE_METHOD.strip("/").split("/")
    handler = grpc.stream_stream_rpc_method_handler(exchange)
    return grpc.method_handlers_generic_handler(service, {method: handler})


def measure(
    address: Address,
    *,
    credentials: grpc.ChannelCredentials | None = None,
    tls_name: str = "",
    budget_s: float = 2.0,
) -> Measurement:
    """Measure over connections of its own, within `budget_s`.

    Raises PeerError when not even small messages come back, ProbeBusyError when the other end is
    in other probes, ProtocolError when messages come back changed.
    """
    end_s = time.monotonic() + budget_s - END_MARGIN_S
    with contextlib.ExitStack() as stack:

        def connect() -> grpc.Channel:
            return stack.enter_context(
                open_channel(address, credentials=credentials, tls_name=tls_name)
            )

        channel = connect()
        try:
            round_trips_s = _echo(channel, budget_s)
            rtt_s = statistics.median(round_trips_s)
            limit_s = (end_s - time.monotonic()) / 2
            to_peer = _fill(channel, _upload, limit_s=limit_s, rtt_s=rtt_s)
            if not to_peer.is_finished:
                channel = connect()  # what is left in the old one would delay the wish
            limit_s = end_s - time.monotonic()
            from_peer = _fill(channel, _download, limit_s=limit_s, rtt_s=rtt_s)
        except grpc.RpcError as error:
            kind = ProbeBusyError if _is_busy(error) else PeerError
            raise kind(
                f"The way to {address} cannot be measured ({break_reason(error)}); it is tried "
                f"again later"
            ) from None
    return Measurement(
        rtt_s=rtt_s,
        jitter_s=max(0.0, _percentile_95(round_trips_s) - rtt_s),
        to_peer_bytes_per_s=to_peer.bytes_per_s,
        from_peer_bytes_per_s=from_peer.bytes_per_s,
        trouble=_trouble(to_peer, from_peer, rtt_s),
    )


def _answers(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    num_received = num_sent = 0
    filling = b""
    for message in requests:
        kind = message[:1]
        num_received += len(message)
        if num_received > MAX_CALL_BYTES:
            _refuse(context, f"{num_received} bytes in one probe (limit {MAX_CALL_BYTES})")
        if kind == ECHO and len(message) <= MAX_ECHO_BYTES:
            yield message
        elif kind == DATA and len(message) <= MAX_MESSAGE_BYTES:
            yield ARRIVED
        elif kind == SEND and len(message) == 1 + _SEND_WISH.size:
            count, size = _SEND_WISH.unpack(message[1:])
            num_sent += count * size
            if not (0 < count <= MAX_WISHED_MESSAGES and 0 < size <= MAX_MESSAGE_BYTES):
                _refuse(context, f"{count} messages of {size} bytes wished for at once")
            if num_sent > MAX_CALL_BYTES:
                _refuse(context, f"{num_sent} bytes wished for (limit {MAX_CALL_BYTES})")
            if len(filling) != size:
                filling = _filling(size)
            for _ in range(count):
                yield filling
        else:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is no message of a probe")


def _is_busy(error: grpc.RpcError) -> bool:
    return isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def _refuse(context: grpc.ServicerContext, sentence: str) -> NoReturn:
    context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, sentence)


def _filling(num_bytes: int) -> bytes:
    """Make a DATA message that no tunnel on the way can compress."""
    return DATA + os.urandom(num_bytes - 1)


class _Conversation:
    """One call as put and get; `get` raises grpc.RpcError, also when `timeout_s` is over."""

    def __init__(self, channel: grpc.Channel, timeout_s: float) -> None:
        # Never holds more than one round, and its messages are one object.
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        exchange = channel.stream_stream(
            PROBE_METHOD, request_serializer=bytes, response_deserializer=bytes
        )
        self._call = exchange(iter(self._outgoing.get, None), timeout=max(timeout_s, 0.0))
        self.put: Callable[[bytes], None] = self._outgoing.put

    def __enter__(self) -> _Conversation:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._outgoing.put(None)  # or gRPC's thread would wait for more
        self._call.cancel()  # type: ignore[no-untyped-call]

    def get(self) -> bytes:
        for message in self._call:
            return bytes(message)
        raise ProtocolError("A device ended a probe before its time; it is tried again later")


def _echo(channel: grpc.Channel, budget_s: float) -> list[float]:
    """Give round trips of small messages; the first, which opens the connection, is not timed."""
    round_trips_s: list[float] = []
    with _Conversation(channel, budget_s * CONNECT_SHARE) as conversation:
        _echo_once(conversation, 0)
        stop_s = time.monotonic() + budget_s * ECHO_SHARE
        try:
            # One at least, also when this process was held up meanwhile.
            while not round_trips_s or (
                len(round_trips_s) < NUM_ECHOES and time.monotonic() < stop_s
            ):
                round_trips_s.append(_echo_once(conversation, 1 + len(round_trips_s)))
        except grpc.RpcError as error:
            if not round_trips_s or not _is_overdue(error):
                raise
    return round_trips_s


def _echo_once(conversation: _Conversation, number: int) -> float:
    message = ECHO + bytes([number])
    start_ns = time.perf_counter_ns()
    conversation.put(message)
    reply = conversation.get()
    if reply != message:
        raise ProtocolError("A device answered a probe with something else than was sent")
    return (time.perf_counter_ns() - start_ns) / 1e9


def _upload(conversation: _Conversation, count: int, size: int) -> Iterator[None]:
    """Send a round; yields as the peer says that it has one message more."""
    filling = _filling(size)
    for _ in range(count):
        conversation.put(filling)
    for _ in range(count):
        if conversation.get() != ARRIVED:
            raise ProtocolError("A device answered a probe with something else than an arrival")
        yield


def _download(conversation: _Conversation, count: int, size: int) -> Iterator[None]:
    """Wish for a round; yields as one message more is here."""
    conversation.put(SEND + _SEND_WISH.pack(count, size))
    for _ in range(count):
        if len(conversation.get()) != size:
            raise ProtocolError(f"A device sent something else than the {size} bytes asked for")
        yield


def _fill(
    channel: grpc.Channel,
    rounds: Callable[[_Conversation, int, int], Iterator[None]],
    *,
    limit_s: float,
    rtt_s: float,
) -> _Flow:
    """Fill one direction round after round, each larger; the last one is the result.

    Earlier rounds take away what flatters or belittles: a shaper's burst, TCP's slow start.
    """
    stop_s = time.monotonic() + min(DIRECTION_S, limit_s / 2)
    passed_bytes = 0
    count, size = 1, FIRST_ROUND_BYTES
    before_bytes_per_s = 0.0
    with _Conversation(channel, limit_s) as conversation:
        while True:
            start_s = last_s = time.monotonic()
            num_here = 0
            try:
                for _ in rounds(conversation, count, size):
                    last_s = time.monotonic()
                    num_here += 1
            except grpc.RpcError as error:
                if not _is_overdue(error):
                    raise
                now_s = time.monotonic()
                return _Flow(
                    bytes_per_s=_bytes_per_s(num_here * size, now_s - start_s, rtt_s),
                    passed_bytes=passed_bytes + num_here * size,
                    stalled_s=now_s - last_s if now_s - last_s >= STALL_S else 0.0,
                    is_finished=False,
                )
            passed_bytes += count * size
            bytes_per_s = _bytes_per_s(count * size, last_s - start_s, rtt_s)
            is_believed = (
                last_s - start_s >= LONG_ENOUGH_S + rtt_s
                and bytes_per_s >= AGREEING_SHARE * before_bytes_per_s
            )
            wanted_bytes = min(count * size * ROUND_GROWTH, int(bytes_per_s * ROUND_S))
            left_bytes = DIRECTION_BYTES - passed_bytes
            if is_believed or last_s >= stop_s or left_bytes < count * size:
                return _Flow(bytes_per_s=bytes_per_s, passed_bytes=passed_bytes)
            before_bytes_per_s = bytes_per_s
            # Rather one long last round than a short one after it.
            count, size = _messages(wanted_bytes if 2 * wanted_bytes < left_bytes else left_bytes)


def _messages(round_bytes: int) -> tuple[int, int]:
    """Cut a round into equal messages, of full size when it is large."""
    size = min(max(round_bytes // ROUND_MESSAGES, MIN_MESSAGE_BYTES), MAX_MESSAGE_BYTES)
    return max(round_bytes // size, 2), size


def _bytes_per_s(num_bytes: int, round_s: float, rtt_s: float) -> float:
    """Give a round's speed, less the round trip that its first byte or last answer took.

    At least half of the time counts, as a round trip varies.
    """
    return num_bytes / max(round_s - rtt_s, round_s / 2, num_bytes / MAX_BYTES_PER_S, 1e-9)


def _is_overdue(error: grpc.RpcError) -> bool:
    return isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def _percentile_95(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def _trouble(to_peer: _Flow, from_peer: _Flow, rtt_s: float) -> str:
    stalled = [flow for flow in (to_peer, from_peer) if flow.stalled_s]
    if not stalled:
        return ""
    way = "to the peer" if to_peer.stalled_s else "from the peer"
    if len(stalled) == 2:
        way = "either way"
    worst = min(stalled, key=lambda flow: flow.passed_bytes)
    if worst.passed_bytes == 0:
        return (
            f"messages of {FIRST_ROUND_BYTES} bytes do not pass {way} within "
            f"{worst.stalled_s:.1f} s, though small ones come back in {rtt_s * 1e3:.1f} ms: large "
            f"packets are lost; give both devices and the switch between them the same MTU "
            f"(1500, or 1400 through a VPN)"
        )
    return (
        f"data stopped {way} for {worst.stalled_s:.1f} s after {worst.passed_bytes} bytes: packets "
        f"are lost; come nearer to the access point or change the cable, and if jumbo frames are "
        f"on, set the MTU to 1500"
    )
