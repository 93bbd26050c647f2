"""A model's fingerprint: its spec, how every tensor is stored, and a hash of each.

Owns the manifest's JSON form, its strict reading (it comes from other devices) and the cache of
digests. Must not decode tensors or open a socket.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from exo_train.errors import ModelError
from exo_train.models.decode import encoded_num_bytes
from exo_train.models.fields import canonical_json, parse_object, text, whole
from exo_train.models.spec import MAX_CONFIG_CHARS, ModelSpec
from exo_train.models.tensors import TensorInfo, TensorSource

SCHEMA = 1
MAX_MANIFEST_CHARS = 32 << 20
_MAX_TENSOR_BYTES = 1 << 40
_SHA256 = re.compile(r"[0-9a-f]{64}")


@runtime_checkable
class FileBacked(Protocol):
    """A source whose tensors lie in files of this device."""

    def files_of(self, name: str) -> tuple[Path, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelManifest:
    """`model_hash` covers the whole model, also in a manifest of just one stage's tensors."""

    spec: ModelSpec
    infos: Mapping[str, TensorInfo]
    digests: Mapping[str, str]  # sha256 of the encoded bytes, hex
    model_hash: str

    def subset(self, *, start: int, end: int, embedding: bool, head: bool) -> ModelManifest:
        """Keep what one stage needs."""
        names = self.spec.tensor_shapes(start=start, end=end, embedding=embedding, head=head)
        if missing := [name for name in names if name not in self.infos]:
            raise ModelError(f"the manifest lacks {len(missing)} tensors, first '{missing[0]}'")
        return dataclasses.replace(
            self,
            infos={name: self.infos[name] for name in names},
            digests={name: self.digests[name] for name in names},
        )

    def to_json(self) -> str:
        return canonical_json(
            {
                "schema": SCHEMA,
                "config": self.spec.config_json,
                "tensors": _tensor_entries(self.infos, self.digests),
                "model_hash": self.model_hash,
            }
        )

    @classmethod
    def from_json(cls, document: str, *, place: str) -> ModelManifest:
        """Read what another device sent; `place` names it in messages."""
        if len(document) > MAX_MANIFEST_CHARS:
            raise ModelError(
                f"{place}: manifest of {len(document)} characters is above the limit of "
                f"{MAX_MANIFEST_CHARS}"
            )
        fields = parse_object(document, place=place)
        whole(fields, "schema", place=place, low=SCHEMA, high=SCHEMA)
        config_json = text(fields, "config", place=place, max_chars=MAX_CONFIG_CHARS)
        spec = ModelSpec.from_config(parse_object(config_json, place=place), place=place)
        shapes = spec.all_tensor_shapes()
        tensors = fields.get("tensors")
        if not isinstance(tensors, dict) or len(tensors) > len(shapes):
            raise ModelError(f"{place}: 'tensors' must be an object of at most {len(shapes)} names")
        infos: dict[str, TensorInfo] = {}
        digests: dict[str, str] = {}
        for name, entry in tensors.items():
            if name not in shapes:
                raise ModelError(f"{place}: tensor {name[:80]!r} does not belong to this model")
            infos[name] = _read_info(name, shapes[name], entry, spec, place)
            digests[name] = _read_digest(entry, "sha256", place)
        model_hash = _read_digest(fields, "model_hash", place)
        if len(infos) == len(shapes) and model_hash != _model_hash(spec, infos, digests):
            raise ModelError(f"{place}: 'model_hash' does not match the manifest's own tensors")
        return cls(spec=spec, infos=infos, digests=digests, model_hash=model_hash)


def build_manifest(
    source: TensorSource, spec: ModelSpec, *, cache_dir: Path | None
) -> ModelManifest:
    """Hash every tensor that the spec needs; files unchanged since the last time are not read."""
    infos = {name: source.infos[name] for name in spec.all_tensor_shapes()}
    digests: dict[str, str] = {}
    for files, names in _names_by_files(source, infos).items():
        known = _cached_digests(cache_dir, files)
        fresh = {n: _sha256(source.read(n)) for n in names if n not in known}
        if fresh:
            _store_digests(cache_dir, files, {**known, **fresh})
        digests.update({name: fresh.get(name) or known[name] for name in names})
    return ModelManifest(
        spec=spec, infos=infos, digests=digests, model_hash=_model_hash(spec, infos, digests)
    )


