"""Writing down what a run has come to, however it ended: summary, curves, adapters or model.

Owns what is left in the run directory at the end. Must not train.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from exo_train.agent.opening import OpenedModel
from exo_train.agent.run_template import save_tokenizer
from exo_train.errors import ExoTrainError, InterruptedRunError, NumericsError, TakenOverError
from exo_train.export.adapters import AdapterPaths, write_adapters
from exo_train.shell import command_line
from exo_train.train.checkpoint import Checkpoint, checkpoint_of, newest_checkpoint
from exo_train.train.durable import require_free_bytes
from exo_train.train.full_model import model_bytes, write_model
from exo_train.train.progress import Progress
from exo_train.train.ring import Ring
from exo_train.train.rundir import DeviceSummary, RunDir, Summary, relative_to_run
from exo_train.train.stopping import best_of


@dataclass(frozen=True, slots=True)
class Finish:
    """Writes down what a run has come to, however it ended."""

    run_dir: RunDir
    ring: Ring
    model: OpenedModel
    progress: Progress

    @contextlib.contextmanager
    def told_with_errors(self) -> Iterator[None]:
        """Write down what there is when the run ends early, and add to the error how to go on."""
        try:
            yield
        except InterruptedRunError as error:
            raise InterruptedRunError(f"{error}; {self.after_end('interrupted')}") from None
        except (NumericsError, TakenOverError) as error:
            # Going on with the same options would end the same way, or disturb who goes on now.
            left = self.after_end("failed", can_resume=False)
            raise type(error)(f"{error}; {left}") from None
        except ExoTrainError as error:
            raise type(error)(f"{error}; {self.after_end('failed')}") from None
        except BaseException:
            self.after_end("failed")
            raise

    def leave(self, status: str) -> Summary:
        progress = self.progress
        best = best_of(progress.held_out_losses)
        # Step 0 has no adapter of this run's.
        wants_best = bool(progress.ended_early and best and best[0])
        checkpoint = self._checkpoint(best[0] if best and wants_best else None)
        is_full = self.ring.plan.lora.full
        adapters = None if is_full else self._write_adapters(checkpoint)
        model = self._write_model(checkpoint) if is_full else None
        losses, held_out = progress.train_losses, progress.held_out_losses
        relative = {
            kind: relative_to_run(getattr(adapters, kind), self.run_dir.path) if adapters else None
            for kind in ("peft", "mlx")
        }
        summary = Summary(
            status=status,
            steps=progress.step,
            saved_step=checkpoint.step if checkpoint else progress.saved_step,
            loss_first=losses[0][1] if losses else None,
            loss_last=losses[-1][1] if losses else None,
            eval_loss_before=held_out[0][1] if held_out else None,
            eval_loss_after=held_out[-1][1] if len(held_out) > 1 else None,
            tokens=progress.tokens,
            tokens_per_s=progress.tokens_per_s,
            devices=self._devices(),
            peft_adapter=relative["peft"],
            mlx_adapter=relative["mlx"],
            model=relative_to_run(model, self.run_dir.path) if model else None,
            prediction=progress.reckoning.compared(),
            interruptions=tuple(progress.interruptions),
            best_step=best[0] if best else None,
            best_eval_loss=best[1] if best else None,
            ended_early=progress.ended_early or None,
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
        num_dropped = self.progress.totals.num_dropped
        if num_dropped and num_dropped == self.progress.step:
            said = f"nothing was trained (see {path})"
        elif saved_step:
            said = f"the work up to step {saved_step} is saved in {path}"
        else:
            said = f"nothing was saved yet in {path}"
        if can_resume:
            said += f"; go on with: {command_line('exo-train', 'train', '--resume', path)}"
        return said + trouble

    def _checkpoint(self, best_step: int | None) -> Checkpoint | None:
        """Give the best checkpoint where that is wanted and there, else the newest one."""
        best = None if best_step is None else checkpoint_of(self.run_dir.path, best_step)
        return best or newest_checkpoint(self.run_dir.path)

    def _write_adapters(self, checkpoint: Checkpoint | None) -> AdapterPaths | None:
        """Write a checkpoint's adapter in both formats, with the tokenizer beside it."""
        if checkpoint is None or not checkpoint.optimizer["step"]:
            return None
        plan = self.ring.plan
        require_free_bytes(
            self.run_dir.path,
            needed_bytes=3 * sum(array.nbytes for array in checkpoint.adapter.values()),
            what="the adapter in two formats",
        )
        paths = write_adapters(
            self.run_dir.adapters,
            checkpoint.adapter,
            lora=plan.lora,
            base_model=str(self.model.path),
            num_layers=plan.num_layers,
            steps=int(checkpoint.optimizer["step"]),  # dropped steps trained nothing
        )
        save_tokenizer(self.run_dir.path, paths.peft, paths.mlx, model_path=self.model.path)
        return paths

    def _write_model(self, checkpoint: Checkpoint | None) -> Path | None:
        """Write the whole model with a checkpoint's weights, and the tokenizer with it."""
        if checkpoint is None or not checkpoint.optimizer["step"]:
            return None
        run, base = self.run_dir, self.model.path
        # The one of an earlier end stays until this one is proven.
        require_free_bytes(run.path, needed_bytes=model_bytes(base), what="the trained model")
        return write_model(
            run.model,
            checkpoint.adapter,
            base=base,
            steps=int(checkpoint.optimizer["step"]),
            write_tokenizer=lambda folder: save_tokenizer(run.path, folder, model_path=base),
        )

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
            for rank in progress.ranks
        )
