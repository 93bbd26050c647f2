"""A trained model on disk as Hugging Face has it: what was trained, and the rest of its base.

Owns writing it tensor by tensor, and reading back what was written: a model that is its base,
misses a layer or differs from what was trained is an error before anybody uses it. Each tensor has
the dtype that the base's files have; trained values are rounded to it once. Tokenizer files are
the caller's.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from exo_train.backends.full import layer_of
from exo_train.errors import NumericsError
from exo_train.models.decode import decode
from exo_train.models.open import open_model
from exo_train.models.spec import ARCHITECTURES, EMBEDDING, ModelSpec
from exo_train.models.tensors import TensorSource
from exo_train.train.durable import disk_errors, sync_directory, write_synced
from exo_train.wire.tensor import DType, HostTensor

SHARD_BYTES = 5_000_000_000
_STORED = {DType.FP32: ("F32", "float32"), DType.FP16: ("F16", "float16")}
_STORED |= {DType.BF16: ("BF16", "bfloat16")}
_OTHER_FILES = ("generation_config.json",)


def write_model(
    final: Path,
    trained: Mapping[str, np.ndarray],
    *,
    base: Path,
    steps: int,
    write_tokenizer: Callable[[Path], None],
) -> Path:
    """Write the whole model to `final`, prove it, and only then replace what is there.

    `trained` are the float32 weights after `steps` updates. Raises NumericsError for a model that
    is not what was trained, DiskError.
    """
    spec, source = open_model(base)
    _check_trained(trained, source, steps)
    temp = final.with_name(f".{final.name}.tmp")
    with disk_errors("the model", final.parent):
        shutil.rmtree(temp, ignore_errors=True)
        temp.mkdir(parents=True)
        try:
            _write_weights(temp, trained, spec, source)
            _write_config(temp, spec, source)
            for name in _OTHER_FILES:
                if base.is_dir() and (base / name).is_file():
                    write_synced(temp / name, (base / name).read_bytes())
            write_tokenizer(temp)
            _compare(temp, trained, source, steps)
            if final.exists():
                shutil.rmtree(final)
            temp.rename(final)
            sync_directory(final.parent)
        except BaseException:
            shutil.rmtree(temp, ignore_errors=True)
            raise
    return final


def model_bytes(base: Path) -> int:
    """Give what `write_model` will take of the disk."""
    spec, source = open_model(base)
    return sum(_size(source, name) for name in spec.all_tensor_shapes())


def read_weights(folder: Path, names: Mapping[str, object]) -> dict[str, np.ndarray]:
    """Read float32 weights by name out of a model's folder."""
    _, source = open_model(folder)
    return {name: _values(_stored(source, name)) for name in names}


def _check_trained(trained: Mapping[str, np.ndarray], source: TensorSource, steps: int) -> None:
    """Refuse bad numbers, and layers of which no value has moved."""
    moved: dict[int | None, bool] = {}
    for name, array in trained.items():
        if not np.isfinite(array).all():
            raise NumericsError(f"the model has NaN or infinities in {name}; it was not written")
        layer = layer_of(name)
        if not moved.get(layer):
            moved[layer] = not np.array_equal(array, _values(_stored(source, name)))
    still = [layer for layer, is_moved in moved.items() if not is_moved]
    if still and steps:
        names = ", ".join("embedding and head" if s is None else f"layer {s}" for s in still)
        raise NumericsError(f"nothing has moved after {steps} steps in {names}; it was not written")


def _tensor(name: str, trained: Mapping[str, np.ndarray], source: TensorSource) -> HostTensor:
    """Give a tensor as it is to be stored."""
    stored = _stored(source, name)
    if name not in trained:
        return stored
    return _rounded(trained[name], stored.dtype)


