"""`validate`: options to a report, and exit code 2 where a row is bad."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console

from exo_train.agent.validation import validate_report
from exo_train.cluster.home import open_home
from exo_train.config import TrainConfig
from exo_train.errors import DataError
from exo_train.ui.validation_screen import validation_screen


def register(app: typer.Typer) -> None:
    app.command(
        "validate",
        epilog="Example: exo-train validate chats.jsonl --model ./llama-3.2-1b",
    )(validate_command)


def validate_command(
    data: Annotated[str, typer.Argument(help="Rows, as --data of train takes them.")],
    model: Annotated[
        str, typer.Option(help="Whose tokenizer counts; only that and the config are needed.")
    ] = "",
    columns: Annotated[
        str, typer.Option(help="What your columns are to us: prompt=question,completion=answer.")
    ] = "",
    max_seq_length: Annotated[int, typer.Option(min=1, help="Rows above it are counted.")] = 512,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check every row of DATA: kinds, bad rows, duplicates; with a model tokens and a sample.

    The sample is a row as the model sees it, with what is learnt in colour. Exit code 2 when a row
    cannot be trained on; train would leave out the empty ones among these and refuse the others.
    """
    config = TrainConfig.from_mapping(
        {"data": data, "model": model, "columns": columns, "max_seq_length": max_seq_length},
        source="command line",
    )
    report = validate_report(open_home(), config)
    if as_json:
        typer.echo(json.dumps(report, allow_nan=False))
    else:
        console = Console()
        has_colour = console.is_terminal and not console.no_color
        console.print(validation_screen(report, has_colour=has_colour))
    _refuse(report)


def _refuse(report: dict[str, Any]) -> None:
    if not report["rows"]:
        raise DataError(f"{report['data']}: 0 usable of 0 rows, there is nothing in it")
    if report["bad"]:
        first = report["bad"][0]
        raise DataError(
            f"{report['num_bad']} of {report['rows']} rows cannot be trained on; the first is "
            f"{first['file']}, {first['place']}: {first['reason']}"
        )
