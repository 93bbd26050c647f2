"""From encoded bytes to numbers: which encodings are known, their sizes, and how they decode.

Owns the list of encodings. Must not read files.

Matrices in the forms of `packed`: "AFFINE:<bits>:<group size>:<float type>" is its words, then its
scales, then its biases, the latter two in that float type; "NF4" is bitsandbytes' bytes of codes,
row by row, then a float32 scale for each 64 columns.
"""

from __future__ import annotations

import math
import re

import gguf
import numpy as np

from exo_train.errors import ModelError
from exo_train.models.packed import (
    AFFINE,
    GGUF_PACKINGS,
    NF4_PACKING,
    PackedMatrix,
    Packing,
    from_gguf_blocks,
    from_nf4,
)
from exo_train.models.tensors import TensorInfo
from exo_train.wire.tensor import Bytes, DType, HostTensor

GGUF_PREFIX = "GGUF:"
NF4_ENCODING = "NF4"
FLOATS = {"F32": DType.FP32, "F16": DType.FP16, "BF16": DType.BF16}
# Blocks that the `gguf` package can turn into float32.
_QUANTISED = {
    name: gguf.GGMLQuantizationType[name]
    for name in (
        *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
        *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
        *("TQ1_0", "TQ2_0"),
    )
}
_STORED_TYPES = frozenset([*FLOATS, *_QUANTISED])
_AFFINE = re.compile(r"AFFINE:(\d{1,2}):(\d{1,3}):(F32|F16|BF16)")


def packed_encoding(packing: Packing, scale_type: str) -> str:
    """Name the encoding of a packed matrix; NF4 always has its scales in F32."""
    if packing.form != AFFINE:
        return NF4_ENCODING
    return f"AFFINE:{packing.bits}:{packing.group_size}:{scale_type}"


def packing_of(encoding: str) -> Packing | None:
    """Give the packing in which a matrix's numbers are held exactly; None: as floats only."""
    if parts := _packed_parts(encoding):
        return parts[0]
    if not encoding.startswith(GGUF_PREFIX):
        return None
    return GGUF_PACKINGS.get(_stored_type(encoding))


def is_known_encoding(encoding: str) -> bool:
    return (
        encoding in FLOATS
        or _packed_parts(encoding) is not None
        or (encoding.startswith(GGUF_PREFIX) and _stored_type(encoding) in _STORED_TYPES)
    )


