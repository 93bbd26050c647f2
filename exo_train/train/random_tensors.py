"""Random tensors in the place of a model's, for measurements that need its shapes only.

Owns the values and how they are stored. Must not read files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from exo_train.errors import ModelError
from exo_train.models.decode import encoded_num_bytes, packed_encoding, packing_of
from exo_train.models.packed import AFFINE, Packing, packing_for
from exo_train.models.spec import ModelSpec, is_projection
from exo_train.models.tensors import TensorInfo
from exo_train.wire.tensor import Bytes, DType

_NUM_VALUES = 1 << 18  # repeated to fill a tensor: quick, and takes no second tensor's memory
_ENCODINGS = {DType.FP32: "F32", DType.FP16: "F16", DType.BF16: "BF16"}


class RandomTensors:
    """A `TensorSource` of a model that is not there: random matrices, norms of ones.

    Matrices are packed where the model's are, and projections where the run quantises them.
    """

    def __init__(self, spec: ModelSpec, dtype: DType, *, quantize: int = 0) -> None:
        self._dtype = dtype
        self._infos: dict[str, TensorInfo] = {}
        for name, shape in spec.all_tensor_shapes().items():
            packing = _packing(spec, name, shape, quantize)
            encoding = packed_encoding(packing, "F32") if packing else _ENCODINGS[dtype]
            num_bytes = encoded_num_bytes(encoding, shape, place=name)
            self._infos[name] = TensorInfo(
                name=name, encoding=encoding, shape=shape, num_bytes=num_bytes
            )
        self._values = np.random.default_rng(0).standard_normal(_NUM_VALUES, np.float32)

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def read(self, name: str) -> Bytes:
        if name not in self._infos:
            raise ModelError(f"no tensor is called '{name}' in this model")
        info = self._infos[name]
        shape = info.shape
        if packing := packing_of(info.encoding):
            return self._packed(packing, shape, name)
        # As after training: products neither grow nor vanish from layer to layer.
        values = self._values / np.float32(math.sqrt(shape[-1]))
        pattern = np.ones(1, np.float32) if len(shape) == 1 else values
        return encoded(pattern, self._dtype, size=math.prod(shape))

    def _packed(self, packing: Packing, shape: tuple[int, ...], name: str) -> Bytes:
        """Give random codes; scales and biases as of values of about 1 / sqrt(columns)."""
        words, scales = packing.shapes(shape, place=name)
        codes = np.resize(self._values.view(np.uint32) * np.uint32(2654435761), math.prod(words))
        if packing.form != AFFINE:
            scales_RG = np.full(math.prod(scales), np.float32(2 / math.sqrt(shape[-1])))
            return codes.tobytes() + scales_RG.tobytes()
        scale = np.float32(4 / (1 << packing.bits) / math.sqrt(shape[-1]))
        scales_RG = np.full(math.prod(scales), scale)
        biases_RG = np.full(math.prod(scales), -scale * np.float32((1 << packing.bits) / 2))
        return b"".join(part.tobytes() for part in (codes, scales_RG, biases_RG))


def _packing(spec: ModelSpec, name: str, shape: tuple[int, ...], quantize: int) -> Packing | None:
    """Give how a tensor is packed in training; a profile's model has all its layers alike."""
    if len(shape) != 2:
        return None
    if spec.quantisation and (packing := spec.quantisation.of(name.removesuffix(".weight"))):
        return packing
    if quantize and is_projection(name):
        return packing_for(shape[-1], quantize, place=name)
    return None


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
