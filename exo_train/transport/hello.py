"""The first message each way on a data stream: who speaks, for which run.

Owns its layout and every reason to refuse it. Must not touch a stream. Pure.
"""

from __future__ import annotations

import hmac

from google.protobuf.message import DecodeError

from exo_train.errors import ProtocolError
from exo_train.transport.base import LinkIdentity, LinkLimits
from exo_train.wire.pb import data_pb2

PROTOCOL_VERSION = 1
MAX_HELLO_BYTES = 4096


def encode_hello(identity: LinkIdentity, limits: LinkLimits, *, with_token: bool) -> bytes:
    """Introduce this end; only the dialler shows the token, the server asks for it."""
    return data_pb2.Hello(
        protocol=PROTOCOL_VERSION,
        cluster=identity.cluster,
        run=identity.run,
        generation=identity.generation,
        rank=identity.rank,
        name=identity.name,
        token=identity.token if with_token else "",
        max_tensor_bytes=limits.max_tensor_bytes,
    ).SerializeToString()


def check_hello(
    message: bytes, identity: LinkIdentity, limits: LinkLimits, *, with_token: bool
) -> None:
    """Raise ProtocolError unless the message is the expected peer's.

    The sentence goes to the peer: before the token is right it tells nothing but the version.
    """
    hello = data_pb2.Hello()
    try:
        if len(message) > MAX_HELLO_BYTES:
            raise DecodeError
        hello.ParseFromString(message)
    except DecodeError:
        raise ProtocolError(f"the first message ({len(message)} bytes) is no Hello") from None
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
        "largest tensor in bytes": (hello.max_tensor_bytes, limits.max_tensor_bytes),
    }
    for what, (got, expected) in facts.items():
        if got != expected:
            raise ProtocolError(f"the {what} is {got!r}, expected {expected!r}")
