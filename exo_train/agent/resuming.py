"""Taking up an earlier run: its options, its state, and what must not have changed.

Owns the comparison of then and now. Must not start anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from exo_train.agent.run_data import fingerprint
from exo_train.config import OPTIONS, TrainConfig
from exo_train.errors import ConfigError, DataError, ProtocolError
from exo_train.options import plain_values
from exo_train.plan.plan import Plan
from exo_train.train.batches import plan_batches
from exo_train.train.checkpoint import Checkpoint, newest_checkpoint
from exo_train.train.kept_rows import read_rows
from exo_train.train.loop import Data
from exo_train.train.rundir import PLAN_FILE, SUMMARY_FILE, RunDir

# What may differ when a run is resumed: where it runs and when it ends, not what it computes. Of
# model and data the contents are compared.
RESUME_MAY_CHANGE = (
    "model", "data", "devices", "min_devices", "device_wait_s", "layers", "profile_s",
    "save_every", "save_minutes", "keep", "shadow", "takeover", "step_timeout_s",
    "early_stop", "stop_loss", "report_to", "base_weights",
)  # fmt: skip
# A template is kept with the run; what it makes of the rows is compared with the data. An adapter
# that a run started from is its step 0.
NOT_COMPARED = (*RESUME_MAY_CHANGE, "run_dir", "chat_template", "init_adapter")


def resumed_options(run: Path, changes: Mapping[str, Any]) -> TrainConfig:
    """Give the options of an earlier run, with what was asked for anew.

    Its `data` is empty unless data is named anew: the rows are then those that the run keeps.
    Raises ConfigError for a change that would make it another run.
    """
    stored = _stored_options(run)
    if "config" in changes:
        raise ConfigError(
            f"--config cannot change on --resume: the options are those of {run}; leave it out"
        )
    # The split is in the plan; laid down anew it is what counts.
    before = {**stored.to_dict(), "layers": ()}
    # Compared one by one first: what two options say together is no matter of a resumed run.
    asked = {**before, **plain_values(OPTIONS, changes, source="command line")}
    conflicts = [
        f"--{name.replace('_', '-')} cannot change on --resume: the run has "
        f"{_shown(before[name])}, the command line says {_shown(asked[name])}"
        for name in changes
        if name not in RESUME_MAY_CHANGE and asked[name] != before[name]
    ]
    if conflicts:
        raise ConfigError(
            f"{'; '.join(conflicts)}; a resumed run goes on with the options it was started with: "
            f"leave them out, or start a new run"
        )
    there = {"run_dir": str(run), "data": changes.get("data", "")}
    return TrainConfig.from_mapping({**asked, **there}, source="command line")


def _stored_options(run: Path) -> TrainConfig:
    return TrainConfig.from_stored(RunDir.open(run).read_config(), source=f"{run}/config.yaml")


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value)) or "none"
    return str(value) if value != "" else "none"


def check_unfinished(run: Path) -> None:
    """Refuse a run that has nothing left to do."""
    try:
        summary = json.loads((run / SUMMARY_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return
    if isinstance(summary, dict) and summary.get("status") == "done":
        said = summary.get("ended_early") or f"all its {summary.get('steps')} steps are done"
        raise ConfigError(f"{run} is finished: {said}")


def newest(
    run: Path, *, on_note: Callable[[str], None], options: TrainConfig | None = None
) -> Checkpoint | None:
    """Give the newest whole checkpoint; None: the run stopped before its first.

    `options` are those to go on with: what differs in them from the run's is said.
    """
    checkpoint = newest_checkpoint(run, say=on_note)
    step = checkpoint.step if checkpoint else 0
    anew = _taken_anew(run, options) if options is not None else ""
    said = f"the command line gives {anew}; all other options" if anew else "all options"
    on_note(f"resuming after step {step}: {said} are taken from {run}")
    return checkpoint


def _taken_anew(run: Path, options: TrainConfig) -> str:
    """List the options that are not as the run has them."""
    before, now = _stored_options(run).to_dict(), options.to_dict()
    before["layers"] = []  # the split of before is in the plan
    return ", ".join(
        f"--{name.replace('_', '-')} {_shown(now[name])} (before: {_shown(before[name])})"
        for name in RESUME_MAY_CHANGE
        if now[name] != before[name] and not (name == "data" and not now[name])
    )


def data_before(run: Path) -> str:
    """Give where the data lay that the run was started with, perhaps on another device."""
    return _stored_options(run).data


def kept_data(run: Path, options: TrainConfig, *, vocab_size: int) -> Data:
    """Give the rows that the run keeps with its checkpoints; raises DataError.

    Never what lies now where the run had its data: that may have changed, or the run is a copy of
    another device's, and its options would name a file of this one.
    """
    train, held_out = read_rows(run, vocab_size=vocab_size)
    return Data(batches=plan_batches(train, options), held_out=held_out)


def plan_before(run: Path, *, on_note: Callable[[str], None]) -> Plan | None:
    """Give the plan that the run had; None: it never had one, or it cannot be read."""
    try:
        return Plan.from_json((run / PLAN_FILE).read_text("utf-8"))
    except OSError:
        return None
    except (ProtocolError, UnicodeDecodeError) as error:
        on_note(f"the run is planned anew: {PLAN_FILE} of before cannot be read ({error})")
        return None


def check_resumed(
    run: Path, checkpoint: Checkpoint | None, state: dict[str, Any], *, vocab_size: int
) -> str | None:
    """Refuse to go on with something else than the run had; give the hash of the data it had.

    Before its first checkpoint the kept rows say that. None: they are damaged, so nothing does.
    """
    if checkpoint is not None:
        check_same(checkpoint, state)
        return str(checkpoint.state["data_hash"])
    try:
        before = fingerprint(*read_rows(run, vocab_size=vocab_size))
    except DataError:
        return None
    if before != state["data_hash"]:
        raise _other("data", str(run), before, state["data_hash"])
    return before


def check_same(checkpoint: Checkpoint, state: dict[str, Any]) -> None:
    """Refuse to go on with something else than what the checkpoint was trained with."""
    for key, what in (("model_hash", "model"), ("data_hash", "data")):
        before, here = str(checkpoint.state.get(key)), str(state[key])
        if before != here:
            raise _other(what, str(checkpoint.path), before, here)
    # An option that is younger than the run was not there, so it did what its default does now.
    stored = TrainConfig().to_dict() | checkpoint.state.get("options", {})
    now = state["options"]
    names = [name for name, value in now.items() if stored.get(name) != value]
    if names:
        said = ", ".join(f"{name}: {_shown(now[name])}" for name in names)
        there = ", ".join(_shown(stored.get(name)) for name in names)
        raise ConfigError(
            f"config.yaml says {said}, but {checkpoint.path} was trained with {there}; put it "
            f"back, or start a new run"
        )


def _other(what: str, where: str, before: str, here: str) -> ConfigError:
    return ConfigError(
        f"the {what} is not the one that {where} was trained with: its contents have the hash "
        f"{here[:12]}…, there it is {before[:12]}…; bring the old one back, or start a new run"
    )
