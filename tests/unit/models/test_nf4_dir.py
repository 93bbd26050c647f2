"""Directories of bitsandbytes' NF4 weights: read to its numbers, hashed whole, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from exo_train.errors import ConfigError, ModelError
from exo_train.models.decode import decode, decode_packed
from exo_train.models.manifest import ModelManifest, build_manifest
from exo_train.models.open import open_model
from exo_train.models.packed import NF4_PACKING, NF4_VALUES
from tests.packed_models import make_nf4_model

DOWN = "model.layers.0.mlp.down_proj.weight"
Q = "model.layers.0.self_attn.q_proj.weight"
STATE = f"{DOWN}.quant_state.bitsandbytes__nf4"


def plainly(parts: dict[str, np.ndarray], name: str, shape: tuple[int, int]) -> np.ndarray:
    """Dequantise one value after the other, as the format is described."""
    state = json.loads(parts[f"{name}.quant_state.bitsandbytes__nf4"].tobytes())
    numbers = np.empty(shape[0] * shape[1], np.float32)
    for place in range(len(numbers)):
        byte = int(parts[name].reshape(-1)[place // 2])
        code = byte & 15 if place % 2 else byte >> 4
        scale = parts[f"{name}.absmax"][place // 64]
        if "nested_offset" in state:
            of_block = parts[f"{name}.nested_absmax"][place // 64 // 256]
            scale = parts[f"{name}.nested_quant_map"][scale] * of_block
            scale = scale + np.float32(state["nested_offset"])
        numbers[place] = NF4_VALUES[code] * scale
    return numbers.reshape(shape)


@pytest.mark.parametrize("double", [True, False])
def test_numbers_are_those_that_the_format_says(tmp_path: Path, double: bool) -> None:
    model = make_nf4_model(tmp_path / "model", num_layers=1, double=double, num_heads=8)
    spec, source = open_model(model)
    assert set(source.infos) == set(spec.all_tensor_shapes())
    info = source.infos[DOWN]
    assert (info.encoding, info.shape) == ("NF4", (128, 256))
    raw = source.read(DOWN)
    assert len(raw) == info.num_bytes == 128 * 256 // 2 + 128 * 256 // 64 * 4
    expected = plainly(load_file(model / "model.safetensors"), DOWN, (128, 256))
    assert np.array_equal(decode(info, raw).to_numpy(), expected)
    assert decode_packed(info, raw).packing == NF4_PACKING
    assert source.infos["model.embed_tokens.weight"].encoding == "F32"


def test_scales_are_part_of_what_is_hashed(tmp_path: Path) -> None:
    model = make_nf4_model(tmp_path / "model", num_layers=1)

    def manifest() -> ModelManifest:
        spec, source = open_model(model)
        return build_manifest(source, spec, cache_dir=tmp_path / "cache")

    before = manifest()
    weights = load_file(model / "model.safetensors")
    weights[f"{Q}.nested_absmax"] = weights[f"{Q}.nested_absmax"] * np.float32(1.01)
    save_file(weights, model / "model.safetensors")
    after = manifest()
    assert {n for n in before.digests if before.digests[n] != after.digests[n]} == {Q}
    assert ModelManifest.from_json(after.to_json(), place="peer") == after


def test_modules_may_be_left_out(tmp_path: Path) -> None:
    model = make_nf4_model(tmp_path / "model", num_layers=1, tied=False, skipped=("down_proj",))
    spec, source = open_model(model)
    assert (source.infos[DOWN].encoding, source.infos[Q].encoding) == ("F32", "NF4")
    assert source.infos["lm_head.weight"].encoding == "F32"
    spec.validate_quantize(4)  # of what is left out


def test_quantising_it_again_is_refused(tmp_path: Path) -> None:
    spec, _ = open_model(make_nf4_model(tmp_path / "model", num_layers=1))
    with pytest.raises(ConfigError, match=r"quantised already \(NF4 in groups of 64\)"):
        spec.validate_quantize(4)


def described(**changes: Any) -> np.ndarray:
    state = {"quant_type": "nf4", "blocksize": 64, "shape": [128, 256], "nested_blocksize": 256}
    return np.frombuffer(json.dumps(state | {"nested_offset": 0.5} | changes).encode(), np.uint8)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({STATE: None}, "is not in NF4, against its config"),
        ({STATE: described(blocksize=128)}, "nf4 in blocks of 128 is not supported"),
        ({STATE: described(quant_type="fp4")}, "fp4 in blocks of 64 is not supported"),
        ({STATE: described(shape=[128, 128])}, "does not lie in 16384 bytes of U8"),
        ({STATE: described(shape=[128, 1e9])}, "'shape' must be two whole numbers"),
        ({STATE: described(shape=[256, 128])}, "the config needs"),
        ({STATE: described(nested_offset=float("inf"))}, "'nested_offset' must be above 0"),
        ({STATE: np.zeros(5000, np.uint8)}, "its description is too long"),
        ({STATE: np.zeros(8, np.uint8)}, "not valid JSON"),
        ({DOWN: np.zeros((16384, 1), np.int8)}, "does not lie in 16384 bytes of I8"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    tmp_path: Path, changes: dict[str, np.ndarray | None], cause: str
) -> None:
    model = make_nf4_model(tmp_path / "model", num_layers=1, changes=changes)
    with pytest.raises(ModelError, match=cause):
        open_model(model)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({f"{DOWN}.absmax": None}, "absmax' must have 512 values in U8, is missing"),
        ({f"{DOWN}.absmax": np.zeros(512, np.float32)}, r"in U8, is F32 \[512\]"),
        ({f"{DOWN}.nested_absmax": np.zeros(3, np.float32)}, "nested_absmax' must have 2 values"),
        ({f"{DOWN}.quant_map": np.zeros(16, np.float32)}, "has other values than NF4's"),
    ],
)
def test_damaged_parts_are_refused_when_they_are_read(
    tmp_path: Path, changes: dict[str, np.ndarray | None], cause: str
) -> None:
    model = make_nf4_model(tmp_path / "model", num_layers=1, changes=changes)
    _, source = open_model(model)
    with pytest.raises(ModelError, match=cause):
        source.read(DOWN)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"bnb_4bit_quant_type": "fp4"}, "bitsandbytes' fp4 stored as uint8 is not supported"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, "nf4 stored as bfloat16 is not supported"),
        ({"load_in_4bit": False, "load_in_8bit": True}, "bitsandbytes' 8 bits is not supported"),
        ({"llm_int8_skip_modules": [3]}, "'llm_int8_skip_modules' must be a list of names"),
    ],
)
def test_other_ways_of_bitsandbytes_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], cause: str
) -> None:
    model = make_nf4_model(tmp_path / "model", num_layers=1)
    config = json.loads((model / "config.json").read_text("utf-8"))
    config["quantization_config"] |= changes
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelError, match=cause):
        open_model(model)
