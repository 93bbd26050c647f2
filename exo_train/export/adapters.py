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
from exo_train.errors import ConfigError, NumericsError, ProtocolError
from exo_train.export.adapter_formats import (
    MLX,
    PEFT,
    Adapter,
    Format,
    Place,
    layer_and_target,
)
from exo_train.lora_config import ALL_TARGETS, LoraConfig, placements
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
    ranks = {p.prefix: p.rank for p in placements(lora, num_layers)}
    expected = {f"{prefix}.{part}" for prefix in ranks for part in parts_of(lora)}
    _refuse(expected - arrays.keys(), "misses")
    _refuse(arrays.keys() - expected, "has what the run did not train:")
    for name, array in arrays.items():
        rank = ranks[name.rpartition(".")[0]]
        _refuse(set() if _has_rank(name, array, rank) else {name}, f"is not of rank {rank} in")
    _refuse({name for name, array in arrays.items() if not np.isfinite(array).all()}, "is NaN in")
    if steps > 0:
        # AdamW moves every value that ever had a gradient, and B starts at zero.
        still = {name for name in arrays if name.endswith(".lora_b") and not arrays[name].any()}
        _refuse(still, f"does nothing after {steps} steps in")


def parts_of(lora: LoraConfig) -> tuple[str, ...]:
    """Name the arrays of each adapted projection."""
    return ("lora_a", "lora_b", "dora_m") if lora.dora else ("lora_a", "lora_b")


def _has_rank(name: str, array: np.ndarray, rank: int) -> bool:
    if name.endswith(".dora_m"):
        return array.ndim == 1
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
        told = form.as_stored(live, num_layers)
        weights = save(form.to_arrays(told.arrays), metadata=form.metadata)
        config = form.to_config(told, num_layers)
        _write_synced(temp / form.weights_file, weights)
        text = json.dumps(config, indent=2, ensure_ascii=False)
        _write_synced(temp / CONFIG_FILE, f"{text}\n".encode())
        _compare(read_adapter(temp, num_layers=num_layers), told, final, num_layers)
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


def _compare(found: Adapter, live: Adapter, place: Path, num_layers: int) -> None:
    """Refuse when what lies on disk is not bit for bit what is in memory."""
    differing = {
        name
        for name in live.arrays.keys() | found.arrays.keys()
        if name not in found.arrays
        or name not in live.arrays
        or not np.array_equal(found.arrays[name], live.arrays[name])
    }
    _refuse(differing, f"read back from {place} differs in")
    read, meant = (
        {p.prefix: (p.rank, p.scale) for p in placements(adapter.lora, num_layers)}
        for adapter in (found, live)
    )
    for prefix, (rank, scale) in meant.items():
        found_rank, found_scale = read[prefix]
        if found_rank != rank or not np.isclose(found_scale, scale, rtol=1e-9, atol=0.0):
            raise NumericsError(
                f"the adapter read back from {place} has rank {found_rank} and scale "
                f"{found_scale:g} in {prefix}, trained were {rank} and {scale:g}"
            )


def read_adapter(path: Path, *, num_layers: int | None = None) -> Adapter:
    """Read a PEFT or mlx-lm adapter folder into the neutral form; raises ConfigError.

    `num_layers` are the model's, where it is known.
    """
    config = _read_config(path)
    form = PEFT if "peft_type" in config else MLX
    try:
        arrays = form.from_arrays(_read_weights(path / form.weights_file))
        lora = form.from_config(config, _ranks_of(arrays), num_layers)
        _check_whole(arrays, lora)
    except ConfigError as error:
        raise ConfigError(f"adapter {path}: {error}") from None
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


def _ranks_of(arrays: Arrays) -> dict[Place, int]:
    """Give the rank of each adapted projection, in the order of computing."""
    ranks: dict[Place, int] = {}
    for name, array in arrays.items():
        place = layer_and_target(name)
        if array.ndim != (1 if name.endswith(".dora_m") else 2):
            raise ConfigError(f"'{name}' has shape {array.shape}")
        if name.endswith(".lora_a"):
            ranks[place] = array.shape[1]
        else:
            ranks.setdefault(place, 0)
    return {p: ranks[p] for p in sorted(ranks, key=lambda p: (p[0], ALL_TARGETS.index(p[1])))}


def _check_whole(arrays: Arrays, lora: LoraConfig) -> None:
    for name, array in arrays.items():
        prefix, _, part = name.rpartition(".")
        if part not in parts_of(lora):
            raise ConfigError(f"'{name}' belongs to DoRA, which its config does not say")
        for other in parts_of(lora):
            if f"{prefix}.{other}" not in arrays:
                raise ConfigError(f"'{name}' has no {other} beside it")
        if part == "lora_b" and array.shape[0] != arrays[f"{prefix}.lora_a"].shape[1]:
            raise ConfigError(f"'{name}' has shape {array.shape}, lora_a beside it another rank")
