"""How rows become token ids and masks, as far as options say it. Pure; owns the choices."""

from __future__ import annotations

from dataclasses import dataclass

SYSTEM_ROLES = ("template", "merge", "drop", "error")
TRAIN_TURNS = ("all", "last")
ON_LONG = ("truncate", "drop", "split", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingConfig:
    """How rows become token ids and masks, the template itself aside."""

    system_role: str = SYSTEM_ROLES[0]
    train_turns: str = TRAIN_TURNS[0]
    on_long: str = ON_LONG[0]
