"""Mutual TLS between members, and the gate that looks at every caller of a server.

Owns how credentials are made of an identity and how a call's caller is known. Must not know who
belongs to the cluster: the agent's roster is asked.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from google.protobuf.message import DecodeError

from exo_train.errors import PeerError
from exo_train.identity import (
    ANY_MEMBER_TLS_NAME,
    Identity,
    MemberCertificate,
    node_id_of,
    tls_name,
    to_pem,
)
from exo_train.peer import NodeId, short_id

MAX_SAID = 64  # log lines about refusals, per server: a flood must not fill the disk
MAX_HOSTS = 256  # from which members have called; the newest stay
MAX_CALLS_OF_ONE = 16  # under way at once: no member may take the threads that the others need
FIRST_MESSAGE_S = 5.0  # for a call that says nothing
_CERTIFICATE = "x509_pem_cert"

log = logging.getLogger(__name__)


class RemovedError(PeerError):
    """The caller was a member, and is none any more."""


class MalformedError(grpc.RpcError):
    """A message cannot be read; to whoever reads the stream it has broken."""


@dataclass(frozen=True, slots=True)
class PeerTls:
    """What a channel to one peer is opened with."""

    credentials: grpc.ChannelCredentials = field(repr=False)
    name: str  # that the peer's certificate must carry


@dataclass(frozen=True, slots=True)
class MemberTls:
    """Dials other members as this device; `certificate_of` gives a member's certificate."""

    identity: Identity
    certificate_of: Callable[[NodeId], MemberCertificate | None] = field(repr=False)

    def to(self, node_id: NodeId) -> PeerTls:
        """Trust this member's own certificate and no other, not even another of the authority's.

        Every member holds the authority's key. Raises PeerError for a device that is no member.
        """
        certificate = self.certificate_of(node_id)
        if certificate is None:
            raise PeerError(
                f"device {short_id(node_id)} is not a member of this cluster; pair it with a code "
                f"from `exo-train invite`"
            )
        return PeerTls(self._credentials(certificate.der), tls_name(node_id))

    def to_any(self) -> PeerTls:
        """Trust whoever the authority has certified: to ask who it is, and for nothing else."""
        return PeerTls(self._credentials(self.identity.authority_certificate), ANY_MEMBER_TLS_NAME)

    def server(self) -> grpc.ServerCredentials:
        """Demand a certificate of the cluster's authority from every caller."""
        own = (self.identity.key_pem, to_pem(self.identity.certificate))
        return grpc.ssl_server_credentials(
            [own],
            root_certificates=to_pem(self.identity.authority_certificate),
            require_client_auth=True,
        )

    def _credentials(self, root: bytes) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(
            root_certificates=to_pem(root),
            private_key=self.identity.key_pem,
            certificate_chain=to_pem(self.identity.certificate),
        )


def caller_certificate(context: grpc.ServicerContext) -> bytes:
    """Give the certificate (DER) that the caller has proven to own; raises PeerError."""
    shown = context.auth_context().get(_CERTIFICATE)
    if not shown:
        raise PeerError("this call came without a certificate")
    return _to_der(bytes(shown[0]))


def caller_id(context: grpc.ServicerContext) -> NodeId:
    """Give the caller's node id, which is the fingerprint of its key; raises PeerError."""
    return _id_of(caller_certificate(context))


def host_of(peer: str) -> str:
    """Give the host of what gRPC calls a peer: `ipv4:1.2.3.4:5` or `ipv6:[::1]:5`, escaped."""
    host = urllib.parse.unquote(peer).partition(":")[2].rpartition(":")[0]
    return host.strip("[]").removeprefix("::ffff:")


@functools.lru_cache(maxsize=256)
def _to_der(pem: bytes) -> bytes:
    return x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)


@functools.lru_cache(maxsize=256)
def _id_of(der: bytes) -> NodeId:
    key = x509.load_der_x509_certificate(der).public_key()
    return node_id_of(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))


