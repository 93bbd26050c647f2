"""A directory of MLX-quantised weights as a TensorSource: each packed matrix is one tensor.

Owns the joining of `X.weight` (words), `X.scales` and `X.biases` into `X.weight` with an AFFINE
encoding, so that scales are hashed, sent and cached with their words and cannot be missing. Must
not decode anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from exo_train.errors import ModelError
from exo_train.models.decode import encoded_num_bytes, packed_encoding
from exo_train.models.quantised_config import Quantisation
from exo_train.models.safetensors_dir import SafetensorsDir
from exo_train.models.tensors import TensorInfo

_SCALE_TYPES = ("F32", "F16", "BF16")


class PackedDir:
    """The tensors of `stored` by their names in an unquantised model."""

    def __init__(self, stored: SafetensorsDir, quantisation: Quantisation, *, place: str) -> None:
        self._stored = stored
        self._infos: dict[str, TensorInfo] = {}
        self._parts: dict[str, tuple[str, ...]] = {}
        modules = {name.removesuffix(".scales") for name in stored.infos if _is_scales(name)}
        for name, info in stored.infos.items():
            module, _, leaf = name.rpartition(".")
            if module not in modules:
                self._infos[name], self._parts[name] = info, (name,)
            elif leaf == "weight":
                self._parts[name] = (name, f"{module}.scales", f"{module}.biases")
                self._infos[name] = _joined(
                    module, stored.infos, quantisation, place=f"{place}: '{module}'"
                )
            elif leaf == "bias":
                self._infos[name], self._parts[name] = info, (name,)

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def files_of(self, name: str) -> tuple[Path, ...]:
        """Give the files that a tensor lies in: shards are cut between words and scales too."""
        files = [file for part in self._named(name) for file in self._stored.files_of(part)]
        return tuple(dict.fromkeys(files))

    def read(self, name: str) -> bytes:
        return b"".join(self._stored.read(part) for part in self._named(name))

    def _named(self, name: str) -> tuple[str, ...]:
        if name not in self._parts:
            raise ModelError(f"no tensor is called '{name}' in this model")
        return self._parts[name]


def _is_scales(name: str) -> bool:
    return name.endswith(".scales")


def _joined(
    module: str, infos: Mapping[str, TensorInfo], quantisation: Quantisation, *, place: str
) -> TensorInfo:
    """Check the three parts against each other and the config; give the matrix they make."""
    packing = quantisation.of(module)
    if packing is None:
        raise ModelError(f"{place} has scales, but the config says that it is not quantised")
    words, scales = infos[f"{module}.weight"], infos[f"{module}.scales"]
    biases = infos.get(f"{module}.biases")
    if biases is None:
        raise ModelError(f"{place} has scales but no biases; fetch the model again")
    if words.encoding != "U32" or scales.encoding not in _SCALE_TYPES:
        raise ModelError(
            f"{place} is stored as {words.encoding} with scales in {scales.encoding}; only U32 "
            f"words with scales in {', '.join(_SCALE_TYPES)} are supported"
        )
    shape = (words.shape[0], words.shape[-1] * 32 // packing.bits)
    expected = packing.shapes(shape, place=place)
    got = (words.shape, scales.shape, biases.shape)
    if got != (*expected, expected[1]) or biases.encoding != scales.encoding:
        raise ModelError(
            f"{place}: words {list(words.shape)}, scales {list(scales.shape)} {scales.encoding} "
            f"and biases {list(biases.shape)} {biases.encoding} do not belong together at "
            f"{packing}; fetch the model again"
        )
    encoding = packed_encoding(packing, scales.encoding)
    info = TensorInfo(
        name=f"{module}.weight",
        encoding=encoding,
        shape=shape,
        num_bytes=encoded_num_bytes(encoding, shape, place=place),
    )
    if info.num_bytes != words.num_bytes + scales.num_bytes + biases.num_bytes:
        raise ModelError(f"{place}: the header gives its words another size; fetch it again")
    return info
