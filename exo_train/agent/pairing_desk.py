"""The side that invites: a plain-text port that is open while a pairing code lives.

Owns the port, its limits and the life of one code at a time. The cryptography is
cluster/pairing.py's; must not decide who is a member, nor store anything.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError

from exo_train.agent.protocol import PROTOCOL_VERSION, greeting
from exo_train.cluster.pairing import (
    INVITATION_S,
    REFUSED_ADMISSION,
    REFUSED_CLOSED,
    REFUSED_CODE,
    REFUSED_NUMBER,
    Closed,
    Code,
    Invitation,
    InviterExchange,
    WrongCodeError,
)
from exo_train.cluster.steady_clock import steady_s
from exo_train.errors import ExoTrainError, ProtocolError
from exo_train.peer import Address
from exo_train.transport.channel import GRPC_OPTIONS, bind_all
from exo_train.wire.pb import handshake_pb2
from exo_train.wire.pb import pairing_pb2 as pb

# One joiner may dial eight addresses of this device at once; others must not cut it off.
MAX_STREAMS = 16
STREAM_S = 20.0
# Those that were cut off to make room need a thread until they have noticed.
MAX_CALLS = 2 * MAX_STREAMS
MAX_REQUEST_MESSAGE_BYTES = 4096
CLOSE_GRACE_S = 1.0
LOOK_S = 1.0  # a wait stands still while the machine sleeps; the code's time does not
# No stream lives that long, and a connection without one has no business here.
MAX_CONNECTION_IDLE_MS = 10_000
PAIRING_SERVICE = "exo_train.wire.Pairing"
HANDSHAKE_SERVICE = "exo_train.wire.Handshake"

_DESK_OPTIONS = {
    "grpc.max_receive_message_length": MAX_REQUEST_MESSAGE_BYTES,
    "grpc.max_connection_idle_ms": MAX_CONNECTION_IDLE_MS,
    "grpc.max_concurrent_streams": MAX_CALLS,
    "grpc.http2.lookahead_bytes": 64 * 1024,
}

log = logging.getLogger(__name__)
Admit = Callable[[bytes], pb.Admission]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A fresh code, how long it lives, and the port that is open for it."""

    code: Code
    lifetime_s: float
    port: int


