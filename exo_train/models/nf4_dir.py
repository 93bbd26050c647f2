"""A directory of bitsandbytes' NF4 weights as a TensorSource: each matrix is one tensor.

Owns the joining of `X.weight` and what bitsandbytes stores beside it into `X.weight` with the NF4
encoding: codes, then float32 scales, for which scales that are quantised themselves ("double
quantisation") are read. Must not import bitsandbytes, nor decode the matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from exo_train.errors import ModelError
from exo_train.models.decode import NF4_ENCODING, encoded_num_bytes
from exo_train.models.fields import number, parse_object, whole
from exo_train.models.packed import NF4_PACKING, NF4_VALUES
from exo_train.models.quantised_config import Quantisation
from exo_train.models.safetensors_dir import SafetensorsDir
from exo_train.models.tensors import TensorInfo

_STATE = ".quant_state.bitsandbytes__nf4"
_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", _STATE)
_MAX_STATE_BYTES = 4096
_MAX_SIDE = 1 << 24
_MAX_OFFSET = 1e6
_MAX_NESTED_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Nested:
    """Scales in 8 bits: `nested_quant_map[code] * nested_absmax[block] + offset`."""

    block_size: int
    offset: float


class Nf4Dir:
    """The tensors of `stored` by their names in an unquantised model."""

    def __init__(self, stored: SafetensorsDir, quantisation: Quantisation, *, place: str) -> None:
        self._stored, self._place = stored, place
        self._infos: dict[str, TensorInfo] = {}
        self._nested: dict[str, _Nested | None] = {}  # of the matrices in NF4
        for name, info in stored.infos.items():
            if name.endswith(_PARTS):
                continue
            is_nf4 = f"{name}{_STATE}" in stored.infos
            if is_nf4:
                self._infos[name], self._nested[name] = self._joined(name)
            else:
                self._infos[name] = info
            wanted = quantisation.of(name.removesuffix(".weight"))
            if len(info.shape) == 2 and name.endswith(".weight") and is_nf4 != bool(wanted):
                raise ModelError(
                    f"{place}: '{name}' is {'' if is_nf4 else 'not '}in NF4, against its config; "
                    f"fetch the model again"
                )

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def files_of(self, name: str) -> tuple[Path, ...]:
        """Give the files that a tensor lies in: shards may be cut between its parts."""
        parts = [name, *(part for end in _PARTS if (part := name + end) in self._stored.infos)]
        return tuple(dict.fromkeys(file for part in parts for file in self._stored.files_of(part)))

    def read(self, name: str) -> bytes:
        if name not in self._nested:
            return self._stored.read(name)
        values = self._array(name, "quant_map", "F32", len(NF4_VALUES))
        if not np.allclose(values, NF4_VALUES, rtol=0, atol=1e-6):
            raise ModelError(f"{self._place}: '{name}' has other values than NF4's; use another")
        return self._stored.read(name) + self._scales(name).tobytes()

    def _scales(self, name: str) -> np.ndarray:
        """Give the float32 scales as `bitsandbytes.functional.dequantize_4bit` makes them."""
        nested = self._nested[name]
        num_scales = math.prod(self._infos[name].shape) // NF4_PACKING.group_size
        if nested is None:
            return self._array(name, "absmax", "F32", num_scales)
        codes = self._array(name, "absmax", "U8", num_scales)
        num_blocks = -(-num_scales // nested.block_size)
        largest = self._array(name, "nested_absmax", "F32", num_blocks)
        values = self._array(name, "nested_quant_map", "F32", 256)
        scales = values[codes] * np.repeat(largest, nested.block_size)[:num_scales]
        return np.asarray(scales + np.float32(nested.offset))

    def _array(self, name: str, part: str, encoding: str, size: int) -> np.ndarray:
        info = self._stored.infos.get(f"{name}.{part}")
        if info is None or info.encoding != encoding or math.prod(info.shape) != size:
            found = f"{info.encoding} {list(info.shape)}" if info else "missing"
            raise ModelError(
                f"{self._place}: '{name}.{part}' must have {size} values in {encoding}, is "
                f"{found}; fetch the model again"
            )
        return np.frombuffer(self._stored.read(info.name), "u1" if encoding == "U8" else "<f4")

    def _joined(self, name: str) -> tuple[TensorInfo, _Nested | None]:
        """Check a matrix against its own description; give what it is."""
        place = f"{self._place}: '{name}'"
        if self._stored.infos[f"{name}{_STATE}"].num_bytes > _MAX_STATE_BYTES:
            raise ModelError(f"{place}: its description is too long; fetch the model again")
        state = parse_object(self._stored.read(f"{name}{_STATE}"), place=place)
        block_size = whole(state, "blocksize", place=place, high=1 << 20)
        if block_size != NF4_PACKING.group_size or state.get("quant_type") != "nf4":
            raise ModelError(
                f"{place}: {str(state.get('quant_type'))[:40]} in blocks of {block_size} is not "
                f"supported; use nf4 in blocks of {NF4_PACKING.group_size}"
            )
        shape = _shape(state.get("shape"), place)
        info = TensorInfo(
            name=name,
            encoding=NF4_ENCODING,
            shape=shape,
            num_bytes=encoded_num_bytes(NF4_ENCODING, shape, place=place),
        )
        stored = self._stored.infos[name]
        if stored.encoding != "U8" or stored.num_bytes * 2 != math.prod(shape):
            raise ModelError(
                f"{place}: {list(shape)} in NF4 does not lie in {stored.num_bytes} bytes of "
                f"{stored.encoding}; fetch the model again"
            )
        if f"{name}.nested_absmax" not in self._stored.infos:
            return info, None
        return info, _Nested(
            block_size=whole(state, "nested_blocksize", place=place, high=_MAX_NESTED_BLOCK),
            offset=number(state, "nested_offset", place=place, high=_MAX_OFFSET),
        )


def _shape(value: Any, place: str) -> tuple[int, ...]:
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(side) is int and 0 < side < _MAX_SIDE for side in value)
    ):
        raise ModelError(f"{place}: 'shape' must be two whole numbers; fetch the model again")
    return tuple(value)
