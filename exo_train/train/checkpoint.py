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
from exo_train.train.durable import (
    DiskError,
    disk_errors,
    require_free_bytes,
    sync_directory,
    write_synced,
)
from exo_train.train.fault_points import point

Arrays = Mapping[str, npt.NDArray[Any]]

SCHEMA = 2
MAX_MANIFEST_BYTES = 16_000_000
MAX_STEP = 10**9

ADAPTER_FILE = "adapter.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
MANIFEST_FILE = "manifest.json"
FOLDER = "checkpoints"

# Left free by a save, for what is written beside checkpoints: metrics and the like.
MARGIN_BYTES = 1 << 20
# A file's own header, an array's part of it, and the manifest: generous.
_FILE_BYTES = 64 << 10
_ARRAY_BYTES = 256
_NAME = re.compile(r"step-([0-9]{6,10})")
_UNFINISHED = re.compile(r"\.step-[0-9]{6,10}\.tmp")
_REPLACED = re.compile(r"\.(step-[0-9]{6,10})\.old")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """What was saved after `step` updates; arrays by global name."""

    path: Path
    step: int
    adapter: dict[str, npt.NDArray[Any]]
    optimizer: dict[str, npt.NDArray[Any]]
    state: dict[str, Any]


def checkpoint_bytes(*sets: Arrays) -> int:
    """Give what a checkpoint of these arrays takes on the disk, or a little more."""
    arrays = [array for arrays in sets for array in arrays.values()]
    return sum(array.nbytes + _ARRAY_BYTES for array in arrays) + _FILE_BYTES


def expected_checkpoint_bytes(*, array_bytes: int, num_arrays: int) -> int:
    """Give the same before there is one, from what all its arrays hold."""
    return array_bytes + _ARRAY_BYTES * num_arrays + _FILE_BYTES


