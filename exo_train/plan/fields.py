"""Strict reading of JSON that another device sent. Owns the checks of keys, types and ranges.

Pure. Must not know what the fields mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from exo_train.errors import ProtocolError
from exo_train.peer import has_control_characters

MAX_TEXT_CHARS = 256
MAX_WHOLE = 2**53  # every JSON reader agrees on integers up to here

_MAX_DIGITS = 64  # a random generator's 128-bit state has 39
_T = TypeVar("_T")


class Fields:
    """One JSON object, read key by key; `place` names it in messages."""

    def __init__(self, value: object, place: str) -> None:
        if not isinstance(value, Mapping):
            raise ProtocolError(f"{place} must be an object, got {_shown(value)}")
        self._mapping: Mapping[str, object] = value
        self._place = place
        self._read: set[str] = set()

    def __enter__(self) -> Fields:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Refuse keys that nobody asked for."""
        unknown = sorted(set(self._mapping) - self._read)
        if kind is None and unknown:
            raise ProtocolError(f"{self._place} has the unknown key {_shown(unknown[0])}")

    def text(self, key: str, *, choices: Sequence[str] = ()) -> str:
        value = self._take(key)
        too_long = isinstance(value, str) and len(value) > MAX_TEXT_CHARS
        if not isinstance(value, str) or too_long or has_control_characters(value):
            what = f"text of at most {MAX_TEXT_CHARS} characters without control characters"
            self._refuse(key, what, value)
        if choices and value not in choices:
            self._refuse(key, f"one of {', '.join(choices)}", value)
        return value

    def whole(self, key: str, *, low: int, high: int = MAX_WHOLE) -> int:
        value = self._take(key)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self._refuse(key, f"a whole number from {low} to {high}", value)
        return value

    def number(self, key: str, *, low: float, high: float = math.inf) -> float:
        value = self._take(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self._refuse(key, "a number", value)
        if not low <= value <= high or math.isinf(value):
            self._refuse(key, f"a finite number from {low:g} to {high:g}", value)
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._take(key)
        if not isinstance(value, bool):
            self._refuse(key, "true or false", value)
        return value

    def each(self, key: str, *, most: int, read: Callable[[object, str], _T]) -> tuple[_T, ...]:
        """Read a list of at most `most` items; `read` gets each value and its place."""
        value = self._take(key)
        if not isinstance(value, list) or len(value) > most:
            self._refuse(key, f"a list of at most {most} items", value)
        return tuple(read(item, f"{self._place}.{key}[{i}]") for i, item in enumerate(value))

    def inner(self, key: str) -> Fields:
        return Fields(self._take(key), f"{self._place}.{key}")

    def _take(self, key: str) -> object:
        self._read.add(key)
        if key not in self._mapping:
            raise ProtocolError(f"{self._place} lacks '{key}'")
        return self._mapping[key]

    def _refuse(self, key: str, expected: str, value: object) -> NoReturn:
        raise ProtocolError(f"{self._place}.{key} must be {expected}, got {_shown(value)}")


def parse_json(text: str, *, place: str, max_chars: int) -> Any:
    """Parse untrusted JSON: bounded size, depth and digits, no NaN, no key twice."""
    if len(text) > max_chars:
        raise ProtocolError(f"{place} has {len(text)} characters, the limit is {max_chars}")
    try:
        return json.loads(
            text,
            parse_int=_bounded_int,
            parse_constant=_refuse_constant,
            object_pairs_hook=_unique_keys,
        )
    except RecursionError:
        raise ProtocolError(f"{place} is nested too deeply") from None
    except ValueError as error:
        raise ProtocolError(f"{place} is not valid JSON: {error}") from None


def _bounded_int(digits: str) -> int:
    # Python's own limit is thousands of digits, and absent in early 3.10 releases.
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key comes twice")
    return result


def _shown(value: object) -> str:
    """Show a foreign value in a message: short, and without control characters."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
