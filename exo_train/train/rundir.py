"""A run's directory, which documents itself. Owns its files' names, layout and JSON keys.

Must not decide what is measured: values come in as frozen metrics and summaries. Checkpoints are
in `checkpoint`, adapters in `export`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import yaml

from exo_train.errors import ConfigError
from exo_train.shell import command_line
from exo_train.train.durable import append_whole, disk_errors, write_durable
from exo_train.train.loss_plot import Points, draw_loss
from exo_train.train.metrics import StepMetrics, finite_or_none
from exo_train.train.progress import Interruption

SUMMARY_SCHEMA = 1

CONFIG_FILE = "config.yaml"
PLAN_FILE = "plan.json"
METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
LOSS_FILE = "loss.png"
TEMPLATE_FILE = "chat_template.jinja"  # where the run was given one
LOCK_FILE = ".lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSummary:
    """One device's part in a run; `layers` is half-open, `busy_share` from 0 to 1.

    What is left of the time is its `bubble_fraction`.
    """

    name: str
    rank: int
    backend: str
    device: str
    layers: tuple[int, int]
    busy_share: float
    peak_memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What scripts read after a run; `adapters` and `model` are paths from its directory.

    `prediction` sets what the plan promised beside what came, or is None without a promise. It
    covers the last ring only: there may have been others, each with a plan. `interruptions` are
    the times at which this start's ring was formed anew. `ended_early` says why a run is done that
    did not take all its steps; its adapters are then those of `best_step`.
    """

    status: str
    steps: int
    saved_step: int  # the step that the adapters are of
    loss_first: float | None
    loss_last: float | None
    eval_loss_before: float | None
    eval_loss_after: float | None  # the last one measured
    tokens: int
    tokens_per_s: float
    devices: tuple[DeviceSummary, ...]
    peft_adapter: str | None
    mlx_adapter: str | None
    model: str | None = None  # where all weights were trained; there are no adapters then
    prediction: dict[str, Any] | None = None
    interruptions: tuple[Interruption, ...] = ()
    best_step: int | None = None  # of the lowest held-out loss
    best_eval_loss: float | None = None
    ended_early: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Give plain values under the published keys; NaN and infinities become null."""
        plain = dataclasses.asdict(self)
        adapters = {"peft": plain.pop("peft_adapter"), "mlx": plain.pop("mlx_adapter")}
        if self.model is not None:
            adapters = {}
        prediction = plain.pop("prediction")
        interruptions = [finite_or_none(each) for each in plain.pop("interruptions")]
        devices = [
            finite_or_none(device | {"bubble_fraction": max(0.0, 1 - device["busy_share"])})
            | {"layers": list(device["layers"])}
            for device in plain.pop("devices")
        ]
        return {
            "schema": SUMMARY_SCHEMA,
            **finite_or_none(plain),
            "devices": devices,
            "adapters": adapters,
            "prediction": prediction,
            "interruptions": interruptions,
        }


@dataclass(frozen=True, slots=True)
class RunDir:
    """An existing run directory."""

    path: Path

    @classmethod
    def create(cls, path: Path, *, allow_existing: bool = False) -> RunDir:
        """Make the directory; one with files in it is refused unless `allow_existing`."""
        check_free(path, allow_existing=allow_existing)
        with disk_errors("a run", path):
            path.mkdir(parents=True, exist_ok=True)
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Take a directory that an earlier run left."""
        if not (path / CONFIG_FILE).is_file():
            raise ConfigError(f"{path} is not a run: it has no {CONFIG_FILE}")
        return cls(path)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep other processes from writing here; refused while one does."""
        lock = filelock.FileLock(self.path / LOCK_FILE, timeout=0)
        try:
            lock.acquire()
        except filelock.Timeout:
            raise ConfigError(
                f"another process trains in {self.path}; wait for it to end, or stop it"
            ) from None
        except OSError as error:
            raise ConfigError(f"cannot write in {self.path}: {error.strerror or error}") from None
        try:
            yield
        finally:
            lock.release()

    @property
    def adapters(self) -> Path:
        return self.path / "adapters"

    @property
    def model(self) -> Path:
        return self.path / "model"

    def write_config(self, config: Mapping[str, Any]) -> None:
        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        self._write(CONFIG_FILE, text.encode())

    def read_config(self) -> dict[str, Any]:
        """Read back what `write_config` wrote; the caller checks keys and ranges."""
        path = self.path / CONFIG_FILE
        try:
            plain = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        if not isinstance(plain, dict):
            raise ConfigError(f"{path} is not a mapping of options")
        return plain

    def write_plan(self, plan_json: str) -> None:
        """Write the plan for people: indented, with non-ASCII names as they are."""
        self._write_json(PLAN_FILE, json.loads(plan_json))

    def append_metrics(self, metrics: StepMetrics) -> None:
        """Add one line and hand it to the system at once, so that a tail -f sees it."""
        line = json.dumps(metrics.to_dict(), ensure_ascii=False, allow_nan=False)
        with disk_errors(METRICS_FILE, self.path):
            append_whole(self.path / METRICS_FILE, f"{line}\n".encode())

    def read_metrics(self) -> list[dict[str, Any]]:
        """Read all lines that have a step and a loss; a damaged one is passed over."""
        try:
            lines = (self.path / METRICS_FILE).read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        return [row for line in lines if (row := _metrics_row(line)) is not None]

    def rewind_metrics(self, *, last_step: int) -> None:
        """Drop lines after `last_step`: a resumed run does those steps again."""
        rows = self.read_metrics()
        kept = [row for row in rows if row["step"] <= last_step]
        if kept == rows and not (self.path / METRICS_FILE).exists():
            return
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in kept]
        self._write(METRICS_FILE, "".join(lines).encode())

    def write_summary(self, summary: Summary) -> None:
        self._write_json(SUMMARY_FILE, summary.to_dict())

    def step_left(self) -> int | None:
        """Give the step whose adapter the run has ended with; None: it is not done."""
        try:
            summary = json.loads((self.path / SUMMARY_FILE).read_text("utf-8"))
            step = summary["saved_step"] if summary["status"] == "done" else None
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None
        return step if isinstance(step, int) else None

    def write_loss_plot(self, *, train: Points, held_out: Points = ()) -> None:
        """Draw loss against step; each point is (step, loss)."""
        self._write(LOSS_FILE, draw_loss(train=train, held_out=held_out))

    def _write_json(self, name: str, plain: Any) -> None:
        text = json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False)
        self._write(name, f"{text}\n".encode())

    def _write(self, name: str, data: bytes) -> None:
        with disk_errors(name, self.path):
            write_durable(self.path / name, data)


def _metrics_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    is_loss = "loss" in row and isinstance(row["loss"], (int, float, type(None)))
    return row if is_loss else None


def check_free(path: Path, *, allow_existing: bool = False) -> None:
    """Refuse a file, and a directory with files in it unless `allow_existing`; make nothing."""
    with disk_errors("a run", path):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"--run-dir {path} is a file; choose another name")
        there = path.iterdir() if path.exists() else ()
        entries = sorted(e.name for e in there if e.name != LOCK_FILE)
    if entries and not allow_existing:
        raise ConfigError(
            f"--run-dir {path} is not empty ({len(entries)} entries, {entries[0]} first); "
            f"choose another, or continue the run in it with: "
            f"{command_line('exo-train', 'train', '--resume', path)}"
        )


def relative_to_run(path: Path, run_dir: Path) -> str:
    """Give `path` as `summary.json` writes it: relative, with forward slashes."""
    return Path(os.path.relpath(path, run_dir)).as_posix()
