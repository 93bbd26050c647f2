"""The packed form: MLX's rule bit for bit, and GGUF blocks without loss."""

from __future__ import annotations

import gguf
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from exo_train.errors import ModelError
from exo_train.models.decode import decode, decode_packed, encoded_num_bytes, packing_of
from exo_train.models.packed import (
    BITS,
    GGUF_PACKINGS,
    GROUP_SIZES,
    Packing,
    packing_for,
    quantised,
)
from exo_train.models.tensors import TensorInfo


@settings(max_examples=60, deadline=None)
@given(
    values=hnp.arrays(
        np.float32,
        (2, 128),
        elements=st.floats(-65504, 65504, width=32, allow_subnormal=False),
    ),
    bits=st.sampled_from(BITS),
    group_size=st.sampled_from(GROUP_SIZES),
    scale=st.sampled_from([1.0, 1e-3, 1e-8]),
)
def test_any_numbers_are_quantised_as_mlx_does(
    values: np.ndarray, bits: int, group_size: int, scale: float
) -> None:
    values = (values * np.float32(scale)).astype(np.float32)
    got = quantised(values, Packing(bits=bits, group_size=group_size))
    with mx.stream(mx.cpu):
        parts = mx.quantize(mx.array(values), group_size=group_size, bits=bits)
        dense = mx.dequantize(*parts, group_size=group_size, bits=bits)
    for one, other in zip((got.words_RW, got.scales_RG, got.biases_RG), parts, strict=True):
        np.testing.assert_array_equal(one, np.array(other))
    np.testing.assert_allclose(got.dense(), np.array(dense), rtol=1e-6, atol=1e-6 * scale)


def test_a_group_keeps_zero_and_its_largest_value_exactly() -> None:
    values = np.linspace(-3, 2, 64, dtype=np.float32).reshape(1, 64)
    values[0, 7] = 0
    dense = quantised(values, Packing(bits=4, group_size=64)).dense()
    assert dense[0, 0] == -3
    assert abs(dense[0, 7]) < 1e-6
    assert np.abs(dense - values).max() <= 0.5 * 5 / 15 * 1.1  # half a step, and zero's shift


def test_numbers_that_are_not_finite_do_not_become_finite() -> None:
    values = np.ones((2, 64), np.float32)
    values[1, 3] = np.nan
    dense = quantised(values, Packing(bits=4, group_size=32)).dense()
    assert np.isfinite(dense[0]).all()
    assert not np.isfinite(dense[1]).all()


@pytest.mark.parametrize("rope_heads", [0, 2])
@pytest.mark.parametrize("stored", GGUF_PACKINGS)
def test_gguf_blocks_keep_their_numbers_when_packed(stored: str, rope_heads: int) -> None:
    values = np.random.default_rng(0).standard_normal((16, 96), np.float32)
    blocks = gguf.quantize(values, gguf.GGMLQuantizationType[stored])
    info = TensorInfo(
        name="w",
        encoding=f"GGUF:{stored}",
        shape=values.shape,
        num_bytes=blocks.nbytes,
        rope_heads=rope_heads,
    )
    packed = decode_packed(info, blocks.tobytes())
    np.testing.assert_array_equal(packed.dense(), decode(info, blocks.tobytes()).to_numpy())
    assert packed.packing == packing_of(info.encoding)


@pytest.mark.parametrize(
    ("columns", "group_size"), [(576, 64), (1536, 64), (96, 32), (64, 64), (32, 32)]
)
def test_groups_of_64_where_they_divide_else_of_32(columns: int, group_size: int) -> None:
    packing = packing_for(columns, 4, place="w")
    assert packing == Packing(bits=4, group_size=group_size)


def test_rows_without_whole_groups_are_refused() -> None:
    with pytest.raises(ModelError, match=r"w: rows of 80 values do not divide into groups of 32"):
        packing_for(80, 8, place="w")


@pytest.mark.parametrize(
    ("encoding", "shape", "cause"),
    [
        ("AFFINE:3:64:F16", (8, 64), "3 bits in groups of 64 are not supported"),
        ("AFFINE:4:16:F16", (8, 64), "4 bits in groups of 16 are not supported"),
        ("AFFINE:4:64:F16", (8, 96), "does not divide into groups of 64"),
        ("AFFINE:4:64:F16", (64,), "does not divide"),
        ("AFFINE:4:64:F64", (8, 64), "not supported"),
        ("AFFINE:4:64", (8, 64), "not supported"),
    ],
)
def test_encodings_that_cannot_be_are_refused(
    encoding: str, shape: tuple[int, ...], cause: str
) -> None:
    with pytest.raises(ModelError, match=cause):
        encoded_num_bytes(encoding, shape, place="w")


def test_bytes_of_a_packed_matrix() -> None:
    """8 x 128 codes of 4 bits, and 2 x 8 x 2 halves."""
    assert encoded_num_bytes("AFFINE:4:64:F16", (8, 128), place="w") == 512 + 64
