"""A run from its options to its results: data, model, devices, plan, ring, training, adapters.

Owns the order of these and what is left behind when one of them fails. It runs in the process
where `train` was typed, the run's coordinator.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from exo_train.agent.live_plan import Asking
from exo_train.agent.local_client import own_agent
from exo_train.agent.members import wait_candidates
from exo_train.agent.opening import (
    Narrator,
    OpenedModel,
    best_host_of,
    open_for_run,
    open_ring,
    own_tls,
)
from exo_train.agent.resuming import (
    NOT_COMPARED,
    check_same,
    check_unfinished,
    newest,
    plan_before,
)
from exo_train.agent.run_data import encode_data, fingerprint
from exo_train.agent.run_plan import Run, RunPlan, choose_plan
from exo_train.cluster.home import Home
from exo_train.config import TrainConfig
from exo_train.errors import ExoTrainError, InterruptedRunError, NumericsError
from exo_train.export.adapters import AdapterPaths, write_adapters
from exo_train.models.tokenizer import load_tokenizer
from exo_train.peer import NodeId
from exo_train.plan.plan import Plan
from exo_train.shell import command_line
from exo_train.train.checkpoint import Checkpoint, newest_checkpoint
from exo_train.train.loop import Data, Progress, Trainer, Watcher
from exo_train.train.ring import Ring
from exo_train.train.rows import read_data
from exo_train.train.rundir import (
    DeviceSummary,
    RunDir,
    Summary,
    check_free,
    relative_to_run,
)
from exo_train.train.step_shapes import steps_of


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
    with contextlib.ExitStack() as stack:
        checkpoint = None
        if resume is not None:
            # Locked before anything is read: what is resumed must not change meanwhile.
            stack.enter_context(RunDir.open(resume).in_use())
            check_unfinished(resume)
            checkpoint = newest(resume, on_note=narrator.on_note)
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
    model, data = _read(home, config, narrator)
    state = _identity(model, data, config)
    if checkpoint is not None:
        check_same(checkpoint, state)
    run_dir = _run_dir(home, config, resume)
    client = stack.enter_context(own_agent(home))
    candidates, status = wait_candidates(
        client, config, on_note=narrator.on_note, wants_stop=watcher.wants_stop
    )
    tls = own_tls(home)
    run = Run(
        config=config,
        manifest=model.manifest,
        steps=steps_of(data.batches, config),
        cluster=status["cluster"],
        coordinator=NodeId(status["self"]),
        again=command_line("exo-train", "train", "--resume", run_dir),
    )
    asking = Asking(
        status=client.status,
        tls_to=tls.to,
        on_note=narrator.on_note,
        wants_stop=watcher.wants_stop,
        best_host=functools.partial(best_host_of, status["links"], NodeId(status["self"])),
        fresh=replan,
    )
    before = None if replan or resume is None else plan_before(resume, on_note=narrator.on_note)
    chosen = choose_plan(run, candidates, asking, before=before)
    directory = RunDir.create(run_dir, allow_existing=resume is not None)
    if resume is None:
        stack.enter_context(directory.in_use())
    # From here on the run can be taken up again with --resume, even from step 0.
    directory.write_config(_absolute(config, model.path, run_dir))
    with _resumable(run.again):
        ring = stack.enter_context(
            open_ring(
                client,
                tls,
                chosen.plan,
                model,
                status,
                narrator,
                step_timeout_s=config.step_timeout_s,
                committed_step=checkpoint.step if checkpoint else 0,
                wants_stop=watcher.wants_stop,
            )
        )
    directory.write_plan(ring.plan.to_json())
    return _train_on(ring, config, data, directory, model, watcher, state, checkpoint, chosen)


def _identity(model: OpenedModel, data: Data, config: TrainConfig) -> dict[str, Any]:
    """Give what must be the same when the run is resumed."""
    return {
        "model_hash": model.manifest.model_hash,
        "data_hash": fingerprint(data.batches.examples),
        "options": {k: v for k, v in config.to_dict().items() if k not in NOT_COMPARED},
    }


@contextlib.contextmanager
def _resumable(again: str) -> Iterator[None]:
    """Add to an error before the first step how to go on."""
    try:
        yield
    except ExoTrainError as error:
        raise type(error)(f"{error}; no step was done; go on with: {again}") from None


def _read(home: Home, config: TrainConfig, narrator: Narrator) -> tuple[OpenedModel, Data]:
    """Rows first: what is wrong with them shows in seconds."""
    files = read_data(config.data)
    model = open_for_run(home, config.model)
    spec = model.manifest.spec
    spec.validate_max_seq_length(config.max_seq_length)
    data = encode_data(files, config, model_path=model.path, spec=spec, on_note=narrator.on_note)
    return model, data


def _train_on(
    ring: Ring,
    config: TrainConfig,
    data: Data,
    run_dir: RunDir,
    model: OpenedModel,
    watcher: Watcher,
    state: dict[str, Any],
    checkpoint: Checkpoint | None,
    chosen: RunPlan,
) -> Outcome:
    num_steps = config.steps or config.epochs * data.batches.steps_per_epoch
    trainer = Trainer(
        ring,
        config,
        data,
        run_dir,
        num_steps=num_steps,
        watcher=watcher,
        state=state,
        prediction=chosen.prediction,
        advise=chosen.advise,
    )
    finish = _Finish(run_dir, config, ring.plan, model, trainer.progress)
    try:
        trainer.run(checkpoint)
    except InterruptedRunError as error:
        raise InterruptedRunError(f"{error}; {finish.after_end('interrupted')}") from None
    except NumericsError as error:
        # Going on with the same options would end the same way.
        left = finish.after_end("failed", can_resume=False)
        raise NumericsError(f"{error}; {left}") from None
    except ExoTrainError as error:
        raise type(error)(f"{error}; {finish.after_end('failed')}") from None
    except BaseException:
        finish.after_end("failed")
        raise
    return Outcome(run_dir=run_dir.path, summary=finish.leave("done"))


@dataclass(frozen=True, slots=True)
class _Finish:
    """Writes down what a run has come to, however it ended."""

    run_dir: RunDir
    config: TrainConfig
    plan: Plan
    model: OpenedModel
    progress: Progress

    def leave(self, status: str) -> Summary:
        adapters = self._write_adapters()
        progress = self.progress
        losses, held_out = progress.train_losses, progress.held_out_losses
        relative = {
            kind: relative_to_run(getattr(adapters, kind), self.run_dir.path) if adapters else None
            for kind in ("peft", "mlx")
        }
        summary = Summary(
            status=status,
            steps=progress.step,
            saved_step=progress.saved_step,
            loss_first=losses[0][1] if losses else None,
            loss_last=losses[-1][1] if losses else None,
            eval_loss_before=held_out[0][1] if held_out else None,
            eval_loss_after=held_out[-1][1] if len(held_out) > 1 else None,
            tokens=progress.tokens,
            tokens_per_s=progress.tokens_per_s,
            devices=self._devices(),
            peft_adapter=relative["peft"],
            mlx_adapter=relative["mlx"],
            prediction=progress.reckoning.compared(),
        )
        self.run_dir.write_summary(summary)
        if losses:
            self.run_dir.write_loss_plot(train=losses, held_out=held_out)
        return summary

    def after_end(self, status: str, *, can_resume: bool = True) -> str:
        """Leave what there is after an early end; says what that is, and how to go on.

        What goes wrong here must not hide why the run ended.
        """
        trouble = ""
        try:
            self.leave(status)
        except ExoTrainError as error:
            trouble = f" (and then: {error})"
        path = self.run_dir.path
        saved_step = self.progress.saved_step
        if self.progress.num_dropped and self.progress.num_dropped == self.progress.step:
            said = f"nothing was trained (see {path})"
        elif saved_step:
            said = f"the work up to step {saved_step} is saved in {path}"
        else:
            said = f"nothing was saved yet in {path}"
        if can_resume:
            said += f"; go on with: {command_line('exo-train', 'train', '--resume', path)}"
        return said + trouble

    def _write_adapters(self) -> AdapterPaths | None:
        """Write the newest checkpoint's adapter in both formats, with the tokenizer beside it."""
        checkpoint = newest_checkpoint(self.run_dir.path)
        if checkpoint is None or not checkpoint.optimizer["step"]:
            return None
        paths = write_adapters(
            self.run_dir.adapters,
            checkpoint.adapter,
            lora=self.plan.lora,
            base_model=str(self.model.path),
            num_layers=self.plan.num_layers,
            steps=int(checkpoint.optimizer["step"]),  # dropped steps trained nothing
        )
        tokenizer = load_tokenizer(self.model.path)
        for path in (paths.peft, paths.mlx):
            tokenizer.save_pretrained(str(path))
        return paths

    def _devices(self) -> tuple[DeviceSummary, ...]:
        progress = self.progress
        return tuple(
            DeviceSummary(
                name=rank.name,
                rank=rank.rank,
                backend=rank.backend,
                device=rank.device,
                layers=(rank.stage.start, rank.stage.end),
                busy_share=progress.busy_share(rank.rank),
                peak_memory_bytes=progress.peak_memory_bytes[rank.rank],
            )
            for rank in self.plan.ranks
        )


def _run_dir(home: Home, config: TrainConfig, resume: Path | None) -> Path:
    """Give where the run's files go; a place that is taken is refused before anything is begun."""
    if resume is not None:
        return resume
    if not config.run_dir:
        return home.runs / datetime.now().strftime("%Y-%m-%d-%H%M%S")
    path = Path(config.run_dir).expanduser()
    check_free(path)
    return path


def _absolute(config: TrainConfig, model_path: Path, run_dir: Path) -> dict[str, Any]:
    """Give the options as the run used them: a resumed run may start in another directory."""
    plain = config.to_dict()
    plain["model"] = str(model_path.resolve())
    plain["data"] = str(Path(config.data).expanduser().resolve())
    plain["run_dir"] = str(run_dir.resolve())
    return plain
