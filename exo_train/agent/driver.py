"""A run from its options to its results: data, model, devices, plan, ring, training, adapters.

Owns the order of these and what is left behind when one of them fails. It runs in the process
where `train` was typed, the run's coordinator.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from exo_train.agent.adopting import Estate, carrying_metrics
from exo_train.agent.finishing import Finish
from exo_train.agent.household_now import HouseholdNow
from exo_train.agent.members import wait_candidates
from exo_train.agent.opening import Narrator, OpenedModel, open_for_run, own_tls
from exo_train.agent.recovery import Recovery
from exo_train.agent.replicating import Replicator
from exo_train.agent.reporting import Reports, check_installed
from exo_train.agent.resuming import (
    NOT_COMPARED,
    check_resumed,
    check_unfinished,
    data_before,
    kept_data,
    newest,
    plan_before,
)
from exo_train.agent.run_data import encode_data, fingerprint, rows_of_run
from exo_train.agent.run_plan import Run, choose_plan
from exo_train.agent.run_template import keep_template, with_kept_template
from exo_train.agent.starting_adapter import check_adapter_options, first_checkpoint
from exo_train.agent.succession import (
    TIED_VARIABLE,
    Succession,
    model_names,
    read_succession,
)
from exo_train.cluster.home import Home
from exo_train.config import TrainConfig
from exo_train.models.open import require_floats
from exo_train.plan.stages import StageSpec
from exo_train.shell import command_line
from exo_train.train.beginning import Beginning, beginning_of
from exo_train.train.checkpoint import Checkpoint, checkpoint_steps, expected_checkpoint_bytes
from exo_train.train.data_sources import absolute
from exo_train.train.disk_pause import DiskPause
from exo_train.train.kept_rows import write_rows
from exo_train.train.learning_rate import Schedule
from exo_train.train.loop import Data, Trainer
from exo_train.train.ring import Ring
from exo_train.train.rundir import RunDir, Summary, check_free
from exo_train.train.saving import Saver, SaveTimer, check_space
from exo_train.train.state_copies import layout_bytes, state_layout
from exo_train.train.step_shapes import padding_note, steps_of
from exo_train.train.stopping import check_early_stop
from exo_train.train.templates import KNOWN_TEMPLATES, read_template
from exo_train.train.watcher import Watcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    run_dir: Path
    summary: Summary


def train(
    home: Home,
    config: TrainConfig,
    *,
    watcher: Watcher,
    narrator: Narrator,
    resume: Path | None = None,
    replan: bool = False,
) -> Outcome:
    """Run to the end; raises an ExoTrainError that says what is saved where.

    `config` of a resumed run is what `resumed_options` gives; it keeps its split unless `replan`,
    which also measures all devices anew.
    """
    if os.environ.get(TIED_VARIABLE):
        watcher = _tied_to_input(watcher)
    if resume is None:  # a run that is taken over goes on without them
        check_installed(config.report_to)
    with contextlib.ExitStack() as stack:
        reports = stack.enter_context(Reports(config, on_note=watcher.on_note))
        watcher, narrator = reports.carrying(watcher, narrator)
        checkpoint = None
        if resume is not None:
            # Locked before anything is read: what is resumed must not change meanwhile.
            stack.enter_context(RunDir.open(resume).in_use())
            check_unfinished(resume)
            checkpoint = newest(resume, on_note=narrator.on_note, options=config)
        return _train(
            home, config, stack, checkpoint, watcher, narrator, resume=resume, replan=replan
        )


def _train(
    home: Home,
    config: TrainConfig,
    stack: contextlib.ExitStack,
    checkpoint: Checkpoint | None,
    watcher: Watcher,
    narrator: Narrator,
    *,
    resume: Path | None,
    replan: bool,
) -> Outcome:
    model, data = _read(home, config, narrator, resume)
    state = _identity(model, data, config)
    vocab_size = model.manifest.spec.vocab_size
    data_hash = check_resumed(resume, checkpoint, state, vocab_size=vocab_size) if resume else None
    run_dir = _run_dir(home, config, resume)
    narrator.on_begin(_beginning(config, model, data, run_dir, checkpoint))
    household = stack.enter_context(
        HouseholdNow(home, config, model, narrator, wants_stop=watcher.wants_stop)
    )
    pause = DiskPause(device=household.own_name, say=watcher.on_note, wants_stop=watcher.wants_stop)
    before = plan_before(resume, on_note=narrator.on_note) if resume else None
    if before:
        before, checkpoint = Estate.of(
            run_dir, before, checkpoint, state, data_hash=data_hash, own_id=household.own_id
        ).taken(household.status, own_tls(home), pause, spec=model.manifest.spec)
    candidates, status = wait_candidates(
        household, config, on_note=narrator.on_note, wants_stop=watcher.wants_stop
    )
    run = Run(
        config=config,
        manifest=model.manifest,
        steps=steps_of(data.batches, config),
        cluster=status["cluster"],
        coordinator=household.own_id,
        again=command_line("exo-train", "train", "--resume", run_dir),
    )
    chosen = choose_plan(
        run, candidates, household.asking(fresh=replan), before=None if replan else before
    )
    chosen = chosen.following(before) if before else chosen
    directory = RunDir.create(run_dir, allow_existing=resume is not None)
    if resume is None:
        stack.enter_context(directory.in_use())
        keep_template(directory.path, config, model_path=model.path)
    if config.data:  # given, perhaps as the kept rows are damaged
        write_rows(directory.path, train=data.batches.examples, held_out=data.held_out)
    # From here on the run can be taken up again with --resume, even from step 0.
    directory.write_config(_absolute(config, model.path, run_dir, resume))
    _write_succession(directory.path, chosen.plan.run_id, config, model, household)
    _check_space(directory.path, model, config, data, checkpoint)
    checkpoint = checkpoint or _first(directory.path, config, model, state, watcher)
    ring = stack.enter_context(household.ring_of(chosen.plan))
    recovery = Recovery(
        ring, run, chosen, household, on_note=narrator.on_note, wants_stop=watcher.wants_stop
    )
    stack.callback(recovery.watch_standbys().close)
    return _train_on(
        ring, config, data, directory, model, watcher, household, recovery, checkpoint, state, pause
    )


def _first(
    run_dir: Path,
    config: TrainConfig,
    model: OpenedModel,
    state: dict[str, Any],
    watcher: Watcher,
) -> Checkpoint | None:
    """Give the adapter that a new run starts from, as its step 0; None: from nothing."""
    if not config.init_adapter:
        return None
    checkpoint = first_checkpoint(run_dir, config, model.manifest.spec, state)
    watcher.on_note(f"the run starts from the adapter {config.init_adapter}")
    return checkpoint


def _train_on(
    ring: Ring,
    config: TrainConfig,
    data: Data,
    directory: RunDir,
    model: OpenedModel,
    watcher: Watcher,
    household: HouseholdNow,
    recovery: Recovery,
    checkpoint: Checkpoint | None,
    state: dict[str, Any],
    pause: DiskPause,
) -> Outcome:
    watcher.on_note(padding_note(recovery.run.steps(ring.plan.microbatch_size), config))
    replicator = Replicator(
        ring.plan.run_id,
        directory.path,
        holders=household.holders,
        on_note=watcher.on_note,
        takes_over=ring.plan.generation > 1,  # resumed
        first=checkpoint.path if checkpoint and not checkpoint.step else None,
    )
    trainer = Trainer(
        ring,
        config,
        data,
        directory,
        num_steps=_num_steps(config, data),
        vocab_size=model.manifest.spec.vocab_size,
        identity=state,
        watcher=carrying_metrics(watcher, ring),
        saver=Saver(
            directory.path,
            keep=config.keep,
            pause=pause,
            replicate=replicator.replicate,
            resumed=checkpoint,
        ),
        timer=SaveTimer(every_steps=config.save_every, every_minutes=config.save_minutes),
        pause=pause,
        regrouping=recovery,
        on_formed=replicator.try_run_files,
        prediction=recovery.chosen.prediction,
        advise=recovery.chosen.advise,
    )
    finish = Finish(directory, ring, model, trainer.progress)
    with finish.told_with_errors():
        trainer.run(checkpoint, bring_up=lambda at: household.bring_up(ring, at=at))
        summary = pause.pausing(lambda: finish.leave("done"))
    return Outcome(run_dir=directory.path, summary=summary)


def _tied_to_input(watcher: Watcher) -> Watcher:
    """Have the run saved and ended when standard input ends, as the agent that started it does."""
    ended = threading.Event()

    def wait_ended() -> None:
        with contextlib.suppress(OSError):
            # Not sys.stdin: its lock, held by a waiting thread, is fatal when Python ends.
            while os.read(0, 1):
                pass
        ended.set()

    threading.Thread(target=wait_ended, name="tied", daemon=True).start()
    return replace(watcher, wants_stop=lambda: ended.is_set() or watcher.wants_stop())


def _num_steps(config: TrainConfig, data: Data) -> int:
    return config.steps or config.epochs * data.batches.steps_per_epoch


def _beginning(
    config: TrainConfig,
    model: OpenedModel,
    data: Data,
    run_dir: Path,
    checkpoint: Checkpoint | None,
) -> Beginning:
    num_steps = _num_steps(config, data)
    schedule = Schedule.of(config, num_steps)
    rates = [schedule.rate(update) for update in range(num_steps)]
    return beginning_of(
        config,
        model.manifest.spec,
        data,
        rates=rates,
        run_dir=str(run_dir),
        steps_done=checkpoint.step if checkpoint else 0,
    )


def num_to_make_room_for(config: TrainConfig, *, steps_left: int, num_there: int) -> int:
    """Give how many checkpoints more will lie there at once than do now."""
    at_once = config.keep + 2  # the newest, the best, and one that is being written
    if config.save_minutes or config.early_stop:
        num_saves = steps_left  # at most
    else:  # the last step is always saved
        num_saves = math.ceil(steps_left / config.save_every) if config.save_every else 1
    return max(0, min(at_once - num_there, num_saves))


def _check_space(
    run_dir: Path,
    model: OpenedModel,
    config: TrainConfig,
    data: Data,
    checkpoint: Checkpoint | None,
) -> None:
    spec = model.manifest.spec
    whole = StageSpec(start=0, end=spec.num_layers, embedding=True, head=True)
    layout = state_layout(spec, config.lora, config.optimizer_rule, whole)
    steps_left = _num_steps(config, data) - (checkpoint.step if checkpoint else 0)
    num_there = len(checkpoint_steps(run_dir))
    check_space(
        run_dir,
        checkpoint_bytes=expected_checkpoint_bytes(
            array_bytes=layout_bytes(layout), num_arrays=len(layout)
        ),
        num_checkpoints=num_to_make_room_for(config, steps_left=steps_left, num_there=num_there),
    )


def _identity(model: OpenedModel, data: Data, config: TrainConfig) -> dict[str, Any]:
    """Give what must be the same when the run is resumed."""
    return {
        "model_hash": model.manifest.model_hash,
        "data_hash": fingerprint(data.batches.examples, data.held_out),
        "options": {k: v for k, v in config.to_dict().items() if k not in NOT_COMPARED},
    }


def _read(
    home: Home, config: TrainConfig, narrator: Narrator, resume: Path | None
) -> tuple[OpenedModel, Data]:
    """Give model and rows; refuses options that do not go with so many rows."""
    model, data = _opened(home, config, narrator, resume)
    Schedule.of(config, _num_steps(config, data))
    check_early_stop(config, num_held_out=len(data.held_out))
    return model, data


def _opened(
    home: Home, config: TrainConfig, narrator: Narrator, resume: Path | None
) -> tuple[OpenedModel, Data]:
    """Rows first: what is wrong with them shows in seconds."""
    if resume is not None and not config.data:
        model = open_for_run(home, config.model)
        return model, kept_data(resume, config, vocab_size=model.manifest.spec.vocab_size)
    files = rows_of_run(config)
    if resume is not None:
        config = with_kept_template(config, resume)
    if config.chat_template:
        read_template(config.chat_template)  # before anything is fetched
    model = open_for_run(home, config.model)
    spec = model.manifest.spec
    spec.validate_max_seq_length(config.max_seq_length)
    spec.validate_quantize(config.quantize)
    if config.full:
        require_floats(model.manifest.infos)
    if resume is None:  # else what it started from is saved, and may lie on another device
        check_adapter_options(config, spec)
    data = encode_data(files, config, model_path=model.path, spec=spec, on_note=narrator.on_note)
    return model, data


def _write_succession(
    run_dir: Path, run_id: str, config: TrainConfig, model: OpenedModel, household: HouseholdNow
) -> None:
    before = read_succession(run_dir)
    Succession(
        run_id=run_id,
        wanted=config.takeover,
        models=model_names([config.model, str(model.path.resolve())], before),
        model_hash=model.manifest.model_hash,
        coordinator=household.own_id,
        coordinator_name=household.own_name,
    ).write(run_dir)


def _run_dir(home: Home, config: TrainConfig, resume: Path | None) -> Path:
    """Give where the run's files go; a place that is taken is refused before anything is begun."""
    if resume is not None:
        return resume
    if not config.run_dir:
        return home.runs / datetime.now().strftime("%Y-%m-%d-%H%M%S")
    path = Path(config.run_dir).expanduser()
    check_free(path)
    return path


def _absolute(
    config: TrainConfig, model_path: Path, run_dir: Path, resume: Path | None
) -> dict[str, Any]:
    """Give the options as the run used them: a resumed run may start in another directory."""
    plain = config.to_dict()
    plain["model"] = str(model_path.resolve())
    if resume is not None and not config.data:
        plain["data"] = data_before(resume)
    else:
        plain["data"] = absolute(config.data)
    plain["run_dir"] = str(run_dir.resolve())
    if resume is None and config.chat_template and config.chat_template not in KNOWN_TEMPLATES:
        plain["chat_template"] = str(Path(config.chat_template).expanduser().resolve())
    if config.init_adapter:
        plain["init_adapter"] = str(Path(config.init_adapter).expanduser().resolve())
    return plain
