"""`eval`: a run against its base on a data set."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from exo_train.agent.evaluating import EvaluationOptions, evaluate
from exo_train.cluster.home import open_home
from exo_train.ui.tables import evaluation_screen


def register(app: typer.Typer) -> None:
    app.command("eval", epilog="Example: exo-train eval my-run --data test.jsonl --samples 3")(
        eval_command
    )


def eval_command(
    run: Annotated[str, typer.Argument(help="A run directory, or a model.")],
    data: Annotated[
        str,
        typer.Option(help="Rows as for train; of a directory valid.jsonl. Default: the run's own."),
    ] = "",
    max_seq_length: Annotated[
        int, typer.Option(min=0, help="Tokens; longer rows are cut. 0: as the run.")
    ] = 0,
    samples: Annotated[
        int, typer.Option(min=0, help="Answers of base and adapter to so many of the prompts.")
    ] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 60,
    backend: Annotated[str, typer.Option(help="auto, mlx or torch.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure loss and perplexity of a run's adapter and of its base, on this device alone.

    The loss is that of training: the same masks, a mean over all supervised tokens; of preference
    pairs over the pairs, with rewards in place of perplexity. Without --data it is about the rows
    that the run held out.
    """
    notes = Console(stderr=True)
    report = evaluate(
        open_home(),
        run,
        EvaluationOptions(
            data=data,
            max_seq_length=max_seq_length,
            num_samples=samples,
            max_answer_tokens=max_tokens,
            backend=backend,
        ),
        on_note=lambda text: notes.print(text, style="dim", markup=False, soft_wrap=True),
    ).to_dict()
    if as_json:
        typer.echo(json.dumps(report, allow_nan=False))
        return
    Console().print(evaluation_screen(report))
