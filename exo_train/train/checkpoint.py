"""Checkpoints on disk: adapter, optimizer and the trainer's state of one step.

Owns the folder `checkpoints/step-NNNNNN/` and its manifest. A checkpoint exists only when its
manifest does. Tensors carry global names, so any ring can load what another saved. Must not
unpickle anything: safetensors and JSON only, both with limits.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from exo_train.errors import ConfigError, ProtocolError
from exo_train.plan.fields import Fields, parse_json
from exo_train.train.durable import disk_errors, sync_directory, write_synced

Arrays = Mapping[str, npt.NDArray[Any]]

SCHEMA = 1
MAX_MANIFEST_BYTES = 16_000_000
MAX_STEP = 10**9

ADAPTER_FILE = "adapter.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
MANIFEST_FILE = "manifest.json"

_FOLDER = "checkpoints"
_NAME = re.compile(r"step-([0-9]{6,10})")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """What was saved after `step` updates; arrays by global name."""

    path: Path
    step: int
    adapter: dict[str, npt.NDArray[Any]]
    optimizer: dict[str, npt.NDArray[Any]]
    state: dict[str, Any]


def save_checkpoint(
    run_dir: Path, *, step: int, adapter: Arrays, optimizer: Arrays, state: Mapping[str, Any]
) -> Path:
    """Write the checkpoint of `step`, read it back, and only then let it exist.

    `state` is plain JSON. An older checkpoint of the same step stays until the new one is proven.
    """
    folder = run_dir / _FOLDER
    final = folder / f"step-{step:06d}"
    temp = folder / f".{final.name}.tmp"
    with disk_errors(f"the checkpoint of step {step}", run_dir):
        folder.mkdir(parents=True, exist_ok=True)
        _remove(temp)
        temp.mkdir()
        try:
            _write_files(temp, step, adapter, optimizer, state)
            load_checkpoint(temp)
            _replace_folder(temp, final)
        except BaseException:
            shutil.rmtree(temp, ignore_errors=True)
            raise
        sync_directory(folder)
    return final


def _write_files(
    folder: Path, step: int, adapter: Arrays, optimizer: Arrays, state: Mapping[str, Any]
) -> None:
    files = {}
    for name, arrays in ((ADAPTER_FILE, adapter), (OPTIMIZER_FILE, optimizer)):
        data = save({key: np.asarray(value, order="C") for key, value in arrays.items()})
        write_synced(folder / name, data)
        files[name] = {"sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
    manifest = {"schema": SCHEMA, "step": step, "files": files, "state": dict(state)}
    encoded = json.dumps(manifest, allow_nan=False, indent=1).encode()
    if len(encoded) > MAX_MANIFEST_BYTES:
        raise ConfigError(
            f"the state saved with step {step} has {len(encoded)} bytes, "
            f"the limit is {MAX_MANIFEST_BYTES}"
        )
    sync_directory(folder)
    write_synced(folder / MANIFEST_FILE, encoded)
    sync_directory(folder)


def _replace_folder(temp: Path, final: Path) -> None:
    """Put `temp` where `final` is; folders cannot be swapped in one rename."""
    old = final.with_name(f".{final.name}.old")
    _remove(old)
    if final.exists():
        final.rename(old)
    temp.rename(final)
    _remove(old)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and check every byte against its manifest; raises ConfigError."""
    try:
        return _load(path)
    except FileNotFoundError as error:
        missing = Path(error.filename).name if error.filename else "a file"
        raise ConfigError(f"checkpoint {path} is incomplete: {missing} is missing") from None
    except OSError as error:
        raise ConfigError(f"checkpoint {path} cannot be read: {error.strerror or error}") from None
    except (ProtocolError, SafetensorError, ValueError, KeyError) as error:
        raise ConfigError(f"checkpoint {path} is damaged: {error}") from None


def _load(path: Path) -> Checkpoint:
    size = (path / MANIFEST_FILE).stat().st_size
    if size > MAX_MANIFEST_BYTES:
        raise ProtocolError(f"{MANIFEST_FILE} has {size} bytes, the limit is {MAX_MANIFEST_BYTES}")
    text = (path / MANIFEST_FILE).read_text(encoding="utf-8")
    plain = parse_json(text, place=MANIFEST_FILE, max_chars=MAX_MANIFEST_BYTES)
    with Fields(plain, MANIFEST_FILE) as fields:
        fields.whole("schema", low=SCHEMA, high=SCHEMA)
        step = fields.whole("step", low=0, high=MAX_STEP)
        with fields.inner("files") as files:
            adapter = load(_verified(path / ADAPTER_FILE, files.inner(ADAPTER_FILE)))
            optimizer = load(_verified(path / OPTIMIZER_FILE, files.inner(OPTIMIZER_FILE)))
        fields.inner("state")
    return Checkpoint(
        path=path, step=step, adapter=adapter, optimizer=optimizer, state=plain["state"]
    )


def _verified(path: Path, entry: Fields) -> bytes:
    """Read one file; its size is compared before memory is taken for it."""
    with entry:
        size_bytes, sha256 = entry.whole("size_bytes", low=0), entry.text("sha256")
    found_bytes = path.stat().st_size
    if found_bytes != size_bytes:
        raise ProtocolError(f"{path.name} has {found_bytes} bytes, its manifest says {size_bytes}")
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ProtocolError(f"{path.name} does not have the SHA-256 of its manifest")
    return data


def newest_checkpoint(
    run_dir: Path, *, say: Callable[[str], None] = lambda note: None
) -> Checkpoint | None:
    """Load the newest whole checkpoint; each one that is skipped is said with the reason."""
    for path in reversed(_by_step(run_dir)):
        try:
            return load_checkpoint(path)
        except ConfigError as error:
            say(f"{error}; trying the one before")
    return None


def prune(run_dir: Path, *, keep: int, verified: Collection[Path] = ()) -> list[Path]:
    """Delete what is older than the `keep` newest whole checkpoints; gives the paths deleted.

    Damaged ones do not count, so the last good one cannot be deleted for their sake. Those in
    `verified` are known to be whole and are not read again.
    """
    if keep < 1:
        raise ConfigError(f"'keep' must be at least 1, got {keep}")
    removed = []
    whole = 0
    for path in reversed(_by_step(run_dir)):
        if whole >= keep:
            # Renamed first: a deletion cut short must not look like a damaged checkpoint.
            doomed = path.with_name(f".{path.name}.tmp")
            with disk_errors("a deletion", run_dir):
                _remove(doomed)
                path.rename(doomed)
                _remove(doomed)
            removed.append(path)
        elif path in verified or _is_whole(path):
            whole += 1
    return removed


def _is_whole(path: Path) -> bool:
    try:
        load_checkpoint(path)
    except ConfigError:
        return False
    return True


def _by_step(run_dir: Path) -> list[Path]:
    """List checkpoint folders, oldest step first; leftovers of cut-short saves do not match."""
    folder = run_dir / _FOLDER
    if not folder.is_dir():
        return []
    found = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for match, path in sorted(found, key=lambda pair: int(pair[0].group(1)))]