class PairingDesk:
    """Invites other devices, one code at a time. Thread-safe.

    `hosts` gives where to listen, asked for each code: addresses change. `admit` makes the owner of
    a public key a member; what it raises is logged, and the joiner is sent away. `on_closed` hears
    once of each code why it is over, from a thread of the desk.
    """

    def __init__(
        self,
        hosts: Callable[[], Sequence[str]],
        *,
        admit: Admit,
        on_closed: Callable[[Closed], None],
        lifetime_s: float = INVITATION_S,
        choose: Callable[[], Code] = Code.choose,
        clock: Callable[[], float] = steady_s,
    ) -> None:
        self._hosts = hosts
        self._admit = admit
        self._on_closed = on_closed
        self._lifetime_s = lifetime_s
        self._choose = choose
        self._clock = clock
        self._session: _Session | None = None
        self._lock = threading.Lock()

    def invite(self) -> Opened:
        """Open a port for a fresh code; one made before is void.

        Raises PeerError when no port can be opened, and what `hosts` raises.
        """
        code = self._choose()
        session = _Session(
            self._hosts(),
            code,
            self._lifetime_s,
            admit=self._admit,
            on_closed=self._on_closed,
            clock=self._clock,
        )
        self._replace(session, Closed.REPLACED)
        return Opened(code=code, lifetime_s=self._lifetime_s, port=session.port)

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Give where the port is open; empty while no code lives."""
        session = self._session
        if session is None or session.is_over:
            return ()
        return tuple(Address(host, session.port) for host in session.hosts)

    @property
    def port(self) -> int | None:
        addresses = self.addresses
        return addresses[0].port if addresses else None

    def close(self) -> None:
        self._replace(None, Closed.ENDED)

    def _replace(self, session: _Session | None, why: Closed) -> None:
        with self._lock:
            before, self._session = self._session, session
        if before is not None:  # outside the lock: `on_closed` may call us
            before.end(why)


class _Session:
    """The port of one code, from its opening to its closing."""

    def __init__(
        self,
        hosts: Sequence[str],
        code: Code,
        lifetime_s: float,
        *,
        admit: Admit,
        on_closed: Callable[[Closed], None],
        clock: Callable[[], float],
    ) -> None:
        self.hosts = tuple(hosts)
        self._admit = admit
        self._on_closed = on_closed
        self._clock = clock
        self._invitation = Invitation(code, now_s=clock(), lifetime_s=lifetime_s)
        self._streams = _Streams()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._has_complained = False
        self._pool = ThreadPoolExecutor(max_workers=MAX_CALLS, thread_name_prefix="pairing")
        self._server = self._new_server()
        self.port = bind_all(self._server, hosts)
        self._server.start()
        self._keeper = threading.Thread(target=self._keep, name="pairing", daemon=True)
        self._keeper.start()

    @property
    def is_over(self) -> bool:
        with self._lock:
            return self._invitation.closed(self._clock()) is not None

    def end(self, why: Closed) -> None:
        with self._lock:
            self._invitation.close(why)
        self._over.set()
        if threading.current_thread() is not self._keeper:  # `on_closed` may invite again
            self._keeper.join()

    def _keep(self) -> None:
        """Close the port when the code is over, or its time is."""
        while (left_s := self._invitation.expires_s - self._clock()) > 0:
            if self._over.wait(min(left_s, LOOK_S)):
                break
        with self._lock:
            self._invitation.close(Closed.EXPIRED)
            why = self._invitation.closed(self._clock())
        assert why is not None
        self._server.stop(CLOSE_GRACE_S).wait()
        self._pool.shutdown(wait=False)  # gRPC leaves its threads to the garbage collector
        self._on_closed(why)

    def _new_server(self) -> grpc.Server:
        # gRPC writes a traceback for bytes that it cannot decode: it gets bytes. And it would wait
        # for a single message as long as the caller likes: it gets a stream of one.
        pair = grpc.stream_stream_rpc_method_handler(
            self._pair, response_serializer=pb.InviterMessage.SerializeToString
        )
        greet = grpc.stream_unary_rpc_method_handler(
            self._greet, response_serializer=handshake_pb2.Greeting.SerializeToString
        )
        return grpc.server(
            self._pool,
            handlers=[
                grpc.method_handlers_generic_handler(PAIRING_SERVICE, {"Pair": pair}),
                grpc.method_handlers_generic_handler(HANDSHAKE_SERVICE, {"Greet": greet}),
            ],
            options=list({**dict(GRPC_OPTIONS), **_DESK_OPTIONS}.items()),
            maximum_concurrent_rpcs=MAX_CALLS,
        )

    def _greet(
        self, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> handshake_pb2.Greeting:
        """Answer at once: the joiner decides by our version, and what it says changes nothing."""
        self._streams.enter(context)
        return greeting()

    def _pair(
        self, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[pb.InviterMessage]:
        self._streams.enter(context)
        try:
            yield from self._conversation(requests, context)
        except ProtocolError as error:
            if not self._has_complained:  # once a code: a flood must not fill the disk
                self._has_complained = True
                log.warning("the pairing port heard nonsense from %s: %s", context.peer(), error)
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a pairing message")

    def _conversation(
        self, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[pb.InviterMessage]:
        first = _next_message(requests, "spake")
        if first is None:
            return
        if first.number != self._invitation.code.number:
            yield pb.InviterMessage(refusal=REFUSED_NUMBER)
            return
        if self.is_over:
            yield pb.InviterMessage(refusal=REFUSED_CLOSED)
            return
        exchange = InviterExchange(self._invitation.code, protocol=PROTOCOL_VERSION)
        yield pb.InviterMessage(spake=exchange.answer(first.spake))
        proof = _next_message(requests, "sealed")
        if proof is None:  # it reached us at two addresses, or meant another device
            return
        request, refusal = self._judge(exchange, proof.sealed)
        if self.is_over and not context.add_callback(self._over.set):
            self._over.set()  # whoever ended it has gone already
        if request is None:
            yield pb.InviterMessage(refusal=refusal)
            return
        try:
            admission = self._admit(request.public_key)
        except ExoTrainError as error:
            log.warning("a device with the right code could not be admitted: %s", error)
            with self._lock:
                self._invitation.failed()
            yield pb.InviterMessage(refusal=REFUSED_ADMISSION)
            return
        yield pb.InviterMessage(sealed=exchange.seal(admission.SerializeToString()))

    def _judge(self, exchange: InviterExchange, sealed: bytes) -> tuple[pb.JoinRequest | None, str]:
        """Let one proof at a time use the code up, or count as a wrong try."""
        with self._lock:
            if self._invitation.closed(self._clock()) is not None:
                return None, REFUSED_CLOSED
            try:
                request = pb.JoinRequest.FromString(exchange.open(sealed))
            except WrongCodeError:
                self._invitation.wrong_try()
                return None, REFUSED_CODE
            except DecodeError:
                raise ProtocolError("a sealed request cannot be read") from None
            self._invitation.close(Closed.PAIRED)
            return request, ""


class _Streams:
    """The conversations under way; when there are too many, the oldest ends."""

    def __init__(self) -> None:
        self._contexts: list[grpc.ServicerContext] = []
        self._lock = threading.Lock()

    def enter(self, context: grpc.ServicerContext) -> None:
        """Count a stream in until it ends; it has STREAM_S for that."""
        limit = threading.Timer(STREAM_S, context.cancel)
        limit.daemon = True
        with self._lock:
            # A real one is done in a fraction of a second; the oldest is somebody who says nothing.
            while len(self._contexts) >= MAX_STREAMS:
                self._contexts.pop(0).cancel()  # type: ignore[no-untyped-call]
            self._contexts.append(context)
        limit.start()
        if not context.add_callback(lambda: self._leave(context, limit)):
            self._leave(context, limit)

    def _leave(self, context: grpc.ServicerContext, limit: threading.Timer) -> None:
        limit.cancel()
        with self._lock:
            if context in self._contexts:
                self._contexts.remove(context)


def _next_message(requests: Iterator[bytes], expected: str) -> pb.JoinerMessage | None:
    """Read the next message, None at the end; raises ProtocolError when `expected` is another."""
    raw = next(requests, None)
    if raw is None:
        return None
    try:
        message = pb.JoinerMessage.FromString(raw)
    except DecodeError:
        raise ProtocolError("a message cannot be read") from None
    if message.WhichOneof("body") != expected:
        raise ProtocolError("the messages come in another order")
    return message
