"""Frames: tensors cut into chunks and put together again; `data.proto` has the layout in words.

Owns every check of what a peer sends: each size is checked before memory is taken. Must not open
a socket or start a thread. Pure.
"""

from __future__ import annotations

import enum
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from exo_train.errors import ProtocolError
from exo_train.wire.pb import data_pb2
from exo_train.wire.tensor import Bytes, DType, HostTensor

PREFIX_BYTES = 4
MAX_HEADER_BYTES = 4096
MAX_DIMS = 8
# Large enough that the cost per message does not show, small against MAX_CHUNK_BYTES.
CHUNK_BYTES = 1 << 20
MAX_CHUNK_BYTES = 16 << 20


class Kind(enum.Enum):
    """What a stream carries; the value is the number in `data.proto`."""

    ACTIVATION = data_pb2.KIND_ACTIVATION
    GRADIENT = data_pb2.KIND_GRADIENT

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True, order=True)
class Tag:
    """Which tensor of a stream."""

    step: int
    microbatch: int

    def __str__(self) -> str:
        return f"step {self.step}, microbatch {self.microbatch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamId:
    """What all frames of one direction of a link have in common."""

    cluster: str
    run: str
    generation: int
    kind: Kind

    def __str__(self) -> str:
        return (
            f"{self.kind}, cluster '{self.cluster}', run '{self.run}', generation {self.generation}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """The checked part of a FrameHeader that all frames of one tensor share."""

    stream: StreamId
    tag: Tag
    dtype: DType
    shape: tuple[int, ...]
    total_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightChunk:
    """One checked frame of an encoded weight; `offset` to `offset + len(payload)` of the whole."""

    name: str
    encoding: str
    total_bytes: int
    offset: int
    payload: memoryview


def encode_tensor(
    stream: StreamId, tag: Tag, tensor: HostTensor, *, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[bytes]:
    """Give the tensor's frames in order; the data must not change until the last is taken."""
    data = memoryview(tensor.data)
    header = data_pb2.FrameHeader(
        cluster=stream.cluster,
        run=stream.run,
        generation=stream.generation,
        step=tag.step,
        microbatch=tag.microbatch,
        kind=stream.kind.value,
        dtype=data_pb2.DType.Name(tensor.dtype.value),
        shape=tensor.shape,
        total_bytes=len(data),
        crc32=zlib.crc32(data),
    )
    yield from _frames(header, data, chunk_bytes)


def encode_weight(
    name: str, encoding: str, data: Bytes, *, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[bytes]:
    """Give the frames of one encoded weight in order."""
    header = data_pb2.WeightHeader(name=name, encoding=encoding, total_bytes=len(data))
    yield from _frames(header, memoryview(data), chunk_bytes)


def decode_weight(message: bytes) -> WeightChunk:
    """Check one frame for itself; that frames follow each other is checked by the receiver."""
    header = data_pb2.WeightHeader()
    payload = _split(message, header)
    total_bytes, offset = header.total_bytes, header.chunk_offset
    _check_chunk(offset, header.chunk_bytes, len(payload), total_bytes)
    return WeightChunk(
        name=header.name,
        encoding=header.encoding,
        total_bytes=total_bytes,
        offset=offset,
        payload=payload,
    )


class Assembler:
    """Puts the frames of one stream together; after a ProtocolError the stream is unusable."""

    def __init__(self, stream: StreamId, *, max_tensor_bytes: int) -> None:
        self._stream = stream
        self._max_tensor_bytes = max_tensor_bytes
        self._head: _Head | None = None
        self._buffer = bytearray()
        self._num_received_bytes = 0
        self._crc32 = 0

    @property
    def num_received_bytes(self) -> int:
        """Bytes of the unfinished tensor that are here."""
        return self._num_received_bytes

    def feed(self, message: bytes) -> tuple[Tag, HostTensor] | None:
        """Take one frame; give the tensor when it was the last one."""
        header = data_pb2.FrameHeader()
        payload = _split(message, header)
        head = _checked_head(header, self._stream, self._max_tensor_bytes)
        self._check_order(head, header.chunk_offset)
        _check_chunk(header.chunk_offset, header.chunk_bytes, len(payload), head.total_bytes)
        if self._head is None:
            self._head = head
            self._buffer = bytearray(head.total_bytes)
            self._crc32 = 0
        end = self._num_received_bytes + len(payload)
        self._buffer[self._num_received_bytes : end] = payload
        self._crc32 = zlib.crc32(payload, self._crc32)
        self._num_received_bytes = end
        return self._finish(head) if end == head.total_bytes else None

    def _check_order(self, head: _Head, offset: int) -> None:
        if self._head is not None and head != self._head:
            raise ProtocolError(
                f"a frame of {head.tag} ({head.total_bytes} bytes) came in the middle of "
                f"{self._head.tag} (byte {self._num_received_bytes} of {self._head.total_bytes})"
            )
        if offset != self._num_received_bytes:
            raise ProtocolError(
                f"a frame of {head.tag} begins at byte {offset}, expected "
                f"{self._num_received_bytes}; frames were lost, repeated or reordered"
            )

    def _finish(self, head: _Head) -> tuple[Tag, HostTensor]:
        buffer, crc32 = self._buffer, self._crc32
        self._head, self._buffer, self._num_received_bytes = None, bytearray(), 0
        if crc32 != head.crc32:
            raise ProtocolError(
                f"the {head.stream.kind} of {head.tag} ({head.total_bytes} bytes) arrived damaged: "
                f"checksum {crc32:08x}, sent {head.crc32:08x}"
            )
        return head.tag, HostTensor(head.dtype, head.shape, buffer)


def _frames(
    header: data_pb2.FrameHeader | data_pb2.WeightHeader, data: memoryview, chunk_bytes: int
) -> Iterator[bytes]:
    assert 0 < chunk_bytes <= MAX_CHUNK_BYTES
    for offset in range(0, max(len(data), 1), chunk_bytes):
        chunk = data[offset : offset + chunk_bytes]
        header.chunk_offset, header.chunk_bytes = offset, len(chunk)
        encoded = header.SerializeToString()
        assert len(encoded) <= MAX_HEADER_BYTES
        # One copy, into the message itself: gRPC takes nothing but `bytes`.
        yield b"".join((len(encoded).to_bytes(PREFIX_BYTES, "little"), encoded, chunk))


def _split(message: bytes, header: data_pb2.FrameHeader | data_pb2.WeightHeader) -> memoryview:
    """Parse the header in place and give the payload."""
    header_bytes = int.from_bytes(message[:PREFIX_BYTES], "little")
    end = PREFIX_BYTES + header_bytes
    if header_bytes > MAX_HEADER_BYTES or end > len(message):
        raise ProtocolError(
            f"a frame of {len(message)} bytes claims a header of {header_bytes} bytes "
            f"(limit {MAX_HEADER_BYTES})"
        )
    try:
        header.ParseFromString(message[PREFIX_BYTES:end])
    except DecodeError:
        raise ProtocolError(
            f"a frame's header of {header_bytes} bytes is not a {type(header).__name__}"
        ) from None
    return memoryview(message)[end:]


def _checked_head(header: data_pb2.FrameHeader, expected: StreamId, max_tensor_bytes: int) -> _Head:
    tag = Tag(header.step, header.microbatch)
    try:
        kind, dtype = Kind(header.kind), DType(header.dtype)
    except ValueError as error:
        raise ProtocolError(f"a frame of {tag} has an unknown code: {error}") from None
    stream = StreamId(
        cluster=header.cluster, run=header.run, generation=header.generation, kind=kind
    )
    if stream != expected:
        raise ProtocolError(f"a frame of {tag} belongs to {stream}; expected {expected}")
    if len(header.shape) > MAX_DIMS:
        raise ProtocolError(
            f"a tensor of {tag} has {len(header.shape)} dimensions (limit {MAX_DIMS})"
        )
    shape = tuple(header.shape)
    if any(size < 0 for size in shape):
        raise ProtocolError(f"a tensor of {tag} has a negative dimension: {shape}")
    num_bytes = math.prod(shape) * dtype.num_bytes
    if num_bytes != header.total_bytes:
        raise ProtocolError(
            f"a tensor of {tag} is {dtype.name} {shape}, which is {num_bytes} bytes, "
            f"but claims {header.total_bytes}"
        )
    if num_bytes > max_tensor_bytes:
        raise ProtocolError(
            f"a tensor of {tag} has {num_bytes} bytes (limit {max_tensor_bytes} on this link)"
        )
    return _Head(
        stream=stream,
        tag=tag,
        dtype=dtype,
        shape=shape,
        total_bytes=num_bytes,
        crc32=header.crc32,
    )


def _check_chunk(offset: int, claimed_bytes: int, payload_bytes: int, total_bytes: int) -> None:
    if payload_bytes != claimed_bytes:
        raise ProtocolError(
            f"a frame claims {claimed_bytes} payload bytes but carries {payload_bytes}"
        )
    if payload_bytes > MAX_CHUNK_BYTES:
        raise ProtocolError(f"a frame carries {payload_bytes} bytes (limit {MAX_CHUNK_BYTES})")
    if payload_bytes == 0 and total_bytes > 0:
        raise ProtocolError(f"a frame of a tensor of {total_bytes} bytes is empty")
    if offset + payload_bytes > total_bytes:
        raise ProtocolError(
            f"a frame reaches byte {offset + payload_bytes} of a tensor of {total_bytes} bytes"
        )
