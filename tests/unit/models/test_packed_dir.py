"""Directories of quantised weights: joined into matrices, hashed with their scales, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from exo_train.errors import ModelError
from exo_train.models.manifest import ModelManifest, build_manifest
from exo_train.models.open import open_model
from exo_train.models.packed import Packing
from tests.packed_models import make_packed_model

DOWN = "model.layers.0.mlp.down_proj"
FOUR = Packing(bits=4, group_size=64)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    overrides = {DOWN: Packing(bits=8, group_size=32)}
    return make_packed_model(tmp_path / "model", FOUR, num_layers=1, overrides=overrides)


def test_a_matrix_is_one_tensor_of_its_real_shape(model: Path) -> None:
    spec, source = open_model(model)
    assert set(source.infos) == set(spec.all_tensor_shapes())
    info = source.infos[f"{DOWN}.weight"]
    assert (info.encoding, info.shape) == ("AFFINE:8:32:F32", (128, 256))
    assert source.infos["model.embed_tokens.weight"].encoding == "AFFINE:4:64:F32"
    assert source.infos["model.norm.weight"].encoding == "F32"
    assert len(source.read(info.name)) == info.num_bytes == 128 * 256 + 2 * 128 * 8 * 4


def test_another_scale_is_another_model(model: Path, tmp_path: Path) -> None:
    """Also with remembered digests, and where scales lie in a shard of their own."""
    weights = load_file(model / "model.safetensors")
    shards = {
        "model-00001-of-00002.safetensors": [n for n in weights if not n.endswith("scales")],
        "model-00002-of-00002.safetensors": [n for n in weights if n.endswith("scales")],
    }
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    (model / "model.safetensors").unlink()
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (model / "model.safetensors.index.json").write_text(index, encoding="utf-8")

    def manifest() -> ModelManifest:
        for shard, names in shards.items():
            save_file({name: weights[name] for name in names}, model / shard)
        spec, source = open_model(model)
        return build_manifest(source, spec, cache_dir=tmp_path / "cache")

    before = manifest()
    assert manifest() == before
    weights[f"{DOWN}.scales"] = weights[f"{DOWN}.scales"] * np.float32(1.01)
    after = manifest()
    changed = {name for name in before.digests if before.digests[name] != after.digests[name]}
    assert changed == {f"{DOWN}.weight"}
    assert after.model_hash != before.model_hash
    assert ModelManifest.from_json(after.to_json(), place="peer") == after


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({f"{DOWN}.biases": None}, f"'{DOWN}' has scales but no biases"),
        ({f"{DOWN}.scales": np.ones((128, 4), np.float32)}, "do not belong together at 8 bits"),
        ({f"{DOWN}.biases": np.ones((128, 8), np.float16)}, "do not belong together"),
        ({f"{DOWN}.weight": np.ones((128, 64), np.int32)}, "stored as I32 with scales in F32"),
        ({f"{DOWN}.weight": np.ones((128, 32), np.uint32)}, "do not belong together"),
        ({f"{DOWN}.scales": None}, "shape .* the config needs|stored as U32"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    model: Path, changes: dict[str, np.ndarray | None], cause: str
) -> None:
    weights = load_file(model / "model.safetensors") | changes
    kept = {name: weight for name, weight in weights.items() if weight is not None}
    save_file(kept, model / "model.safetensors")
    with pytest.raises(ModelError, match=cause):
        open_model(model)


@pytest.mark.parametrize(
    ("quantisation", "cause"),
    [
        ({"bits": 6, "group_size": 64}, "6 bits in groups of 64 are not supported"),
        ({"bits": 2, "group_size": 64}, "2 bits"),
        ({"bits": 4, "group_size": 16}, "groups of 16"),
        ({"bits": 4, "group_size": 32, "mode": "mxfp4"}, "quantised as 'mxfp4'"),
        ({"bits": 4, "group_size": 64, DOWN: {"bits": 3, "group_size": 64}}, f"{DOWN}: 3 bits"),
        ({"bits": 4, "group_size": 64, DOWN: False}, "the config says that it is not quantised"),
        ({"bits": "4", "group_size": 64}, "'bits' must be a whole number"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "quantised by gptq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes' None"),
        ({"load_in_4bit": True}, "by an unknown method"),
        ([4], "must hold a JSON object"),
    ],
)
def test_other_ways_to_quantise_are_refused_by_name(
    model: Path, quantisation: Any, cause: str
) -> None:
    config = json.loads((model / "config.json").read_text("utf-8"))
    config |= {"quantization": quantisation, "quantization_config": quantisation}
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelError, match=cause):
        open_model(model)


def test_two_settings_that_differ_are_refused(model: Path) -> None:
    config = json.loads((model / "config.json").read_text("utf-8"))
    config["quantization_config"] = {"bits": 8, "group_size": 64}
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelError, match="'quantization' and 'quantization_config' differ"):
        open_model(model)