def save_checkpoint(
    run_dir: Path, *, step: int, adapter: Arrays, optimizer: Arrays, state: Mapping[str, Any]
) -> Path:
    """Write the checkpoint of `step`, read it back, and only then let it exist.

    `state` is plain JSON. An older checkpoint of the same step stays until the new one is proven.
    """
    with disk_errors(f"the checkpoint of step {step}", run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    return publish_checkpoint(
        write_checkpoint(run_dir, step=step, adapter=adapter, optimizer=optimizer, state=state)
    )


def unfinished_name(step: int) -> str:
    """Name the folder in which a checkpoint is made, and deleted; it never counts as one."""
    return f".step-{step:06d}.tmp"


def write_checkpoint(
    run_dir: Path, *, step: int, adapter: Arrays, optimizer: Arrays, state: Mapping[str, Any]
) -> Path:
    """Write and verify all files of a checkpoint in a folder that does not count yet; give it.

    What earlier attempts left behind is deleted first. Raises DiskError, and then leaves nothing.
    """
    what = f"the checkpoint of step {step}"
    folder = run_dir / FOLDER
    temp = folder / unfinished_name(step)
    with disk_errors(what, run_dir):
        folder.mkdir(exist_ok=True)
        _delete_leftovers(folder)
        needed_bytes = checkpoint_bytes(adapter, optimizer) + MARGIN_BYTES
        require_free_bytes(run_dir, needed_bytes=needed_bytes, what=what)
        temp.mkdir()
        try:
            _write_files(temp, step, adapter, optimizer, state)
            _check_written(temp, what)
        except BaseException:
            shutil.rmtree(temp, ignore_errors=True)
            raise
    return temp


def _check_written(temp: Path, what: str) -> None:
    try:
        load_checkpoint(temp)
    except ConfigError as error:
        raise DiskError(
            f"{what} was written, but cannot be read back: {error}",
            obstacle=f"does not give back what was written ({error})",
        ) from None


def publish_checkpoint(temp: Path) -> Path:
    """Let what `write_checkpoint` gave exist, under its own name; may be tried again."""
    final = temp.with_name(temp.name.removeprefix(".").removesuffix(".tmp"))
    old = final.with_name(f".{final.name}.old")
    with disk_errors(f"the checkpoint {final.name}", final.parent):
        # Folders cannot be swapped in one rename; between the two, `_by_step` finds the old one.
        if temp.exists() and final.exists():
            _remove(old)
            final.rename(old)
        if temp.exists():
            temp.rename(final)
        sync_directory(final.parent)
        _remove(old)
    return final


def _write_files(
    folder: Path, step: int, adapter: Arrays, optimizer: Arrays, state: Mapping[str, Any]
) -> None:
    files = {}
    for name, arrays in ((ADAPTER_FILE, adapter), (OPTIMIZER_FILE, optimizer)):
        data = save({key: np.asarray(value, order="C") for key, value in arrays.items()})
        write_synced(folder / name, data)
        point("checkpoint-write", step=step)
        files[name] = {"sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
    manifest = {"schema": SCHEMA, "step": step, "files": files, "state": dict(state)}
    encoded = json.dumps(manifest | {"sha256": _digest(manifest)}, allow_nan=False, indent=1)
    if len(encoded) > MAX_MANIFEST_BYTES:
        raise ConfigError(
            f"the state saved with step {step} has {len(encoded)} characters, "
            f"the limit is {MAX_MANIFEST_BYTES}"
        )
    sync_directory(folder)
    write_synced(folder / MANIFEST_FILE, encoded.encode())
    sync_directory(folder)


def _digest(manifest: Mapping[str, Any]) -> str:
    """Digest what a manifest says, however it is laid out: it vouches for all other files."""
    said = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _delete_leftovers(folder: Path) -> None:
    """Delete what saves and deletions that were cut short have left."""
    for path in list(folder.iterdir()):
        replaced = _REPLACED.fullmatch(path.name)
        if _UNFINISHED.fullmatch(path.name) or (replaced and (folder / replaced[1]).exists()):
            _remove(path)


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


def check_manifest(path: Path, digests: Mapping[str, str]) -> None:
    """Refuse a manifest that does not vouch for files with these SHA-256; reads no other file.

    Raises ConfigError.
    """
    try:
        _, files, _ = _read_manifest(path)
    except (OSError, ValueError, ProtocolError) as error:
        raise ConfigError(f"its {MANIFEST_FILE} is damaged: {error}") from None
    if {name: sha256 for name, (_, sha256) in files.items()} != digests:
        raise ConfigError(f"its {MANIFEST_FILE} is of other files")


def _load(path: Path) -> Checkpoint:
    step, files, state = _read_manifest(path)
    adapter, optimizer = (
        load(_verified(path / name, *files[name])) for name in (ADAPTER_FILE, OPTIMIZER_FILE)
    )
    return Checkpoint(path=path, step=step, adapter=adapter, optimizer=optimizer, state=state)


def _read_manifest(path: Path) -> tuple[int, dict[str, tuple[int, str]], dict[str, Any]]:
    """Give a manifest's step, each file's bytes and SHA-256, and the state."""
    size = (path / MANIFEST_FILE).stat().st_size
    if size > MAX_MANIFEST_BYTES:
        raise ProtocolError(f"{MANIFEST_FILE} has {size} bytes, the limit is {MAX_MANIFEST_BYTES}")
    text = (path / MANIFEST_FILE).read_text(encoding="utf-8")
    plain = parse_json(text, place=MANIFEST_FILE, max_chars=MAX_MANIFEST_BYTES)
    files = {}
    with Fields(plain, MANIFEST_FILE) as fields:
        fields.whole("schema", low=SCHEMA, high=SCHEMA)
        step = fields.whole("step", low=0, high=MAX_STEP)
        if fields.text("sha256") != _digest(plain):
            raise ProtocolError(f"{MANIFEST_FILE} does not have the SHA-256 that it names")
        named = _NAME.search(path.name)
        if named and int(named[1]) != step:
            raise ProtocolError(f"its files are of step {step}")
        with fields.inner("files") as entries:
            for name in (ADAPTER_FILE, OPTIMIZER_FILE):
                with entries.inner(name) as entry:
                    files[name] = entry.whole("size_bytes", low=0), entry.text("sha256")
        fields.inner("state")
    return step, files, plain["state"]


def _verified(path: Path, size_bytes: int, sha256: str) -> bytes:
    """Read one file; its size is compared before memory is taken for it."""
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
            say(f"{error}; it is skipped, and the one before is taken, if there is one")
    return None


def checkpoint_of(run_dir: Path, step: int) -> Checkpoint | None:
    """Load the checkpoint of `step`; None: it is not there, or not whole."""
    for path in _by_step(run_dir):
        if _step_of(path) == step and _is_whole(path):
            return load_checkpoint(path)
    return None


def checkpoint_steps(run_dir: Path) -> list[int]:
    """Give the steps that have a checkpoint, whole or not, oldest first."""
    return [_step_of(path) for path in _by_step(run_dir)]


def steps_to_keep(steps: Collection[int], *, keep: int, best_step: int | None) -> list[int]:
    """Choose the `keep` newest steps and the best one; oldest first."""
    newest = sorted(steps)[-keep:]
    return sorted({*newest, *(step for step in steps if step == best_step)})


def prune(
    run_dir: Path, *, keep: int, verified: Collection[Path] = (), best_step: int | None = None
) -> list[Path]:
    """Delete what is older than the `keep` newest whole checkpoints; gives the paths deleted.

    The best one stays. Damaged ones do not count, so the last good one cannot be deleted for
    their sake. Those in `verified` are known to be whole and are not read again.
    """
    if keep < 1:
        raise ConfigError(f"'keep' must be at least 1, got {keep}")
    removed = []
    whole = 0
    for path in reversed(_by_step(run_dir)):
        if whole >= keep:
            if _step_of(path) == best_step:
                continue
            _delete(path)
            removed.append(path)
        elif path in verified or _is_whole(path):
            whole += 1
    return removed


def delete_steps(run_dir: Path, *, spare: Collection[int]) -> None:
    """Delete the checkpoints of all other steps than those to `spare`."""
    for path in _by_step(run_dir):
        if _step_of(path) not in spare:
            _delete(path)


def _delete(path: Path) -> None:
    """Delete a checkpoint; cut short, that does not look like a damaged one."""
    doomed = path.with_name(unfinished_name(_step_of(path)))
    with disk_errors("a deletion", path.parent):
        _remove(doomed)
        path.rename(doomed)
        _remove(doomed)


def _is_whole(path: Path) -> bool:
    try:
        load_checkpoint(path)
    except ConfigError:
        return False
    return True


def _by_step(run_dir: Path) -> list[Path]:
    """List checkpoint folders, oldest step first; leftovers of cut-short saves do not match.

    One that was just moved aside for its successor, which then did not come, is taken for it.
    """
    folder = run_dir / FOLDER
    if not folder.is_dir():
        return []
    found = [
        path
        for path in folder.iterdir()
        if _NAME.fullmatch(path.name)
        or ((replaced := _REPLACED.fullmatch(path.name)) and not (folder / replaced[1]).exists())
    ]
    return sorted(found, key=_step_of)


def _step_of(path: Path) -> int:
    named = _NAME.search(path.name)
    assert named is not None
    return int(named[1])
