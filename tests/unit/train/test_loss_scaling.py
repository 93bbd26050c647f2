"""fp16 gradients: a scale that finds its size, what is dropped meanwhile, what is no failure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from exo_train.errors import InterruptedRunError, NumericsError
from exo_train.train.checkpoint import newest_checkpoint
from exo_train.train.loop import Trainer
from exo_train.train.loss_scaling import (
    FIRST_SCALE,
    MAX_SCALE,
    STEPS_TO_GROW,
    LossScale,
    StepNumbers,
)
from exo_train.train.progress import Progress
from exo_train.train.rundir import RunDir
from exo_train.train.watcher import Watcher
from exo_train.wire.pb import control_pb2 as pb
from tests.unit.train.scripted_run import CONFIG, SUPERVISED, ScriptedStep, run_script

STEPS = 9


def fp16_run(run_dir: Path, *, fits: float, wire_dtype: str = "fp16", **more: object) -> Trainer:
    """Run with gradients that overflow where the loss scale is above `fits`."""

    def script(step: int) -> ScriptedStep:
        return ScriptedStep(step_s=1.0, busy_s=(1, 1), largest_loss_scale=fits / SUPERVISED)

    config = replace(CONFIG, save_every=1, keep=1)
    return run_script(
        script, run_dir, num_steps=STEPS, config=config, wire_dtype=wire_dtype,
        **more,  # type: ignore[arg-type]
    )  # fmt: skip


def test_the_scale_is_halved_until_gradients_fit_and_such_steps_are_no_failure(
    tmp_path: Path,
) -> None:
    notes: list[str] = []
    run = fp16_run(tmp_path / "run", fits=FIRST_SCALE / 2**5, watcher=Watcher(on_note=notes.append))
    totals = run.progress.totals
    assert (totals.num_dropped, totals.dropped_in_a_row) == (5, 0), "more than three in a row"
    assert totals.loss_scale == LossScale(value=FIRST_SCALE / 2**5, num_good=STEPS - 5)
    assert [note for note in notes if "fp16" in note][4] == (
        "step 5: a gradient is too large for fp16 at loss scale 256; the step is dropped on all "
        "devices, the next one has 128"
    )
    norms = [row["grad_norm"] for row in RunDir(tmp_path / "run").read_metrics()]
    assert norms[:5] == [None] * 5
    assert norms[5:] == pytest.approx([2**0.5] * 4), "of the loss as it is, whatever the scale"


def resumed_at(scale: LossScale, tmp_path: Path, *, fits: float) -> Progress:
    """Go on with a run that was stopped after its first step, with `scale`."""
    trainers: list[Trainer] = []
    stop = Watcher(wants_stop=lambda: trainers[0].progress.step == 1)
    with pytest.raises(InterruptedRunError):
        fp16_run(tmp_path / "run", fits=FIRST_SCALE, watcher=stop, on_trainer=trainers.append)
    checkpoint = newest_checkpoint(tmp_path / "run")
    assert checkpoint is not None
    assert checkpoint.state["loss_scale"] == {"value": FIRST_SCALE, "num_good": 1}
    state = checkpoint.state | {"loss_scale": {"value": scale.value, "num_good": scale.num_good}}
    resumed = replace(checkpoint, state=state)
    return fp16_run(tmp_path / "run", fits=fits, resumed=resumed).progress


def test_a_resumed_run_goes_on_with_its_scale(tmp_path: Path) -> None:
    progress = resumed_at(LossScale(value=64.0, num_good=3), tmp_path, fits=FIRST_SCALE)
    assert progress.totals.loss_scale == LossScale(value=64.0, num_good=3 + STEPS - 1)


def test_at_the_smallest_scale_it_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(NumericsError, match="3 steps in a row were dropped"):
        resumed_at(LossScale(value=2.0), tmp_path, fits=0.5)


def test_without_fp16_nothing_is_scaled(tmp_path: Path) -> None:
    assert fp16_run(tmp_path / "run", fits=1.0, wire_dtype="bf16").progress.totals.num_dropped == 0


def test_gradients_are_applied_without_the_scale_and_clipped_by_their_own_norm() -> None:
    reports = [pb.StepReport(grad_square_sum=(256 * 3.0) ** 2),
               pb.StepReport(grad_square_sum=(256 * 4.0) ** 2, loss_sum=16.0)]  # fmt: skip
    numbers = StepNumbers.of(reports, 8, 256.0, 2.0)
    assert (numbers.loss, numbers.grad_norm) == (2.0, 5.0)
    assert numbers.grad_scale == pytest.approx(2 / 5 / 256, rel=1e-6)
    assert StepNumbers.of(reports, 8, 256.0, 0.0).grad_scale == 1 / 256


def test_the_scale_grows_again_up_to_a_limit() -> None:
    scale = LossScale(value=MAX_SCALE / 2)
    for _ in range(STEPS_TO_GROW - 1):
        scale = scale.after(overflowed=False)
    assert scale.value == MAX_SCALE / 2
    scale = scale.after(overflowed=False)
    assert scale == LossScale(value=MAX_SCALE)
    for _ in range(STEPS_TO_GROW):
        scale = scale.after(overflowed=False)
    assert scale.value == MAX_SCALE
    assert LossScale(value=1.0).after(overflowed=True).value == 1.0
