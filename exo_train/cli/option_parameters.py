"""Parameters of a command out of a run's options, so that Typer reads what is said at their fields.

Owns how an option becomes a parameter. Must not know any single option or command.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from exo_train.options import Option

# Type, what Typer is told, default.
Parameter = tuple[Any, Any, Any]


def option_parameter(option: Option) -> Parameter:
    """Give the parameter of one option; None stands for "not given", so that a file may decide."""
    if option.hint is bool:
        about = typer.Option(help=option.help, rich_help_panel=option.about.group)
        return bool | None, about, None
    kind = option.hint if option.hint in (int, float) else str
    about = typer.Option(option.flag, help=option.help, rich_help_panel=option.about.group)
    return kind | None, about, None


def signature_of(parameters: Mapping[str, Parameter]) -> inspect.Signature:
    """Give the signature of a command that takes them, and its `context`, by keyword."""
    by_keyword = inspect.Parameter.KEYWORD_ONLY
    context = inspect.Parameter("context", by_keyword, annotation=typer.Context)
    return inspect.Signature(
        [
            context,
            *(
                inspect.Parameter(
                    name, by_keyword, default=default, annotation=Annotated[kind, about]
                )
                for name, (kind, about, default) in parameters.items()
            ),
        ]
    )


def take_parameters(command: Any, parameters: Mapping[str, Parameter]) -> None:
    """Have Typer read `parameters` in place of the command's own `**values`."""
    signature = signature_of(parameters)
    command.__signature__ = signature
    command.__annotations__ = {
        name: parameter.annotation for name, parameter in signature.parameters.items()
    }
