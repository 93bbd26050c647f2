"""`train`: the command line to options, Ctrl-C to an orderly stop, results to the screen."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import typer

from exo_train.agent.chosen_options import choose_options
from exo_train.agent.driver import Outcome, train
from exo_train.agent.opening import Narrator
from exo_train.agent.reporting import check_installed
from exo_train.cli.foreign_flags import TrainParser, foreign_flags
from exo_train.cli.option_parameters import option_parameter, take_parameters
from exo_train.cluster.home import open_home
from exo_train.config import OPTIONS, TrainConfig
from exo_train.errors import ConfigError
from exo_train.shell import command_line
from exo_train.train.watcher import Watcher
from exo_train.ui.run_screen import RunScreen, make_screen

# A closing terminal sends its signal twice at once; only a later Ctrl-C is a second wish.
SECOND_SIGNAL_S = 0.5
LAST_WORDS_S = 0.5  # for a few bytes to each device


def register(app: typer.Typer) -> None:
    app.command(
        "train",
        cls=TrainParser,
        epilog="Example: exo-train train HuggingFaceTB/SmolLM2-135M-Instruct --data chats.jsonl "
        "--steps 200",
    )(train_command)


def train_command(**values: Any) -> None:
    """Fine-tune MODEL with LoRA on all devices of the cluster, or on those you name."""
    as_json, resume, replan = values["as_json"], values["resume"], values["replan"]
    if replan and resume is None:
        raise ConfigError("--replan is for --resume RUN: a new run is planned anyway")
    given = {name: values[name] for name in OPTIONS if values[name] is not None}
    chosen = choose_options(
        values["config"], given | foreign_flags(values["context"]), resume=resume
    )
    if values["print_config"]:
        for note in chosen.notes:
            typer.echo(note, err=True)
        typer.echo(chosen.to_json() if as_json else chosen.to_yaml(), nl=as_json)
        return
    if "report_to" in given:  # a resumed run may do without what it once had
        check_installed(chosen.config.report_to)
    if resume is None:
        chosen.require_model_and_data()
    screen = make_screen(as_json=as_json)
    if chosen.notes:
        screen.note("; ".join(chosen.notes))
    outcome = run_training(chosen.config, screen, resume=resume, replan=replan)
    if as_json:
        typer.echo(
            json.dumps(
                {"event": "done", "run_dir": str(outcome.run_dir), **outcome.summary.to_dict()}
            )
        )
    else:
        typer.echo(describe(outcome))


_BESIDE_THE_OPTIONS: dict[str, tuple[Any, Any, Any]] = {
    "config": (
        Path | None,
        typer.Option(help="YAML with these options; the command line wins."),
        None,
    ),
    "resume": (Path | None, typer.Option(help="Go on with an earlier run's directory."), None),
    "replan": (
        bool,
        typer.Option(help="With --resume: measure and split anew; else the split is kept."),
        False,
    ),
    "print_config": (
        bool,
        typer.Option(help="Print the options as YAML with where each is from; train nothing."),
        False,
    ),
    "as_json": (bool, typer.Option("--json", help="One JSON object a line."), False),
}


take_parameters(
    train_command,
    {name: option_parameter(option) for name, option in OPTIONS.items()}
    | {"model": (str | None, typer.Argument(help=OPTIONS["model"].help), None)}
    | _BESIDE_THE_OPTIONS,
)


def run_training(
    options: TrainConfig,
    screen: RunScreen,
    *,
    resume: Path | None = None,
    replan: bool = False,
) -> Outcome:
    """Train with a screen; the first Ctrl-C stops after the step, the second at once."""
    stop = _StopOnSignal()
    watcher = Watcher(
        on_step=screen.step,
        on_evaluation=screen.evaluation,
        on_note=screen.note,
        wants_stop=stop.wanted,
        on_ring=lambda ring: stop.before_end(ring.tell_end),
    )
    narrator = Narrator(on_note=screen.note, on_begin=screen.begin, on_plan=screen.plan)
    with stop:
        try:
            return train(
                open_home(),
                options,
                watcher=watcher,
                narrator=narrator,
                resume=resume,
                replan=replan,
            )
        finally:
            screen.close()


def describe(outcome: Outcome) -> str:
    """Say what came out and where it lies."""
    summary = outcome.summary
    lines = [f"run: {outcome.run_dir}"]
    if summary.eval_loss_before is not None and summary.eval_loss_after is not None:
        lines.append(
            f"held-out loss: {summary.eval_loss_before:.4f} → {summary.eval_loss_after:.4f}"
        )
    what = "model is that" if summary.model else "adapters are those"
    if summary.ended_early:
        lines.append(f"{summary.ended_early}; the {what} of step {summary.saved_step}")
    lines.append(f"loss curve: {outcome.run_dir / 'loss.png'}")
    if summary.model:
        lines.append(f"model: {outcome.run_dir / summary.model}")
    else:
        lines.append(f"adapters: {outcome.run_dir / 'adapters'} (peft/ and mlx/)")
    try_it = command_line("exo-train", "generate", outcome.run_dir, "--prompt", "Who are you?")
    lines.append(f"try it: {try_it}")
    return "\n".join(lines)


class _StopOnSignal:
    """Context manager: turns Ctrl-C, a closed terminal and SIGTERM into a wish to stop."""

    def __init__(self) -> None:
        self._wanted_since_s: float | None = None
        self._before: dict[int, Any] = {}
        self._last_words: Callable[[], None] = lambda: None

    def before_end(self, last_words: Callable[[], None]) -> None:
        """Say what is still to be done when the second signal ends the process at once."""
        self._last_words = last_words

    def wanted(self) -> bool:
        return self._wanted_since_s is not None

    def __enter__(self) -> None:
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            if hasattr(signal, name):
                number = getattr(signal, name)
                self._before[number] = signal.signal(number, self._on_signal)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._wanted_since_s is None:
            self._wanted_since_s = now_s
            # Straight to the terminal: the screen may be in the middle of a line.
            os.write(2, b"stopping as soon as all is saved; Ctrl-C once more to stop at once\n")
        elif number == signal.SIGINT and now_s - self._wanted_since_s > SECOND_SIGNAL_S:
            self._last_words()
            time.sleep(LAST_WORDS_S)
            os._exit(130)
