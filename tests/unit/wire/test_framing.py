"""Messages between an agent and its worker survive any splitting of the stream."""

from __future__ import annotations

import io
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exo_train.errors import ProtocolError
from exo_train.wire.framing import MAX_MESSAGE_BYTES, frame, read_message


class DripStream:
    """A pipe that gives at most `step` bytes a read."""

    def __init__(self, data: bytes, step: int) -> None:
        self._file = io.BytesIO(data)
        self._step = step

    def read(self, size: int, /) -> bytes:
        return self._file.read(min(size, self._step))


@given(st.lists(st.binary(max_size=300), max_size=5), st.integers(1, 7))
def test_what_was_written_is_read(messages: list[bytes], step: int) -> None:
    stream = DripStream(b"".join(frame(m) for m in messages), step)
    assert [read_message(stream) for _ in messages] == messages
    assert read_message(stream) is None


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 8])
def test_a_stream_that_ends_in_a_message_is_an_end(cut: int) -> None:
    assert read_message(io.BytesIO(frame(b"hello")[:cut])) is None


def test_noise_is_refused_before_memory_is_taken() -> None:
    noise = struct.pack("<I", MAX_MESSAGE_BYTES + 1) + b"x"
    with pytest.raises(ProtocolError, match=str(MAX_MESSAGE_BYTES)):
        read_message(io.BytesIO(noise))
