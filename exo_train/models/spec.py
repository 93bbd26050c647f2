"""What a model is: sizes, options, and the names and shapes of its tensors.

Owns the reading of a Hugging Face config and the list of supported architectures. Must not read
files or know how tensors are stored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from exo_train.errors import ConfigError, ModelError
from exo_train.models.fields import canonical_json, flag, number, whole
from exo_train.models.packed import Packing, packing_for
from exo_train.models.quantised_config import KEYS as QUANTISATION_KEYS
from exo_train.models.quantised_config import Quantisation, read_quantisation
from exo_train.models.rope import MAX_POSITIONS, RopeSpec

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

# Above any model known in 2026, below what would make a hostile config costly.
MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_HEADS = 4096
MAX_VOCAB = 1 << 22
MAX_CONFIG_CHARS = 1 << 20

Shapes = dict[str, tuple[int, ...]]

_PROJECTION = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.[a-z]+_proj\.weight")


def is_projection(name: str) -> bool:
    """Tell whether a tensor is the matrix of one of a decoder layer's projections."""
    return _PROJECTION.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A supported decoder; `config_json` is the HF config verbatim as canonical JSON.

    `sliding_window` is the window really in effect, in positions; None: full attention.
    `quantisation` is how matrices are packed that can stay so; None: none can.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    max_position: int
    sliding_window: int | None
    rms_norm_eps: float
    rope: RopeSpec
    config_json: str
    quantisation: Quantisation | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, place: str) -> ModelSpec:
        """Read a HF config; `place` names the file or peer in messages."""
        architecture = _architecture(config, place)
        _refuse_unsupported(config, architecture, place)
        config_json = _config_json(config, place)
        num_heads = whole(config, "num_attention_heads", place=place, high=MAX_HEADS)
        hidden_size = whole(config, "hidden_size", place=place, high=MAX_WIDTH)
        # Defaults are those of transformers' config classes; only Llama's is "as many as heads".
        num_kv_heads = whole(
            config,
            "num_key_value_heads",
            place=place,
            high=num_heads,
            default=num_heads if architecture == "llama" else None,
        )
        if num_heads % num_kv_heads:
            raise ModelError(
                f"{place}: {num_heads} attention heads cannot share {num_kv_heads} key-value heads"
            )
        return cls(
            architecture=architecture,
            num_layers=whole(config, "num_hidden_layers", place=place, high=MAX_LAYERS),
            hidden_size=hidden_size,
            intermediate_size=whole(config, "intermediate_size", place=place, high=MAX_WIDTH),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_head_dim(config, architecture, hidden_size, num_heads, place),
            vocab_size=whole(config, "vocab_size", place=place, high=MAX_VOCAB),
            tied_embeddings=flag(config, "tie_word_embeddings", place=place),
            attention_bias=architecture == "llama" and flag(config, "attention_bias", place=place),
            mlp_bias=architecture == "llama" and flag(config, "mlp_bias", place=place),
            max_position=whole(config, "max_position_embeddings", place=place, high=MAX_POSITIONS),
            sliding_window=_sliding_window(config, architecture, place),
            rms_norm_eps=number(config, "rms_norm_eps", place=place, high=0.1),
            rope=RopeSpec.from_config(config, place=place),
            config_json=config_json,
            quantisation=read_quantisation(config, place=place),
        )

    def explicit_config(self) -> dict[str, Any]:
        """Give the HF config with every value spelled out that libraries default differently.

        Without it mlx-lm and transformers disagree on tied embeddings, on rope given only as
        `rope_parameters`, and on sliding windows.
        """
        config: dict[str, Any] = json.loads(self.config_json)
        config.pop("layer_types", None)  # follows from the window, where it matters
        for key in QUANTISATION_KEYS:  # how weights lie in files is not the libraries' business
            config.pop(key, None)
        config.update(
            model_type=self.architecture,
            architectures=[ARCHITECTURES[self.architecture]],
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            tie_word_embeddings=self.tied_embeddings,
            attention_bias=self.attention_bias,
            mlp_bias=self.mlp_bias,
            rope_theta=self.rope.theta,
            rope_scaling=self.rope.scaling(),
            rope_parameters=self.rope.parameters(),
            sliding_window=self.sliding_window,
        )
        if self.architecture in ("qwen2", "qwen3"):
            config["use_sliding_window"] = self.sliding_window is not None
        return config

    def tensor_shapes(self, *, start: int, end: int, embedding: bool, head: bool) -> Shapes:
        """Give the exact HF names and shapes of layers [start, end) and the ends asked for."""
        if not 0 <= start <= end <= self.num_layers:
            raise ModelError(
                f"layers {start}..{end} are not within the model's {self.num_layers} layers"
            )
        shapes: Shapes = {}
        embedding_shape = (self.vocab_size, self.hidden_size)
        if embedding:
            shapes[EMBEDDING] = embedding_shape
        for index in range(start, end):
            for name, shape in self._layer_shapes():
                shapes[f"model.layers.{index}.{name}"] = shape
        if head:
            shapes[FINAL_NORM] = (self.hidden_size,)
            shapes[EMBEDDING if self.tied_embeddings else LM_HEAD] = embedding_shape
        return shapes

    def all_tensor_shapes(self) -> Shapes:
        """Give the names and shapes of the whole model."""
        return self.tensor_shapes(start=0, end=self.num_layers, embedding=True, head=True)

    def validate_max_seq_length(self, num_tokens: int) -> None:
        """Refuse lengths the model has no positions for, or on which the backends differ."""
        if num_tokens > self.max_position:
            raise ConfigError(
                f"'max_seq_length' {num_tokens} is above the model's {self.max_position} "
                f"positions; use {self.max_position} or less"
            )
        if self.sliding_window is not None and num_tokens > self.sliding_window:
            raise ConfigError(
                f"'max_seq_length' {num_tokens} is above the model's sliding window of "
                f"{self.sliding_window} positions; use {self.sliding_window} or less"
            )

    def validate_quantize(self, bits: int) -> None:
        """Refuse to quantise (0: not asked) what is so already, or rows without whole groups."""
        if not bits:
            return
        packed: set[Packing] = set()
        is_whole = True
        for name, shape in self.all_tensor_shapes().items():
            if is_projection(name):
                module = name.removesuffix(".weight")
                packing = self.quantisation.of(module) if self.quantisation else None
                if packing is None:
                    packing_for(shape[-1], bits, place=f"tensor '{name}'")
                    is_whole = False
                else:
                    packed.add(packing)
        if is_whole:
            raise ConfigError(
                f"'quantize' {bits}: the model's projections are quantised already "
                f"({' and '.join(sorted(map(str, packed)))}); leave --quantize out"
            )

    def _layer_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        query_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        qkv_bias = self.attention_bias or self.architecture == "qwen2"
        yield "input_layernorm.weight", (hidden,)
        for name, rows, columns, bias in (
            ("self_attn.q_proj", query_size, hidden, qkv_bias),
            ("self_attn.k_proj", kv_size, hidden, qkv_bias),
            ("self_attn.v_proj", kv_size, hidden, qkv_bias),
            ("self_attn.o_proj", hidden, query_size, self.attention_bias),
            ("mlp.gate_proj", inner, hidden, self.mlp_bias),
            ("mlp.up_proj", inner, hidden, self.mlp_bias),
            ("mlp.down_proj", hidden, inner, self.mlp_bias),
        ):
            yield f"{name}.weight", (rows, columns)
            if bias:
                yield f"{name}.bias", (rows,)
        if self.architecture == "qwen3":
            yield "self_attn.q_norm.weight", (self.head_dim,)
            yield "self_attn.k_norm.weight", (self.head_dim,)
        yield "post_attention_layernorm.weight", (hidden,)


