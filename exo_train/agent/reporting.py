"""A run's numbers in the tracking libraries that people use, where they are installed.

Owns which libraries there are, how each is called and under which names numbers go there. A library
that fails is said once and left out from then on: it must never end a run. Rows are not sent; where
a library sends the numbers is its own affair.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from exo_train.agent.opening import Narrator
from exo_train.config import TrainConfig
from exo_train.errors import ConfigError
from exo_train.train.beginning import Beginning
from exo_train.train.metrics import PairMetrics, StepMetrics
from exo_train.train.watcher import Watcher

PROJECT = "exo-train"
TENSORBOARD_FOLDER = "tensorboard"
_COUNTERS = ("step", "ranks")  # not numbers to draw


class Report(Protocol):
    """One library; any of this may raise whatever the library likes."""

    def log(self, values: Mapping[str, float], *, step: int) -> None: ...

    def close(self) -> None: ...


class _TensorBoard:
    """Event files in the run directory, by TensorBoard's own writer: no framework is needed."""

    def __init__(self, begin: Beginning) -> None:
        summary = importlib.import_module("tensorboard.summary")
        self._writer = summary.Writer(str(Path(begin.run_dir) / TENSORBOARD_FOLDER))

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a run is looked at while it goes on

    def close(self) -> None:
        self._writer.close()


class _InitLogFinish:
    """The three calls that wandb, trackio and swanlab share."""

    def __init__(self, library: str, begin: Beginning) -> None:
        self._library = importlib.import_module(library)
        project = os.environ.get(f"{library.upper()}_PROJECT") or PROJECT
        self._library.init(project=project, name=Path(begin.run_dir).name, config=begin.to_dict())

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        self._library.log(dict(values), step=step)

    def close(self) -> None:
        self._library.finish()


def _opener(library: str) -> Callable[[Beginning], Report]:
    if library == "tensorboard":
        return _TensorBoard
    return lambda begin: _InitLogFinish(library, begin)


def check_installed(libraries: tuple[str, ...]) -> None:
    """Refuse libraries that are not here, with the command that installs them."""
    if missing := [name for name in libraries if importlib.util.find_spec(name) is None]:
        raise ConfigError(
            f"--report-to {','.join(missing)}: not installed here; install with "
            f"`pip install {' '.join(missing)}`, or leave it out"
        )


class Reports:
    """Context manager over a run: what its watcher hears goes to the libraries, too."""

    def __init__(self, config: TrainConfig, *, on_note: Callable[[str], None]) -> None:
        self._libraries = config.report_to
        self._on_note = on_note
        self._begin: Beginning | None = None
        self._open: dict[str, Report] = {}

    def carrying(self, watcher: Watcher, narrator: Narrator) -> tuple[Watcher, Narrator]:
        """Give both with the libraries behind them."""
        if not self._libraries:
            return watcher, narrator

        def begin(facts: Beginning) -> None:
            self._begin = facts
            narrator.on_begin(facts)

        def ring(formed: Any) -> None:
            self._open_all()  # the run directory is there by now
            watcher.on_ring(formed)

        def after_step(metrics: StepMetrics, remaining_s: float | None) -> None:
            watcher.on_step(metrics, remaining_s)
            self._log(step_values(metrics), step=metrics.step)

        def evaluation(step: int, loss: float, pairs: PairMetrics | None = None) -> None:
            watcher.on_evaluation(step, loss, pairs)
            values = {"loss": loss, **(pairs.to_dict() if pairs else {})}
            self._log({f"held_out/{name}": value for name, value in values.items()}, step=step)

        return (
            replace(watcher, on_ring=ring, on_step=after_step, on_evaluation=evaluation),
            replace(narrator, on_begin=begin),
        )

    def __enter__(self) -> Reports:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            for name in list(self._open):
                self._do(name, lambda report: report.close())

    def _open_all(self) -> None:
        assert self._begin is not None
        for name in self._libraries:
            try:
                with contextlib.redirect_stdout(sys.stderr):  # standard output may be JSON lines
                    self._open[name] = _opener(name)(self._begin)
            except Exception as error:
                self._leave_out(name, error)

    def _log(self, values: Mapping[str, float], *, step: int) -> None:
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        for name in list(self._open):
            self._do(name, lambda report: report.log(finite, step=step))

    def _do(self, name: str, what: Callable[[Report], None]) -> None:
        try:
            what(self._open[name])
        except Exception as error:
            self._leave_out(name, error)

    def _leave_out(self, name: str, error: Exception) -> None:
        self._open.pop(name, None)
        reason = " ".join(str(error).split()) or type(error).__name__
        self._on_note(
            f"reporting to {name} failed and is left out from here on, metrics.jsonl has all "
            f"numbers: {reason[:200]}"
        )


def step_values(metrics: StepMetrics) -> dict[str, float]:
    """Name the numbers of a step: train/… for the run's, devices/NAME/… for a rank's."""
    plain = metrics.to_dict()
    values = {f"train/{key}": value for key, value in plain.items() if key not in _COUNTERS}
    for rank in plain["ranks"]:
        numbers = {key: value for key, value in rank.items() if key not in ("rank", "name")}
        values |= {f"devices/{rank['name']}/{key}": value for key, value in numbers.items()}
    return {name: float(value) for name, value in values.items() if value is not None}
