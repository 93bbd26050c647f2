"""The training loop, read top to bottom: batch, step, agree, commit, record.

Owns what a run does and in which order. Must not know devices or messages: the Ring has those.
A step is a transaction: all ranks report, all numbers are finite, then all commit or all drop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from exo_train.backends.base import Arrays
from exo_train.config import TrainConfig
from exo_train.errors import ExoTrainError, InterruptedRunError, NumericsError
from exo_train.plan.drift import Drift
from exo_train.plan.prediction import Prediction
from exo_train.train.batches import (
    BatchPlan,
    Microbatch,
    StepBatch,
    evaluation_batches,
    split_microbatches,
)
from exo_train.train.chat import Example
from exo_train.train.checkpoint import Checkpoint, prune, save_checkpoint
from exo_train.train.learning_rate import learning_rate_at
from exo_train.train.metrics import RankMetrics, StepMetrics, Throughput
from exo_train.train.reckoning import Reckoning, drift_sentence
from exo_train.train.ring import Ring
from exo_train.train.rundir import RunDir
from exo_train.wire.pb import control_pb2 as pb

MAX_DROPPED_IN_A_ROW = 3
KEPT_CHECKPOINTS = 3
EVALUATION_BATCH_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What the run trains on and is measured by."""

    batches: BatchPlan
    held_out: tuple[Example, ...]


@dataclass(frozen=True, slots=True)
class Watcher:
    """Callbacks of a run: for the screen, and to stop it."""

    on_step: Callable[[StepMetrics, float | None], None] = lambda metrics, remaining_s: None
    on_evaluation: Callable[[int, float], None] = lambda step, loss: None
    on_note: Callable[[str], None] = lambda note: None
    wants_stop: Callable[[], bool] = lambda: False


@dataclass(slots=True)
class Progress:
    """What the run has come to; survives an error, so that what there is can be written down."""

    step: int = 0  # the last committed one
    saved_step: int = 0
    dropped_in_a_row: int = 0
    num_dropped: int = 0
    tokens: int = 0
    seconds: float = 0.0
    train_losses: list[tuple[int, float]] = field(default_factory=list)
    held_out_losses: list[tuple[int, float]] = field(default_factory=list)
    # Since this start only: a resumed run may have other devices.
    busy_s: list[float] = field(default_factory=list)
    seconds_here: float = 0.0
    peak_memory_bytes: list[int] = field(default_factory=list)
    throughput: Throughput = field(default_factory=Throughput)
    reckoning: Reckoning = field(default_factory=Reckoning)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def busy_share(self, rank: int) -> float:
        return self.busy_s[rank] / self.seconds_here if self.seconds_here > 0 else 0.0


