"""Runs that end before their last step: which, when, with what left behind, and after a resume."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from exo_train.config import TrainConfig
from exo_train.errors import ConfigError, InterruptedRunError, NumericsError
from exo_train.train.checkpoint import checkpoint_of, checkpoint_steps, newest_checkpoint
from exo_train.train.loop import Trainer
from exo_train.train.rundir import RunDir
from exo_train.train.stopping import RUNAWAY_STEPS, best_of, check_early_stop
from exo_train.train.watcher import Watcher
from tests.unit.train.scripted_run import CONFIG, SUPERVISED, ScriptedStep, rows, run_script

HELD_OUT = rows([4])
NAN = math.nan
EARLY = replace(CONFIG, early_stop=2, eval_every=2, save_every=0, keep=1)


def held_out_run(
    run_dir: Path, losses: list[float], *, config: TrainConfig = EARLY, **more: object
) -> Trainer:
    """Run 12 steps; `losses` are measured after steps 0, 2, 4 …"""

    def script(step: int) -> ScriptedStep:
        return ScriptedStep(step_s=1.0, busy_s=(1, 1), held_out_loss_sum=4 * losses[step // 2])

    return run_script(
        script, run_dir, num_steps=12, held_out=HELD_OUT, config=config,
        **more,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("losses", "ends_at", "best"),
    [
        ([5.0, 4.0, 3.0, 3.5, 3.0, 1.0, 1.0], 8, 4),  # as good is no better
        ([5.0, 4.0, 4.5, 3.0, 3.5, 2.0, 1.0], 12, 12),
        ([1.0, 2.0, 3.0, 0.5, 0.5, 0.5, 0.5], 4, 0),  # training makes it worse
        ([5.0, NAN, 4.0, NAN, NAN, 1.0, 1.0], 8, 4),
    ],
)
def test_a_run_ends_after_so_many_evaluations_without_a_better_loss(
    tmp_path: Path, losses: list[float], ends_at: int, best: int
) -> None:
    notes: list[str] = []
    watcher = Watcher(on_note=notes.append)
    progress = held_out_run(tmp_path / "run", losses, watcher=watcher).progress
    assert progress.step == ends_at
    assert best_of(progress.held_out_losses) == (best, losses[best // 2])
    early = ends_at < 12
    said = f"stopped after step {ends_at}: the held-out loss got no better since step {best} "
    assert progress.ended_early.startswith(said) == early
    assert [note for note in notes if note.startswith("stopped")] == [progress.ended_early] * early
    # The best is kept though nothing else asked for a checkpoint, and --keep is 1.
    assert checkpoint_steps(tmp_path / "run") == sorted({best, ends_at} - {0})


@pytest.mark.parametrize("stop_at", [3, 6, 7])
def test_a_resumed_run_goes_on_counting(tmp_path: Path, stop_at: int) -> None:
    losses = [5.0, 4.0, 3.0, 3.5, 3.0, 1.0, 1.0]
    trainers: list[Trainer] = []
    stop = Watcher(wants_stop=lambda: trainers[0].progress.step == stop_at)
    with pytest.raises(InterruptedRunError):
        held_out_run(tmp_path / "run", losses, watcher=stop, on_trainer=trainers.append)
    resumed = newest_checkpoint(tmp_path / "run")
    assert resumed is not None
    assert resumed.step == stop_at
    again = held_out_run(tmp_path / "run", losses, resumed=resumed).progress
    assert again.step == 8
    assert "since step 4" in again.ended_early
    assert checkpoint_of(tmp_path / "run", 4) is not None


def test_without_the_option_nothing_ends_early(tmp_path: Path) -> None:
    config = replace(EARLY, early_stop=0)
    progress = held_out_run(tmp_path / "run", [1.0] * 7, config=config).progress
    assert (progress.step, progress.ended_early) == (12, "")


def test_early_stopping_says_what_it_lacks() -> None:
    config = TrainConfig(early_stop=3)
    with pytest.raises(ConfigError, match=r"^--early-stop 3 goes by held-out rows.*--val-rows$"):
        check_early_stop(config, num_held_out=0)
    with pytest.raises(ConfigError, match=r"say how often with --eval-every$"):
        check_early_stop(config, num_held_out=5)
    check_early_stop(replace(config, eval_every=10), num_held_out=5)
    check_early_stop(TrainConfig(), num_held_out=0)


def loss_run(run_dir: Path, losses: list[float], **more: object) -> Trainer:
    def script(step: int) -> ScriptedStep:
        return ScriptedStep(step_s=1.0, busy_s=(1, 1), loss_sum=SUPERVISED * losses[step - 1])

    return run_script(script, run_dir, num_steps=len(losses), **more)  # type: ignore[arg-type]


def test_a_loss_that_runs_away_ends_the_run_by_name(tmp_path: Path) -> None:
    config = replace(CONFIG, learning_rate=1.0, lr_schedule="constant", save_every=2)
    losses = [2.0, 1.5, 7.0, 8.0, 5.0, *[6.5] * (RUNAWAY_STEPS + 3)]
    with pytest.raises(NumericsError) as told:
        loss_run(tmp_path / "run", losses, config=config)
    last = 5 + RUNAWAY_STEPS
    assert told.value.exit_code == 5
    assert str(told.value).startswith(
        f"step {last}: loss 6.5, learning rate 1, gradient norm 1.41; the loss was above 6 in "
        f"{RUNAWAY_STEPS} steps in a row (step 1: 2, "
    )
    assert len(RunDir(tmp_path / "run").read_metrics()) == last
    assert max(checkpoint_steps(tmp_path / "run")) < last, "what ran away is not saved"


@pytest.mark.parametrize(
    ("losses", "changes"),
    [
        ([2.0, *[6.0] * 9], {}),  # not above
        ([2.0, *[6.5, 6.5, 6.5, 6.5, 5.9] * 3], {}),  # comes back
        ([2.0, *[60.0] * 9], {"stop_loss": 0.0}),
        ([2.0, *[6.5] * 9], {"stop_loss": 4.0}),
        ([0.1, *[6.5] * 9], {"vocab_size": 1000}),  # an easy first batch; a guess costs 6.9
    ],
)
def test_a_loss_that_does_not_run_away_is_left_alone(
    tmp_path: Path, losses: list[float], changes: dict[str, float]
) -> None:
    more = {"vocab_size": changes.pop("vocab_size")} if "vocab_size" in changes else {}
    config = replace(CONFIG, **changes)  # type: ignore[arg-type]
    trainer = loss_run(tmp_path / "run", losses, config=config, **more)
    assert trainer.progress.step == len(losses)
