"""The options of a new run out of file and command line, and where each of them is from.

Owns which place wins and how the result is shown. Must not know models, data or devices.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from exo_train.agent.resuming import resumed_options
from exo_train.agent.starting_adapter import with_adapter
from exo_train.agent.yaml_file import read_mapping
from exo_train.config import OPTIONS, TrainConfig
from exo_train.errors import ConfigError
from exo_train.lora_config import NOT_WITH_FULL, check_no_adapter, said_over
from exo_train.options import plain_values
from exo_train.own_names import OwnNames, to_own_names

COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenOptions:
    """`sources` say where an option that is not the default is from; `notes` are for the user."""

    config: TrainConfig
    sources: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def require_model_and_data(self) -> None:
        for name, what in (("model", "MODEL"), ("data", "--data")):
            if not getattr(self.config, name):
                raise ConfigError(f"{what} is missing; see `exo-train train --help`")

    def to_yaml(self) -> str:
        """Give a file for --config; each line says in a comment where its value is from."""
        lines = (
            f"{_yaml_line(name, value)}  # {self.sources.get(name, 'default')}\n"
            for name, value in self.config.to_dict().items()
        )
        return "".join(lines)

    def to_json(self) -> str:
        options = {
            name: {"value": value, "source": self.sources.get(name, "default")}
            for name, value in self.config.to_dict().items()
        }
        return json.dumps({"schema": 1, "options": options}, allow_nan=False)


def choose_options(
    file: Path | None, given: Mapping[str, Any], *, resume: Path | None = None
) -> ChosenOptions:
    """Join the file of --config and the command line, which wins; `given` may be other names."""
    if resume is not None:
        return _resumed(file, given, resume)
    in_file = _NOTHING
    if file is not None:
        in_file = to_own_names(read_mapping(file, option="--config"), source=str(file))
        plain_values(OPTIONS, in_file.values, source=str(file))
    on_line = to_own_names(given, source=COMMAND_LINE, weaker=in_file.values)
    plain_values(OPTIONS, on_line.values, source=COMMAND_LINE)
    place = COMMAND_LINE if file is None else f"{file} and {COMMAND_LINE}" if given else str(file)
    said = said_over(in_file.values, on_line.values)
    if said.get("full"):  # on the command line even what is usual: it would have no effect
        typed = {name: v for name, v in on_line.values.items() if name in NOT_WITH_FULL}
        check_no_adapter(typed, {})
    values = with_adapter(said, source=place)
    config = TrainConfig.from_mapping(values, source=place)
    settled = {name: "--init-adapter" for name in values if name not in said}
    sources = settled | _sources(in_file, "file") | _sources(on_line, COMMAND_LINE)
    return ChosenOptions(config=config, sources=sources, notes=in_file.notes + on_line.notes)


def _resumed(file: Path | None, given: Mapping[str, Any], run: Path) -> ChosenOptions:
    on_line = to_own_names(given, source=COMMAND_LINE)
    changes = on_line.values if file is None else {**on_line.values, "config": file}
    config = resumed_options(run, changes)
    default = TrainConfig()
    of_run = {
        name: "the run" for name in OPTIONS if getattr(config, name) != getattr(default, name)
    }
    sources = of_run | _sources(on_line, COMMAND_LINE)
    return ChosenOptions(config=config, sources=sources, notes=on_line.notes)


def _sources(names: OwnNames, place: str) -> dict[str, str]:
    return {
        option: f"{place}, as {names.said_as[option]}" if option in names.said_as else place
        for option in names.values
    }


def _yaml_line(name: str, value: Any) -> str:
    is_flat = isinstance(value, (list, dict))  # within its line, where the comment follows
    text = yaml.safe_dump(
        {name: value},
        default_flow_style=None if is_flat else False,
        allow_unicode=True,
        width=2**20,
    )
    return text.rstrip("\n")


_NOTHING = OwnNames(values={}, notes=(), said_as={})
