"""How PEFT and mlx-lm name, orient and describe a LoRA adapter.

Owns the translation of keys, matrices and configuration between them and the neutral form:
`model.layers.N.<path>.lora_a` (in, rank) and `.lora_b` (rank, out), global layer indices. Must not
touch the disk.

| | mlx-lm | PEFT |
|---|---|---|
| A, B | (in, rank), (rank, out): neutral | transposed: (rank, in), (out, rank) |
| strength | `scale` | `lora_alpha` / r |
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from exo_train.backends.base import Arrays
from exo_train.backends.lora import adapter_prefix, module_path
from exo_train.config import ALL_TARGETS, LoraConfig
from exo_train.errors import ConfigError

_NEUTRAL = re.compile(r"model\.layers\.([0-9]{1,5})\.(?:self_attn|mlp)\.(\w+)\.lora_[ab]")
_PEFT = re.compile(r"base_model\.model\.(model\.layers\..+)\.lora_([AB])(?:\.default)?\.weight")
# What would change the numbers and has no place in the neutral form.
_PEFT_REFUSED = (
    "use_dora",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "fan_in_fan_out",
    "lora_bias",
    "trainable_token_indices",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """A whole adapter in neutral form; `base_model` is empty where its file does not say it."""

    arrays: Arrays
    lora: LoraConfig
    base_model: str = ""


@dataclass(frozen=True, slots=True)
class Format:
    """One program's files: names, and both directions of keys and configuration."""

    name: str
    weights_file: str
    metadata: dict[str, str]
    to_arrays: Callable[[Mapping[str, np.ndarray]], Arrays]
    to_config: Callable[[LoraConfig, str, int], dict[str, Any]]
    from_arrays: Callable[[Mapping[str, np.ndarray]], Arrays]
    from_config: Callable[[Mapping[str, Any]], tuple[int, float, float]]  # rank, alpha, dropout


def layer_and_target(name: str) -> tuple[int, str]:
    """Split a neutral name; raises ConfigError for one that is no adapter array."""
    match = _NEUTRAL.fullmatch(name)
    if match is None or match[2] not in ALL_TARGETS:
        raise ConfigError(f"adapter array '{name}' belongs to none of {', '.join(ALL_TARGETS)}")
    layer, target = int(match[1]), match[2]
    if not name.startswith(adapter_prefix(layer, target) + "."):
        raise ConfigError(f"adapter array '{name}' should be {adapter_prefix(layer, target)}")
    return layer, target


def targets_of(names: Iterable[str]) -> tuple[str, ...]:
    """Give the projections that `names` adapt, in the usual order."""
    found = {layer_and_target(name)[1] for name in names}
    return tuple(target for target in ALL_TARGETS if target in found)


def _to_peft_arrays(arrays: Mapping[str, np.ndarray]) -> Arrays:
    return {
        f"base_model.model.{name[:-1]}{name[-1].upper()}.weight": np.ascontiguousarray(array.T)
        for name, array in arrays.items()
    }


def _from_peft_arrays(arrays: Mapping[str, np.ndarray]) -> Arrays:
    result = {}
    for key, array in arrays.items():
        match = _PEFT.fullmatch(key)
        if match is None:
            raise ConfigError(f"'{key}' is not a LoRA array of a decoder layer")
        result[f"{match[1]}.lora_{match[2].lower()}"] = np.ascontiguousarray(array.T)
    return result


def _to_peft_config(lora: LoraConfig, base_model: str, num_layers: int) -> dict[str, Any]:
    alpha = int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "revision": None,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": lora.dropout,
        "target_modules": list(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def _from_peft_config(config: Mapping[str, Any]) -> tuple[int, float, float]:
    for key in _PEFT_REFUSED:
        if config.get(key):
            raise ConfigError(f"adapters with '{key}' cannot be read; merge it with PEFT first")
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none":
        raise ConfigError("only peft_type LORA with bias none can be read")
    rank, alpha = _rank(config, "r"), _number(config, "lora_alpha")
    # Rank-stabilised LoRA divides by the root of the rank (Kalajdzievski 2023, arXiv:2312.03732).
    strength = alpha * math.sqrt(rank) if config.get("use_rslora") else alpha
    return rank, strength, _number(config, "lora_dropout", 0.0)


def _to_mlx_config(lora: LoraConfig, base_model: str, num_layers: int) -> dict[str, Any]:
    return {
        "fine_tune_type": "lora",
        "model": base_model,
        "num_layers": num_layers,
        "lora_parameters": {
            "rank": lora.rank,
            "scale": lora.scale,
            "dropout": lora.dropout,
            "keys": [module_path(target) for target in lora.targets],
        },
    }


def _from_mlx_config(config: Mapping[str, Any]) -> tuple[int, float, float]:
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        raise ConfigError(f"fine_tune_type '{kind}' cannot be read; fuse it with mlx-lm first")
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, Mapping):
        raise ConfigError("'lora_parameters' is missing")
    rank = _rank(parameters, "rank")
    # Twelve digits take off what the division by the rank left behind.
    alpha = float(f"{_number(parameters, 'scale') * rank:.12g}")
    return rank, alpha, _number(parameters, "dropout", 0.0)


def _rank(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"'{key}' must be a whole number of at least 1, got {value!r}")
    return value


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"'{key}' must be a number, got {value!r}")
    return float(value)


PEFT = Format(
    name="peft",
    weights_file="adapter_model.safetensors",
    metadata={"format": "pt"},
    to_arrays=_to_peft_arrays,
    to_config=_to_peft_config,
    from_arrays=_from_peft_arrays,
    from_config=_from_peft_config,
)
MLX = Format(
    name="mlx",
    weights_file="adapters.safetensors",
    metadata={"format": "mlx"},
    to_arrays=dict,
    to_config=_to_mlx_config,
    from_arrays=dict,
    from_config=_from_mlx_config,
)
