"""Flags of `train` under other programs' names: taken off the command line before it is parsed.

Owns their spelling only; what a name means is said in `aliases`. They are no options of the
command, so that its help and its frozen surface hold our own names.
"""

from __future__ import annotations

from typing import Any

import typer
import typer.core

from exo_train.aliases import is_flag
from exo_train.config import OPTIONS
from exo_train.errors import ConfigError
from exo_train.options import nearest
from exo_train.own_names import is_foreign, known_names

_KEY = "exo_train.foreign_flags"
_SAID = {"true": True, "false": False}


def foreign_flags(context: typer.Context) -> dict[str, Any]:
    """Give what `TrainParser` took off the command line that is being run."""
    return dict(context.meta.get(_KEY, {}))


class TrainParser(typer.core.TyperCommand):
    """Typer's command; flags of other programs go to `foreign_flags`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own_flags = {
            flag
            for parameter in self.get_params(ctx)
            for flag in (*parameter.opts, *parameter.secondary_opts)
        }
        ctx.meta[_KEY], own = _take_foreign(args, own_flags)
        return super().parse_args(ctx, own)


def _take_foreign(args: list[str], own_flags: set[str]) -> tuple[dict[str, Any], list[str]]:
    """Part arguments into foreign flags with their values, and all the rest.

    `--name value` and `--name=value`; what is a flag in those programs is true without a value,
    and takes no other words than true and false.
    """
    foreign: dict[str, Any] = {}
    own: list[str] = []
    rest = list(args)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return foreign, [*own, word, *rest]
        flag, equals, text = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or not is_foreign(name):
            if flag.startswith("--") and flag not in own_flags:
                names = [f"--{known.replace('_', '-')}" for known in known_names()]
                near = nearest(flag, [*own_flags, *names])
                raise ConfigError(f"command line: unknown option '{flag}'{near}")
            own.append(word)
            if _takes_a_value(name, flag, equals) and rest:
                own.append(rest.pop(0))  # a value may look like a flag
            continue
        if not equals:
            has_value = bool(rest) and (not is_flag(name) or rest[0].lower() in _SAID)
            text = rest.pop(0) if has_value else "true"
        if name in foreign:
            raise ConfigError(f"command line: --{name.replace('_', '-')} is there twice")
        foreign[name] = _SAID.get(text.lower(), text)
    return foreign, own


def _takes_a_value(name: str, flag: str, equals: str) -> bool:
    if not flag.startswith("--") or equals:
        return False
    return name in ("config", "resume") or (name in OPTIONS and OPTIONS[name].hint is not bool)
