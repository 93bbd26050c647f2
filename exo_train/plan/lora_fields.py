"""Reading from JSON which adapters another device means. Owns its keys and ranges.

Pure. What the choice comes to on a model is `lora_config.placements`' to say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from exo_train.errors import ConfigError, ProtocolError
from exo_train.lora_config import (
    MAX_ALPHA,
    MAX_RANK,
    LoraConfig,
    Placement,
    check_words,
    placements,
)
from exo_train.plan.fields import Fields

MAX_NAMES = 4096
_T = TypeVar("_T", int, float)


def read_lora(fields: Fields, place: str) -> LoraConfig:
    """Read and check the words of a choice; raises ProtocolError naming `place`."""
    with fields:
        lora = LoraConfig(
            rank=fields.whole("rank", low=1, high=MAX_RANK),
            alpha=fields.number("alpha", low=1e-12, high=MAX_ALPHA),
            dropout=fields.number("dropout", low=0.0, high=0.999999),
            targets=fields.each("targets", most=MAX_NAMES, read=_name),
            layers=fields.each("layers", most=MAX_NAMES, read=_name),
            rslora=fields.flag("rslora"),
            dora=fields.flag("dora"),
            rank_pattern=fields.each("rank_pattern", most=MAX_NAMES, read=_pair(_rank)),
            alpha_pattern=fields.each("alpha_pattern", most=MAX_NAMES, read=_pair(_alpha)),
            full=fields.flag("full"),
        )
    try:
        check_words(lora)
    except ConfigError as error:
        raise ProtocolError(f"{place}: {error}") from None
    return lora


def placements_of(lora: LoraConfig, num_layers: int, place: str) -> tuple[Placement, ...]:
    """Give `placements`; raises ProtocolError naming `place` where the model has no place."""
    try:
        return placements(lora, num_layers)
    except ConfigError as error:
        raise ProtocolError(f"{place}: {error}") from None


def _name(value: object, place: str) -> str:
    return Fields({"name": value}, place).text("name")


def _pair(read: Callable[[Fields], _T]) -> Callable[[object, str], tuple[str, _T]]:
    """Read [name, value]."""

    def pair(value: object, place: str) -> tuple[str, _T]:
        if not isinstance(value, list) or len(value) != 2:
            raise ProtocolError(f"{place} must be [name, value]")
        with Fields({"name": value[0], "value": value[1]}, place) as fields:
            return fields.text("name"), read(fields)

    return pair


def _rank(fields: Fields) -> int:
    return fields.whole("value", low=1, high=MAX_RANK)


def _alpha(fields: Fields) -> float:
    return fields.number("value", low=1e-12, high=MAX_ALPHA)
