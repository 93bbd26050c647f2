"""GGUF files give the same tensors and config as the Hugging Face model they came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from exo_train.errors import ModelError
from exo_train.models.decode import decode
from exo_train.models.gguf_file import GgufFile
from exo_train.models.open import open_model
from exo_train.models.rope import RopeSpec
from exo_train.models.spec import ModelSpec
from exo_train.wire.tensor import DType
from tests.tiny_models import make_tiny_gguf, tiny_config, tiny_weights


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_f32_gives_the_hf_tensors_and_spec(tmp_path: Path, architecture: str, tied: bool) -> None:
    options: dict[str, Any] = {"architecture": architecture, "tied": tied, "num_layers": 2}
    spec, source = open_model(make_tiny_gguf(tmp_path / "m.gguf", **options))
    config = tiny_config(**options)
    wanted = ModelSpec.from_config(config, place="m")
    assert spec.all_tensor_shapes() == wanted.all_tensor_shapes()
    assert spec.rope == wanted.rope
    assert (spec.rms_norm_eps, spec.max_position) == (1e-5, 512)
    for name, expected in tiny_weights(config).items():
        host = decode(source.infos[name], source.read(name))
        np.testing.assert_array_equal(host.to_numpy(), expected, err_msg=name)


@pytest.mark.parametrize(
    ("encoding", "dtype", "relative_error"),
    [
        ("F16", DType.FP16, 5e-4),
        ("BF16", DType.BF16, 4e-3),
        ("Q8_0", DType.FP32, 1e-2),
        ("Q4_0", DType.FP32, 0.12),
    ],
)
def test_encodings_decode_near_the_original(
    tmp_path: Path, encoding: str, dtype: DType, relative_error: float
) -> None:
    options: dict[str, Any] = {"num_layers": 1}
    _, source = open_model(make_tiny_gguf(tmp_path / "m.gguf", encoding=encoding, **options))
    for name, expected in tiny_weights(tiny_config(**options)).items():
        info = source.infos[name]
        host = decode(info, source.read(name))
        if expected.ndim == 1:
            assert info.encoding == "GGUF:F32"
            continue
        assert info.encoding == f"GGUF:{encoding}"
        assert host.dtype is dtype
        error = np.linalg.norm(host.to_numpy() - expected) / np.linalg.norm(expected)
        assert error < relative_error, name


def test_rope_order_is_marked_with_the_right_heads(tmp_path: Path) -> None:
    _, source = open_model(make_tiny_gguf(tmp_path / "m.gguf", num_layers=1))
    marked = {name: info.rope_heads for name, info in source.infos.items() if info.rope_heads}
    layer = "model.layers.0.self_attn"
    assert marked == {f"{layer}.q_proj.weight": 4, f"{layer}.k_proj.weight": 2}


def test_linear_rope_scaling_is_read(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 4.0}
    spec, _ = open_model(make_tiny_gguf(tmp_path / "m.gguf", num_layers=1, rope_scaling=scaling))
    assert spec.rope == RopeSpec(kind="linear", theta=10000.0, factor=4.0)


def test_yarn_is_refused_by_name(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0}
    file = make_tiny_gguf(tmp_path / "m.gguf", num_layers=1, rope_scaling=scaling)
    with pytest.raises(ModelError, match=r"m\.gguf: rope type 'yarn' is not supported"):
        open_model(file)


def test_llama3_rope_is_found_again_from_its_divisors(tmp_path: Path) -> None:
    rope = RopeSpec(kind="llama3", theta=500000.0, factor=32.0)
    divisors = np.asarray(rope.llama3_divisors(16))
    options: dict[str, Any] = {"num_layers": 1, "rope_theta": 500000.0}
    file = make_tiny_gguf(tmp_path / "m.gguf", rope_freqs=divisors, **options)
    assert open_model(file)[0].rope == rope
    strange = make_tiny_gguf(tmp_path / "s.gguf", rope_freqs=divisors**0.5, **options)
    with pytest.raises(ModelError, match=r"s\.gguf: tensor 'rope_freqs\.weight' is not Llama 3's"):
        open_model(strange)


def test_truncated_and_foreign_files_are_named(tmp_path: Path) -> None:
    file = make_tiny_gguf(tmp_path / "m.gguf", num_layers=1)
    whole = file.read_bytes()
    for num_bytes in (0, 3, 20, 2000, len(whole) // 2, len(whole) - 100):
        file.write_bytes(whole[:num_bytes])
        with pytest.raises(ModelError, match=rf"m\.gguf: not a whole GGUF file \({num_bytes} by"):
            open_model(file)
    file.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError, match=r"m\.gguf: not a whole GGUF file .*magic"):
        open_model(file)


def write_metadata_only(file: Path, architecture: str, **metadata: int) -> Path:
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in metadata.items():
        writer.add_uint32(key.replace("__", "."), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_unsupported_architecture_split_and_missing_metadata(tmp_path: Path) -> None:
    file = write_metadata_only(tmp_path / "a.gguf", "gemma3")
    with pytest.raises(ModelError, match=r"a\.gguf: GGUF architecture 'gemma3' is not supported"):
        open_model(file)
    file = write_metadata_only(tmp_path / "b.gguf", "llama", split__count=3)
    with pytest.raises(ModelError, match=r"b\.gguf: is one part of a split GGUF"):
        open_model(file)
    file = write_metadata_only(tmp_path / "c.gguf", "llama")
    with pytest.raises(ModelError, match=r"c\.gguf: tensor 'token_embd\.weight' is missing"):
        open_model(file)


def test_config_has_the_token_ids(tmp_path: Path) -> None:
    config = GgufFile(make_tiny_gguf(tmp_path / "m.gguf", num_layers=1)).config
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 1)