def _sha256(data: bytes | bytearray | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def _model_hash(
    spec: ModelSpec, infos: Mapping[str, TensorInfo], digests: Mapping[str, str]
) -> str:
    whole_model = {"config": spec.config_json, "tensors": _tensor_entries(infos, digests)}
    return _sha256(canonical_json(whole_model).encode())


def _tensor_entries(
    infos: Mapping[str, TensorInfo], digests: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "encoding": info.encoding,
            "num_bytes": info.num_bytes,
            "rope_heads": info.rope_heads,
            "sha256": digests[name],
            "shape": list(info.shape),
        }
        for name, info in infos.items()
    }


def _read_info(
    name: str, shape: tuple[int, ...], entry: Any, spec: ModelSpec, place: str
) -> TensorInfo:
    place = f"{place}: tensor '{name}'"
    if not isinstance(entry, dict) or entry.get("shape") != list(shape):
        raise ModelError(f"{place}: must have shape {list(shape)}")
    encoding = text(entry, "encoding", place=place, max_chars=32)
    expected_bytes = encoded_num_bytes(encoding, shape, place=place)
    num_bytes = whole(entry, "num_bytes", place=place, low=0, high=_MAX_TENSOR_BYTES)
    if num_bytes != expected_bytes:
        raise ModelError(f"{place}: {encoding} needs {expected_bytes} bytes, got {num_bytes}")
    heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads}.get(name.split(".")[-2], 0)
    rope_heads = whole(entry, "rope_heads", place=place, low=0, high=heads, default=0)
    if rope_heads not in (0, heads):
        raise ModelError(f"{place}: 'rope_heads' must be 0 or {heads}, got {rope_heads}")
    return TensorInfo(
        name=name, encoding=encoding, shape=shape, num_bytes=num_bytes, rope_heads=rope_heads
    )


def _read_digest(entry: Mapping[str, Any], key: str, place: str) -> str:
    digest = text(entry, key, place=place, max_chars=64)
    if not _SHA256.fullmatch(digest):
        raise ModelError(f"{place}: '{key}' must be 64 hex digits")
    return digest


def _names_by_files(
    source: TensorSource, infos: Mapping[str, TensorInfo]
) -> dict[tuple[Path, ...], list[str]]:
    """Group tensors by the files they lie in; () where they lie in none."""
    groups: dict[tuple[Path, ...], list[str]] = {}
    for name in infos:
        files = source.files_of(name) if isinstance(source, FileBacked) else ()
        groups.setdefault(tuple(file.resolve() for file in files), []).append(name)
    return groups


def _cache_file(cache_dir: Path, files: tuple[Path, ...]) -> Path:
    """One cache file per weight file, so that a changed file replaces its old digests."""
    joined = "\n".join(map(str, files))
    return cache_dir / "digests" / f"{_sha256(joined.encode())[:32]}.json"


def _cache_key(files: tuple[Path, ...]) -> list[dict[str, Any]]:
    stats = [(file, file.stat()) for file in files]
    return [
        {"path": str(file), "size_bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
        for file, stat in stats
    ]


def _cached_digests(cache_dir: Path | None, files: tuple[Path, ...]) -> dict[str, str]:
    """Give digests stored for these very files; a damaged cache counts as none."""
    if cache_dir is None or not files:
        return {}
    try:
        stored = json.loads(_cache_file(cache_dir, files).read_text(encoding="utf-8"))
        if stored["key"] != _cache_key(files):
            return {}
        return {n: d for n, d in stored["digests"].items() if _SHA256.fullmatch(d)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _store_digests(
    cache_dir: Path | None, files: tuple[Path, ...], digests: dict[str, str]
) -> None:
    if cache_dir is None or not files:
        return
    target = _cache_file(cache_dir, files)
    content = canonical_json({"key": _cache_key(files), "digests": digests})
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(content)
        os.replace(temporary, target)
    except OSError:
        return  # a cache that cannot be written costs time, not correctness
