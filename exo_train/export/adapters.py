"""Adapters on disk for other programs: `peft/` and `mlx/` side by side, and either one back.

Owns writing, and reading back what was written: an adapter that does nothing, misses layers or
differs from the trained one is an error before anybody uses it. Must not unpickle anything.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from exo_train.backends.base import Arrays
from exo_train.backends.lora import adapter_prefix
from exo_train.config import LoraConfig
from exo_train.errors import ConfigError, NumericsError, ProtocolError
from exo_train.export.adapter_formats import (
    MLX,
    PEFT,
    Adapter,
    Format,
    layer_and_target,
    targets_of,
)
from exo_train.plan.fields import parse_json
from exo_train.wire.tensor import DType, HostTensor

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 1_000_000

_DTYPES = {"F32": DType.FP32, "F16": DType.FP16, "BF16": DType.BF16}
_NAMED_AT_MOST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPaths:
    """The two folders of one adapter."""

    peft: Path
    mlx: Path


def write_adapters(
    directory: Path,
    arrays: Mapping[str, np.ndarray],
    *,
    lora: LoraConfig,
    base_model: str,
    num_layers: int,
    steps: int,
) -> AdapterPaths:
    """Write `directory`/peft and /mlx in fp32, and compare both, read back, with `arrays`.

    `steps` is the number of updates taken. Raises NumericsError for an adapter that is not whole;
    a folder of an earlier write stays until the new one is proven.
    """
    check_adapter(arrays, lora=lora, num_layers=num_layers, steps=steps)
    live = Adapter(
        arrays={name: np.asarray(array, np.float32, order="C") for name, array in arrays.items()},
        lora=lora,
        base_model=base_model,
    )
    try:
        return AdapterPaths(
            peft=_write(directory, PEFT, live, num_layers),
            mlx=_write(directory, MLX, live, num_layers),
        )
    except OSError as error:
        raise ConfigError(
            f"cannot write the adapter in {directory}: {error.strerror or error}; "
            "free some space or choose another folder"
        ) from None


def check_adapter(
    arrays: Mapping[str, np.ndarray], *, lora: LoraConfig, num_layers: int, steps: int
) -> None:
    """Refuse an adapter that misses a layer, has a strange array, a bad number or no effect."""
    expected = {
        f"{adapter_prefix(layer, target)}.{part}"
        for layer in range(num_layers)
        for target in lora.targets
        for part in ("lora_a", "lora_b")
    }
    _refuse(expected - arrays.keys(), "misses")
    _refuse(arrays.keys() - expected, "has what the run did not train:")
    wrong = {name for name, array in arrays.items() if not _has_rank(name, array, lora.rank)}
    _refuse(wrong, f"is not of rank {lora.rank} in")
    _refuse({name for name, array in arrays.items() if not np.isfinite(array).all()}, "is NaN in")
    if steps > 0:
        # AdamW moves every value that ever had a gradient, and B starts at zero.
        still = {name for name in arrays if name.endswith(".lora_b") and not arrays[name].any()}
        _refuse(still, f"does nothing after {steps} steps in")


def _has_rank(name: str, array: np.ndarray, rank: int) -> bool:
    return array.ndim == 2 and array.shape[1 if name.endswith(".lora_a") else 0] == rank


def _refuse(names: set[str], complaint: str) -> None:
    if names:
        shown = ", ".join(sorted(names)[:_NAMED_AT_MOST])
        more = f" and {len(names) - _NAMED_AT_MOST} more" if len(names) > _NAMED_AT_MOST else ""
        raise NumericsError(f"the adapter {complaint} {shown}{more}; it was not written")


def _write(directory: Path, form: Format, live: Adapter, num_layers: int) -> Path:
    final = directory / form.name
    temp = directory / f".{form.name}.tmp"
    shutil.rmtree(temp, ignore_errors=True)
    temp.mkdir(parents=True)
    try:
        weights = save(form.to_arrays(live.arrays), metadata=form.metadata)
        config = form.to_config(live.lora, live.base_model, num_layers)
        _write_synced(temp / form.weights_file, weights)
        text = json.dumps(config, indent=2, ensure_ascii=False)
        _write_synced(temp / CONFIG_FILE, f"{text}\n".encode())
        _compare(read_adapter(temp), live, final)
        if final.exists():
            shutil.rmtree(final)
        temp.rename(final)
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)
        raise
    return final


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _compare(found: Adapter, live: Adapter, place: Path) -> None:
    """Refuse when what lies on disk is not bit for bit what is in memory."""
    differing = {
        name
        for name in live.arrays.keys() | found.arrays.keys()
        if name not in found.arrays
        or name not in live.arrays
        or not np.array_equal(found.arrays[name], live.arrays[name])
    }
    _refuse(differing, f"read back from {place} differs in")
    same_scale = np.isclose(found.lora.scale, live.lora.scale, rtol=1e-9, atol=0.0)
    if found.lora.rank != live.lora.rank or not same_scale:
        raise NumericsError(
            f"the adapter read back from {place} has rank {found.lora.rank} and scale "
            f"{found.lora.scale:g}, trained were {live.lora.rank} and {live.lora.scale:g}"
        )


def read_adapter(path: Path) -> Adapter:
    """Read a PEFT or mlx-lm adapter folder into the neutral form; raises ConfigError."""
    config = _read_config(path)
    form = PEFT if "peft_type" in config else MLX
    try:
        arrays = form.from_arrays(_read_weights(path / form.weights_file))
        rank, alpha, dropout = form.from_config(config)
        targets = targets_of(arrays)
        _check_pairs(arrays, rank)
    except ConfigError as error:
        raise ConfigError(f"adapter {path}: {error}") from None
    lora = LoraConfig(rank=rank, alpha=alpha, dropout=dropout, targets=targets)
    base = config.get("base_model_name_or_path") or config.get("model") or ""
    return Adapter(arrays=arrays, lora=lora, base_model=str(base))


def _read_config(path: Path) -> dict[str, Any]:
    file = path / CONFIG_FILE
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{file} is longer than {MAX_CONFIG_BYTES} bytes")
        text = file.read_text(encoding="utf-8")
        plain = parse_json(text, place=CONFIG_FILE, max_chars=MAX_CONFIG_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not an adapter: {error}") from None
    except ProtocolError as error:
        raise ConfigError(f"adapter {path}: {error}") from None
    if not isinstance(plain, dict):
        raise ConfigError(f"adapter {path}: {CONFIG_FILE} is not an object")
    return plain


def _read_weights(file: Path) -> Arrays:
    """Read fp32, fp16 or bf16 arrays as fp32; NumPy alone cannot read bf16."""
    pickled = file.with_suffix(".bin")
    if not file.exists() and pickled.exists():
        raise ConfigError(f"{pickled.name} is a pickle, which may run code; convert to safetensors")
    try:
        entries = deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file.name} cannot be read: {error}") from None
    arrays = {}
    for name, entry in entries:
        if entry["dtype"] not in _DTYPES:
            raise ConfigError(f"'{name}' is {entry['dtype']}, known are {', '.join(_DTYPES)}")
        tensor = HostTensor(_DTYPES[entry["dtype"]], tuple(entry["shape"]), bytes(entry["data"]))
        arrays[name] = tensor.to_numpy().astype(np.float32)
    if not arrays:
        raise ConfigError(f"{file.name} holds no arrays")
    return arrays


def _check_pairs(arrays: Arrays, rank: int) -> None:
    for name, array in arrays.items():
        layer, target = layer_and_target(name)
        if not _has_rank(name, array, rank):
            raise ConfigError(f"'{name}' has shape {array.shape}, its config says rank {rank}")
        for part in ("lora_a", "lora_b"):
            if f"{adapter_prefix(layer, target)}.{part}" not in arrays:
                raise ConfigError(f"'{name}' has no {part} beside it")
