"""The command line: parse, call, print. No logic.

Owns the names of commands and options, and the way an error reaches the user: one sentence on
standard error and the documented exit code.
"""

from __future__ import annotations

import sys
import traceback
from typing import Annotated

import typer

import exo_train
from exo_train.cli import (
    cluster_commands,
    data_commands,
    doctor_command,
    eval_command,
    model_commands,
    train_command,
)
from exo_train.errors import ExoTrainError

app = typer.Typer(
    name="exo-train",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Fine-tune language models on the computers you have at home, together.",
    epilog="Exit codes: 0 done, 2 usage or data, 3 peer or network, 4 does not fit, "
    "5 numbers went wrong, 130 interrupted (what is saved is said).",
)
cluster_commands.register(app)
doctor_command.register(app)
data_commands.register(app)
train_command.register(app)
model_commands.register(app)
eval_command.register(app)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"exo-train {exo_train.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option(help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options of all commands; `--debug` is read by `main`."""


def main() -> None:
    """Run the command; errors meant for the user are one sentence, others say how to report."""
    debug = "--debug" in sys.argv
    try:
        app()
    except ExoTrainError as error:
        if debug:
            traceback.print_exc()
        typer.echo(f"exo-train: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if debug:
            raise
        typer.echo(
            f"exo-train: unexpected {type(error).__name__}: {error}; run it again with "
            f"`exo-train --debug …` and report what it prints",
            err=True,
        )
        sys.exit(1)
