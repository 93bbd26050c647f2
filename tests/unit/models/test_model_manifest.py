"""The manifest fingerprints a model, survives its JSON, and refuses what a peer made up."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exo_train.errors import ModelError
from exo_train.models.manifest import ModelManifest, build_manifest
from exo_train.models.open import open_model
from exo_train.models.safetensors_dir import SafetensorsDir
from tests.tiny_models import make_tiny_gguf, make_tiny_model

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def manifest_of(path: Path, cache_dir: Path | None = None) -> ModelManifest:
    spec, source = open_model(path)
    return build_manifest(source, spec, cache_dir=cache_dir)


@pytest.fixture
def manifest(tmp_path: Path) -> ModelManifest:
    return manifest_of(make_tiny_model(tmp_path / "m", num_layers=2))


def test_digests_are_of_the_encoded_bytes(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, num_layers=1, dtype="BF16")
    manifest = manifest_of(path)
    for name, digest in manifest.digests.items():
        assert digest == hashlib.sha256(SafetensorsDir(path).read(name)).hexdigest()


def test_json_gives_the_same_manifest(tmp_path: Path, manifest: ModelManifest) -> None:
    assert ModelManifest.from_json(manifest.to_json(), place="peer") == manifest
    quantised = manifest_of(make_tiny_gguf(tmp_path / "m.gguf", encoding="Q8_0", num_layers=1))
    assert ModelManifest.from_json(quantised.to_json(), place="peer") == quantised


def test_one_changed_byte_or_option_changes_the_hash(tmp_path: Path) -> None:
    original = manifest_of(make_tiny_model(tmp_path / "a", num_layers=1))
    assert manifest_of(make_tiny_model(tmp_path / "b", num_layers=1)) == original
    theta = manifest_of(make_tiny_model(tmp_path / "c", num_layers=1, rope_theta=10001.0))
    file = tmp_path / "b" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    flipped = manifest_of(tmp_path / "b")
    assert len({original.model_hash, theta.model_hash, flipped.model_hash}) == 3
    assert sum(original.digests[n] != d for n, d in flipped.digests.items()) == 1


def test_subset_keeps_the_whole_models_hash(manifest: ModelManifest) -> None:
    part = manifest.subset(start=1, end=2, embedding=False, head=True)
    shapes = manifest.spec.tensor_shapes(start=1, end=2, embedding=False, head=True)
    assert set(part.infos) == set(part.digests) == set(shapes)
    assert part.model_hash == manifest.model_hash
    assert ModelManifest.from_json(part.to_json(), place="peer") == part
    with pytest.raises(ModelError, match=r"lacks 9 tensors, first 'model\.layers\.0\.input_lay"):
        part.subset(start=0, end=1, embedding=False, head=False)


class CountingSource(SafetensorsDir):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.num_reads = 0

    def read(self, name: str) -> bytes:
        self.num_reads += 1
        return super().read(name)


def test_unchanged_files_are_hashed_once(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", num_layers=2, shards=2)
    spec, _ = open_model(path)
    cache = tmp_path / "cache"
    first = CountingSource(path)
    manifest = build_manifest(first, spec, cache_dir=cache)
    assert first.num_reads == len(spec.all_tensor_shapes())
    second = CountingSource(path)
    assert build_manifest(second, spec, cache_dir=cache) == manifest
    assert second.num_reads == 0
    shard = path / "model-00001-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    os.utime(shard, ns=(1, 1))
    third = CountingSource(path)
    changed = build_manifest(third, spec, cache_dir=cache)
    assert 0 < third.num_reads < first.num_reads
    assert changed.model_hash == manifest_of(path).model_hash != manifest.model_hash
    for file in (cache / "digests").iterdir():
        file.write_text("{broken")
    assert build_manifest(CountingSource(path), spec, cache_dir=cache) == changed


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", num_layers=1)
    (tmp_path / "cache").write_text("a file where the directory should be")
    assert manifest_of(path, tmp_path / "cache") == manifest_of(path)


def tensor(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["tensors"][Q_PROJ].update(changes)


def rename(document: dict[str, Any]) -> None:
    document["tensors"]["model.layers.9.mlp.up_proj.weight"] = document["tensors"].pop(Q_PROJ)


def add(document: dict[str, Any]) -> None:
    document["tensors"]["../../etc/passwd"] = document["tensors"][Q_PROJ]


def set_field(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.update({key: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_field("schema", 2), "'schema' must be from 1 to 1"),
        (set_field("config", 7), "'config' must be text"),
        (set_field("config", "[]"), "must hold a JSON object"),
        (set_field("config", '{"model_type":"gemma3"}'), "architecture 'gemma3'"),
        (set_field("tensors", []), "'tensors' must be an object of at most 20 names"),
        (set_field("model_hash", "0" * 64), "'model_hash' does not match"),
        (set_field("model_hash", "xyz"), "'model_hash' must be 64 hex digits"),
        (rename, "tensor 'model.layers.9.mlp.up_proj.weight' does not belong to this model"),
        (add, "at most 20 names"),
        (tensor(shape=[64, 65]), r"must have shape \[64, 64\]"),
        (tensor(shape=[-64, -64]), r"must have shape \[64, 64\]"),
        (tensor(num_bytes=-1), "'num_bytes' must be from 0"),
        (tensor(num_bytes=1 << 60), "'num_bytes' must be from 0"),
        (tensor(num_bytes=64), "F32 needs 16384 bytes, got 64"),
        (tensor(num_bytes=16384.0), "'num_bytes' must be a whole number"),
        (tensor(encoding="PICKLE"), "stored as PICKLE, which is not supported"),
        (tensor(encoding="F" * 100), "'encoding' has 100 characters"),
        (tensor(rope_heads=3), "'rope_heads' must be 0 or 4, got 3"),
        (tensor(rope_heads=-4), "'rope_heads' must be from 0 to 4"),
        (tensor(sha256="A" * 64), "'sha256' must be 64 hex digits"),
        (tensor(sha256=None), "'sha256' must be text"),
    ],
)
def test_what_a_peer_made_up_is_refused(
    manifest: ModelManifest, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    document = json.loads(manifest.to_json())
    change(document)
    with pytest.raises(ModelError, match=message) as caught:
        ModelManifest.from_json(json.dumps(document), place="kitchen-mac")
    assert str(caught.value).startswith("kitchen-mac: ")


def test_hostile_documents_are_refused_at_once(manifest: ModelManifest) -> None:
    for document in ("", "null", "[" * 200_000, "x" * (33 << 20)):
        with pytest.raises(ModelError, match=r"^peer: "):
            ModelManifest.from_json(document, place="peer")
    tampered = dataclasses.replace(manifest, digests=dict.fromkeys(manifest.digests, "0" * 64))
    with pytest.raises(ModelError, match="'model_hash' does not match"):
        ModelManifest.from_json(tampered.to_json(), place="peer")
