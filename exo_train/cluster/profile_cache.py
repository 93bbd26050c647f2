"""Block times measured earlier on this device, in a file of its home.

Owns what makes two measurements the same, how long one counts, and the file. Must not measure,
and must not import a framework: versions are read from the packages' metadata.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import exo_train
from exo_train.errors import ConfigError, ProtocolError
from exo_train.lora_config import densest_layer
from exo_train.models.fields import canonical_json
from exo_train.models.spec import ModelSpec
from exo_train.plan.block_times import BlockTimes, ProfileRequest
from exo_train.plan.fields import parse_json

SCHEMA = 1
FILE_NAME = "profiles.json"
MAX_ENTRIES = 64
MAX_FILE_BYTES = 1 << 20
MAX_AGE_S = 30 * 86400.0
# A device that was busy, or is slow, had too few calls for a result to trust for long.
MAX_UNSTEADY_AGE_S = 600.0
CLOCK_SLACK_S = 60.0  # entries from later than this were written under another clock

# All that decides a decoder layer's arithmetic; not how many there are, nor rope's numbers.
_SHAPE = (
    "architecture", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim",
    "vocab_size", "tied_embeddings", "attention_bias", "mlp_bias", "sliding_window",
)  # fmt: skip
_PACKAGES = {"mlx": ("mlx", "mlx-lm"), "torch": ("torch", "transformers")}
# What decides a worker's speed from outside, with the fault that makes a device slow for a test.
_ENVIRONMENT = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "EXO_TRAIN_TEST_FAULT",
)  # fmt: skip


def profile_key(request: ProfileRequest, *, chip: str) -> str:
    """Give a hash of everything that a block's time depends on, versions included.

    `with_ends` is not in it: a profile with ends answers for one without. Nor is a GPU's number:
    those of one chip are equally fast.
    """
    spec = ModelSpec.from_config(json.loads(request.config_json), place="the model's config")
    packages = _PACKAGES.get(request.backend, (request.backend,))
    parts = {
        "shape": {name: getattr(spec, name) for name in _SHAPE},
        "backend": request.backend,
        "device": request.device.partition(":")[0],
        "chip": chip,
        "compute_dtype": request.compute_dtype,
        "microbatch_size": request.microbatch_size,
        "sequence": request.sequence,
        "checkpoint_activations": request.checkpoint_activations,
        "quantisation": dataclasses.asdict(spec.quantisation) if spec.quantisation else {},
        "quantize": request.quantize,
        "base_weights": request.base_weights,
        "ranks": densest_layer(request.lora, spec.num_layers),
        "full": request.lora.full,
        "dora": request.lora.dora,
        "dropout": request.lora.dropout > 0,
        "versions": {"exo-train": exo_train.__version__, **{p: _version(p) for p in packages}},
        "cpus": _num_cpus(),
        "environment": {name: os.environ.get(name, "") for name in _ENVIRONMENT},
    }
    return hashlib.sha256(canonical_json(parts).encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _num_cpus() -> int:
    """Count the cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class _Entry:
    measured_s: float  # seconds since 1970
    times: BlockTimes

    def counts(self, now_s: float) -> bool:
        max_age_s = MAX_AGE_S if self.times.is_steady else MAX_UNSTEADY_AGE_S
        return -CLOCK_SLACK_S <= now_s - self.measured_s <= max_age_s


class ProfileCache:
    """Reads the file at each question: it is small, and another process may have written it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME

    def get(
        self, key: str, *, with_ends: bool, now_s: float, since_s: float = 0.0
    ) -> BlockTimes | None:
        """Give what was measured; None when nothing was, it is too old, or lacks the ends.

        What is older than `since_s` does not count either.
        """
        entry = self._read().get(key)
        if entry is None or not entry.counts(now_s) or entry.measured_s < since_s:
            return None
        return None if with_ends and entry.times.ends is None else entry.times

    def put(self, key: str, times: BlockTimes, *, now_s: float) -> None:
        """Keep `times` and the newest others; a cache that cannot be written costs time only."""
        entries = {k: e for k, e in self._read().items() if e.counts(now_s)}
        entries[key] = _Entry(now_s, times)
        newest = sorted(entries.items(), key=lambda item: item[1].measured_s, reverse=True)
        content = {
            "schema": SCHEMA,
            "profiles": {
                key: {"measured_s": entry.measured_s, "times": entry.times.to_fields()}
                for key, entry in newest[:MAX_ENTRIES]
            },
        }
        with contextlib.suppress(OSError):
            self._replace(json.dumps(content).encode())

    def _read(self) -> dict[str, _Entry]:
        """Give every whole entry; a damaged one, or a damaged file, counts as none."""
        try:
            if self._path.stat().st_size > MAX_FILE_BYTES:
                return {}
            text = self._path.read_text("utf-8")
            stored = parse_json(text, place=FILE_NAME, max_chars=MAX_FILE_BYTES)
        except (OSError, ValueError, ProtocolError):
            return {}
        if not isinstance(stored, dict) or stored.get("schema") != SCHEMA:
            return {}
        profiles = stored.get("profiles")
        found = {key: _read_entry(e) for key, e in _items(profiles)}
        return {key: entry for key, entry in found.items() if entry is not None}

    def _replace(self, data: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self._path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def _items(profiles: object) -> list[tuple[str, Any]]:
    return list(profiles.items())[:MAX_ENTRIES] if isinstance(profiles, dict) else []


def _read_entry(value: object) -> _Entry | None:
    try:
        if not isinstance(value, dict):
            return None
        measured_s = float(value["measured_s"])
        return _Entry(measured_s, BlockTimes.from_fields(value["times"], place=FILE_NAME))
    except (KeyError, TypeError, ValueError, OverflowError, ConfigError, ProtocolError):
        return None