def encoded_num_bytes(encoding: str, shape: tuple[int, ...], *, place: str) -> int:
    """Count the bytes of a tensor of this shape; refuses unknown encodings and broken blocks."""
    if not is_known_encoding(encoding):
        raise ModelError(
            f"{place}: stored as {encoding}, which is not supported; use a model in F32, F16, "
            f"BF16, or a GGUF of a type such as Q8_0 or Q4_K"
        )
    if parts := _packed_parts(encoding):
        packing, scale_type = parts
        words, scales = packing.shapes(shape, place=place)
        numbers = packing.numbers_per_group * math.prod(scales)
        return 4 * math.prod(words) + numbers * scale_type.num_bytes
    stored = _stored_type(encoding)
    num_elements = math.prod(shape)
    if stored in FLOATS:
        return num_elements * FLOATS[stored].num_bytes
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[_QUANTISED[stored]]
    if not shape or shape[-1] % block_elements:
        raise ModelError(
            f"{place}: rows of {shape[-1] if shape else 0} values do not fill "
            f"{stored} blocks of {block_elements}"
        )
    return int(num_elements // block_elements * block_bytes)


def decode(info: TensorInfo, raw: Bytes) -> HostTensor:
    """Give the numbers: float types as stored, quantised types as FP32, rope order undone."""
    _check_size(info, raw)
    if _packed_parts(info.encoding):
        return HostTensor.from_numpy(decode_packed(info, raw).dense())
    stored = _stored_type(info.encoding)
    if stored in FLOATS:
        dtype = FLOATS[stored]
        if not info.rope_heads:
            return HostTensor(dtype, info.shape, raw)
        bits = np.frombuffer(raw, dtype=f"<u{dtype.num_bytes}").reshape(info.shape)
        ordered = _undo_rope_order(bits, info)
        return HostTensor(dtype, info.shape, ordered.data.cast("B"))
    num_rows = math.prod(info.shape[:-1])
    blocks = np.frombuffer(raw, dtype=np.uint8).reshape(num_rows, -1)
    values = gguf.dequantize(blocks, _QUANTISED[stored]).reshape(info.shape)
    if info.rope_heads:
        values = _undo_rope_order(values, info)
    return HostTensor.from_numpy(np.asarray(values, dtype=np.float32))


def decode_packed(info: TensorInfo, raw: Bytes) -> PackedMatrix:
    """Give a tensor that `packing_of` knows without unpacking it, rope order undone."""
    _check_size(info, raw)
    if parts := _packed_parts(info.encoding):
        matrix = _split(*parts, info, memoryview(raw))
    else:
        blocks_RB = np.frombuffer(raw, dtype=np.uint8).reshape(info.shape[0], -1)
        matrix = from_gguf_blocks(_stored_type(info.encoding), blocks_RB)
    if not info.rope_heads or matrix.biases_RG is None:  # only a GGUF has that order
        return matrix
    return PackedMatrix(
        packing=matrix.packing,
        words_RW=_undo_rope_order(matrix.words_RW, info),
        scales_RG=_undo_rope_order(matrix.scales_RG, info),
        biases_RG=_undo_rope_order(matrix.biases_RG, info),
    )


def _split(packing: Packing, scale_type: DType, info: TensorInfo, raw: memoryview) -> PackedMatrix:
    words, scales = packing.shapes(info.shape, place=info.name)
    start = 4 * math.prod(words)
    if packing.form != AFFINE:
        return from_nf4(
            np.frombuffer(raw[:start], np.uint8), np.frombuffer(raw[start:], "<f4").reshape(scales)
        )
    end = start + math.prod(scales) * scale_type.num_bytes
    scales_RG, biases_RG = (
        HostTensor(scale_type, scales, part).to_numpy().astype(np.float32)
        for part in (raw[start:end], raw[end:])
    )
    return PackedMatrix(
        packing=packing,
        words_RW=np.frombuffer(raw[:start], "<u4").reshape(words),
        scales_RG=scales_RG,
        biases_RG=biases_RG,
    )


def _packed_parts(encoding: str) -> tuple[Packing, DType] | None:
    if encoding == NF4_ENCODING:
        return NF4_PACKING, DType.FP32
    parts = _AFFINE.fullmatch(encoding)
    if parts is None:
        return None
    return Packing(bits=int(parts[1]), group_size=int(parts[2])), FLOATS[parts[3]]


def _check_size(info: TensorInfo, raw: Bytes) -> None:
    expected_bytes = encoded_num_bytes(info.encoding, info.shape, place=info.name)
    if len(raw) != expected_bytes:
        raise ModelError(
            f"{info.name}: {info.encoding} {list(info.shape)} needs {expected_bytes} bytes, "
            f"got {len(raw)}; fetch the model again"
        )


def _stored_type(encoding: str) -> str:
    return encoding.removeprefix(GGUF_PREFIX)


def _undo_rope_order(array: np.ndarray, info: TensorInfo) -> np.ndarray:
    """Put rows back: GGUF's Llama interleaves the two halves of each head that HF keeps apart."""
    num_rows = info.shape[0]
    if num_rows % (2 * info.rope_heads):
        raise ModelError(f"{info.name}: {num_rows} rows cannot hold {info.rope_heads} rope heads")
    pairs = array.reshape(info.rope_heads, num_rows // info.rope_heads // 2, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(array.shape))
