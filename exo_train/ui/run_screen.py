"""What a run shows: a live screen on a terminal, plain lines elsewhere, or JSON lines.

Owns the drawing. Must not compute: it is given steps, plans and notes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from exo_train.plan.plan import Plan
from exo_train.train.beginning import Beginning
from exo_train.train.metrics import PairMetrics, StepMetrics, finite_or_none
from exo_train.ui.header import header_lines

OVERALL_BAR_CELLS = 60
DEVICE_BAR_CELLS = 12


class RunScreen(Protocol):
    """Context manager; `num_steps` is known once the data is."""

    def note(self, text: str) -> None: ...

    def begin(self, begin: Beginning) -> None: ...

    def plan(self, plan: Plan) -> None: ...

    def step(self, metrics: StepMetrics, remaining_s: float | None) -> None: ...

    def evaluation(self, step: int, loss: float, pairs: PairMetrics | None = None) -> None: ...

    def close(self) -> None: ...


class JsonScreen:
    """One JSON object a line on standard output, each with `event` and `schema`."""

    def __init__(self, write: Callable[[str], None] = print) -> None:
        self._write = write

    def note(self, text: str) -> None:
        self._line("note", {"text": text})

    def begin(self, begin: Beginning) -> None:
        self._line("begin", begin.to_dict())

    def plan(self, plan: Plan) -> None:
        self._line("plan", {"hash": plan.hash, "plan": json.loads(plan.to_json())})

    def step(self, metrics: StepMetrics, remaining_s: float | None) -> None:
        self._line("step", {**metrics.to_dict(), "remaining_s": remaining_s})

    def evaluation(self, step: int, loss: float, pairs: PairMetrics | None = None) -> None:
        numbers = pairs.to_dict() if pairs else {}
        self._line("evaluation", {"step": step, "loss": loss, **numbers})

    def close(self) -> None:
        pass

    def _line(self, event: str, content: dict[str, Any]) -> None:
        line = {"schema": 1, "event": event, **finite_or_none(content)}
        self._write(json.dumps(line, allow_nan=False))


class PlainScreen:
    """A line per step: for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def note(self, text: str) -> None:
        _say(self._console, text)

    def begin(self, begin: Beginning) -> None:
        for line in header_lines(begin):
            _say(self._console, line)

    def plan(self, plan: Plan) -> None:
        for rank in plan.ranks:
            self._console.print(stage_line(plan, rank.rank), highlight=False, markup=False)

    def step(self, metrics: StepMetrics, remaining_s: float | None) -> None:
        busy = "  ".join(f"{r.name} {1 - r.bubble_fraction:.0%}" for r in metrics.ranks)
        self._console.print(
            f"{_step_words(metrics)}  ETA {duration(remaining_s)}  busy: {busy}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )

    def evaluation(self, step: int, loss: float, pairs: PairMetrics | None = None) -> None:
        self._console.print(
            f"held-out loss after step {step}: {loss:.4f}{pair_words(pairs)}", highlight=False
        )

    def close(self) -> None:
        pass


class LiveScreen:
    """Redraws in place; notes scroll above."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._plan: Plan | None = None
        self._metrics: StepMetrics | None = None
        self._remaining_s: float | None = None
        self._done_share = 0.0
        self._held_out = ""
        self._live = Live(console=console, refresh_per_second=4, transient=False)

    def note(self, text: str) -> None:
        _say(self._console, text)

    def begin(self, begin: Beginning) -> None:
        for line in header_lines(begin):
            _say(self._console, line)

    def plan(self, plan: Plan) -> None:
        self._plan = plan
        self._live.start()
        self._live.update(self._draw())

    def step(self, metrics: StepMetrics, remaining_s: float | None) -> None:
        self._metrics, self._remaining_s = metrics, remaining_s
        left_s = remaining_s or 0.0
        spent_s = metrics.step * metrics.step_s
        self._done_share = spent_s / (spent_s + left_s) if spent_s + left_s else 0.0
        self._live.update(self._draw())

    def evaluation(self, step: int, loss: float, pairs: PairMetrics | None = None) -> None:
        self._held_out = f"  held-out {loss:.4f}{pair_words(pairs)} after step {step}"
        self._live.update(self._draw())

    def close(self) -> None:
        self._live.stop()

    def _draw(self) -> RenderableType:
        assert self._plan is not None
        overall = Table.grid()  # a bar alone does not end its line
        overall.add_row(ProgressBar(1.0, self._done_share, width=OVERALL_BAR_CELLS))
        devices = Table.grid(padding=(0, 2))
        for rank in self._plan.ranks:
            share = 0.0
            if self._metrics is not None:
                share = 1 - self._metrics.ranks[rank.rank].bubble_fraction
            bar = ProgressBar(total=1.0, completed=share, width=DEVICE_BAR_CELLS)
            devices.add_row(stage_line(self._plan, rank.rank), bar, f"{share:4.0%} busy")
        return Group(self._headline(), overall, devices)

    def _headline(self) -> Text:
        metrics = self._metrics
        if metrics is None:
            return Text(f"loading the model{self._held_out}")
        return Text(f"{_step_words(metrics)}  ETA {duration(self._remaining_s)}{self._held_out}")


class SilentWhenClosed:
    """A screen whose reader may go away (`| head`): the run goes on without it."""

    def __init__(self, inner: RunScreen) -> None:
        self._inner: RunScreen | None = inner

    def note(self, text: str) -> None:
        self._draw(lambda screen: screen.note(text))

    def begin(self, begin: Beginning) -> None:
        self._draw(lambda screen: screen.begin(begin))

    def plan(self, plan: Plan) -> None:
        self._draw(lambda screen: screen.plan(plan))

    def step(self, metrics: StepMetrics, remaining_s: float | None) -> None:
        self._draw(lambda screen: screen.step(metrics, remaining_s))

    def evaluation(self, step: int, loss: float, pairs: PairMetrics | None = None) -> None:
        self._draw(lambda screen: screen.evaluation(step, loss, pairs))

    def close(self) -> None:
        self._draw(lambda screen: screen.close())

    def _draw(self, draw: Callable[[RunScreen], None]) -> None:
        if self._inner is None:
            return
        try:
            draw(self._inner)
            sys.stdout.flush()
        except OSError:
            self._inner = None
            # What Python still holds for the closed pipe must not fail at exit either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _HonestConsole(Console):
    """Says that the pipe is closed; rich's own would end the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_screen(*, as_json: bool) -> RunScreen:
    if as_json:
        return SilentWhenClosed(JsonScreen())
    console = _HonestConsole()
    return SilentWhenClosed(LiveScreen(console) if console.is_terminal else PlainScreen(console))


def _step_words(metrics: StepMetrics) -> str:
    return (
        f"step {metrics.step}  loss {metrics.loss:.4f}{pair_words(metrics.pairs)}  "
        f"lr {metrics.lr:.2e}  grad-norm {metrics.grad_norm:.3f}  "
        f"{metrics.tokens_per_s:.0f} tokens/s"
    )


def pair_words(pairs: PairMetrics | None) -> str:
    """Say how many pairs are the right way round, and by how much."""
    if pairs is None:
        return ""
    return f"  accuracy {pairs.reward_accuracy:.0%}  margin {pairs.reward_margin:.4f}"


def stage_line(plan: Plan, rank: int) -> str:
    """Describe a rank: name, backend, layers and what else it owns."""
    mine = plan.ranks[rank]
    parts = ["embedding"] if mine.stage.embedding else []
    parts.append(f"layers {mine.stage.start}–{mine.stage.end - 1}")
    parts += ["head"] if mine.stage.head else []
    return f"{rank}  {mine.name}  {mine.backend}/{mine.device} {mine.compute_dtype}  " + ", ".join(
        parts
    )


def _say(console: Console, text: str) -> None:
    """Print a sentence; the terminal may break it, we must not: commands in it are copied."""
    console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
