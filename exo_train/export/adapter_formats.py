"""How PEFT and mlx-lm name, orient and describe an adapter.

Owns the translation of keys, matrices and configuration between them and the neutral form:
`model.layers.N.<path>.lora_a` (in, rank) and `.lora_b` (rank, out), with DoRA `.dora_m` (out),
global layer indices. Must not touch the disk.

| | mlx-lm | PEFT |
|---|---|---|
| A, B | (in, rank), (rank, out): neutral | transposed: (rank, in), (out, rank) |
| DoRA's lengths | `m` | `lora_magnitude_vector` |
| strength | one `scale` | `lora_alpha` over r or its root; `alpha_pattern` |
| rank | one | `r`, `rank_pattern` |
| layers | the last `num_layers` | `layers_to_transform`, or full paths as `target_modules` |

What mlx-lm has one of is folded in: B is multiplied by what its strength differs, and a smaller
rank is filled up with zeros. Of layers that its `num_layers` takes in without a need it finds no
arrays, and leaves their B at zero.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from exo_train.backends.base import Arrays
from exo_train.errors import ConfigError
from exo_train.lora_config import (
    ALL_LAYERS,
    ALL_TARGETS,
    LoraConfig,
    adapter_prefix,
    alpha_of,
    chosen_layers,
    densest_layer,
    described,
    module_path,
    placements,
)

_NEUTRAL = re.compile(
    r"model\.layers\.([0-9]{1,5})\.(?:self_attn|mlp)\.(\w+)\.(?:lora_a|lora_b|dora_m)"
)
_PEFT = re.compile(
    r"base_model\.model\.(model\.layers\..+)\."
    r"(lora_[AB]|lora_magnitude_vector)(?:\.default)?(?:\.weight)?"
)
_PEFT_PARTS = {"lora_a": "lora_A", "lora_b": "lora_B", "dora_m": "lora_magnitude_vector"}
_PATTERN_KEY = re.compile(r"\^?([\w.]+)\$?")
# What would change the numbers and has no place in the neutral form.
_PEFT_REFUSED = (
    "modules_to_save",
    "fan_in_fan_out",
    "lora_bias",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "use_qalora",
    "alora_invocation_tokens",
    "arrow_config",
)
# First values that PEFT takes out of the base: such an adapter belongs to a changed one.
_PEFT_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """A whole adapter in neutral form; `base_model` is empty where its file does not say it."""

    arrays: Arrays
    lora: LoraConfig
    base_model: str = ""


Place = tuple[int, str]  # layer, target


@dataclass(frozen=True, slots=True)
class Format:
    """One program's files: names, and both directions of keys and configuration.

    `as_stored` gives the adapter as this program can say it, with equal numbers; `from_config`
    gets the ranks that the arrays have, and the model's number of layers where it is known.
    """

    name: str
    weights_file: str
    metadata: dict[str, str]
    as_stored: Callable[[Adapter, int], Adapter]
    to_arrays: Callable[[Mapping[str, np.ndarray]], Arrays]
    to_config: Callable[[Adapter, int], dict[str, Any]]
    from_arrays: Callable[[Mapping[str, np.ndarray]], Arrays]
    from_config: Callable[[Mapping[str, Any], Mapping[Place, int], int | None], LoraConfig]


def layer_and_target(name: str) -> Place:
    """Split a neutral name; raises ConfigError for one that is no adapter array."""
    match = _NEUTRAL.fullmatch(name)
    if match is None or match[2] not in ALL_TARGETS:
        raise ConfigError(f"adapter array '{name}' belongs to none of {', '.join(ALL_TARGETS)}")
    layer, target = int(match[1]), match[2]
    if not name.startswith(adapter_prefix(layer, target) + "."):
        raise ConfigError(f"adapter array '{name}' should be {adapter_prefix(layer, target)}")
    return layer, target


def _to_peft_arrays(arrays: Mapping[str, np.ndarray]) -> Arrays:
    result = {}
    for name, array in arrays.items():
        prefix, _, part = name.rpartition(".")
        # Its magnitudes have no `.weight`.
        suffix = "" if part == "dora_m" else ".weight"
        key = f"base_model.model.{prefix}.{_PEFT_PARTS[part]}{suffix}"
        result[key] = np.ascontiguousarray(array.T)
    return result


def _from_peft_arrays(arrays: Mapping[str, np.ndarray]) -> Arrays:
    parts = {theirs: ours for ours, theirs in _PEFT_PARTS.items()}
    result = {}
    for key, array in arrays.items():
        match = _PEFT.fullmatch(key)
        if match is None:
            raise ConfigError(f"'{key}' is not a LoRA array of a decoder layer")
        # Older versions kept the magnitudes as a column.
        value = array.reshape(-1) if match[2] == "lora_magnitude_vector" else array.T
        result[f"{match[1]}.{parts[match[2]]}"] = np.ascontiguousarray(value)
    return result


def _to_peft_config(adapter: Adapter, num_layers: int) -> dict[str, Any]:
    lora = resolved(adapter.lora, num_layers)
    layers = None
    if lora.layers != ALL_LAYERS:
        layers = chosen_layers(lora.layers, num_layers)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base_model,
        "revision": None,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": _short(lora.alpha),
        "lora_dropout": lora.dropout,
        "target_modules": list(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "modules_to_save": None,
        "layers_to_transform": layers,
        "layers_pattern": None,
        "rank_pattern": dict(lora.rank_pattern),
        "alpha_pattern": {key: _short(alpha) for key, alpha in lora.alpha_pattern},
    }


def resolved(lora: LoraConfig, num_layers: int) -> LoraConfig:
    """Give the same adapters named by what they are: no group, no pattern that says nothing."""
    adapted = {(p.layer, p.target): (p.rank, p.alpha) for p in placements(lora, num_layers)}
    return described(adapted, lora, all_layers=_has_all(adapted, num_layers))


def _has_all(adapted: Iterable[Place], num_layers: int) -> bool:
    return {layer for layer, _ in adapted} == set(range(num_layers))


def _short(alpha: float) -> int | float:
    return int(alpha) if float(alpha).is_integer() else alpha


def _from_peft_config(
    config: Mapping[str, Any], ranks: Mapping[Place, int], num_layers: int | None
) -> LoraConfig:
    for key in _PEFT_REFUSED:
        if config.get(key):
            raise ConfigError(f"adapters with '{key}' cannot be read; merge it with PEFT first")
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none":
        raise ConfigError("only peft_type LORA with bias none can be read")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.startswith(_PEFT_CHANGES_BASE):
        raise ConfigError(
            f"adapters that started from '{start}' belong to a changed base; save it anew with "
            f"PEFT's path_initial_model_for_weight_conversion"
        )
    base = LoraConfig(
        rank=_rank(config, "r"),
        alpha=_number(config, "lora_alpha"),
        dropout=_number(config, "lora_dropout", 0.0),
        rslora=bool(config.get("use_rslora")),
        dora=bool(config.get("use_dora")),
    )
    adapted = {}
    for place in ranks:
        rank = _by_pattern(config, "rank_pattern", place, base.rank)
        alpha = _by_pattern(config, "alpha_pattern", place, base.alpha)
        adapted[place] = (int(rank), float(alpha))
    _check_ranks(ranks, {place: rank for place, (rank, _) in adapted.items()})
    named = config.get("target_modules")
    are_paths = isinstance(named, list) and any("layers." in str(name) for name in named)
    is_open = config.get("layers_to_transform") is None and not are_paths
    return described(adapted, base, all_layers=_are_all(ranks, num_layers, is_open))


def _are_all(places: Iterable[Place], num_layers: int | None, is_open: bool) -> bool:
    """Tell whether these are all layers of the model; of an unknown one by what its file says."""
    layers = {layer for layer, _ in places}
    if num_layers is not None:
        return layers == set(range(num_layers))
    return is_open and layers == set(range(len(layers)))


def _by_pattern(config: Mapping[str, Any], key: str, place: Place, default: float) -> float:
    """Look a projection up as PEFT does: the first key that its path ends with."""
    pattern = config.get(key) or {}
    if not isinstance(pattern, Mapping):
        raise ConfigError(f"'{key}' must be an object, got {pattern!r}")
    path = adapter_prefix(*place)
    for name in pattern:
        match = _PATTERN_KEY.fullmatch(name)
        if match is None:
            raise ConfigError(f"'{key}': only names of projections can be read, not '{name[:80]}'")
        anchored = name.startswith("^")
        if path == match[1] or (not anchored and path.endswith(f".{match[1]}")):
            return _rank(pattern, name) if key == "rank_pattern" else _number(pattern, name)
    return default


def _check_ranks(found: Mapping[Place, int], said: Mapping[Place, int]) -> None:
    for place, rank in found.items():
        if said[place] != rank:
            raise ConfigError(
                f"'{adapter_prefix(*place)}' has rank {rank}, its config says rank {said[place]}"
            )


def _for_mlx(adapter: Adapter, num_layers: int) -> Adapter:
    """Give the adapter with one rank and one scale, and the same products A B."""
    lora = adapter.lora
    chosen = placements(lora, num_layers)
    rank = max(placement.rank for placement in chosen)
    scales = {placement.scale for placement in chosen}
    scale = scales.pop() if len(scales) == 1 else lora.scale
    arrays = dict(adapter.arrays)
    for placement in chosen:
        missing = rank - placement.rank
        a, b = f"{placement.prefix}.lora_a", f"{placement.prefix}.lora_b"
        if placement.scale != scale:
            arrays[b] = arrays[b] * np.float32(placement.scale / scale)
        if missing:
            arrays[a] = np.pad(arrays[a], ((0, 0), (0, missing)))
            arrays[b] = np.pad(arrays[b], ((0, missing), (0, 0)))
    alpha = alpha_of(scale, rank, rslora=False)
    adapted = {(p.layer, p.target): (rank, alpha) for p in chosen}
    one = replace(lora, rank=rank, alpha=alpha, rslora=False, rank_pattern=(), alpha_pattern=())
    return replace(
        adapter,
        arrays=arrays,
        lora=described(adapted, one, all_layers=_has_all(adapted, num_layers)),
    )


def _to_mlx_arrays(arrays: Mapping[str, np.ndarray]) -> Arrays:
    return {re.sub(r"\.dora_m$", ".m", name): array for name, array in arrays.items()}


def _from_mlx_arrays(arrays: Mapping[str, np.ndarray]) -> Arrays:
    return {re.sub(r"\.m$", ".dora_m", name): array for name, array in arrays.items()}


def _to_mlx_config(adapter: Adapter, num_layers: int) -> dict[str, Any]:
    lora = adapter.lora
    lowest = min(placement.layer for placement in placements(lora, num_layers))
    return {
        "fine_tune_type": "dora" if lora.dora else "lora",
        "model": adapter.base_model,
        "num_layers": num_layers - lowest,
        "lora_parameters": {
            "rank": lora.rank,
            "scale": lora.scale,
            "dropout": lora.dropout,
            "keys": [module_path(target) for target in densest_layer(lora, num_layers)],
        },
    }


def _from_mlx_config(
    config: Mapping[str, Any], ranks: Mapping[Place, int], num_layers: int | None
) -> LoraConfig:
    kind = config.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        raise ConfigError(f"fine_tune_type '{kind}' cannot be read; fuse it with mlx-lm first")
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, Mapping):
        raise ConfigError("'lora_parameters' is missing")
    rank = _rank(parameters, "rank")
    alpha = alpha_of(_number(parameters, "scale"), rank, rslora=False)
    lora = LoraConfig(
        rank=rank,
        alpha=alpha,
        dropout=_number(parameters, "dropout", 0.0),
        dora=kind == "dora",
    )
    _check_ranks(ranks, dict.fromkeys(ranks, rank))
    layers = {layer for layer, _ in ranks}
    is_open = config.get("num_layers", -1) in (-1, len(layers))
    return described(
        dict.fromkeys(ranks, (rank, alpha)),
        lora,
        all_layers=_are_all(ranks, num_layers, is_open),
    )


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
    as_stored=lambda adapter, num_layers: adapter,
    to_arrays=_to_peft_arrays,
    to_config=_to_peft_config,
    from_arrays=_from_peft_arrays,
    from_config=_from_peft_config,
)
MLX = Format(
    name="mlx",
    weights_file="adapters.safetensors",
    metadata={"format": "mlx"},
    as_stored=_for_mlx,
    to_arrays=_to_mlx_arrays,
    to_config=_to_mlx_config,
    from_arrays=_from_mlx_arrays,
    from_config=_from_mlx_config,
)
