"""The encoded rows of a run as a file in its directory, so that it can go on without the data.

Owns the file's layout and its digest. Must not know where rows come from, nor batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from exo_train.errors import DataError
from exo_train.train.durable import disk_errors, write_durable
from exo_train.train.examples import Example

ROWS_FILE = "rows.safetensors"

_TRAIN, _HELD_OUT, _DIGEST = "train", "held_out", "sha256"


def write_rows(run_dir: Path, *, train: Sequence[Example], held_out: Sequence[Example]) -> Path:
    """Write token ids and masks of all rows, in their order; raises DiskError."""
    arrays = {**_packed(_TRAIN, train), **_packed(_HELD_OUT, held_out)}
    arrays[_DIGEST] = _digest(arrays)
    path = run_dir / ROWS_FILE
    with disk_errors(ROWS_FILE, run_dir):
        write_durable(path, save(arrays))
    return path


def read_rows(run_dir: Path, *, vocab_size: int) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """Give the training and the held-out rows that `write_rows` wrote; raises DataError."""
    path = run_dir / ROWS_FILE
    try:
        arrays = load(path.read_bytes())
        stored = arrays.pop(_DIGEST)
        if not np.array_equal(stored, _digest(arrays)):
            raise ValueError("it does not have the SHA-256 that it names")
        train, held_out = (_unpacked(part, arrays, vocab_size) for part in (_TRAIN, _HELD_OUT))
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{path} cannot be read: {reason}; name the data with --data") from None
    except (SafetensorError, ValueError, KeyError) as error:
        raise DataError(f"{path} is damaged: {error}; name the data with --data") from None
    return train, held_out


def _packed(part: str, examples: Sequence[Example]) -> dict[str, npt.NDArray[Any]]:
    """Give one array per field, with all rows end to end."""
    return {
        f"{part}.lengths": np.array([len(e.tokens) for e in examples], np.int32),
        f"{part}.tokens": np.array([t for e in examples for t in e.tokens], np.int32),
        f"{part}.supervised": np.array([s for e in examples for s in e.supervised], np.bool_),
    }


def _unpacked(
    part: str, arrays: Mapping[str, npt.NDArray[Any]], vocab_size: int
) -> tuple[Example, ...]:
    lengths, tokens, supervised = (
        arrays[f"{part}.{field}"] for field in ("lengths", "tokens", "supervised")
    )
    if [array.ndim for array in (lengths, tokens, supervised)] != [1, 1, 1]:
        raise ValueError(f"its {part} rows are no lists")
    ends = np.cumsum(lengths)
    num_tokens = int(ends[-1]) if len(ends) else 0
    if (lengths < 1).any() or not num_tokens == len(tokens) == len(supervised):
        raise ValueError(f"its {len(lengths)} {part} rows do not fill its {len(tokens)} tokens")
    if ((tokens < 0) | (tokens >= vocab_size)).any():
        raise ValueError(f"its {part} rows have token ids beyond the model's {vocab_size}")
    return tuple(
        Example(
            tokens=tuple(tokens[end - length : end].tolist()),
            supervised=tuple(supervised[end - length : end].tolist()),
            where=f"{ROWS_FILE} {part} row {number}",
        )
        for number, (length, end) in enumerate(zip(lengths, ends, strict=True), start=1)
    )


def _digest(arrays: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.tobytes())
    return np.frombuffer(digest.digest(), np.uint8)
