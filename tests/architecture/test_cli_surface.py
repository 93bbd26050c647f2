"""Commands and options that scripts rely on, and that `train --help` tells the truth.

After a wanted change: `python tests/architecture/test_cli_surface.py` rewrites the list.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from exo_train.cli.main import app
from exo_train.config import OPTIONS, TrainConfig
from exo_train.lora_config import ALL_TARGETS

GOLDEN = Path(__file__).with_name("cli_surface.txt")
NOT_OF_THE_CONFIG = {"config", "resume", "replan", "print_config", "as_json"}
FIELDS = {field.name: field for field in dataclasses.fields(TrainConfig)}


def _described(parameter: Any) -> str:
    """Give what a script depends on: spelling, whether it takes a value, must be there, repeats."""
    names = "/".join([*parameter.opts, *parameter.secondary_opts])
    if not names.startswith("-"):
        return f"{names.upper()}" if parameter.required else f"[{names.upper()}]"
    value = "" if parameter.is_flag else " VALUE"
    marks = (" required" if parameter.required else "") + (" repeatable" * parameter.multiple)
    return f"{names}{value}{marks}"


def _surface(command: Any, name: str) -> Iterator[str]:
    for parameter in command.params:
        yield f"{name} {_described(parameter)}"
    for child_name, child in sorted(getattr(command, "commands", {}).items()):
        yield f"{name} {child_name}"
        yield from _surface(child, f"{name} {child_name}")


def surface() -> str:
    return "".join(f"{line}\n" for line in _surface(typer.main.get_command(app), "exo-train"))


def _train_parameters() -> dict[str, Any]:
    root: Any = typer.main.get_command(app)
    return {parameter.name: parameter for parameter in root.commands["train"].params}


def _help(name: str) -> str:
    return str(_train_parameters()[name].help)


def test_commands_and_options_are_the_frozen_ones() -> None:
    expected, actual = GOLDEN.read_text("utf-8"), surface()
    changes = difflib.unified_diff(expected.splitlines(), actual.splitlines(), lineterm="", n=0)
    assert actual == expected, "\n".join(["scripts rely on these:", *changes])


def test_every_command_has_help_and_an_example() -> None:
    root: Any = typer.main.get_command(app)
    for name, command in root.commands.items():
        assert command.help, name
        assert (command.epilog or "").startswith(f"Example: exo-train {name}"), name
        assert all(p.help for p in command.params), [p.name for p in command.params if not p.help]


def test_train_options_are_the_fields_of_the_config() -> None:
    parameters = _train_parameters()
    assert parameters.keys() - NOT_OF_THE_CONFIG == FIELDS.keys()
    for name in FIELDS.keys() - {"model"}:
        assert parameters[name].opts == [f"--{name.replace('_', '-')}"]
        # Else an option that was not given would win over the file.
        assert parameters[name].default is None, name


@pytest.mark.parametrize(
    "name",
    sorted(name for name, field in FIELDS.items() if type(field.default) in (int, float)),
)
def test_number_in_the_help_is_the_default(name: str) -> None:
    stated = re.search(r"\(([^()]+)\)\.$", _help(name))
    if stated is None:
        assert not OPTIONS[name].about.shows_default
        assert re.search(r"default: |; 0: ", _help(name)), "what happens without it?"
    else:
        assert float(stated[1]) == FIELDS[name].default


def test_help_of_targets_counts_them_right() -> None:
    assert FIELDS["targets"].default == ALL_TARGETS
    assert len(ALL_TARGETS) == 7
    assert "(all seven)" in _help("targets")


@pytest.mark.parametrize("name", [n for n, option in OPTIONS.items() if option.about.choices])
def test_help_lists_all_choices_with_the_default_first(name: str) -> None:
    listed = re.split(r", | or ", _help(name).split(":")[0])
    assert set(listed) == set(map(str, OPTIONS[name].about.choices))
    assert listed[0] == str(FIELDS[name].default)


if __name__ == "__main__":
    GOLDEN.write_text(surface(), "utf-8", newline="\n")
