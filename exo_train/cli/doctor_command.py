"""`doctor`: why a device is not found or slow, and the fix."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console

from exo_train.agent.diagnosis import diagnose
from exo_train.cluster.checks.finding import exit_code
from exo_train.cluster.home import open_home
from exo_train.ui.findings import finding_lines

DOCTOR_SCHEMA = 1


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: exo-train doctor --json")(doctor)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this device, its network and the others; say what is wrong and how to mend it.

    While `exo-train join` runs it checks more: it asks the others, too. Exit code 0: nothing is
    wrong; 3: network or other devices; 4: memory; 2: the configuration of this device.
    """
    findings = diagnose(open_home())
    code = exit_code(findings)
    if as_json:
        rows = [dataclasses.asdict(finding) for finding in findings]
        content = {"schema": DOCTOR_SCHEMA, "ok": code == 0, "findings": rows}
        typer.echo(json.dumps(content, indent=2))
    else:
        console = Console()
        for text, style in finding_lines(findings, encoding=console.encoding):
            console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code)
