"""What an option of a run is: default, range, choices and help, said once at its field.

Owns reading a value of YAML or of the command line into the field's type, the ranges, and the
sentences that `--help` and docs/options.md show. Must not know any single option.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from exo_train.errors import ConfigError

_KEY = "about"


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """`text` is one sentence without its full stop; `group` is a heading in the help."""

    text: str
    group: str
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    choices: tuple[str, ...] | tuple[int, ...] = ()
    shows_default: bool = True  # a number's; else `text` says what happens without it
    takes_numbers: bool = False  # in a list of names, as YAML reads `[0, 7]`
    only_with: tuple[str, tuple[str, ...]] | None = None  # another option, and its values

    def check(self, name: str, value: Any) -> None:
        """Raise ConfigError for a value outside the range or the choices."""
        if self.choices and value not in self.choices:
            known = ", ".join(map(str, self.choices))
            raise ConfigError(f"'{name}' must be one of {known}, got '{value}'")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"'{name}' must be a finite number, got {value}")
        is_outside = (
            (self.minimum is not None and value < self.minimum)
            or (self.above is not None and value <= self.above)
            or (self.maximum is not None and value > self.maximum)
            or (self.below is not None and value >= self.below)
        )
        if is_outside:
            raise ConfigError(f"'{name}' must {self.range_words()}, got {value}")

    def range_words(self) -> str:
        """Say what the value must be; "be " where there is no limit."""
        if self.minimum is not None and self.maximum is not None:
            return f"be from {self.minimum:g} to {self.maximum:g}"
        if self.minimum == 0 and self.below is None:
            return "not be negative"
        ends = [
            f"{words} {end:g}"
            for words, end in (
                ("at least", self.minimum),
                ("a number above", self.above),
                ("at most", self.maximum),
                ("below", self.below),
            )
            if end is not None
        ]
        return f"be {' and '.join(ends)}"


def option(default: Any, text: str, *, group: str, **about: Any) -> Any:
    """Make a field of an options dataclass; `about` are the other fields of `About`."""
    return dataclasses.field(
        default=default, metadata={_KEY: About(text=text, group=group, **about)}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One field of an options dataclass, with its resolved type (int, float, bool, str, tuple)."""

    name: str
    default: Any
    hint: Any
    about: About

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def help(self) -> str:
        about, default = self.about, self.default
        text = about.text
        if about.choices:
            first_default = sorted(about.choices, key=lambda choice: choice != default)
            *others, last = map(str, first_default)
            text = f"{', '.join(others)} or {last}: {text}"
        if type(default) in (int, float) and about.shows_default:
            text = f"{text} ({default:g})"
        return f"{text}."


def options_of(cls: Any) -> dict[str, Option]:
    """Give the options of a dataclass whose fields are made by `option`, in their order."""
    hints = typing.get_type_hints(cls)
    return {
        f.name: Option(name=f.name, default=f.default, hint=hints[f.name], about=f.metadata[_KEY])
        for f in dataclasses.fields(cls)
    }


def check_ranges(values: Any) -> None:
    """Check each field of an options dataclass by itself; raises ConfigError."""
    for field in dataclasses.fields(values):
        field.metadata[_KEY].check(field.name, getattr(values, field.name))


def check_used(values: Any) -> None:
    """Refuse an option that was changed and that another one's value leaves without a use."""
    for field in dataclasses.fields(values):
        about = field.metadata[_KEY]
        is_changed = getattr(values, field.name) != field.default
        if is_changed and not _has_use(about, lambda other: getattr(values, other)):
            other, uses = about.only_with
            raise ConfigError(
                f"'{field.name}' does nothing with '{other}' {getattr(values, other)}, only with "
                f"{' or '.join(uses)}; leave one of them out"
            )


def used(known: Mapping[str, Option], values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out options that another one's value leaves without a use."""

    def value_of(other: str) -> Any:
        return values.get(other, known[other].default)

    return {n: value for n, value in values.items() if _has_use(known[n].about, value_of)}


def _has_use(about: About, value_of: Callable[[str], Any]) -> bool:
    return about.only_with is None or value_of(about.only_with[0]) in about.only_with[1]


def read_values(
    known: Mapping[str, Option], mapping: Mapping[str, Any], *, source: str
) -> dict[str, Any]:
    """Turn keys of a file or command line into the fields' values; dashes count as underscores.

    Raises ConfigError naming `source` for an unknown key, with the nearest name, or a wrong type.
    """
    values: dict[str, Any] = {}
    for raw_key, value in mapping.items():
        key = str(raw_key).replace("-", "_")
        if key not in known:
            raise ConfigError(f"{source}: unknown key '{raw_key}'{nearest(key, known)}")
        if known[key].about.takes_numbers:
            value = _numbers_as_names(value)
        values[key] = _coerce(key, value, known[key].hint, source)
    return values


def plain_values(
    known: Mapping[str, Option], mapping: Mapping[str, Any], *, source: str
) -> dict[str, Any]:
    """Read single options as YAML and JSON have them; raises ConfigError for one that is wrong."""
    values = read_values(known, mapping, source=source)
    for name, value in values.items():
        try:
            known[name].about.check(name, value)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def nearest(name: str, names: Iterable[str]) -> str:
    """Give "; did you mean ...?", or nothing where no name is near."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def _coerce(key: str, value: Any, hint: Any, source: str) -> Any:
    """Turn a YAML or command-line value into the field's type ('1e-4' is a number to us)."""

    def refuse(expected: str) -> ConfigError:
        return ConfigError(f"{source}: '{key}' must be {expected}, got {value!r}")

    if hint is bool:
        if isinstance(value, bool):
            return value
        raise refuse("true or false")
    if hint in (int, float):
        return _number(value, hint, refuse)
    if hint is str:
        if not isinstance(value, str):
            raise refuse("text")
        return value
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value):
        return tuple(value)
    raise refuse("a list of names")


def _numbers_as_names(value: Any) -> Any:
    if isinstance(value, list):
        return [_numbers_as_names(part) for part in value]
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _number(value: Any, hint: Any, refuse: Callable[[str], ConfigError]) -> int | float:
    """Read a finite number; whole ones without a detour through floats, which would round."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise refuse("a number")
    if hint is int and not isinstance(value, float):
        with contextlib.suppress(ValueError):  # perhaps "8.0" or "1e3"
            return int(value)
    try:
        number = float(value)
    except ValueError:
        raise refuse("a number") from None
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise refuse("a finite number")
    if hint is float:
        return number
    if number != int(number):
        raise refuse("a whole number")
    return int(number)
