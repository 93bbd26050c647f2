"""Frames: whatever goes in comes out; whatever is broken is refused before memory is taken."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exo_train.errors import ProtocolError
from exo_train.wire.codec import (
    MAX_DIMS,
    PREFIX_BYTES,
    Assembler,
    Kind,
    StreamId,
    Tag,
    decode_weight,
    encode_tensor,
    encode_weight,
)
from exo_train.wire.pb import data_pb2
from exo_train.wire.tensor import DType, HostTensor

STREAM = StreamId(cluster="home", run="run-1", generation=3, kind=Kind.ACTIVATION)
LIMIT_BYTES = 1 << 20

shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
tags = st.builds(Tag, st.integers(0, 2**63), st.integers(0, 2**32 - 1))
chunk_sizes = st.integers(1, 300)


@st.composite
def tensors(draw: st.DrawFn, *, min_bytes: int = 0) -> HostTensor:
    dtype = draw(st.sampled_from(DType))
    shape = draw(shapes if not min_bytes else st.lists(st.integers(1, 6), max_size=3).map(tuple))
    num_bytes = int(np.prod(shape, dtype=int)) * dtype.num_bytes
    return HostTensor(dtype, shape, draw(st.binary(min_size=num_bytes, max_size=num_bytes)))


def feed_all(frames: list[bytes], *, limit_bytes: int = LIMIT_BYTES) -> list[tuple]:
    assembler = Assembler(STREAM, max_tensor_bytes=limit_bytes)
    return [done for frame in frames if (done := assembler.feed(frame)) is not None]


def header_of(frame: bytes) -> data_pb2.FrameHeader:
    end = PREFIX_BYTES + int.from_bytes(frame[:PREFIX_BYTES], "little")
    return data_pb2.FrameHeader.FromString(frame[PREFIX_BYTES:end])


def frame_of(header: data_pb2.FrameHeader, payload: bytes = b"") -> bytes:
    encoded = header.SerializeToString()
    return len(encoded).to_bytes(PREFIX_BYTES, "little") + encoded + payload


@given(st.lists(st.tuples(tags, tensors()), max_size=3), chunk_sizes)
def test_any_tensors_round_trip_at_any_chunk_size(
    items: list[tuple[Tag, HostTensor]], chunk_bytes: int
) -> None:
    frames = [f for tag, t in items for f in encode_tensor(STREAM, tag, t, chunk_bytes=chunk_bytes)]
    back = feed_all(frames)
    assert [(tag, t.dtype, t.shape, bytes(t.data)) for tag, t in back] == [
        (tag, t.dtype, t.shape, bytes(t.data)) for tag, t in items
    ]


@given(st.integers(1, 5), st.integers(1, 5), chunk_sizes)
def test_non_contiguous_arrays_keep_their_values(rows: int, columns: int, chunk: int) -> None:
    array = np.arange(rows * columns * 2, dtype=np.float32).reshape(columns, 2 * rows).T[::2]
    frames = list(encode_tensor(STREAM, Tag(1, 2), HostTensor.from_numpy(array), chunk_bytes=chunk))
    [(_, tensor)] = feed_all(frames)
    np.testing.assert_array_equal(tensor.to_numpy(), array)


@given(tensors(min_bytes=1), chunk_sizes, st.data())
def test_every_flipped_payload_bit_is_caught(
    tensor: HostTensor, chunk_bytes: int, data: st.DataObject
) -> None:
    frames = list(encode_tensor(STREAM, Tag(4, 0), tensor, chunk_bytes=chunk_bytes))
    i = data.draw(st.integers(0, len(frames) - 1))
    payload_bytes = header_of(frames[i]).chunk_bytes
    bit = data.draw(st.integers(0, 8 * payload_bytes - 1))
    flipped = bytearray(frames[i])
    flipped[len(flipped) - payload_bytes + bit // 8] ^= 1 << bit % 8
    frames[i] = bytes(flipped)
    with pytest.raises(ProtocolError, match=r"step 4, microbatch 0.*arrived damaged"):
        feed_all(frames)


@given(tensors(min_bytes=1), st.integers(1, 20), st.data())
def test_lost_repeated_and_reordered_frames_are_refused(
    tensor: HostTensor, chunk_bytes: int, data: st.DataObject
) -> None:
    good = list(encode_tensor(STREAM, Tag(0, 0), tensor, chunk_bytes=chunk_bytes))
    other = list(encode_tensor(STREAM, Tag(0, 1), tensor, chunk_bytes=chunk_bytes))
    i = data.draw(st.integers(0, len(good) - 1))
    broken = {
        "lost": good[:i] + good[i + 1 :] + other,
        "repeated": good[: i + 1] + good[i:] if len(good) > 1 else [*good, *other[1:], *good[1:]],
        "mixed": good[:i] + other if i else [*other[:-1], *good],
    }[data.draw(st.sampled_from(["lost", "repeated", "mixed"]))]
    try:
        tags_seen = [tag for tag, _ in feed_all(broken)]
    except ProtocolError:
        return
    # One-frame tensors are whole by themselves: dropping or repeating one is the mailbox's matter.
    assert len(good) == 1
    assert set(tags_seen) <= {Tag(0, 0), Tag(0, 1)}


@given(tensors(min_bytes=1), st.data())
def test_a_cut_frame_is_refused(tensor: HostTensor, data: st.DataObject) -> None:
    [frame] = encode_tensor(STREAM, Tag(0, 0), tensor)
    with pytest.raises(ProtocolError):
        feed_all([frame[: data.draw(st.integers(0, len(frame) - 1))]])


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_nothing_else_escapes(message: bytes) -> None:
    with pytest.raises(ProtocolError):
        feed_all([message])


HOSTILE = {
    "negative": {"shape": [-1, 4]},
    "both negative": {"shape": [-2, -2], "total_bytes": 16},
    "2**63 - 1": {"shape": [2**63 - 1]},
    "product wraps to 0": {"shape": [2**62, 4], "total_bytes": 0},
    "product is not the size": {"shape": [2, 3]},
    "above the limit": {"shape": [LIMIT_BYTES], "total_bytes": 4 * LIMIT_BYTES},
    "exabytes": {"shape": [2**40, 2**20], "total_bytes": 2**62},
    "too many dimensions": {"shape": [1] * (MAX_DIMS + 1), "total_bytes": 4},
    "a million dimensions": {"shape": [1] * 1_000_000, "total_bytes": 4},
    "no dtype": {"dtype": 0},
    "unknown dtype": {"dtype": 77},
    "unknown kind": {"kind": 9},
    "a gradient": {"kind": data_pb2.KIND_GRADIENT},
    "other cluster": {"cluster": "next door"},
    "other run": {"run": "run-2"},
    "stale generation": {"generation": 2},
    "begins in the middle": {"chunk_offset": 4},
    "offset at 2**64": {"chunk_offset": 2**64 - 1},
    "claims more payload": {"chunk_bytes": 17},
    "claims 2**63 payload": {"chunk_bytes": 2**63},
    "wrong checksum": {"crc32": 1},
}


@pytest.mark.parametrize("fields", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_headers_are_refused_without_taking_memory(fields: dict) -> None:
    tensor = HostTensor(DType.FP32, (4,), bytes(16))
    [frame] = encode_tensor(STREAM, Tag(7, 1), tensor)
    header = header_of(frame)
    if "shape" in fields:
        header.ClearField("shape")
        header.shape.extend(fields["shape"])
    for name, value in fields.items():
        if name != "shape":
            setattr(header, name, value)
    hostile = frame_of(header, bytes(16))
    tracemalloc.start()
    with pytest.raises(ProtocolError):
        feed_all([hostile])
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 200_000


def test_the_exact_limit_is_accepted_and_one_element_more_is_not() -> None:
    fits = HostTensor(DType.INT32, (5,), bytes(20))
    above = HostTensor(DType.INT32, (6,), bytes(24))
    assert feed_all(list(encode_tensor(STREAM, Tag(0, 0), fits)), limit_bytes=20)
    with pytest.raises(ProtocolError, match=r"24 bytes \(limit 20"):
        feed_all(list(encode_tensor(STREAM, Tag(0, 0), above)), limit_bytes=20)


@given(st.text(min_size=1, max_size=80), st.binary(max_size=500), chunk_sizes)
def test_weights_round_trip(name: str, data: bytes, chunk_bytes: int) -> None:
    chunks = [
        decode_weight(frame) for frame in encode_weight(name, "BF16", data, chunk_bytes=chunk_bytes)
    ]
    assert b"".join(chunk.payload for chunk in chunks) == data
    assert {(chunk.name, chunk.encoding, chunk.total_bytes) for chunk in chunks} == {
        (name, "BF16", len(data))
    }
