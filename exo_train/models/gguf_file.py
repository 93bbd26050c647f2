"""A GGUF file as a TensorSource, with its metadata as a Hugging Face config.

Owns the mapping of GGUF names and keys to Hugging Face's. Must not decode tensors; the `gguf`
package parses the container.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from exo_train.errors import ModelError
from exo_train.models.decode import GGUF_PREFIX
from exo_train.models.file_range import file_size_bytes, read_range
from exo_train.models.quantised_config import quantisation_of
from exo_train.models.rope import RopeSpec
from exo_train.models.spec import ARCHITECTURES
from exo_train.models.tensors import TensorInfo

ROPE_FREQS = "rope_freqs.weight"
_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
# Hugging Face modules whose GGUF names the package's map knows.
_END_MODULES = ("model.embed_tokens", "model.norm", "lm_head")
_LAYER_MODULES = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def open_reader(file: Path) -> Any:
    """Parse the container; whatever breaks in a damaged file is one ModelError naming it."""
    size_bytes = file_size_bytes(file)
    try:
        reader = gguf.GGUFReader(file)
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, MemoryError) as error:
        raise ModelError(
            f"{file}: not a whole GGUF file ({size_bytes} bytes; {error}); fetch it again"
        ) from None
    if reader.endianess != gguf.GGUFEndian.LITTLE:
        raise ModelError(f"{file}: big-endian GGUF files are not supported")
    return reader


def metadata(reader: Any, key: str) -> Any:
    """Give one metadata value as plain Python; None when it is absent."""
    field = reader.get_field(key)
    return None if field is None else field.contents()


class GgufFile:
    """Tensors under their Hugging Face names; `config` is what config.json would say."""

    def __init__(self, file: Path) -> None:
        self._file = file
        reader = open_reader(file)
        name = metadata(reader, "general.architecture")
        if name not in _ARCHITECTURES:
            raise ModelError(
                f"{file}: GGUF architecture '{name}' is not supported; "
                f"supported: {', '.join(_ARCHITECTURES)}"
            )
        if (metadata(reader, "split.count") or 0) > 1:
            raise ModelError(
                f"{file}: is one part of a split GGUF; join the parts with 'llama-gguf-split "
                "--merge' and give the result"
            )
        self.config = _config(reader, str(name), str(file))
        self._infos: dict[str, TensorInfo] = {}
        self._offsets: dict[str, int] = {}
        self._add_tensors(reader, str(name))
        quantisation = quantisation_of(self._infos)
        if quantisation is not None:
            self.config["quantization"] = quantisation

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def files_of(self, name: str) -> tuple[Path, ...]:
        return (self._file,)

    def read(self, name: str) -> bytes:
        if name not in self._offsets:
            raise ModelError(f"{self._file}: no tensor is called '{name}'")
        return read_range(self._file, self._offsets[name], self._infos[name].num_bytes)

    def _add_tensors(self, reader: Any, architecture: str) -> None:
        hf_names = _hf_names(_ARCHITECTURES[architecture], self.config["num_hidden_layers"])
        rope_heads = {}
        if architecture == "llama":
            rope_heads["q_proj"] = self.config["num_attention_heads"]
            rope_heads["k_proj"] = self.config["num_key_value_heads"]
        for tensor in reader.tensors:
            if tensor.name == ROPE_FREQS:
                continue  # read into the config
            name = hf_names.get(tensor.name)
            if name is None:
                raise ModelError(
                    f"{self._file}: tensor '{tensor.name}' has no place in a {architecture} model"
                )
            self._infos[name] = TensorInfo(
                name=name,
                encoding=f"{GGUF_PREFIX}{tensor.tensor_type.name}",
                shape=tuple(int(size) for size in reversed(tensor.shape)),
                num_bytes=int(tensor.n_bytes),
                rope_heads=rope_heads.get(name.split(".")[-2], 0),
            )
            self._offsets[name] = int(tensor.data_offset)


def _hf_names(architecture: Any, num_layers: int) -> dict[str, str]:
    """Map GGUF tensor names to HF's, for weights and biases."""
    name_map = gguf.get_tensor_name_map(architecture, num_layers)
    modules = [*_END_MODULES]
    for index in range(num_layers):
        modules += [f"model.layers.{index}.{module}" for module in _LAYER_MODULES]
    names: dict[str, str] = {}
    for module in modules:
        gguf_module = name_map.get_name(module)
        if gguf_module is not None:
            for suffix in (".weight", ".bias"):
                names[gguf_module + suffix] = module + suffix
    return names


