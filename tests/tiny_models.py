"""Tiny random models on disk, as Hugging Face or llama.cpp lay them out. For tests only.

Owns `make_tiny_model` and `make_tiny_gguf`. NumPy only, no tensor framework; the same arguments
give the same bytes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

BOS, EOS, IM_START, IM_END = SPECIAL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Each line joins two known pieces, as `merges.txt` does; U+0120 is the byte-level space.
MERGES = ("t h", "th e", "Ġ the", "i n", "a n", "an d", "o n", "e r", "Ġ a", "r e", "o u", "Ġ w")
TORCH_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
ARCHITECTURE_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.layers": "blk",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def make_tiny_model(
    path: Path,
    *,
    architecture: str = "llama",
    num_layers: int = 4,
    hidden_size: int = 64,
    intermediate_size: int = 96,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    vocab_size: int = 320,
    tied: bool = True,
    seed: int = 0,
    dtype: str = "F32",
    shards: int = 1,
    max_position: int = 512,
    rope_theta: float = 10000.0,
    rope_scaling: dict[str, Any] | None = None,
    add_bos: bool = False,
    extra_config: dict[str, Any] | None = None,
) -> Path:
    """Write config.json, safetensors (sharded when `shards` > 1) and a tokenizer; give `path`."""
    config = tiny_config(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        tied=tied,
        dtype=dtype,
        max_position=max_position,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
    )
    config.update(extra_config or {})
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / "config.json", config)
    _write_weights(path, tiny_weights(config, seed=seed), dtype=dtype, shards=shards)
    write_tiny_tokenizer(path, vocab_size=vocab_size, add_bos=add_bos)
    return path


def tiny_config(
    *,
    architecture: str = "llama",
    num_layers: int = 4,
    hidden_size: int = 64,
    intermediate_size: int = 96,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    vocab_size: int = 320,
    tied: bool = True,
    dtype: str = "F32",
    max_position: int = 512,
    rope_theta: float = 10000.0,
    rope_scaling: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Give what config.json holds."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE_CLASSES[architecture]],
        "model_type": architecture,
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim or hidden_size // num_heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "torch_dtype": TORCH_DTYPES[dtype],
        "bos_token_id": SPECIAL_TOKENS.index(BOS),
        "eos_token_id": SPECIAL_TOKENS.index(EOS),
    }
    if architecture == "mistral":
        config["sliding_window"] = None
    return config


def tiny_weights(config: dict[str, Any], *, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw float32 weights by HF name, scaled so that activations neither die nor blow up."""
    rng = np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        weights[name] = rng.standard_normal((rows, columns), np.float32) / math.sqrt(columns)

    def vector(name: str, size: int, centre: float) -> None:
        weights[name] = np.float32(centre) + 0.1 * rng.standard_normal(size, np.float32)

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    qwen2 = config["model_type"] == "qwen2"
    matrix("model.embed_tokens.weight", config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        vector(f"{layer}.input_layernorm.weight", hidden, 1.0)
        for name, size in (("q_proj", query_size), ("k_proj", kv_size), ("v_proj", kv_size)):
            matrix(f"{layer}.self_attn.{name}.weight", size, hidden)
            if qwen2 or config.get("attention_bias"):
                vector(f"{layer}.self_attn.{name}.bias", size, 0.0)
        matrix(f"{layer}.self_attn.o_proj.weight", hidden, query_size)
        if config.get("attention_bias") and not qwen2:
            vector(f"{layer}.self_attn.o_proj.bias", hidden, 0.0)
        if config["model_type"] == "qwen3":
            vector(f"{layer}.self_attn.q_norm.weight", config["head_dim"], 1.0)
            vector(f"{layer}.self_attn.k_norm.weight", config["head_dim"], 1.0)
        vector(f"{layer}.post_attention_layernorm.weight", hidden, 1.0)
        for name, rows, columns in (
            ("gate_proj", inner, hidden),
            ("up_proj", inner, hidden),
            ("down_proj", hidden, inner),
        ):
            matrix(f"{layer}.mlp.{name}.weight", rows, columns)
            if config.get("mlp_bias"):
                vector(f"{layer}.mlp.{name}.bias", rows, 0.0)
    vector("model.norm.weight", hidden, 1.0)
    if not config["tie_word_embeddings"]:
        matrix("lm_head.weight", config["vocab_size"], hidden)
    return weights


def make_tiny_gguf(
    file: Path,
    *,
    encoding: str = "F32",
    seed: int = 0,
    rope_freqs: np.ndarray | None = None,
    pre_tokenizer: str = "gpt-2",
    **config_options: Any,
) -> Path:
    """Write the weights of `tiny_config(**config_options)` as GGUF; norms stay F32; give `file`.

    Rows of q and k are permuted for Llama as llama.cpp's converter does.
    """
    config = tiny_config(**config_options)
    architecture = config["model_type"]
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if config["rope_scaling"]:
        writer.add_rope_scaling_type(gguf.RopeScalingType(config["rope_scaling"]["rope_type"]))
        writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])
    _add_gguf_tokenizer(writer, config["vocab_size"], pre_tokenizer)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.astype(np.float32))
    for name, array in tiny_weights(config, seed=seed).items():
        if architecture == "llama" and (heads := _rope_heads(name, config)):
            array = array.reshape(heads, 2, -1, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        kind = gguf.GGMLQuantizationType["F32" if array.ndim == 1 else encoding]
        blocks = gguf.quantize(np.ascontiguousarray(array), kind)
        writer.add_tensor(_gguf_name(name), blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_gguf_tokenizer(writer: gguf.GGUFWriter, vocab_size: int, pre_tokenizer: str) -> None:
    pieces = tiny_vocab()
    pieces += [f"[PAD{index}]" for index in range(len(pieces), vocab_size)]
    control, unused, normal = gguf.TokenType.CONTROL, gguf.TokenType.UNUSED, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(pieces)
    writer.add_token_types(
        [
            control if piece in SPECIAL_TOKENS else unused if piece.startswith("[PAD") else normal
            for piece in pieces
        ]
    )
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(SPECIAL_TOKENS.index(BOS))
    writer.add_eos_token_id(SPECIAL_TOKENS.index(EOS))
    writer.add_chat_template(CHATML)


def _rope_heads(name: str, config: dict[str, Any]) -> int:
    if ".q_proj." in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if ".k_proj." in name else 0


def _gguf_name(name: str) -> str:
    for ours, theirs in GGUF_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def tiny_vocab() -> list[str]:
    """Give the tokens in order of id: specials, the 256 bytes, the merged pieces."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*SPECIAL_TOKENS, *letters, *(merge.replace(" ", "") for merge in MERGES)]


def write_tiny_tokenizer(path: Path, *, vocab_size: int = 320, add_bos: bool = False) -> None:
    """Write a byte-level BPE with four special tokens and ChatML; every text has an encoding."""
    pieces = tiny_vocab()
    if vocab_size < len(pieces):
        raise ValueError(f"vocab_size must be at least {len(pieces)}, got {vocab_size}")
    tokenizer = Tokenizer(
        BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[(merge.split()[0], merge.split()[1]) for merge in MERGES],
        )
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, SPECIAL_TOKENS.index(BOS))]
        )
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHATML,
        },
    )


def _write_weights(path: Path, weights: dict[str, np.ndarray], *, dtype: str, shards: int) -> None:
    names = list(weights)
    if shards == 1:
        _write_safetensors(path / "model.safetensors", weights, names, dtype)
        return
    weight_map: dict[str, str] = {}
    for number, part in enumerate(np.array_split(names, shards), start=1):
        file_name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        part_names = [str(name) for name in part]
        _write_safetensors(path / file_name, weights, part_names, dtype)
        weight_map.update(dict.fromkeys(part_names, file_name))
    index = {"metadata": {}, "weight_map": weight_map}
    _write_json(path / "model.safetensors.index.json", index)


def _write_safetensors(
    file: Path, weights: dict[str, np.ndarray], names: list[str], dtype: str
) -> None:
    if dtype == "BF16":
        _write_bf16(file, {name: weights[name] for name in names})
        return
    numpy_dtype = {"F32": np.float32, "F16": np.float16}[dtype]
    save_file({name: weights[name].astype(numpy_dtype) for name in names}, file, {"format": "pt"})


def _write_bf16(file: Path, weights: dict[str, np.ndarray]) -> None:
    """Write by hand what the safetensors library cannot take from NumPy."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blocks: list[bytes] = []
    end = 0
    for name, array in weights.items():
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # half to even
        blocks.append(rounded.astype("<u2").tobytes())
        start, end = end, end + len(blocks[-1])
        header[name] = {
            "dtype": "BF16",
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blocks))


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
