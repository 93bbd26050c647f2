"""ModelSpec reads configs as both backends' libraries would, and refuses what they do not share."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from exo_train.errors import ConfigError, ModelError
from exo_train.models.rope import RopeSpec
from exo_train.models.spec import ModelSpec
from tests.tiny_models import ARCHITECTURE_CLASSES, tiny_config, tiny_weights

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def spec_of(**changes: Any) -> ModelSpec:
    architecture = changes.pop("architecture", "llama")
    config = {**tiny_config(architecture=architecture), **changes}
    return ModelSpec.from_config(config, place="m/config.json")


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURE_CLASSES))
@pytest.mark.parametrize("tied", [True, False])
def test_the_shapes_are_those_of_a_whole_model(architecture: str, tied: bool) -> None:
    config = tiny_config(architecture=architecture, tied=tied, num_layers=3)
    spec = ModelSpec.from_config(config, place="m")
    expected = {name: array.shape for name, array in tiny_weights(config).items()}
    assert spec.all_tensor_shapes() == expected


def test_llama_biases_are_in_the_shapes() -> None:
    config = {**tiny_config(), "attention_bias": True, "mlp_bias": True}
    spec = ModelSpec.from_config(config, place="m")
    expected = {name: array.shape for name, array in tiny_weights(config).items()}
    assert spec.all_tensor_shapes() == expected
    assert "model.layers.0.self_attn.o_proj.bias" in expected


@pytest.mark.parametrize("tied", [True, False])
def test_stages_cover_the_model_and_only_tied_weights_are_on_two(tied: bool) -> None:
    spec = spec_of(tie_word_embeddings=tied)
    first = spec.tensor_shapes(start=0, end=1, embedding=True, head=False)
    inner = spec.tensor_shapes(start=1, end=3, embedding=False, head=False)
    last = spec.tensor_shapes(start=3, end=4, embedding=False, head=True)
    assert {**first, **inner, **last} == spec.all_tensor_shapes()
    assert all(name.startswith(("model.layers.1.", "model.layers.2.")) for name in inner)
    assert set(first) & set(last) == ({"model.embed_tokens.weight"} if tied else set())
    assert "model.norm.weight" in last


def test_stage_outside_the_model_is_refused() -> None:
    with pytest.raises(ModelError, match=r"layers 2\.\.5 are not within the model's 4 layers"):
        spec_of().tensor_shapes(start=2, end=5, embedding=False, head=False)


def test_unknown_architecture_is_refused_by_name() -> None:
    with pytest.raises(
        ModelError, match=r"m/config\.json: architecture 'gemma3' .* llama, mistral, qwen2, qwen3"
    ):
        spec_of(model_type="gemma3")


def test_architecture_is_found_by_class_when_model_type_is_missing() -> None:
    assert spec_of(architecture="qwen2", model_type=None).architecture == "qwen2"
    with pytest.raises(ModelError, match="architecture 'PhiForCausalLM' is not supported"):
        spec_of(model_type=None, architectures=["PhiForCausalLM"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": None}, "'num_hidden_layers' is missing"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' must be from 1 to 1024, got 0"),
        ({"num_hidden_layers": 10**9}, "must be from 1 to 1024"),
        ({"hidden_size": "64"}, "'hidden_size' must be a whole number, got '64'"),
        ({"hidden_size": True}, "'hidden_size' must be a whole number, got True"),
        ({"vocab_size": -1}, "'vocab_size' must be from 1"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key-value heads"),
        ({"num_key_value_heads": 8}, "'num_key_value_heads' must be from 1 to 4"),
        ({"head_dim": 15}, "'head_dim' must be even"),
        ({"rms_norm_eps": 0}, "'rms_norm_eps' must be above 0"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' must be true or false"),
        ({"max_position_embeddings": None}, "'max_position_embeddings' is missing"),
        ({"quantization": {"bits": 4}}, "quantised"),
        ({"hidden_act": "gelu"}, "'hidden_act' must be silu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope type 'yarn' is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4}}, "rope type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "'low_freq_factor' is missing"),
        ({"rope_scaling": {"type": "linear"}}, "'factor' is missing"),
        ({"rope_scaling": "linear"}, "must be an object"),
        ({"rope_theta": float("inf")}, "JSON config|'rope_theta'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"junk": "x" * 2_000_000}, "above the limit of 1048576"),
    ],
)
def test_missing_or_absurd_fields_are_refused_by_name(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        spec_of(**changes)
    assert str(caught.value).startswith("m/config.json: ")


def test_qwen2_head_dim_must_be_what_mlx_computes() -> None:
    with pytest.raises(ModelError, match="for qwen2, got 32 x 4 heads for width 64"):
        spec_of(architecture="qwen2", head_dim=32)


def test_defaults_of_absent_fields_are_those_of_transformers() -> None:
    changes = {"num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": None}
    llama = spec_of(**changes)
    assert (llama.num_kv_heads, llama.head_dim, llama.tied_embeddings) == (4, 16, False)
    assert spec_of(architecture="qwen3", head_dim=None).head_dim == 128
    with pytest.raises(ModelError, match="'num_key_value_heads' is missing"):
        spec_of(architecture="mistral", num_key_value_heads=None)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0},
        {"rope_scaling": {**LLAMA3_ROPE, "type": "llama3"}, "rope_theta": 500000.0},
        {
            "rope_scaling": None,
            "rope_theta": None,
            "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 500000.0},
        },
    ],
)
def test_every_spelling_of_llama3_rope_is_the_same_rope(spelling: dict[str, Any]) -> None:
    spec = spec_of(**spelling)
    assert spec.rope == RopeSpec(kind="llama3", theta=500000.0, factor=8.0)
    explicit = spec.explicit_config()
    assert explicit["rope_theta"] == 500000.0
    assert explicit["rope_scaling"] == LLAMA3_ROPE
    assert explicit["rope_parameters"] == {**LLAMA3_ROPE, "rope_theta": 500000.0}


def test_legacy_linear_and_nested_default_theta() -> None:
    assert spec_of(rope_scaling={"type": "linear", "factor": 2}).rope.factor == 2.0
    nested = {"rope_type": "default", "rope_theta": 500.0}
    spec = spec_of(rope_scaling=None, rope_theta=None, rope_parameters=nested)
    assert spec.explicit_config()["rope_theta"] == 500.0
    assert spec.explicit_config()["rope_scaling"] is None


def test_llama3_divisors_follow_the_published_formula() -> None:
    rope = RopeSpec(kind="llama3", theta=500000.0, factor=8.0)
    frequencies = 500000.0 ** (-np.arange(0, 128, 2) / 128)
    wavelengths = 2 * np.pi / frequencies
    smooth = (8192 / wavelengths - 1.0) / (4.0 - 1.0)
    scaled = np.where(wavelengths > 8192, frequencies / 8, frequencies)
    medium = (wavelengths <= 8192) & (wavelengths >= 8192 / 4)
    scaled = np.where(medium, (1 - smooth) * frequencies / 8 + smooth * frequencies, scaled)
    assert medium.any()
    np.testing.assert_allclose(rope.llama3_divisors(128), frequencies / scaled, rtol=1e-12)


def test_the_config_is_kept_verbatim_and_canonical() -> None:
    config = {**tiny_config(), "something_new": [1, {"b": None}]}
    spec = ModelSpec.from_config(config, place="m")
    assert json.loads(spec.config_json) == config
    shuffled = dict(reversed(list(config.items())))
    assert ModelSpec.from_config(shuffled, place="m") == spec


def test_sliding_window_counts_only_where_it_is_in_effect() -> None:
    assert spec_of(architecture="mistral", sliding_window=128).sliding_window == 128
    assert spec_of(architecture="mistral", sliding_window=None).sliding_window is None
    assert spec_of(architecture="qwen2", sliding_window=128).sliding_window is None
    qwen = spec_of(architecture="qwen2", sliding_window=128, use_sliding_window=True)
    assert qwen.sliding_window == 128
    assert spec_of(architecture="llama", sliding_window=128).sliding_window is None


def test_max_seq_length_is_refused_with_the_number_to_use() -> None:
    spec = spec_of(architecture="mistral", sliding_window=128)
    spec.validate_max_seq_length(128)
    with pytest.raises(ConfigError, match=r"129 .* sliding window of 128 .* use 128 or less"):
        spec.validate_max_seq_length(129)
    with pytest.raises(ConfigError, match=r"513 is above the model's 512 positions; use 512"):
        spec_of().validate_max_seq_length(513)