def _write_weights(
    folder: Path, trained: Mapping[str, np.ndarray], spec: ModelSpec, source: TensorSource
) -> None:
    """Write shards of at most SHARD_BYTES, and an index where there are several."""
    shards: list[list[str]] = [[]]
    size = total = 0
    for name in spec.all_tensor_shapes():
        num_bytes = _size(source, name)
        if shards[-1] and size + num_bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size, total = size + num_bytes, total + num_bytes
    files = ["model.safetensors"]
    if len(shards) > 1:
        count = len(shards)
        files = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        index = {
            "metadata": {"total_size": total},
            "weight_map": {n: f for f, names in zip(files, shards, strict=True) for n in names},
        }
        write_synced(folder / "model.safetensors.index.json", json.dumps(index).encode())
    for file, names in zip(files, shards, strict=True):
        _write_shard(folder / file, names, trained, source)


def _write_shard(
    path: Path, names: list[str], trained: Mapping[str, np.ndarray], source: TensorSource
) -> None:
    """Write a safetensors file, one tensor in memory at a time: header length, header, data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        start, end = end, end + _size(source, name)
        stored_as, _ = _STORED[_dtype(source, name)]
        shape = list(source.infos[name].shape)
        header[name] = {"dtype": stored_as, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data are aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(_tensor(name, trained, source).data)
        file.flush()
        os.fsync(file.fileno())


def _write_config(folder: Path, spec: ModelSpec, source: TensorSource) -> None:
    """Write the base's config; what it leaves to be guessed is said."""
    config = json.loads(spec.config_json)
    config["model_type"] = spec.architecture
    config.setdefault("architectures", [ARCHITECTURES[spec.architecture]])
    config.setdefault("tie_word_embeddings", spec.tied_embeddings)
    if "dtype" not in config:
        config.setdefault("torch_dtype", _STORED[_dtype(source, EMBEDDING)][1])
    text = json.dumps(config, indent=2, ensure_ascii=False)
    write_synced(folder / "config.json", f"{text}\n".encode())


def _compare(
    folder: Path, trained: Mapping[str, np.ndarray], source: TensorSource, steps: int
) -> None:
    """Read the model back: what is trained is there and to be seen, all else is the base's."""
    spec, written = open_model(folder)
    seen = False
    for name in spec.all_tensor_shapes():
        there, base = _stored(written, name), _stored(source, name)
        expected = _rounded(trained[name], base.dtype) if name in trained else base
        if (there.dtype, there.shape) != (expected.dtype, expected.shape) or not _same(
            there, expected
        ):
            raise NumericsError(f"{name}, read back, is not what was written; try again")
        seen = seen or not _same(there, base)
    if steps and not seen:
        stored_as = _STORED[_dtype(source, EMBEDDING)][0]
        raise NumericsError(
            f"the model is its base: all changes of {steps} steps are lost in its {stored_as}; "
            f"train for longer, or with a higher --learning-rate"
        )


def _stored(source: TensorSource, name: str) -> HostTensor:
    return decode(source.infos[name], source.read(name))


def _dtype(source: TensorSource, name: str) -> DType:
    """Give the dtype that a tensor of an unquantised model is stored in."""
    kind = source.infos[name].encoding.rpartition(":")[2]
    return {stored_as: dtype for dtype, (stored_as, _) in _STORED.items()}[kind]


def _size(source: TensorSource, name: str) -> int:
    return source.infos[name].num_bytes


def _same(one: HostTensor, other: HostTensor) -> bool:
    return bytes(one.data) == bytes(other.data)


def _values(tensor: HostTensor) -> np.ndarray:
    return tensor.to_numpy().astype(np.float32)


def _rounded(array: np.ndarray, dtype: DType) -> HostTensor:
    """Round to nearest, ties to even, as frameworks do."""
    array = np.ascontiguousarray(array, np.float32)
    if dtype is DType.FP32:
        return HostTensor.from_numpy(array)
    if dtype is DType.FP16:
        return HostTensor.from_numpy(array.astype(np.float16))
    bits = array.view(np.uint32)
    upper = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype("<u2")
    return HostTensor(DType.BF16, array.shape, upper.tobytes())
