"""Safetensors directories are read exactly, and every kind of damage is named (F65, F67, L82)."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exo_train.errors import ModelError
from exo_train.models.decode import decode
from exo_train.models.open import open_model
from exo_train.models.safetensors_dir import SafetensorsDir, read_header
from exo_train.wire.tensor import DType
from tests.tiny_models import make_tiny_model, tiny_config, tiny_weights


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [("F32", 0.0), ("F16", 2e-3), ("BF16", 2.0**-8)])
def test_every_tensor_reads_back(tmp_path: Path, shards: int, dtype: str, tolerance: float) -> None:
    spec, source = open_model(make_tiny_model(tmp_path, dtype=dtype, shards=shards, num_layers=2))
    weights = tiny_weights(tiny_config(num_layers=2))
    assert set(source.infos) == set(weights) == set(spec.all_tensor_shapes())
    for name, expected in weights.items():
        host = decode(source.infos[name], source.read(name))
        assert host.dtype is {"F32": DType.FP32, "F16": DType.FP16, "BF16": DType.BF16}[dtype]
        np.testing.assert_allclose(
            host.to_numpy().astype(np.float32), expected, rtol=tolerance, atol=tolerance / 8
        )


def test_truncated_file_is_named_with_both_sizes(tmp_path: Path) -> None:
    file = make_tiny_model(tmp_path, num_layers=1) / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(
        ModelError, match=rf"model\.safetensors: truncated, .* {len(whole)} .* {len(whole) - 100}"
    ):
        open_model(tmp_path)
    file.write_bytes(whole[:100])
    with pytest.raises(ModelError, match="truncated, its header alone needs"):
        open_model(tmp_path)
    file.write_bytes(whole[:5])
    with pytest.raises(ModelError, match="truncated, has 5 bytes"):
        open_model(tmp_path)
    file.write_bytes(whole + b"x")
    with pytest.raises(ModelError, match="has foreign bytes at its end"):
        open_model(tmp_path)


def test_file_cut_after_opening_is_noticed_on_read(tmp_path: Path) -> None:
    file = make_tiny_model(tmp_path, num_layers=1) / "model.safetensors"
    source = SafetensorsDir(tmp_path)
    file.write_bytes(file.read_bytes()[:-100])
    last = list(source.infos)[-1]
    with pytest.raises(ModelError, match=r"model\.safetensors: truncated"):
        source.read(last)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_lfs_pointer_is_called_one(tmp_path: Path, name: str) -> None:
    make_tiny_model(tmp_path, num_layers=1)
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123456\n"
    (tmp_path / name).write_bytes(pointer)
    with pytest.raises(ModelError, match=rf"{name}: is a git-LFS pointer of {len(pointer)} bytes"):
        open_model(tmp_path)


def write_header(file: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


def entry(start: int, end: int, shape: list[Any], dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[1]", "must hold a JSON object"),
        (b"{not json", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        ({"a": entry(0, 16, [4])}, "truncated"),
        ({"a": entry(0, 8, [4])}, "needs 16 bytes, the header gives 8"),
        ({"a": entry(0, 4, [1]), "b": entry(0, 4, [1])}, "starts at byte 0 of the data instead"),
        ({"a": entry(4, 8, [1])}, "starts at byte 4 of the data instead of 0"),
        ({"a": entry(0, 4, [-1])}, "damaged header entry"),
        ({"a": entry(8, 4, [1])}, "damaged header entry"),
        ({"a": entry(0, 4, [True])}, "damaged header entry"),
        ({"a": entry(0, 4, [1], dtype=7)}, "damaged header entry"),
        ({"a": 3}, "damaged header entry"),
    ],
)
def test_damaged_headers_are_refused(tmp_path: Path, header: Any, message: str) -> None:
    file = write_header(tmp_path / "x.safetensors", header, b"\0" * 8)
    with pytest.raises(ModelError, match=message) as caught:
        read_header(file)
    assert str(caught.value).startswith(str(file))


def test_header_length_is_checked_before_memory_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelError, match="above the limit of 100000000"):
        read_header(file)


def test_a_needed_tensor_of_unknown_type_is_refused_by_type(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, num_layers=1)
    header = {"model.embed_tokens.weight": entry(0, 320 * 64, [320, 64], "F8_E4M3")}
    file = tmp_path / "model.safetensors"
    old = read_header(file)
    for info, _ in old:
        if info.name not in header:
            start = max(value["data_offsets"][1] for value in header.values())
            header[info.name] = entry(start, start + info.num_bytes, list(info.shape))
    end = max(value["data_offsets"][1] for value in header.values())
    write_header(file, header, b"\0" * end)
    with pytest.raises(ModelError, match=r"'model\.embed_tokens\.weight': stored as F8_E4M3"):
        open_model(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, shards=3, num_layers=2)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        ModelError,
        match=r"model-00002-of-00003\.safetensors: missing, though model\.safetensors\.index\.json",
    ):
        open_model(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors.incomplete").touch()
    with pytest.raises(ModelError, match=r"an interrupted download left .*\.incomplete"):
        open_model(tmp_path)


def test_missing_index_is_named(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, shards=2, num_layers=2)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json is missing"):
        open_model(tmp_path)


@pytest.mark.parametrize("shard", ["../secret.safetensors", "a\\b.safetensors", "weights.bin", 3])
def test_index_cannot_point_elsewhere(tmp_path: Path, shard: Any) -> None:
    make_tiny_model(tmp_path, shards=2, num_layers=1)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))
    with pytest.raises(ModelError, match="is not a shard's file name"):
        open_model(tmp_path)


def test_index_that_disagrees_with_a_shard_is_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, shards=2, num_layers=1)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"00001-of-00002\.safetensors: lacks tensor 'model\.norm"):
        open_model(tmp_path)


class Bomb:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (open, (str(self.marker), "w"))  # type: ignore[return-value]

    def __init__(self, marker: Path) -> None:
        self.marker = marker


def test_pickled_weights_are_refused_and_never_run(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, num_layers=1)
    (tmp_path / "model.safetensors").unlink()
    marker = tmp_path / "ran"
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(marker)))
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.* convert the model to safetensors"):
        open_model(tmp_path)
    assert not marker.exists()


def test_missing_directory_config_and_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere: no such model directory or file"):
        open_model(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"not a model directory, it has no config\.json"):
        open_model(tmp_path)
    make_tiny_model(tmp_path, num_layers=1)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor model\.safetensors\.in"):
        open_model(tmp_path)
    (tmp_path / "tiny.gguf").touch()
    with pytest.raises(ModelError, match=r"give the GGUF file itself: .*tiny\.gguf"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: not valid JSON"):
        open_model(tmp_path)


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, num_layers=2)
    config = json.loads((tmp_path / "config.json").read_text())
    config_file = tmp_path / "config.json"
    config_file.write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(
        ModelError, match=r"9 of 29 tensors are missing: model\.layers\.2\.input_layernorm\.weight"
    ):
        open_model(tmp_path)
    config_file.write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(ModelError, match=r"'lm_head\.weight' is missing; .*tie_word_embeddings"):
        open_model(tmp_path)
    config_file.write_text(json.dumps({**config, "intermediate_size": 100}))
    with pytest.raises(
        ModelError, match=r"gate_proj\.weight' has shape \[96, 64\], the config needs \[100, 64\]"
    ):
        open_model(tmp_path)
