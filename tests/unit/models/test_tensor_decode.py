"""Decoding checks lengths and puts rotary rows back in Hugging Face's order."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from exo_train.errors import ModelError
from exo_train.models.decode import decode, encoded_num_bytes
from exo_train.models.tensors import TensorInfo
from exo_train.wire.tensor import DType


def info_of(encoding: str, shape: tuple[int, ...], num_bytes: int, heads: int = 0) -> TensorInfo:
    return TensorInfo(
        name="w", encoding=encoding, shape=shape, num_bytes=num_bytes, rope_heads=heads
    )


def test_rope_rows_go_back_to_their_halves() -> None:
    # One head of six rows: GGUF interleaves the halves 0,1,2 and 3,4,5.
    stored = np.array([[0], [3], [1], [4], [2], [5]], np.float32)
    host = decode(info_of("GGUF:F32", (6, 1), 24, heads=1), stored.tobytes())
    np.testing.assert_array_equal(host.to_numpy()[:, 0], [0, 1, 2, 3, 4, 5])
    bias = decode(info_of("GGUF:F32", (6,), 24, heads=1), stored.tobytes())
    np.testing.assert_array_equal(bias.to_numpy(), [0, 1, 2, 3, 4, 5])


def test_bfloat16_bits_are_kept_through_the_reordering() -> None:
    stored = np.array([0x3F80, 0x4000, 0xBF80, 0x7FC0], "<u2")
    host = decode(info_of("GGUF:BF16", (4, 1), 8, heads=1), stored.tobytes())
    assert host.dtype is DType.BF16
    np.testing.assert_array_equal(np.frombuffer(host.data, "<u2"), [0x3F80, 0xBF80, 0x4000, 0x7FC0])


@pytest.mark.parametrize("encoding", ["Q4_1", "Q6_K"])
def test_quantised_blocks_match_the_gguf_package(encoding: str) -> None:
    kind = gguf.GGMLQuantizationType[encoding]
    num_bytes = encoded_num_bytes(f"GGUF:{encoding}", (3, 512), place="w")
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    assert num_bytes == 3 * 512 // block_elements * block_bytes
    raw = np.random.default_rng(0).integers(0, 60, num_bytes).astype(np.uint8)
    host = decode(info_of(f"GGUF:{encoding}", (3, 512), num_bytes), raw.tobytes())
    expected = gguf.dequantize(raw.reshape(3, -1), kind)
    np.testing.assert_array_equal(host.to_numpy(), expected)


@pytest.mark.parametrize("delta", [-1, 1])
def test_wrong_length_is_refused_with_both_sizes(delta: int) -> None:
    with pytest.raises(ModelError, match=rf"w: F16 \[2, 3\] needs 12 bytes, got {12 + delta}"):
        decode(info_of("F16", (2, 3), 12), bytes(12 + delta))


def test_unknown_encodings_broken_blocks_and_impossible_heads_are_refused() -> None:
    with pytest.raises(ModelError, match="w: stored as I64, which is not supported"):
        decode(info_of("I64", (1,), 8), bytes(8))
    with pytest.raises(ModelError, match="stored as GGUF:MXFP4"):
        decode(info_of("GGUF:MXFP4", (32,), 17), bytes(17))
    with pytest.raises(ModelError, match="rows of 40 values do not fill Q8_0 blocks of 32"):
        decode(info_of("GGUF:Q8_0", (2, 40), 85), bytes(85))
    with pytest.raises(ModelError, match="6 rows cannot hold 2 rope heads"):
        decode(info_of("F32", (6,), 24, heads=2), bytes(24))