class Gate(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Lets calls through whose caller `admit` accepts, and only then reads their messages.

    `admit` takes the caller's certificate (DER) and raises PeerError with a sentence for it.
    Refusals are counted by kind; each kind and caller is logged once. Where members call from is
    remembered: it may be no address that they tell of (a second card, NAT, a temporary IPv6 one).
    """

    def __init__(self, admit: Callable[[bytes], object]) -> None:
        self._admit = admit
        self._counts: Counter[str] = Counter()
        self._under_way: Counter[NodeId] = Counter()
        self._hosts: dict[str, None] = {}  # the newest last
        self._said: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def counts(self) -> dict[str, int]:
        """Give how many calls were refused, by kind."""
        with self._lock:
            return dict(self._counts)

    def hosts(self) -> frozenset[str]:
        """Give the hosts from which calls were let in."""
        with self._lock:
            return frozenset(self._hosts)

    def refuse(
        self, context: grpc.ServicerContext, code: grpc.StatusCode, kind: str, sentence: str
    ) -> NoReturn:
        """Count, log once per caller, and end the call."""
        self._note(context, kind, sentence)
        context.abort(code, sentence)

    def _note(self, context: grpc.ServicerContext, kind: str, sentence: str) -> None:
        host = host_of(context.peer())
        with self._lock:
            self._counts[kind] += 1
            is_new = (kind, host) not in self._said and len(self._said) < MAX_SAID
            if is_new:
                self._said.add((kind, host))
        if is_new:
            log.warning("a call from %s was refused: %s", context.peer(), sentence)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Any],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            behaviour = getattr(handler, kind)
            if behaviour is not None:
                return self._guarded(kind, behaviour, handler)
        return None

    def _guarded(self, kind: str, behaviour: Callable[..., Any], handler: Any) -> Any:
        """Take a single request as a stream of one, which is the same on the wire.

        gRPC would else read it, and wait for it as long as the caller likes, before anybody has
        asked who calls; and it gets bytes, since it writes a traceback for what it cannot decode.
        """
        decode = handler.request_deserializer or bytes
        is_single = kind.startswith("unary")

        def answer(raw: Iterator[bytes], context: grpc.ServicerContext) -> Any:
            with self._place(context):
                messages = self._messages(raw, decode, context)
                return behaviour(self._only(messages, context) if is_single else messages, context)

        def answers(raw: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
            with self._place(context):
                messages = self._messages(raw, decode, context)
                request = self._only(messages, context) if is_single else messages
                yield from behaviour(request, context)

        if kind.endswith("_stream"):
            make, call = grpc.stream_stream_rpc_method_handler, answers
        else:
            make, call = grpc.stream_unary_rpc_method_handler, answer
        return make(
            call, request_deserializer=bytes, response_serializer=handler.response_serializer
        )

    @contextlib.contextmanager
    def _place(self, context: grpc.ServicerContext) -> Iterator[None]:
        """Let a member's call in, unless it has too many under way."""
        try:
            self._admit(caller_certificate(context))
        except RemovedError as error:
            self.refuse(context, grpc.StatusCode.PERMISSION_DENIED, "removed", str(error))
        except PeerError as error:
            self.refuse(context, grpc.StatusCode.UNAUTHENTICATED, "not a member", str(error))
        caller, host = caller_id(context), host_of(context.peer())
        with self._lock:
            self._hosts.pop(host, None)
            self._hosts[host] = None
            if len(self._hosts) > MAX_HOSTS:
                del self._hosts[next(iter(self._hosts))]
            has_room = self._under_way[caller] < MAX_CALLS_OF_ONE
            self._under_way[caller] += has_room
        if not has_room:
            sentence = f"device {caller} has {MAX_CALLS_OF_ONE} calls under way, which is the limit"
            self.refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls", sentence)
        try:
            yield
        except MalformedError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            with self._lock:
                self._under_way[caller] -= 1
                if not self._under_way[caller]:
                    del self._under_way[caller]

    def _only(self, messages: Iterator[Any], context: grpc.ServicerContext) -> Any:
        message = next(messages, None)
        if message is None:  # the caller has gone, mostly: nothing to hold against it
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a call came without a message")
        return message

    def _messages(
        self, raw: Iterator[bytes], decode: Callable[..., Any], context: grpc.ServicerContext
    ) -> Iterator[Any]:
        """Give the messages, read; the first must come soon."""

        def cut() -> None:
            self._note(context, "silent", f"nothing came in {FIRST_MESSAGE_S:.0f} s")
            context.cancel()  # type: ignore[no-untyped-call]

        silence = threading.Timer(FIRST_MESSAGE_S, cut)
        silence.daemon = True
        silence.start()
        try:
            first = next(raw, None)
        finally:
            silence.cancel()
        if first is not None:
            yield self._decoded(first, decode, context)
            for message in raw:
                yield self._decoded(message, decode, context)

    def _decoded(
        self, raw: bytes, decode: Callable[..., Any], context: grpc.ServicerContext
    ) -> Any:
        try:
            return decode(raw)
        except (DecodeError, ValueError):
            sentence = f"a message of {len(raw)} bytes is not what this call takes"
            self._note(context, "malformed", sentence)
            # For a reader in a thread of its own, that can only end the call, not say why.
            context.set_code(grpc.StatusCode.INVALID_ARGUMENT)
            context.set_details(sentence)
            raise MalformedError(sentence) from None
