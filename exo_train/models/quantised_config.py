"""What a model's config says of quantised weights.

Owns the reading of MLX's `quantization` (mlx_lm writes it twice, also as `quantization_config`),
the same for a GGUF's tensors, of bitsandbytes' NF4, and the refusal of other ways to quantise, by
name. Must not read files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exo_train.errors import ModelError
from exo_train.models.decode import packing_of
from exo_train.models.fields import whole
from exo_train.models.packed import NF4_PACKING, Packing
from exo_train.models.tensors import TensorInfo

KEYS = ("quantization", "quantization_config")
MAX_OVERRIDES = 1 << 14
_DEFAULT = Packing(bits=4, group_size=64)  # mlx_lm's, where a module's entry leaves one out


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """The packing of all modules but those of `overrides`, by module path; None: not packed.

    Nor is any whose path has one of `skipped` among its parts, which may be several together.
    """

    default: Packing
    overrides: tuple[tuple[str, Packing | None], ...] = ()
    skipped: tuple[str, ...] = ()

    def of(self, module: str) -> Packing | None:
        if any(f".{part}." in f".{module}." for part in self.skipped):
            return None
        return next((given for name, given in self.overrides if name == module), self.default)


def read_quantisation(config: Mapping[str, Any], *, place: str) -> Quantisation | None:
    """Read a HF config; None: the weights are floats. Raises ModelError for any other way."""
    found = [(key, config[key]) for key in KEYS if config.get(key)]
    if not found:
        return None
    key, value = found[0]
    if not isinstance(value, dict):
        raise ModelError(f"{place}: '{key}' must hold a JSON object")
    if any(other != value for _, other in found[1:]):
        raise ModelError(f"{place}: '{KEYS[0]}' and '{KEYS[1]}' differ; fetch the model again")
    if value.get("quant_method") == "bitsandbytes":
        return _bitsandbytes(value, place=f"{place}: '{key}'")
    if "bits" not in value or "group_size" not in value or value.get("quant_method"):
        method = str(value.get("quant_method", "an unknown method"))[:40]
        raise ModelError(
            f"{place}: the weights are quantised by {method} ('{key}'), which is not supported; "
            f"use an MLX model of 4 or 8 bits, a GGUF file, bitsandbytes' NF4, or the unquantised "
            f"model with --quantize 4"
        )
    if len(value) > MAX_OVERRIDES:
        raise ModelError(f"{place}: '{key}' has {len(value)} entries, the limit is {MAX_OVERRIDES}")
    overrides = {
        name: _override(entry, place=f"{place}: '{key}' of {str(name)[:80]}")
        for name, entry in value.items()
        if isinstance(entry, (dict, bool))
    }
    default = _packing(value, place=f"{place}: '{key}'")
    return Quantisation(
        default=default,
        overrides=tuple(
            (name, default if entry is True else entry or None) for name, entry in overrides.items()
        ),
    )


def _bitsandbytes(value: Mapping[str, Any], *, place: str) -> Quantisation:
    """Read what transformers writes; it never quantises embedding and head."""
    is_4_bit = value.get("load_in_4bit") or value.get("_load_in_4bit")
    kind = value.get("bnb_4bit_quant_type") if is_4_bit else "8 bits"
    storage = value.get("bnb_4bit_quant_storage") or "uint8"
    if kind != "nf4" or storage != "uint8":
        said = f"{str(kind)[:40]} stored as {str(storage)[:40]}" if is_4_bit else kind
        raise ModelError(
            f"{place}: bitsandbytes' {said} is not supported; use its nf4 stored as uint8, or the "
            f"unquantised model with --quantize 4"
        )
    skipped = value.get("llm_int8_skip_modules") or []
    if not isinstance(skipped, list) or not all(isinstance(name, str) for name in skipped):
        raise ModelError(f"{place}: 'llm_int8_skip_modules' must be a list of names")
    if len(skipped) > MAX_OVERRIDES:
        raise ModelError(
            f"{place}: 'llm_int8_skip_modules' has {len(skipped)} names, the limit is "
            f"{MAX_OVERRIDES}"
        )
    return Quantisation(default=NF4_PACKING, skipped=("embed_tokens", "lm_head", *skipped))


def quantisation_of(infos: Mapping[str, TensorInfo]) -> dict[str, Any] | None:
    """Give what `quantization` would say of these tensors; None where none can stay packed."""
    found = {
        name.removesuffix(".weight"): packing_of(info.encoding)
        for name, info in infos.items()
        if len(info.shape) == 2
    }
    counts = Counter(packing for packing in found.values() if packing is not None)
    if not counts:
        return None
    ((default, _),) = counts.most_common(1)
    others = {
        module: _entry(packing) if packing else False
        for module, packing in found.items()
        if packing != default
    }
    return {**_entry(default), **others}


def _entry(packing: Packing) -> dict[str, Any]:
    return {"bits": packing.bits, "group_size": packing.group_size}


def _override(entry: dict[str, Any] | bool, *, place: str) -> Packing | bool:
    return entry if isinstance(entry, bool) else _packing(entry, place=place)


def _packing(entry: Mapping[str, Any], *, place: str) -> Packing:
    mode = entry.get("mode", "affine")
    if mode != "affine":
        raise ModelError(
            f"{place}: quantised as {str(mode)[:40]!r}, which is not supported; use an MLX model "
            f"of 4 or 8 bits (affine), or the unquantised model with --quantize 4"
        )
    packing = Packing(
        bits=whole(entry, "bits", place=place, high=64, default=_DEFAULT.bits),
        group_size=whole(
            entry, "group_size", place=place, high=1 << 20, default=_DEFAULT.group_size
        ),
    )
    packing.check(place=place)
    return packing
