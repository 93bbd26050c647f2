"""Bounded reading of fields from untrusted mappings (model configs, manifests).

Owns the checks of type and range. Must not know what a field means.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from exo_train.errors import ModelError


def canonical_json(value: Any) -> str:
    """Give one text per value: keys sorted, no blanks, ASCII only, NaN refused."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def parse_object(text: str | bytes, *, place: str) -> dict[str, Any]:
    """Parse JSON that must be an object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{place}: not valid JSON ({error}); fetch the file again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{place}: must hold a JSON object, got {type(value).__name__}")
    return value


def whole(
    mapping: Mapping[str, Any],
    key: str,
    *,
    place: str,
    low: int = 1,
    high: int,
    default: int | None = None,
) -> int:
    """Read a whole number in [low, high]; absent or null gives `default` when there is one."""
    value = mapping.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        raise ModelError(f"{place}: '{key}' is missing")
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"{place}: '{key}' must be a whole number, got {_short(value)}")
    if not low <= value <= high:
        raise ModelError(f"{place}: '{key}' must be from {low} to {high}, got {_short(value)}")
    return value


def number(
    mapping: Mapping[str, Any],
    key: str,
    *,
    place: str,
    high: float,
    default: float | None = None,
) -> float:
    """Read a finite number in (0, high]; absent or null gives `default` when there is one."""
    value = mapping.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        raise ModelError(f"{place}: '{key}' is missing")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ModelError(f"{place}: '{key}' must be a number, got {_short(value)}")
    if not 0 < value <= high:
        raise ModelError(f"{place}: '{key}' must be above 0 and at most {high:g}, got {value!r}")
    return float(value)


def flag(mapping: Mapping[str, Any], key: str, *, place: str, default: bool = False) -> bool:
    """Read true or false; absent or null gives `default`."""
    value = mapping.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(f"{place}: '{key}' must be true or false, got {_short(value)}")
    return value


def text(mapping: Mapping[str, Any], key: str, *, place: str, max_chars: int) -> str:
    """Read a string of at most `max_chars`."""
    value = mapping.get(key)
    if not isinstance(value, str):
        raise ModelError(f"{place}: '{key}' must be text, got {_short(value)}")
    if len(value) > max_chars:
        raise ModelError(
            f"{place}: '{key}' has {len(value)} characters, above the limit of {max_chars}"
        )
    return value


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