class Trainer:
    """One run over one ring."""

    def __init__(
        self,
        ring: Ring,
        config: TrainConfig,
        data: Data,
        run_dir: RunDir,
        *,
        num_steps: int,
        watcher: Watcher,
        state: dict[str, Any],
        prediction: Prediction | None = None,
        advise: Callable[[Drift], str] | None = None,
        clock_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert prediction is None or len(prediction.ranks) == len(ring.plan.ranks)
        self.progress = Progress(reckoning=Reckoning(prediction))
        self._ring = ring
        self._config = config
        self._data = data
        self._run_dir = run_dir
        self._num_steps = num_steps
        self._watcher = watcher
        self._advise = advise
        self._clock_s = clock_s
        self._state = state  # goes into every checkpoint, to be compared on resume
        self._microbatch_size = ring.plan.microbatch_size
        self._verified: set[Path] = set()  # checkpoints that this run wrote and read back

    def run(self, resumed: Checkpoint | None = None) -> None:
        """Train to the last step; raises InterruptedRunError with everything saved."""
        progress = self.progress
        progress.busy_s = [0.0] * len(self._ring.plan.ranks)
        progress.peak_memory_bytes = [0] * len(self._ring.plan.ranks)
        if resumed is not None:
            self._restore(resumed)
        else:
            self._evaluate()
        if not all(math.isfinite(loss) for _, loss in progress.held_out_losses[:1]):
            raise NumericsError(
                "the held-out loss is not finite before any training: the model's files are "
                "damaged, or --dtype cannot hold its numbers; try --dtype fp32"
            )
        for step in range(progress.step + 1, self._num_steps + 1):
            self._stop_if_wanted()
            self._train_step(step)
            if step == self._num_steps:
                break  # measured and saved below, in this order: the state has the last loss
            if self._config.eval_every and step % self._config.eval_every == 0:
                self._evaluate()
            if self._config.save_every and step % self._config.save_every == 0:
                self._save()
        self._evaluate()
        self._save()
        self._tell_reckoning()
        if progress.num_dropped == self._num_steps:
            raise NumericsError("no step was finite: nothing was trained")

    def _stop_if_wanted(self) -> None:
        if self._watcher.wants_stop():
            if self.progress.step:
                self._save()
            self._tell_reckoning()
            raise InterruptedRunError(
                f"stopped after step {self.progress.step} of {self._num_steps}"
            )

    def adapter(self) -> Arrays:
        """Collect the adapter of all layers from all ranks."""
        return merge(self._ring.collect(pb.ADAPTER))

    def _train_step(self, step: int) -> None:
        started_s = self._clock_s()
        config = self._config
        batch = self._data.batches.batch_for_step(step - 1)
        microbatches = self._microbatches(batch)
        supervised = batch.num_supervised_tokens
        reports = self._ring.run_step(
            step,
            microbatches,
            # Normalised once, by the tokens of the whole step: never a mean of means.
            loss_scale=1.0 / supervised,
            timeout_s=config.step_timeout_s,
        )
        loss = reports[-1].loss_sum / supervised
        grad_norm = math.sqrt(math.fsum(report.grad_square_sum for report in reports))
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        learning_rate = learning_rate_at(
            step - 1,
            total_updates=self._num_steps,
            peak=config.learning_rate,
            schedule=config.lr_schedule,
            warmup_steps=config.warmup_steps,
            min_ratio=config.min_lr_ratio,
        )
        self._ring.commit(
            step,
            apply=finite,
            learning_rate=learning_rate,
            grad_scale=clip_scale(grad_norm, config.max_grad_norm) if finite else 0.0,
            timeout_s=config.step_timeout_s,
        )
        step_s = self._clock_s() - started_s
        self._record(step, batch, microbatches, loss, learning_rate, grad_norm, step_s, reports)
        self._count_dropped(step, finite, loss, grad_norm, reports)

    def _record(
        self,
        step: int,
        batch: StepBatch,
        microbatches: Sequence[Microbatch],
        loss: float,
        learning_rate: float,
        grad_norm: float,
        step_s: float,
        reports: Sequence[pb.StepReport],
    ) -> None:
        progress = self.progress
        progress.step = step
        progress.tokens += batch.num_tokens
        progress.seconds += step_s
        progress.seconds_here += step_s
        progress.train_losses.append((step, loss))
        progress.throughput = progress.throughput.after_step(tokens=batch.num_tokens, step_s=step_s)
        ranks = []
        for index, (rank, report) in enumerate(zip(self._ring.plan.ranks, reports, strict=True)):
            progress.busy_s[index] += report.busy_s
            peak = max(progress.peak_memory_bytes[index], report.peak_memory_bytes)
            progress.peak_memory_bytes[index] = peak
            ranks.append(
                RankMetrics(
                    rank=index,
                    name=rank.name,
                    busy_s=report.busy_s,
                    bubble_fraction=max(0.0, 1.0 - report.busy_s / step_s),
                    sent_bytes=report.sent_bytes,
                    peak_memory_bytes=report.peak_memory_bytes,
                )
            )
        metrics = StepMetrics(
            step=step,
            epoch=step / self._data.batches.steps_per_epoch,
            loss=loss,
            lr=learning_rate,
            grad_norm=grad_norm,
            tokens=batch.num_tokens,
            supervised_tokens=batch.num_supervised_tokens,
            positions=sum(microbatch.tokens_BT.size for microbatch in microbatches),
            tokens_per_s=batch.num_tokens / step_s,
            step_s=step_s,
            period_s=reports[0].period_s,
            generation=self._ring.plan.generation,
            ranks=tuple(ranks),
        )
        self._run_dir.append_metrics(metrics)
        left = self._num_steps - step
        self._watcher.on_step(metrics, progress.throughput.remaining_s(num_steps_left=left))
        drift = progress.reckoning.after_step(metrics, num_microbatches=len(microbatches))
        if drift is not None:
            self._tell_drift(step, drift)

    def _count_dropped(
        self,
        step: int,
        finite: bool,
        loss: float,
        grad_norm: float,
        reports: Sequence[pb.StepReport],
    ) -> None:
        """Stop a run whose numbers stay bad; the adapter is still that of the last good step."""
        progress = self.progress
        if finite:
            progress.dropped_in_a_row = 0
            return
        progress.dropped_in_a_row += 1
        progress.num_dropped += 1
        bad = [
            rank.name
            for rank, report in zip(self._ring.plan.ranks, reports, strict=True)
            if not math.isfinite(report.grad_square_sum) or not math.isfinite(report.loss_sum)
        ]
        sentence = (
            f"step {step}: loss {loss}, gradient norm {grad_norm}; not finite on {', '.join(bad)}"
        )
        if progress.dropped_in_a_row >= MAX_DROPPED_IN_A_ROW:
            self._save()
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
        """Measure the held-out loss; it is normalised by all its supervised tokens."""
        batches = evaluation_batches(self._data.held_out, batch_size=EVALUATION_BATCH_SIZE)
        measured = [step for step, _ in self.progress.held_out_losses]
        if not batches or self.progress.step in measured:
            return
        microbatches = [
            replace(microbatch, index=index)
            for index, microbatch in enumerate(
                microbatch for batch in batches for microbatch in self._microbatches(batch)
            )
        ]
        reports = self._ring.run_step(
            self.progress.step,
            microbatches,
            loss_scale=1.0,
            evaluation=True,
            timeout_s=self._config.step_timeout_s * max(1, len(batches)),
        )
        supervised = sum(batch.num_supervised_tokens for batch in batches)
        loss = reports[-1].loss_sum / supervised
        self.progress.held_out_losses.append((self.progress.step, loss))
        self._watcher.on_evaluation(self.progress.step, loss)

    def _save(self) -> None:
        progress = self.progress
        if progress.saved_step == progress.step:
            return
        state = self._state | {
            "tokens": progress.tokens,
            "seconds": progress.seconds,
            "held_out_losses": [
                [step, loss if math.isfinite(loss) else None]
                for step, loss in progress.held_out_losses
            ],
        }
        saved = save_checkpoint(
            self._run_dir.path,
            step=progress.step,
            adapter=self.adapter(),
            optimizer=merge(self._ring.collect(pb.OPTIMIZER)),
            state=state,
        )
        progress.saved_step = progress.step
        self._verified.add(saved)
        prune(self._run_dir.path, keep=KEPT_CHECKPOINTS, verified=self._verified)

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Put a checkpoint's state on the ranks and go on after its step."""
        self._ring.store(pb.ADAPTER, checkpoint.adapter)
        self._ring.store(pb.OPTIMIZER, checkpoint.optimizer)
        progress = self.progress
        progress.step = progress.saved_step = checkpoint.step
        progress.tokens = int(checkpoint.state["tokens"])
        progress.seconds = float(checkpoint.state["seconds"])
        progress.held_out_losses = [
            (int(step), math.nan if loss is None else float(loss))
            for step, loss in checkpoint.state["held_out_losses"]
        ]
        self._run_dir.rewind_metrics(last_step=checkpoint.step)
        progress.train_losses = [
            (row["step"], row["loss"])
            for row in self._run_dir.read_metrics()
            if row["loss"] is not None
        ]

    def _microbatches(self, batch: StepBatch) -> list[Microbatch]:
        return split_microbatches(
            batch,
            microbatch_size=self._microbatch_size,
            max_seq_length=self._config.max_seq_length,
        )


def clip_scale(grad_norm: float, max_grad_norm: float) -> float:
    """Give the factor that brings the global norm down to `max_grad_norm` (0: no clipping).

    Pascanu et al. 2013, arXiv:1211.5063, algorithm 1; PyTorch's `clip_grad_norm_` adds 1e-6.
    """
    if max_grad_norm <= 0:
        return 1.0
    return min(1.0, max_grad_norm / (grad_norm + 1e-6))


def merge(parts: Sequence[Arrays]) -> Arrays:
    """Join the ranks' arrays; `step`, which all have, is the same everywhere."""
    merged: Arrays = {}
    for part in parts:
        merged.update(part)
    return merged
