"""The first message each way on a data stream: who speaks, for which run.

Owns its layout and every reason to refuse it. Must not touch a stream. Pure.
"""

from __future__ import annotations

import hmac

from google.protobuf.message import DecodeError

from exo_train.errors import ProtocolError
from exo_train.transport.base import LinkLimits, PeerIdentity
from exo_train.wire.pb import data_pb2

PROTOCOL_VERSION = 1
MAX_HELLO_BYTES = 4096


def encode_hello(identity: PeerIdentity, limits: LinkLimits, *, with_token: bool) -> bytes:
    """Introduce this end; only the dialler shows the token, the server asks for it."""
    return _encode(identity, limits.max_tensor_bytes, with_token=with_token)


def check_hello(
    message: bytes, identity: PeerIdentity, limits: LinkLimits, *, with_token: bool
) -> None:
    """Raise ProtocolError unless the message is the expected peer's.

    The sentence goes to the peer: before the token is right it tells nothing but the version.
    """
    what = "largest tensor in bytes"
    _check(message, identity, what, limits.max_tensor_bytes, with_token=with_token)


def encode_copy_hello(identity: PeerIdentity, num_bytes: int, *, with_token: bool) -> bytes:
    """Introduce this end of a copy whose arrays have so many bytes together."""
    return _encode(identity, num_bytes, with_token=with_token)


def check_copy_hello(
    message: bytes, identity: PeerIdentity, num_bytes: int, *, with_token: bool
) -> None:
    """Raise ProtocolError as `check_hello` does, and when the copy has not its one right size."""
    _check(message, identity, "size of the copy in bytes", num_bytes, with_token=with_token)


def read_hello(message: bytes) -> data_pb2.Hello:
    """Give what may be a Hello; nothing in it is checked. Raises ProtocolError."""
    hello = data_pb2.Hello()
    try:
        if len(message) > MAX_HELLO_BYTES:
            raise DecodeError
        hello.ParseFromString(message)
    except DecodeError:
        raise ProtocolError(f"the first message ({len(message)} bytes) is no Hello") from None
    return hello


def _encode(identity: PeerIdentity, num_bytes: int, *, with_token: bool) -> bytes:
    return data_pb2.Hello(
        protocol=PROTOCOL_VERSION,
        cluster=identity.cluster,
        run=identity.run,
        generation=identity.generation,
        rank=identity.rank,
        name=identity.name,
        token=identity.token if with_token else "",
        max_tensor_bytes=num_bytes,
    ).SerializeToString()


def _check(
    message: bytes, identity: PeerIdentity, what_bytes: str, num_bytes: int, *, with_token: bool
) -> None:
    hello = read_hello(message)
    if hello.protocol != PROTOCOL_VERSION:
        raise ProtocolError(
            f"data protocol {hello.protocol} meets {PROTOCOL_VERSION}; "
            "install the same exo-train version on both devices"
        )
    if with_token and not hmac.compare_digest(hello.token.encode(), identity.token.encode()):
        raise ProtocolError("the token is not this run's")
    facts = {
        "cluster": (hello.cluster, identity.cluster),
        "run": (hello.run, identity.run),
        "generation": (hello.generation, identity.generation),
        "rank": (hello.rank, identity.peer_rank),
        what_bytes: (hello.max_tensor_bytes, num_bytes),
    }
    for what, (got, expected) in facts.items():
        if got != expected:
            raise ProtocolError(f"the {what} is {got!r}, expected {expected!r}")