def _architecture(config: Mapping[str, Any], place: str) -> str:
    name = config.get("model_type")
    if name is None:
        classes = config.get("architectures")
        first = classes[0] if isinstance(classes, list) and classes else None
        name = next((key for key, cls in ARCHITECTURES.items() if cls == first), first)
    if name is None:
        raise ModelError(f"{place}: 'model_type' is missing; this is not a language model's config")
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{place}: architecture '{name}' is not supported; "
            f"choose a model of one of these: {', '.join(ARCHITECTURES)}"
        )
    return str(name)


def _refuse_unsupported(config: Mapping[str, Any], architecture: str, place: str) -> None:
    """Refuse options that one of the backends would ignore in silence."""
    activation = config.get("hidden_act")
    if activation not in (None, "silu"):
        raise ModelError(f"{place}: 'hidden_act' must be silu, got {activation!r}")
    if architecture in ("mistral", "qwen3") and config.get("attention_bias"):
        raise ModelError(f"{place}: 'attention_bias' is not supported for {architecture}")


def _config_json(config: Mapping[str, Any], place: str) -> str:
    try:
        config_json = canonical_json(dict(config))
    except (TypeError, ValueError) as error:
        raise ModelError(f"{place}: not a JSON config ({error})") from None
    if len(config_json) > MAX_CONFIG_CHARS:
        raise ModelError(
            f"{place}: the config has {len(config_json)} characters, "
            f"above the limit of {MAX_CONFIG_CHARS}"
        )
    return config_json


def _head_dim(
    config: Mapping[str, Any], architecture: str, hidden_size: int, num_heads: int, place: str
) -> int:
    # transformers: 128 for Qwen3, whatever the width.
    default = 128 if architecture == "qwen3" else hidden_size // num_heads
    head_dim = whole(config, "head_dim", place=place, low=2, high=MAX_WIDTH, default=default)
    if head_dim % 2:
        raise ModelError(f"{place}: 'head_dim' must be even for rope, got {head_dim}")
    if architecture == "qwen2" and head_dim * num_heads != hidden_size:
        raise ModelError(
            f"{place}: 'head_dim' must be 'hidden_size' / 'num_attention_heads' for qwen2, "
            f"got {head_dim} x {num_heads} heads for width {hidden_size}"
        )
    return head_dim


def _sliding_window(config: Mapping[str, Any], architecture: str, place: str) -> int | None:
    if architecture == "llama":
        return None
    if architecture != "mistral" and not flag(config, "use_sliding_window", place=place):
        return None
    if config.get("sliding_window") is None:
        return None
    return whole(config, "sliding_window", place=place, high=MAX_POSITIONS)
