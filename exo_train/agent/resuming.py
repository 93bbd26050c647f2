"""Taking up an earlier run: its options, its state, and what must not have changed.

Owns the comparison of then and now. Must not start anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from exo_train.config import TrainConfig
from exo_train.errors import ConfigError, ProtocolError
from exo_train.plan.plan import Plan
from exo_train.train.checkpoint import Checkpoint, newest_checkpoint
from exo_train.train.rundir import PLAN_FILE, SUMMARY_FILE, RunDir

# What may differ when a run is resumed: where it runs, not what it computes.
RESUME_MAY_CHANGE = (
    "devices", "min_devices", "device_wait_s", "layers", "profile_s", "save_every", "save_minutes",
    "keep", "shadow", "takeover", "step_timeout_s",
)  # fmt: skip
# Paths: their contents are compared instead.
NOT_COMPARED = (*RESUME_MAY_CHANGE, "model", "data", "run_dir")


def resumed_options(run: Path, changes: Mapping[str, Any]) -> TrainConfig:
    """Give the options of an earlier run, with what was asked for anew.

    Raises ConfigError for a change that would make it another run.
    """
    fixed = [name for name in changes if name not in RESUME_MAY_CHANGE]
    if fixed:
        raise ConfigError(
            f"--{fixed[0].replace('_', '-')} cannot change on --resume: a resumed run goes on with "
            f"the options it was started with; leave it out, or start a new run"
        )
    stored = TrainConfig.from_mapping(RunDir.open(run).read_config(), source=f"{run}/config.yaml")
    # The split is in the plan; laid down anew it is what counts.
    before = {**stored.to_dict(), "layers": ()}
    return replace(
        TrainConfig.from_mapping({**before, **changes}, source="command line"),
        run_dir=str(run),
    )


def check_unfinished(run: Path) -> None:
    """Refuse a run that has nothing left to do."""
    try:
        summary = json.loads((run / SUMMARY_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return
    if isinstance(summary, dict) and summary.get("status") == "done":
        raise ConfigError(f"{run} is finished: all its {summary.get('steps')} steps are done")


def newest(run: Path, *, on_note: Callable[[str], None]) -> Checkpoint | None:
    """Give the newest whole checkpoint; None: the run stopped before its first."""
    checkpoint = newest_checkpoint(run, say=on_note)
    step = checkpoint.step if checkpoint else 0
    on_note(
        f"resuming after step {step}: all options but {', '.join(RESUME_MAY_CHANGE)} are taken "
        f"from {run}"
    )
    return checkpoint


def plan_before(run: Path, *, on_note: Callable[[str], None]) -> Plan | None:
    """Give the plan that the run had; None: it never had one, or it cannot be read."""
    try:
        return Plan.from_json((run / PLAN_FILE).read_text("utf-8"))
    except OSError:
        return None
    except (ProtocolError, UnicodeDecodeError) as error:
        on_note(f"the run is planned anew: {PLAN_FILE} of before cannot be read ({error})")
        return None


def check_same(checkpoint: Checkpoint, state: dict[str, Any]) -> None:
    """Refuse to go on with something else than what the checkpoint was trained with."""
    for key, what in (("model_hash", "model"), ("data_hash", "data")):
        if checkpoint.state.get(key) != state[key]:
            raise ConfigError(
                f"the {what} is not the one that {checkpoint.path} was trained with; bring the "
                f"old one back, or start a new run"
            )
    stored, now = checkpoint.state.get("options", {}), state["options"]
    for name, value in now.items():
        if stored.get(name) != value:
            raise ConfigError(
                f"config.yaml says {name}: {value}, but {checkpoint.path} was trained with "
                f"{stored.get(name)}; put it back, or start a new run"
            )
