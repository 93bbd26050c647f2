"""`generate`, `verify`, `plan` and `demo`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from exo_train.agent.generation import Generator
from exo_train.agent.live_report import live_report
from exo_train.agent.opening import Narrator
from exo_train.agent.verification import NUM_MICROBATCHES, NUM_POSITIONS, verify
from exo_train.agent.what_if import what_if_report
from exo_train.cli.option_parameters import option_parameter, take_parameters
from exo_train.cluster.home import open_home
from exo_train.config import OPTIONS, TrainConfig
from exo_train.demo.scenario import DemoOptions, run_demo
from exo_train.errors import ConfigError, NumericsError
from exo_train.models.hub import fetch_demo_model
from exo_train.ui.plan_screen import plan_screen
from exo_train.ui.tables import verify_table


def register(app: typer.Typer) -> None:
    app.command(
        epilog="Example: exo-train generate runs/2026-11-30-201500 --prompt 'Who are you?'"
    )(generate)
    app.command("verify", epilog="Example: exo-train verify ./llama-3.2-1b")(verify_command)
    app.command("plan", epilog="Example: exo-train plan ./llama-3.1-8b --data chats.jsonl")(
        plan_command
    )
    app.command("demo", epilog="Example: exo-train demo --run-dir ./demo-run")(demo_command)


def generate(
    run: Annotated[str, typer.Argument(help="A run directory, or a model.")],
    prompt: Annotated[str, typer.Option(help="What to ask.")],
    system: Annotated[str | None, typer.Option(help="A system message before it.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="For temperatures above 0.")] = 0,
    backend: Annotated[str, typer.Option(help="auto, mlx or torch.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Answer a prompt with a run's adapter on its base, on this device alone."""
    generator = Generator(open_home(), run, backend=backend)
    pieces = generator.answer(
        prompt, system=system, max_tokens=max_tokens, temperature=temperature, seed=seed
    )
    if as_json:
        content = {"schema": 1, "prompt": prompt, "adapter": generator.adapter_path}
        typer.echo(json.dumps({**content, "answer": "".join(pieces)}))
        return
    typer.echo(f"adapter: {generator.adapter_path or 'none'}", err=True)
    for piece in pieces:
        typer.echo(piece, nl=False)
    typer.echo()


def verify_command(
    model: Annotated[
        str | None, typer.Argument(help="Model directory, .gguf or hub id; default: the demo's.")
    ] = None,
    min_devices: Annotated[int, typer.Option(min=1, help="Wait for so many, else exit 3.")] = 1,
    devices: Annotated[str, typer.Option(help="Use just these: NAME,NAME.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Decides the batch and the adapters.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, fp32, bf16 or fp16.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run one step on the cluster and on this device alone, and compare loss and gradients.

    Exit code 5 when they differ; the wrong stage is named. Nothing is trained or saved.
    """
    console = Console(stderr=as_json)

    def note(text: str) -> None:
        console.print(text, style="dim", highlight=False, markup=False)

    home = open_home()
    config = TrainConfig.from_mapping(
        {
            "batch_size": 2 * NUM_MICROBATCHES,
            "microbatch_size": 2,
            "max_seq_length": NUM_POSITIONS,
            "min_devices": min_devices,
            "devices": devices,
            "seed": seed,
            "dtype": dtype,
        },
        source="command line",
    )
    name = model or str(fetch_demo_model(home.cache, say=note))
    report = verify(home, name, config, Narrator(on_note=note))
    if as_json:
        typer.echo(json.dumps(report, allow_nan=False))
    else:
        console.print(verify_table(report))
    if not report["ok"]:
        wrong = next((stage for stage in report["stages"] if stage["wrong"]), None)
        where = f"rank {wrong['rank']} ({wrong['name']}) computes wrongly" if wrong else "?"
        raise NumericsError(
            f"the ring does not equal one device: {where}; loss {report['loss_ring']} against "
            f"{report['loss_one']}; do not train with that device until this is solved"
        )
    if not as_json:
        typer.echo("the ring equals one device")


def plan_command(**values: Any) -> None:
    """Say who would get which layers, how fast that would be, and whether a ring is worth it.

    Each device that is here times one layer of the model with random weights: only the model's
    config is needed. With --devices it is about devices in a file, owned or not, and nobody is
    asked; speeds of presets are makers' peaks halved, not measurements. See docs/planner.md.
    """
    devices, fresh = values["devices"], values["fresh"]
    if devices is not None and (fresh or values["profile_s"] is not None):
        raise ConfigError("--fresh and --profile-s are for devices that are here, not for a file")
    given = {name: values[name] for name in PLAN_OPTIONS if values[name] is not None}
    config = TrainConfig.from_mapping({"model": values["model"], **given}, source="command line")
    report = (
        live_report(open_home(), config, on_note=_note, fresh=fresh)
        if devices is None
        else what_if_report(open_home(), config, devices)
    )
    if values["as_json"]:
        typer.echo(json.dumps(report, allow_nan=False))
        return
    Console().print(plan_screen(report))


# What of a run's options decides a plan, and how long an epoch takes.
PLAN_OPTIONS = (
    "data", "columns", "on_bad_row", "objective", "chat_template", "system_role", "train_turns",
    "batch_size", "microbatch_size", "max_seq_length", "on_long", "packing", "group_by_length",
    "full",
    "rank", "targets", "adapter_layers", "rank_pattern", "dora", "optimizer", "dtype",
    "checkpoint_activations", "quantize", "base_weights", "min_devices", "profile_s",
)  # fmt: skip
_BESIDE_THE_OPTIONS: dict[str, tuple[Any, Any, Any]] = {
    "devices": (
        Path | None,
        typer.Option(help="YAML of devices instead of those here: presets or times, and links."),
        None,
    ),
    "dtype": (
        str | None,
        typer.Option(help="Of the frozen base; auto: each device's own, bf16 with --devices."),
        None,
    ),
    "fresh": (bool, typer.Option(help="Measure again what is known already."), False),
    "as_json": (bool, typer.Option("--json", help="Print JSON."), False),
}
take_parameters(
    plan_command,
    {
        "model": (
            str,
            typer.Argument(
                help="Model directory, config.json, .gguf or hub id; no weights needed."
            ),
            ...,
        )
    }
    | {name: option_parameter(OPTIONS[name]) for name in PLAN_OPTIONS}
    | _BESIDE_THE_OPTIONS,
)


def _note(text: str) -> None:
    """Say what is going on beside the result, which may be JSON."""
    Console(stderr=True).print(text, style="dim", highlight=False, markup=False, soft_wrap=True)


def demo_command(
    run_dir: Annotated[Path | None, typer.Option(help="Where results go; must be empty.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer updates.")] = 40,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Train on this machine with three agents that find each other, as three devices would."""
    run_demo(open_home(), DemoOptions(run_dir=run_dir, steps=steps, as_json=as_json))
