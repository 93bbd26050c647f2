"""`validate`: options to a report, and exit code 2 where a row is bad."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.console import Console

from exo_train.agent.validation import validate_report
from exo_train.cli.option_parameters import option_parameter, take_parameters
from exo_train.cluster.home import open_home
from exo_train.config import OPTIONS, TrainConfig
from exo_train.errors import DataError
from exo_train.ui.validation_screen import validation_screen

# What of a run's options decides which rows there are and what is learnt of them.
VALIDATE_OPTIONS = (
    "columns", "chat_template", "system_role", "train_turns", "max_seq_length",
)  # fmt: skip


def register(app: typer.Typer) -> None:
    app.command(
        "validate",
        epilog="Example: exo-train validate chats.jsonl --model ./llama-3.2-1b",
    )(validate_command)


def validate_command(**values: Any) -> None:
    """Check every row of DATA: kinds, bad rows, duplicates; with a model tokens and a sample.

    The sample is a row as the model sees it, with what is learnt in colour. Exit code 2 when a row
    cannot be trained on; train would leave out the empty ones among these and refuse the others.
    """
    names = ("data", "model", *VALIDATE_OPTIONS)
    given = {name: values[name] for name in names if values[name] is not None}
    report = validate_report(open_home(), TrainConfig.from_mapping(given, source="command line"))
    if values["as_json"]:
        typer.echo(json.dumps(report, allow_nan=False))
    else:
        console = Console()
        has_colour = console.is_terminal and not console.no_color
        console.print(validation_screen(report, has_colour=has_colour))
    _refuse(report)


take_parameters(
    validate_command,
    {
        "data": (str, typer.Argument(help="Rows, as --data of train takes them."), ...),
        "model": (
            str | None,
            typer.Option(help="Whose tokenizer counts; only that and the config are needed."),
            None,
        ),
        **{name: option_parameter(OPTIONS[name]) for name in VALIDATE_OPTIONS},
        "as_json": (bool, typer.Option("--json", help="Print JSON."), False),
    },
)


def _refuse(report: dict[str, Any]) -> None:
    if not report["rows"]:
        raise DataError(f"{report['data']}: 0 usable of 0 rows, there is nothing in it")
    if report["bad"]:
        first = report["bad"][0]
        raise DataError(
            f"{report['num_bad']} of {report['rows']} rows cannot be trained on; the first is "
            f"{first['file']}, {first['place']}: {first['reason']}"
        )
