"""A tensor outside any framework: dtype, shape, bytes.

Owns the host form that backends, codec and transports pass to each other. Must not import a
tensor framework; NumPy has no bfloat16, so the bytes stay bytes.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import numpy as np

Bytes = bytes | bytearray | memoryview


class DType(enum.Enum):
    """Element types on the wire; the value is the number in `data.proto`."""

    FP32 = 1
    FP16 = 2
    BF16 = 3
    INT32 = 4

    @property
    def num_bytes(self) -> int:
        return 2 if self in (DType.FP16, DType.BF16) else 4


_NUMPY = {DType.FP32: np.float32, DType.FP16: np.float16, DType.INT32: np.int32}


@dataclass(frozen=True, slots=True, eq=False)
class HostTensor:
    """`data` is C-contiguous little-endian; its length is the shape's product times the item."""

    dtype: DType
    shape: tuple[int, ...]
    data: Bytes

    def __post_init__(self) -> None:
        expected = math.prod(self.shape) * self.dtype.num_bytes
        if len(self.data) != expected:
            raise ValueError(
                f"{self.dtype.name} {self.shape} needs {expected} bytes, got {len(self.data)}"
            )

    @property
    def num_bytes(self) -> int:
        return len(self.data)

    @classmethod
    def from_numpy(cls, array: np.ndarray) -> HostTensor:
        """Take a float32, float16 or int32 array (any layout)."""
        array = np.asarray(array, order="C")
        for dtype, numpy_dtype in _NUMPY.items():
            if array.dtype == numpy_dtype:
                return cls(dtype, array.shape, array.data.cast("B") if array.size else b"")
        raise ValueError(f"no wire dtype for {array.dtype}")

    def to_numpy(self) -> np.ndarray:
        """Give a read-only view; bfloat16 is widened to float32 (exactly), which copies."""
        if self.dtype is DType.BF16:
            wide = np.frombuffer(self.data, dtype="<u2").astype(np.uint32) << 16
            return wide.view(np.float32).reshape(self.shape)
        return np.frombuffer(self.data, dtype=_NUMPY[self.dtype]).reshape(self.shape)
