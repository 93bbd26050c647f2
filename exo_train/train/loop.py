"""The training loop, read top to bottom: batch, step, agree, commit, record.

Owns what a run does and in which order. Must not know devices or messages: the Ring has those.
A step is a transaction: all ranks report, all numbers are finite, then all commit or all drop.
When a rank is lost, the run goes back to the newest state that is whole and does it again.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from exo_train.backends.base import Arrays
from exo_train.config import TrainConfig
from exo_train.errors import ExoTrainError, InterruptedRunError, NumericsError
from exo_train.plan.drift import Drift
from exo_train.plan.history import StepId, newest_whole
from exo_train.plan.prediction import Prediction
from exo_train.train.batches import BatchPlan, Microbatch, StepBatch, split_microbatches
from exo_train.train.blame import name_trouble
from exo_train.train.checkpoint import Checkpoint, newest_checkpoint
from exo_train.train.collecting import split_state
from exo_train.train.disk_pause import DiskPause
from exo_train.train.evaluation import held_out_loss
from exo_train.train.examples import Example
from exo_train.train.learning_rate import Schedule
from exo_train.train.loss_scaling import StepNumbers, needs_scaling, overflow_sentence
from exo_train.train.metrics import StepMetrics
from exo_train.train.progress import Interruption, Progress
from exo_train.train.reckoning import Reckoning, drift_sentence
from exo_train.train.regrouping import (
    Known,
    NoRegrouping,
    Regrouped,
    Regrouping,
    Restored,
    from_checkpoint,
)
from exo_train.train.ring import START, Ring
from exo_train.train.rundir import RunDir
from exo_train.train.saving import Saver, SaveTimer
from exo_train.train.shadowing import Shadowing
from exo_train.train.step_metrics import step_metrics
from exo_train.train.stopping import Stopping
from exo_train.train.watcher import Watcher
from exo_train.wire.pb import control_pb2 as pb

MAX_DROPPED_IN_A_ROW = 3
# Whoever stops a run waits for a step that ends within so long; a longer one is dropped.
STOP_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What the run trains on and is measured by."""

    batches: BatchPlan
    held_out: tuple[Example, ...]


