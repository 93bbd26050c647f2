"""Random tensors in the place of a model's, for measurements that need its shapes only.

Owns the values and how they are stored. Must not read files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from exo_train.errors import ModelError
from exo_train.models.spec import ModelSpec
from exo_train.models.tensors import TensorInfo
from exo_train.wire.tensor import Bytes, DType

_NUM_VALUES = 1 << 18  # repeated to fill a tensor: quick, and takes no second tensor's memory
_ENCODINGS = {DType.FP32: "F32", DType.FP16: "F16", DType.BF16: "BF16"}


class RandomTensors:
    """A `TensorSource` of a model that is not there: random matrices, norms of ones."""

    def __init__(self, spec: ModelSpec, dtype: DType) -> None:
        self._dtype = dtype
        self._infos = {
            name: TensorInfo(
                name=name,
                encoding=_ENCODINGS[dtype],
                shape=shape,
                num_bytes=math.prod(shape) * dtype.num_bytes,
            )
            for name, shape in spec.all_tensor_shapes().items()
        }
        self._values = np.random.default_rng(0).standard_normal(_NUM_VALUES, np.float32)

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def read(self, name: str) -> Bytes:
        if name not in self._infos:
            raise ModelError(f"no tensor is called '{name}' in this model")
        shape = self._infos[name].shape
        # As after training: products neither grow nor vanish from layer to layer.
        values = self._values / np.float32(math.sqrt(shape[-1]))
        pattern = np.ones(1, np.float32) if len(shape) == 1 else values
        return encoded(pattern, self._dtype, size=math.prod(shape))


def encoded(values: np.ndarray, dtype: DType, *, size: int = 0) -> memoryview:
    """Give `size` values as stored in `dtype`, repeating what there are."""
    if dtype is DType.BF16:
        stored = (values.view(np.uint32) >> 16).astype(np.uint16)
    else:
        stored = values.astype(np.float16 if dtype is DType.FP16 else np.float32)
    whole = np.empty(size or len(stored), stored.dtype)
    for start in range(0, len(whole), len(stored)):
        part = whole[start : start + len(stored)]
        part[:] = stored[: len(part)]
    return whole.view(np.uint8).data
