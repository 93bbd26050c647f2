"""Values that other fine-tuners' options take, read into options here.

Owns one function for each kind of value that is not simply the same. Pure; which names they stand
under is in `aliases`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from exo_train.config import OPTIONS

Values = dict[str, Any]


class NotHereError(Exception):
    """A value that has no meaning here; says what to use."""


def _number(value: Any, expected: str) -> float:
    try:
        return float("nan" if isinstance(value, bool) else value)
    except (TypeError, ValueError):
        raise NotHereError(f"it must be {expected}") from None


def read_steps(value: Any) -> Values:
    """In transformers -1 leaves the length to the epochs."""
    return {"steps": 0 if _number(value, "a whole number") == -1 else value}


def read_rate_curve(value: Any) -> Values:
    return {"lr_schedule": "constant" if value == "constant_with_warmup" else value}


def read_targets(value: Any) -> Values:
    names = [value] if isinstance(value, str) else value
    if names in (["all"], ["all-linear"]):
        return {"targets": OPTIONS["targets"].default}
    return {"targets": value}


def read_all_linear(value: Any) -> Values:
    if value is not True:
        raise NotHereError("say which projections with 'targets'")
    return {"targets": OPTIONS["targets"].default}


def read_held_out(value: Any) -> Values:
    number = _number(value, "a number of rows, or a share of them")
    if number >= 1 or number == 0:
        return {"val_rows": value}
    return {"val_split": value}


def read_dtype(name: str) -> Callable[[Any], Values]:
    def read(value: Any) -> Values:
        if value is False:
            return {}
        if value is not True and value != "auto":
            raise NotHereError("it must be true, false or auto")
        return {"dtype": name if value is True else "auto"}

    return read


def read_data(value: Any) -> Values:
    """Take a path, or axolotl's list with one; kinds of rows are recognised row by row."""
    entries = value if isinstance(value, list) else [value]
    if len(entries) == 1:
        entry = entries[0]
        if isinstance(entry, dict) and isinstance(entry.get("path"), str):
            if others := entry.keys() - {"path", "type", "ds_type"}:
                raise NotHereError(f"'{min(map(str, others))}' in it is not known; say 'data'")
            return {"data": entry["path"]}
        if isinstance(entry, str):
            return {"data": entry}
    raise NotHereError("say 'data' with the file or directory")


def read_last_layers(value: Any) -> Values:
    number = _number(value, "a number of layers")
    return {"adapter_layers": "all" if number == -1 else f"last:{number:g}"}


def read_bits(number: int) -> Callable[[Any], Values]:
    def read(value: Any) -> Values:
        if not isinstance(value, bool):
            raise NotHereError("it must be true or false")
        return {"quantize": number} if value else {}

    return read


def read_kind(value: Any) -> Values:
    """Take what is trained; "lora" is what there is without DoRA. axolotl's `adapter` is empty."""
    if value in ("full", "", None):
        return {"full": True}
    if value not in ("lora", "qlora", "dora"):
        raise NotHereError("adapters of the kinds lora and dora are trained, or full: all weights")
    return {"dora": True} if value == "dora" else {"full": False}


def read_optimizer(value: Any) -> Values:
    """Fused, paged and 8-bit ones compute the same rule."""
    return {"optimizer": "adamw" if "adamw" in str(value) else value}


def read_pair_loss(value: Any) -> Values:
    """In TRL a list, too; orpo is a stage of its own there, a loss in LLaMA-Factory."""
    names = value if isinstance(value, list) else [value]
    if names == ["sigmoid"]:
        return {}
    if names == ["orpo"]:
        return {"objective": "orpo"}
    raise NotHereError("of the losses for pairs there are dpo's sigmoid, and orpo")


def read_dtype_name(value: Any) -> Values:
    """PyTorch's names of them."""
    names = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
    return {"dtype": names.get(str(value), value)}


def read_adapter_folder(value: Any) -> Values:
    """mlx-lm names the file of arrays in it."""
    is_file = str(value).endswith(".safetensors")
    return {"init_adapter": str(Path(value).parent) if is_file else value}