class Trainer:
    """One run over one ring, which may be formed anew meanwhile."""

    def __init__(
        self,
        ring: Ring,
        config: TrainConfig,
        data: Data,
        run_dir: RunDir,
        *,
        num_steps: int,
        vocab_size: int,
        identity: dict[str, Any],
        watcher: Watcher,
        saver: Saver,
        timer: SaveTimer,
        pause: DiskPause,
        regrouping: Regrouping | None = None,
        on_formed: Callable[[], None] = lambda: None,
        prediction: Prediction | None = None,
        advise: Callable[[Drift], str] | None = None,
        clock_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert prediction is None or len(prediction.ranks) == len(ring.plan.ranks)
        self.progress = Progress()
        self.progress.in_new_ring(ring.plan.ranks, Reckoning(prediction))
        self._ring = ring
        self._config = config
        self._data = data
        self._run_dir = run_dir
        self._num_steps = num_steps
        self._schedule = Schedule.of(config, num_steps)
        self._stopping = Stopping.of(config, vocab_size=vocab_size)
        self._identity = identity  # goes into every checkpoint, to be compared on resume
        self._watcher = watcher
        self._saver = saver
        self._timer = timer
        self._pause = pause
        self._regrouping = regrouping or NoRegrouping()
        self._on_formed = on_formed  # a ring, whose plan is on the disk
        self._advise = advise
        self._clock_s = clock_s
        self._shadowing = Shadowing(config.copies, on_note=watcher.on_note)
        self._at = START
        self._step_s = 0.0  # what a step takes now
        self._since_s: float | None = None  # when the interruption began that is not over yet

    def run(
        self,
        resumed: Checkpoint | None = None,
        *,
        bring_up: Callable[[StepId], object] = lambda at: None,
    ) -> None:
        """Train to the last step; raises InterruptedRunError with everything saved.

        `bring_up` starts the ring, where it is not, for the point that it is given.
        """
        self._run_dir.rewind_metrics(last_step=resumed.step if resumed else 0)
        restored = Restored(at=START, state={})
        if resumed is not None:
            restored = from_checkpoint(resumed, generation=0)
            self._go_back(restored)
        self._watcher.on_ring(self._ring)
        todo: Callable[[], None] | None = functools.partial(self._begin, restored.state, bring_up)
        while todo is not None:
            try:
                todo()
                todo = self._next_task if not self._is_done() else None
            except InterruptedRunError:
                raise
            except ExoTrainError as error:
                self._form_anew(error)
                todo = self._next_task
        self._tell_reckoning()
        if self.progress.totals.num_dropped == self._num_steps:
            raise NumericsError("no step was finite: nothing was trained")
        if self.progress.step < self._num_steps:
            held_out = self.progress.held_out_losses
            self.progress.ended_early = self._stopping.stalled_sentence(held_out)
            self._watcher.on_note(self.progress.ended_early)

    def _is_done(self) -> bool:
        is_due = self._evaluation_is_due() or self._save_is_due()
        stalled = self._stopping.has_stalled(self.progress.held_out_losses)
        return (stalled or self.progress.step == self._num_steps) and not is_due

    def _next_task(self) -> None:
        """Do one thing; after it the run can go on from where it is, whatever happens."""
        self._stop_if_wanted()
        progress = self.progress
        if self._evaluation_is_due():  # before saving: the state has the loss
            self._evaluate()
        elif self._save_is_due():
            self._keep(self._ring.collect_state())
        elif reason := self._wanted():
            self._form_anew(reason)
        else:
            self._train_step(progress.step + 1)

    def _wanted(self) -> str:
        """Say who is to be taken in now; nobody before the last interruption brought a step."""
        is_over, left = self._since_s is None, self._num_steps - self.progress.step
        return self._regrouping.wanted(steps_left=left, step_s=self._step_s) if is_over else ""

    def _evaluation_is_due(self) -> bool:
        step, every = self.progress.step, self._config.eval_every
        measured = any(at == step for at, _ in self.progress.held_out_losses)
        wanted = step in (0, self._num_steps) or (every and step % every == 0)
        return bool(wanted and not measured and self._data.held_out)

    def _save_is_due(self) -> bool:
        step, held_out = self.progress.step, self.progress.held_out_losses
        is_due = self._timer.is_due(step) or self._stopping.wants_saved(step, held_out)
        return 0 < step != self.progress.saved_step and (is_due or step == self._num_steps)

    def _stop_if_wanted(self) -> None:
        if self._watcher.wants_stop():
            if self.progress.step and self.progress.saved_step != self.progress.step:
                self._keep(self._ring.collect_state())
            self._tell_reckoning()
            step = self.progress.step
            raise InterruptedRunError(f"stopped after step {step} of {self._num_steps}")

    def _train_step(self, step: int) -> None:
        started_s = self._clock_s()
        config, plan = self._config, self._ring.plan
        scale = self.progress.totals.loss_scale.value if needs_scaling(plan) else 1.0
        batch = self._data.batches.batch_for_step(step - 1)
        microbatches = self._microbatches(batch)
        try:
            reports = self._ring.run_step(
                step,
                microbatches,
                # Normalised once, by the tokens or pairs of the whole step: never a mean of means.
                loss_scale=scale / batch.num_losses,
                timeout_s=config.step_timeout_s,
                # One that ends soon is waited for; one that takes longer than usual may never end.
                may_stop=lambda: (
                    abs(self._step_s - (self._clock_s() - started_s)) > STOP_PATIENCE_S
                ),
            )
        except InterruptedRunError:
            self._stop_within(f"step {step} of {self._num_steps}, which is dropped")
        numbers = StepNumbers.of(reports, batch.num_losses, scale, config.max_grad_norm)
        learning_rate = self._schedule.rate(step - 1)
        self._shadowing.before_commit(self._ring, step_s=self._step_s)
        self._ring.commit(
            step,
            apply=numbers.finite,
            learning_rate=learning_rate,
            grad_scale=numbers.grad_scale,
            timeout_s=config.step_timeout_s,
        )
        self._at = StepId(generation=plan.generation, step=step)
        self._step_s = self._clock_s() - started_s
        self._ring.be_patient(self._step_s)
        metrics = step_metrics(
            plan,
            reports,
            step=step,
            epoch=step / self._data.batches.steps_per_epoch,
            loss=numbers.loss,
            lr=learning_rate,
            grad_norm=numbers.grad_norm,
            tokens=batch.num_tokens,
            supervised_tokens=batch.num_supervised_tokens,
            positions=sum(microbatch.tokens_BT.size for microbatch in microbatches),
            step_s=self._step_s,
        )
        self._record(metrics, numbers, len(microbatches))
        self._shadowing.after_commit(self._ring, self._at, step_s=self._step_s)
        if numbers.overflowed:
            self._watcher.on_note(overflow_sentence(step, scale))
        elif not numbers.finite:
            self._tell_dropped(metrics, reports)
        self._stopping.check_loss(metrics, self.progress.train_losses)

    def _record(self, metrics: StepMetrics, numbers: StepNumbers, num_microbatches: int) -> None:
        progress = self.progress
        progress.after_step(metrics, finite=numbers.finite, overflowed=numbers.overflowed)
        if self._since_s is not None:
            seconds = self._clock_s() - self._since_s
            self._since_s = None
            progress.interruptions[-1] = replace(progress.interruptions[-1], seconds=seconds)
        self._pause.pausing(lambda: self._run_dir.append_metrics(metrics))
        left = self._num_steps - metrics.step
        remaining_s = progress.throughput.remaining_s(num_steps_left=left)
        self._watcher.on_step(metrics, remaining_s)
        drift = progress.reckoning.after_step(metrics, num_microbatches=num_microbatches)
        if drift is not None:
            self._tell_drift(metrics.step, drift)

    def _tell_dropped(self, metrics: StepMetrics, reports: Sequence[pb.StepReport]) -> None:
        """Stop a run whose numbers stay bad; the adapter is still that of the last good step."""
        where = name_trouble(
            [rank.name for rank in self._ring.plan.ranks],
            [report.trouble for report in reports],
            loss_sums=[report.loss_sum for report in reports],
            grad_square_sums=[report.grad_square_sum for report in reports],
        )
        sentence = (
            f"step {metrics.step}: loss {metrics.loss}, learning rate {metrics.lr:.3g}, gradient "
            f"norm {metrics.grad_norm}; first not finite: {where}"
        )
        if self.progress.totals.dropped_in_a_row >= MAX_DROPPED_IN_A_ROW:
            self._keep(self._ring.collect_state())
            raise NumericsError(
                f"{sentence}; {MAX_DROPPED_IN_A_ROW} steps in a row were dropped; start a new run "
                f"with a lower --learning-rate or --dtype fp32"
            )
        self._watcher.on_note(f"{sentence}; the step is dropped on all devices")

    def _tell_drift(self, step: int, drift: Drift) -> None:
        parts = [drift_sentence(step, drift, [rank.name for rank in self._ring.plan.ranks])]
        if self._advise is not None:
            try:
                parts.append(self._advise(drift))
            except ExoTrainError as error:  # the run goes on as it is
                parts.append(f"what a new plan would gain is not known: {error}")
        self._watcher.on_note("; ".join(part for part in parts if part))

    def _tell_reckoning(self) -> None:
        if said := self.progress.reckoning.sentence():
            self._watcher.on_note(said)

    def _evaluate(self) -> None:
        step = self.progress.step
        try:
            found = held_out_loss(self._ring, self._data.held_out, step=step, config=self._config)
        except InterruptedRunError:
            self._stop_within(f"the held-out loss after step {step} of {self._num_steps}")
        self.progress.held_out_losses.append((step, found.loss))
        self._watcher.on_evaluation(step, found.loss, found.pairs)
        if step == 0 and not math.isfinite(found.loss):
            raise NumericsError(
                "the held-out loss is not finite before any training: the model's files are "
                "damaged, or --dtype cannot hold its numbers; try --dtype fp32"
            )

    def _keep(self, state: Arrays) -> None:
        """Write the checkpoint of the step that the run is at."""
        progress = self.progress
        held_out = dict(progress.held_out_losses)
        self._saver.save(
            progress.step,
            *split_state(state),
            self._identity | progress.to_state(),
            held_out.get(progress.step),
        )
        progress.saved_step = progress.step
        self._shadowing.saved(progress.step)
        self._timer.saved()

    def _stop_within(self, what: str) -> NoReturn:
        """End what is half done; the state is the newest that is whole."""
        holdings = self._ring.rewind(self._ring.plan.generation + 1)
        at = newest_whole(holdings, num_layers=self._ring.plan.num_layers, up_to=self._at)
        held = self._shadowing.held
        if at is not None and (held is None or held[0] < at):
            held = at, self._ring.collect_held(at)
        if held is not None and held[0].step > self.progress.saved_step:
            self._go_back(Restored(at=held[0], state=held[1]))
            self._keep(held[1])
        self._tell_reckoning()
        raise InterruptedRunError(f"stopped in {what}")

    def _begin(self, state: Arrays, bring_up: Callable[[StepId], object]) -> None:
        bring_up(self._at)
        self._write_plan()
        if state:
            self._ring.store_state(state)
            self._shadowing.begin(self._ring, self._at, state, saved_step=self._at.step)

    def _write_plan(self) -> None:
        plan_json = self._ring.plan.to_json()
        self._pause.pausing(lambda: self._run_dir.write_plan(plan_json))
        self._on_formed()

    def _form_anew(self, reason: ExoTrainError | str) -> None:
        """Have the ring formed anew and go on after the step that all of it can go back to."""
        if self._since_s is None:
            self._since_s = self._clock_s()
        step_before = self.progress.step
        known = Known(
            up_to=self._at,
            held=self._shadowing.held,
            newest_checkpoint=lambda: newest_checkpoint(
                self._run_dir.path, say=self._watcher.on_note
            ),
        )

        def pause(restored: Restored) -> None:
            self._go_back(restored)
            if restored.at.step and self.progress.saved_step != restored.at.step:
                self._keep(restored.state)

        done = self._regrouping.form_anew(reason, known, on_pause=pause)
        self._go_back(done.restored)
        self._enter(done, str(reason), steps_lost=step_before - done.restored.at.step)

    def _go_back(self, restored: Restored) -> None:
        step, progress = restored.at.step, self.progress
        if restored.checkpoint is not None and not progress.has_totals(step):
            rows = self._run_dir.read_metrics()
            losses = [(r["step"], r["loss"]) for r in rows if r["loss"] is not None]
            progress.restore(step, restored.checkpoint.state, losses)
        progress.go_back(step)
        if restored.checkpoint is not None:
            progress.saved_step = step
        self._at = restored.at

    def _enter(self, done: Regrouped, reason: str, *, steps_lost: int) -> None:
        """Go on in the new ring."""
        plan, step = self._ring.plan, self.progress.step
        names = ", ".join(rank.name for rank in plan.ranks)
        self._pause.pausing(lambda: self._run_dir.rewind_metrics(last_step=step))
        self._write_plan()
        self.progress.in_new_ring(plan.ranks, Reckoning(done.prediction))
        self._advise = done.advise
        restored, saved = done.restored, self.progress.saved_step
        self._shadowing.begin(self._ring, restored.at, restored.state, saved_step=saved)
        self.progress.interruptions.append(
            Interruption(
                step=step, reason=reason, lost=done.lost, joined=done.joined, steps_lost=steps_lost
            )
        )
        steps = "step is" if steps_lost == 1 else "steps are"
        again = f"; {steps_lost} committed {steps} done again" if steps_lost > 0 else ""
        self._watcher.on_note(f"the run goes on after step {step} with {names}{again}")

    def _microbatches(self, batch: StepBatch) -> list[Microbatch]:
        return split_microbatches(
            batch,
            microbatch_size=self._ring.plan.microbatch_size,
            max_seq_length=self._config.max_seq_length,
        )
