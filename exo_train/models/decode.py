"""From encoded bytes to numbers: which encodings are known, their sizes, and how they decode.

Owns the list of encodings. Must not read files.
"""

from __future__ import annotations

import math

import gguf
import numpy as np

from exo_train.errors import ModelError
from exo_train.models.tensors import TensorInfo
from exo_train.wire.tensor import Bytes, DType, HostTensor

GGUF_PREFIX = "GGUF:"
_FLOATS = {"F32": DType.FP32, "F16": DType.FP16, "BF16": DType.BF16}
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
_STORED_TYPES = frozenset([*_FLOATS, *_QUANTISED])


def is_known_encoding(encoding: str) -> bool:
    return encoding in _FLOATS or (
        encoding.startswith(GGUF_PREFIX) and _stored_type(encoding) in _STORED_TYPES
    )


def encoded_num_bytes(encoding: str, shape: tuple[int, ...], *, place: str) -> int:
    """Count the bytes of a tensor of this shape; refuses unknown encodings and broken blocks."""
    if not is_known_encoding(encoding):
        raise ModelError(
            f"{place}: stored as {encoding}, which is not supported; use a model in F32, F16, "
            f"BF16, or a GGUF of a type such as Q8_0 or Q4_K"
        )
    stored = _stored_type(encoding)
    num_elements = math.prod(shape)
    if stored in _FLOATS:
        return num_elements * _FLOATS[stored].num_bytes
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[_QUANTISED[stored]]
    if not shape or shape[-1] % block_elements:
        raise ModelError(
            f"{place}: rows of {shape[-1] if shape else 0} values do not fill "
            f"{stored} blocks of {block_elements}"
        )
    return int(num_elements // block_elements * block_bytes)


def decode(info: TensorInfo, raw: Bytes) -> HostTensor:
    """Give the numbers: float types as stored, quantised GGUF types as FP32, rope order undone."""
    expected_bytes = encoded_num_bytes(info.encoding, info.shape, place=info.name)
    if len(raw) != expected_bytes:
        raise ModelError(
            f"{info.name}: {info.encoding} {list(info.shape)} needs {expected_bytes} bytes, "
            f"got {len(raw)}; fetch the model again"
        )
    stored = _stored_type(info.encoding)
    if stored in _FLOATS:
        dtype = _FLOATS[stored]
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


def _stored_type(encoding: str) -> str:
    return encoding.removeprefix(GGUF_PREFIX)


def _undo_rope_order(array: np.ndarray, info: TensorInfo) -> np.ndarray:
    """Put rows back: GGUF's Llama interleaves the two halves of each head that HF keeps apart."""
    num_rows = info.shape[0]
    if num_rows % (2 * info.rope_heads):
        raise ModelError(f"{info.name}: {num_rows} rows cannot hold {info.rope_heads} rope heads")
    pairs = array.reshape(info.rope_heads, num_rows // info.rope_heads // 2, 2, *info.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(info.shape))
