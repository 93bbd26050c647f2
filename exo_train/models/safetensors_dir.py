"""A Hugging Face model directory as a TensorSource.

Owns the safetensors header and the shard index, both parsed here: the safetensors library gives
neither bfloat16 to NumPy nor the raw bytes of one tensor. Must not unpickle or decode anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from exo_train.errors import ModelError
from exo_train.models.decode import encoded_num_bytes, is_known_encoding
from exo_train.models.fields import parse_object
from exo_train.models.file_range import file_size_bytes, read_range
from exo_train.models.tensors import TensorInfo

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
MAX_JSON_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    file: Path
    offset_bytes: int


class SafetensorsDir:
    """Tensors of `model.safetensors`, or of the shards that the index names."""

    def __init__(self, directory: Path) -> None:
        self._infos: dict[str, TensorInfo] = {}
        self._places: dict[str, _Place] = {}
        if (directory / SINGLE_FILE).exists():
            self._add_file(directory / SINGLE_FILE)
        elif (directory / INDEX_FILE).exists():
            self._add_shards(directory)
        else:
            raise _no_weights(directory)

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def files_of(self, name: str) -> tuple[Path, ...]:
        return (self._place(name).file,)

    def read(self, name: str) -> bytes:
        place = self._place(name)
        return read_range(place.file, place.offset_bytes, self._infos[name].num_bytes)

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            raise ModelError(f"no tensor is called '{name}' in this model")
        return self._places[name]

    def _add_shards(self, directory: Path) -> None:
        index = read_json(directory / INDEX_FILE)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{directory / INDEX_FILE}: 'weight_map' is missing or empty")
        for shard in sorted({str(name) for name in weight_map.values()}):
            if "/" in shard or "\\" in shard or not shard.endswith(".safetensors"):
                raise ModelError(f"{directory / INDEX_FILE}: '{shard}' is not a shard's file name")
            if not (directory / shard).exists():
                raise ModelError(
                    f"{directory / shard}: missing, though {INDEX_FILE} names it"
                    f"{_interrupted(directory)}; fetch it again"
                )
            self._add_file(directory / shard)
        for name, shard in weight_map.items():
            if name not in self._places or self._places[name].file.name != shard:
                raise ModelError(
                    f"{directory / shard}: lacks tensor '{name}', though {INDEX_FILE} puts it "
                    "there; fetch both again"
                )

    def _add_file(self, file: Path) -> None:
        for info, offset_bytes in read_header(file):
            if info.name in self._infos:
                raise ModelError(f"{file}: tensor '{info.name}' is also in another shard")
            self._infos[info.name] = info
            self._places[info.name] = _Place(file=file, offset_bytes=offset_bytes)


def read_header(file: Path) -> list[tuple[TensorInfo, int]]:
    """Give every tensor of a safetensors file with its offset in the file, in bytes.

    Layout: 8 bytes header length (little-endian), JSON header, then the data without gaps.
    """
    size_bytes = file_size_bytes(file)
    if size_bytes < 8:
        raise ModelError(f"{file}: truncated, has {size_bytes} bytes; fetch it again")
    header_bytes = int.from_bytes(read_range(file, 0, 8), "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise ModelError(
            f"{file}: header of {header_bytes} bytes is above the limit of {MAX_HEADER_BYTES}; "
            "this is not a safetensors file"
        )
    data_start = 8 + header_bytes
    if data_start > size_bytes:
        raise ModelError(
            f"{file}: truncated, its header alone needs {data_start} bytes, has {size_bytes}; "
            "fetch it again"
        )
    header = parse_object(read_range(file, 8, header_bytes), place=str(file))
    header.pop("__metadata__", None)
    entries = sorted(
        (_entry(file, name, value) for name, value in header.items()), key=lambda entry: entry[1]
    )
    end = 0
    for info, offset_bytes in entries:
        if offset_bytes != end:
            raise ModelError(
                f"{file}: tensor '{info.name}' starts at byte {offset_bytes} of the data "
                f"instead of {end}; the header is damaged"
            )
        end += info.num_bytes
    if data_start + end != size_bytes:
        cause = "truncated" if data_start + end > size_bytes else "has foreign bytes at its end"
        raise ModelError(
            f"{file}: {cause}, its header promises {data_start + end} bytes, has {size_bytes}; "
            "fetch it again"
        )
    return [(info, data_start + offset_bytes) for info, offset_bytes in entries]


def _entry(file: Path, name: str, value: Any) -> tuple[TensorInfo, int]:
    """Check one header entry; the second value is its offset within the data, in bytes."""
    place = f"{file}: tensor '{name}'"
    fields = value if isinstance(value, dict) else {}
    encoding, shape, offsets = (fields.get(k) for k in ("dtype", "shape", "data_offsets"))
    if not isinstance(encoding, str) or not _is_sizes(shape) or not _is_sizes(offsets, count=2):
        raise ModelError(f"{place}: damaged header entry")
    start, end = offsets
    if end < start:
        raise ModelError(f"{place}: damaged header entry")
    if is_known_encoding(encoding):
        expected_bytes = encoded_num_bytes(encoding, tuple(shape), place=place)
        if end - start != expected_bytes:
            raise ModelError(
                f"{place}: needs {expected_bytes} bytes, the header gives {end - start}"
            )
    info = TensorInfo(name=name, encoding=encoding, shape=tuple(shape), num_bytes=end - start)
    return info, start


def _is_sizes(value: Any, count: int | None = None) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and (count is None or len(value) == count)
        and all(type(size) is int and size >= 0 for size in value)
    )


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file of bounded size."""
    size_bytes = file_size_bytes(file)
    if size_bytes > MAX_JSON_BYTES:
        raise ModelError(f"{file}: {size_bytes} bytes is above the limit of {MAX_JSON_BYTES}")
    return parse_object(read_range(file, 0, size_bytes), place=str(file))


def _no_weights(directory: Path) -> ModelError:
    """Say which of the usual reasons it is that a directory has no weights to read."""
    found = sorted(file.name for file in directory.iterdir())
    shards = [name for name in found if name.endswith(".safetensors")]
    pickles = [name for name in found if name.endswith((".bin", ".pt", ".pth"))]
    ggufs = [name for name in found if name.endswith(".gguf")]
    if interrupted := _interrupted(directory):
        cause = f"{interrupted[2:]}; fetch the model again"
    elif shards:
        cause = f"{shards[0]} is there but {INDEX_FILE} is missing; fetch the index again"
    elif pickles:
        cause = (
            f"only pickled weights ({pickles[0]}), which can run code when read; "
            "convert the model to safetensors"
        )
    elif ggufs:
        cause = f"give the GGUF file itself: {directory / ggufs[0]}"
    else:
        cause = f"neither {SINGLE_FILE} nor {INDEX_FILE} is there"
    return ModelError(f"{directory}: no weights to read, {cause}")


def _interrupted(directory: Path) -> str:
    """Name the leftover of an interrupted download, if there is one."""
    for pattern in ("*.incomplete", ".cache/huggingface/download/*.incomplete"):
        for leftover in sorted(directory.glob(pattern)):
            return f", an interrupted download left {leftover.name}"
    return ""
