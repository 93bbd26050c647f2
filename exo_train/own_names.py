"""A mapping of options under any known names, read into our own names.

Owns what two names of one option may say, and the values that take two options together. Pure;
must not know where the mapping comes from. What a single name means is in `aliases`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from exo_train.alias_values import NotHereError, Values
from exo_train.aliases import ACCUMULATIONS, NESTED, OWN_VALUES, PAIR_LOSSES, RULES, Settled
from exo_train.config import OPTIONS
from exo_train.errors import ConfigError
from exo_train.options import nearest, read_values

_CURVE = (
    "as a mapping it is mlx-lm's; say 'lr_schedule: cosine', 'learning_rate' and 'warmup_steps'"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnNames:
    """Options under their own names; `notes` say which other names were read as what."""

    values: Values
    notes: tuple[str, ...]
    said_as: Mapping[str, str]  # option: the name that it was said by, where that was another


def is_foreign(name: str) -> bool:
    """Say whether `name` (with underscores) is known, and no option of ours."""
    return name in RULES or name in ACCUMULATIONS


def known_names() -> tuple[str, ...]:
    return (*OPTIONS, *RULES, *ACCUMULATIONS)


def to_own_names(
    mapping: Mapping[str, Any], *, source: str, weaker: Mapping[str, Any] | None = None
) -> OwnNames:
    """Read a mapping that may use other programs' names; `source` names the place in messages.

    `weaker` are options said in a place that this one wins over, under their own names: what a
    scale or an accumulation is multiplied by may stand there. Raises ConfigError for a name that
    nobody knows, one that has no meaning here, and two names of one option that disagree.
    """
    return _Reading(source, dict(weaker or {})).read(mapping)


class _Reading:
    def __init__(self, source: str, weaker: Values) -> None:
        self._source = source
        self._weaker = weaker
        self._values: Values = {}
        self._said_as: dict[str, str] = {}  # by option
        self._notes: list[str] = []

    def read(self, mapping: Mapping[str, Any]) -> OwnNames:
        together: Values = {}
        for raw_name, value in _with_one_objective(list(_flat(mapping))):
            name = str(raw_name).replace("-", "_")
            if name == "lr_schedule" and isinstance(value, dict):
                self._refuse(name, _CURVE)
            if name in OPTIONS:
                self._put(name, self._own_value(name, value), said_as=name)
            elif name in ACCUMULATIONS:
                together[name] = value
            elif name in RULES:
                # `null` is how their files say nothing, but for axolotl's `adapter`.
                if value is not None or name == "adapter":
                    self._read_rule(name, value)
            else:
                near = nearest(name, known_names())
                raise ConfigError(f"{self._source}: unknown key '{raw_name}'{near}")
        for name, value in together.items():
            self._accumulation(name, value)
        others = {option: name for option, name in self._said_as.items() if option != name}
        return OwnNames(values=self._values, notes=tuple(self._notes), said_as=others)

    def _read_rule(self, name: str, value: Any) -> None:
        rule = RULES[name]
        try:
            values = rule.values(value)
        except NotHereError as instead:
            self._refuse(name, str(instead))
        for option, own in values.items():
            self._put(option, own, said_as=name)
            shown = "" if own == value else f" {_shown(own)}"
            self._notes.append(f"'{name}' is read as '{option}'{shown}")
        if not values and isinstance(rule, Settled):
            self._notes.append(f"'{name}' is so anyway: {rule.because}")

    def _own_value(self, name: str, value: Any) -> Any:
        """Read a value that only other programs have for an option of ours."""
        own = next((r.values(value)[name] for r in OWN_VALUES if r.option == name), value)
        if own != value:
            self._notes.append(f"'{name}' {_shown(value)} is read as {_shown(own)}")
        return own

    def _accumulation(self, name: str, value: Any) -> None:
        count = self._one("batch_size", value, name)
        micro = self._one("microbatch_size", self._merged("microbatch_size"), "microbatch_size")
        if self._said_as.get("steps") == "iters" and count != 1:
            self._refuse(
                "iters", f"with '{name}' it counts microbatches; say 'steps', iters / {count}"
            )
        if micro:
            self._put("batch_size", micro * count, said_as=name)
            self._notes.append(
                f"'{name}' {count} times microbatches of {micro} is read as "
                f"'batch_size' {micro * count}"
            )
        elif count != 1:
            self._refuse(
                name,
                "alone it does not say how many sequences an update has; say 'batch_size', the "
                "sequences of an update over all devices, or 'microbatch_size' beside it",
            )

    def _merged(self, option: str) -> Any:
        return self._values.get(option, self._weaker.get(option, OPTIONS[option].default))

    def _put(self, option: str, value: Any, *, said_as: str) -> None:
        if option in self._values:
            before = self._said_as[option]
            one, other = (
                self._one(option, self._values[option], before),
                self._one(option, value, said_as),
            )
            if one != other:
                raise ConfigError(
                    f"{self._source}: '{before}' and '{said_as}' both say '{option}', "
                    f"{_shown(one)} and {_shown(other)}; leave one out"
                )
        if said_as != option:
            value = self._one(option, value, said_as)
        self._values[option] = value
        self._said_as[option] = said_as

    def _one(self, option: str, value: Any, said_as: str) -> Any:
        """Read a value as `option` would; a refusal names what it was said by."""
        place = self._source if said_as == option else f"{self._source}: '{said_as}'"
        return read_values(OPTIONS, {option: value}, source=place)[option]

    def _refuse(self, name: str, instead: str) -> NoReturn:
        raise ConfigError(f"{self._source}: '{name}' is refused: {instead}")


def _flat(mapping: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in mapping.items():
        if str(name).replace("-", "_") == NESTED and isinstance(value, dict):
            yield from ((f"{NESTED}.{inner}", each) for inner, each in value.items())
        else:
            yield name, value


def _with_one_objective(said: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Leave out a stage of pairs that another loss is named for: LLaMA-Factory's way to ORPO."""
    losses = [value for name, value in said if name.replace("-", "_") in PAIR_LOSSES]
    if "orpo" not in losses:
        return said
    return [(name, value) for name, value in said if (name, value) != ("stage", "dpo")]


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