def _config(reader: Any, architecture: str, place: str) -> dict[str, Any]:
    def required(key: str) -> Any:
        value = metadata(reader, f"{architecture}.{key}")
        if value is None:
            raise ModelError(f"{place}: metadata '{architecture}.{key}' is missing")
        return value

    def whole_number(key: str) -> int:
        value = required(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"{place}: metadata '{architecture}.{key}' must be a whole number")
        return value

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{place}: tensor 'token_embd.weight' is missing")
    num_heads = whole_number("attention.head_count")
    width = whole_number("embedding_length")
    head_dim = metadata(reader, f"{architecture}.attention.key_length") or width // num_heads
    rotated = metadata(reader, f"{architecture}.rope.dimension_count") or head_dim
    if rotated != head_dim:
        raise ModelError(f"{place}: rope over {rotated} of {head_dim} values is not supported")
    window = metadata(reader, f"{architecture}.attention.sliding_window")
    # llama.cpp calls Mistral 'llama'; only a sliding window tells them apart.
    model_type = "mistral" if architecture == "llama" and window else architecture
    config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [ARCHITECTURES[model_type]],
        "num_hidden_layers": whole_number("block_count"),
        "hidden_size": width,
        "intermediate_size": whole_number("feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata(reader, f"{architecture}.attention.head_count_kv")
        or num_heads,
        "head_dim": head_dim,
        "vocab_size": int(tensors["token_embd.weight"].shape[-1]),
        "max_position_embeddings": whole_number("context_length"),
        # Stored as float32; the shortest text of that float is what the config said.
        "rms_norm_eps": _shortest(required("attention.layer_norm_rms_epsilon")),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_theta": _shortest(metadata(reader, f"{architecture}.rope.freq_base") or 10000.0),
        "bos_token_id": metadata(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata(reader, "tokenizer.ggml.eos_token_id"),
    }
    if architecture == "llama":
        config["attention_bias"] = "blk.0.attn_output.bias" in tensors
        config["mlp_bias"] = "blk.0.ffn_down.bias" in tensors
    if window:
        config["sliding_window"] = int(window)
        config["use_sliding_window"] = True
    config["rope_scaling"] = _rope_scaling(reader, architecture, config, tensors, place)
    return config


def _rope_scaling(
    reader: Any, architecture: str, config: dict[str, Any], tensors: dict[str, Any], place: str
) -> dict[str, Any] | None:
    if ROPE_FREQS in tensors:
        return _llama3_scaling(np.asarray(tensors[ROPE_FREQS].data), config, place)
    kind = metadata(reader, f"{architecture}.rope.scaling.type")
    factor = metadata(reader, f"{architecture}.rope.scaling.factor")
    linear = metadata(reader, f"{architecture}.rope.scale_linear")
    if kind is None and linear not in (None, 1.0):
        kind, factor = "linear", linear
    if kind in (None, "none"):
        return None
    return {"rope_type": kind, "factor": factor}


def _llama3_scaling(divisors: np.ndarray, config: dict[str, Any], place: str) -> dict[str, Any]:
    """Find Llama 3's settings from the divisors it baked into the file.

    Only `factor` differs between the published Llama 3.x; the other three are constants there.
    """
    rope = RopeSpec(kind="llama3", theta=config["rope_theta"], factor=_shortest(divisors.max()))
    expected = np.asarray(rope.llama3_divisors(config["head_dim"]))
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise ModelError(
            f"{place}: tensor '{ROPE_FREQS}' is not Llama 3's rope scaling, and no other is "
            "supported; use the model's safetensors directory"
        )
    scaling = rope.scaling()
    assert scaling is not None
    return scaling


def _shortest(value: Any) -> float:
    """Give the shortest decimal that is this float32, so that 1e-5 reads 1e-5 again."""
    single = np.float32(value)
    if not math.isfinite(single):
        return float(single)
    return float(str(single))
