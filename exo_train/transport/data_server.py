"""The listening end of a rank: rank i waits here for rank i - 1, and takes copies of others' state.

Owns the data port, which stays open over the generations of a run, and whom it lets in. Must not
read tensors: the link does.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType

import grpc

from exo_train.errors import ExoTrainError, PeerError, PeerLostError, ProtocolError
from exo_train.peer import Address
from exo_train.transport.base import CLOSE_TIMEOUT_S, LinkIdentity, LinkLimits
from exo_train.transport.channel import bind_all, new_server
from exo_train.transport.grpc_link import EXCHANGE_METHOD, GrpcLink
from exo_train.transport.hello import check_hello, encode_hello
from exo_train.transport.mailbox import WAIT_SLICE_S
from exo_train.transport.shadow import SHADOW_METHOD, ShadowDesk
from exo_train.transport.tls import caller_id

# The neighbour needs one; the rest let a retry in while a broken or silent stream is cleared away.
MAX_OPEN_STREAMS = 4
MAX_OPEN_COPIES = 8  # GPUs of one computer whose copies come at the same time; more come again
HELLO_TIMEOUT_S = 5.0
# A failed stream gets this long to tell its peer why before it is cut.
LAST_WORDS_S = 0.5


class DataServer:
    """Listens from the start, so that its ports can go into the plan; lets in one neighbour.

    `shadows` says whose copies are taken. `end_before` ends a generation, and keeps the port. It
    must be closed, or its threads keep the process alive.
    """

    def __init__(
        self, hosts: Sequence[str], *, credentials: grpc.ServerCredentials | None = None
    ) -> None:
        service, exchange = EXCHANGE_METHOD.strip("/").split("/")
        _, shadow = SHADOW_METHOD.strip("/").split("/")
        methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            exchange: grpc.stream_stream_rpc_method_handler(self._exchange),
            shadow: grpc.stream_unary_rpc_method_handler(self._shadow),
        }
        self._server = new_server(
            max_workers=MAX_OPEN_STREAMS + MAX_OPEN_COPIES,
            max_rpcs=MAX_OPEN_STREAMS + MAX_OPEN_COPIES,
            handlers=[grpc.method_handlers_generic_handler(service, methods)],
            name="data-server",
        )
        self._is_secure = credentials is not None
        self.shadows = ShadowDesk(is_secure=self._is_secure)
        self._first_generation = 0  # that is not over
        self._over: ExoTrainError | None = None  # why those before are
        self._expected: tuple[LinkIdentity, LinkLimits] | None = None
        self._link: GrpcLink | None = None
        self._handed_out = False
        self._last_refusal = ""
        self._changed = threading.Condition()
        port = bind_all(self._server, hosts, credentials=credentials)
        self.port = port
        self.addresses = tuple(Address(host, port) for host in hosts)
        self._server.start()

    def __enter__(self) -> DataServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def wait_link(
        self, identity: LinkIdentity, *, timeout_s: float, limits: LinkLimits | None = None
    ) -> GrpcLink:
        """Let the neighbour in and give its link, proven by its hello.

        Raises PeerLostError at the deadline, with the last refusal if there was one, and an error
        like the one given to `end_before` when the generation is over.
        """
        start_s = time.monotonic()
        with self._changed:
            self._check_generation(identity)
            if self._expected is None or self._expected[0] != identity:
                self._link, self._handed_out, self._last_refusal = None, False, ""
            self._expected = identity, limits or LinkLimits()
            while self._link is None or self._link.failure is not None:
                waited_s = time.monotonic() - start_s
                if waited_s >= timeout_s:
                    raise PeerLostError(self._deadline_sentence(identity, waited_s))
                self._changed.wait(min(timeout_s - waited_s, WAIT_SLICE_S))
                self._check_generation(identity)
            self._handed_out = True
            return self._link

    def end_before(self, generation: int, reason: ExoTrainError) -> None:
        """End the earlier generations: their link breaks, who waits for one gets `reason`.

        Safe from any thread; the port stays open for the generations that come.
        """
        with self._changed:
            if generation <= self._first_generation:
                return
            self._first_generation, self._over = generation, reason
            link = None
            if self._expected is not None and self._expected[0].generation < generation:
                link, self._link, self._expected = self._link, None, None
            self._changed.notify_all()
        self.shadows.end_before(generation)
        if link is not None:
            link.fail(reason)

    def close(self) -> None:
        """Close the link cleanly, then the port."""
        if self._link is not None:
            self._link.close()
        self._server.stop(CLOSE_TIMEOUT_S).wait()

    def _exchange(
        self, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """Serve one stream; gRPC iterates this in a pool thread, which is the link's sender."""
        first = _wait_first(requests, context)
        link, hello = self._admit(first, context)
        threading.Thread(
            target=link.read,
            args=(requests,),
            name=f"link from {link.identity.peer}",
            daemon=True,
        ).start()
        yield hello
        yield from link.frames()
        if isinstance(link.failure, ProtocolError):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(link.failure))
        elif link.failure is not None:
            context.abort(grpc.StatusCode.ABORTED, str(link.failure))

    def _shadow(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        return self.shadows.serve(requests, _wait_first(requests, context), context)

    def _check_generation(self, identity: LinkIdentity) -> None:
        if self._over is not None and identity.generation < self._first_generation:
            raise type(self._over)(str(self._over))

    def _admit(self, first: bytes, context: grpc.ServicerContext) -> tuple[GrpcLink, bytes]:
        with self._changed:
            if self._expected is None:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the run is not ready here yet")
            identity, limits = self._expected
            try:
                self._check_caller(identity, context)
                check_hello(first, identity, limits, with_token=True)
            except PeerError as error:
                self._last_refusal = str(error)
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            if self._link is not None and (self._handed_out or self._link.failure is None):
                context.abort(grpc.StatusCode.ALREADY_EXISTS, "this neighbour is connected already")

            def cut() -> None:
                timer = threading.Timer(LAST_WORDS_S, context.cancel)
                timer.daemon = True
                timer.start()

            link = GrpcLink(identity, limits, cancel=cut)
            if not context.add_callback(lambda: link.stream_ended("connection lost")):
                context.abort(grpc.StatusCode.CANCELLED, "the stream ended at once")
            self._link = link
            self._changed.notify_all()
            return link, encode_hello(identity, limits, with_token=False)

    def _check_caller(self, identity: LinkIdentity, context: grpc.ServicerContext) -> None:
        """Refuse a member that is not the neighbour, whatever its hello says."""
        if self._is_secure and caller_id(context) != identity.peer_id:
            raise ProtocolError("the caller's certificate is not the ring neighbour's")

    def _deadline_sentence(self, identity: LinkIdentity, waited_s: float) -> str:
        where = ", ".join(map(str, self.addresses))
        refusal = f"; a caller was refused: {self._last_refusal}" if self._last_refusal else ""
        return (
            f"{identity.peer} did not connect to {where} within {waited_s:.1f} s{refusal}; check "
            "that it is awake and that this device's firewall lets it in"
        )


def _wait_first(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
    """Give the first message, or end the stream when the caller stays silent."""
    silence = threading.Timer(HELLO_TIMEOUT_S, context.cancel)
    silence.daemon = True
    silence.start()
    first = b""
    with contextlib.suppress(grpc.RpcError):
        first = next(requests, b"")
    silence.cancel()
    if not first:
        context.abort(grpc.StatusCode.CANCELLED, "no hello came")
    return first
