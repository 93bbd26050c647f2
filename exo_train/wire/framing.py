"""Length-prefixed messages on a byte stream: how an agent and its worker talk over pipes. Pure.

Four bytes of length, little-endian, then the message.
"""

from __future__ import annotations

import struct
from typing import Protocol

from exo_train.errors import ProtocolError

MAX_MESSAGE_BYTES = 1 << 30
_LENGTH = struct.Struct("<I")


class Reader(Protocol):
    def read(self, size: int, /) -> bytes | None: ...


def frame(message: bytes) -> bytes:
    if len(message) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {len(message)} bytes is above {MAX_MESSAGE_BYTES}")
    return _LENGTH.pack(len(message)) + message


def read_message(stream: Reader) -> bytes | None:
    """Give the next message; None at the end of the stream, also in the middle of a message."""
    prefix = _read_exactly(stream, _LENGTH.size)
    if prefix is None:
        return None
    (size,) = _LENGTH.unpack(prefix)
    if size > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {size} bytes is above {MAX_MESSAGE_BYTES}")
    return _read_exactly(stream, size)


def _read_exactly(stream: Reader, size: int) -> bytes | None:
    parts = []
    while size > 0:
        part = stream.read(size)
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
