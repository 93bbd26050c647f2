"""What a run says of its plan's promise: the numbers in summary.json, and the line at its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exo_train.errors import InterruptedRunError
from exo_train.plan.prediction import Prediction, RankPrediction
from exo_train.train.batches import BatchPlan
from exo_train.train.checkpoint import newest_checkpoint
from exo_train.train.loop import Trainer
from exo_train.train.rundir import RunDir, Summary
from exo_train.train.watcher import Watcher
from tests.unit.train.scripted_run import ScriptedStep, rows, run_script

# Steps of 4 rows of 8 inputs have 32 positions; the promise is of a step twice as large.
PROMISE = Prediction(
    positions=64,
    step_s=2.5,
    period_s=1.0,
    ranks=(
        RankPrediction(name="studio", busy_share=0.8, peak_memory_bytes=1000, sent_bytes=400),
        RankPrediction(name="den-pc", busy_share=0.5, peak_memory_bytes=2000, sent_bytes=400),
    ),
)
STEPS_S = (9.0, 5.0, 1.0, 2.0, 1.5)


def uneven(step: int) -> ScriptedStep:
    """Two slow first steps, then three, then the epoch's last, which has half the rows."""
    if step == 6:
        return ScriptedStep(step_s=100.0, busy_s=(1, 1), period_s=0.0, sent_bytes=(9, 9))
    step_s = STEPS_S[step - 1]
    return ScriptedStep(
        step_s=step_s,
        busy_s=(0.9 * step_s, 0.4 * step_s),
        period_s=step_s / 4,
        sent_bytes=(220, 200),
        peak_memory_bytes=(900 + 10 * step, 2100),
    )


def summary_of(trainer: Trainer, run_dir: Path) -> dict:
    progress = trainer.progress
    summary = Summary(
        status="done",
        steps=progress.step,
        saved_step=progress.saved_step,
        loss_first=None,
        loss_last=None,
        eval_loss_before=None,
        eval_loss_after=None,
        tokens=progress.tokens,
        tokens_per_s=progress.tokens_per_s,
        devices=(),
        peft_adapter=None,
        mlx_adapter=None,
        prediction=progress.reckoning.compared(),
    )
    RunDir(run_dir).write_summary(summary)
    plain = json.loads((run_dir / "summary.json").read_text("utf-8"))
    assert isinstance(plain, dict)
    return plain


def test_summary_holds_the_usual_step_against_the_promise(tmp_path: Path) -> None:
    """Medians of steps 3 to 5, at the promise's positions; the short step 6 is another thing."""
    trainer = run_script(
        uneven, tmp_path / "run", num_steps=6, examples=rows([8] * 22), prediction=PROMISE
    )
    found = summary_of(trainer, tmp_path / "run")["prediction"]
    assert found["steps"] == 3
    assert found["positions"] == 64
    assert found["step_s"] == {"predicted": 2.5, "achieved": 3.0, "error": pytest.approx(0.2)}
    assert found["period_s"] == {"predicted": 1.0, "achieved": 0.75, "error": -0.25}
    studio, den_pc = found["devices"]
    assert (studio["name"], den_pc["name"]) == ("studio", "den-pc")
    assert studio["peak_memory_bytes"] == {
        "predicted": 1000, "achieved": 950, "error": pytest.approx(-0.05),
    }  # fmt: skip
    assert den_pc["peak_memory_bytes"]["error"] == pytest.approx(0.05)
    assert studio["bubble_fraction"] == {
        "predicted": pytest.approx(0.2), "achieved": pytest.approx(0.1),
        "error": pytest.approx(-0.5),
    }  # fmt: skip
    assert den_pc["bubble_fraction"]["achieved"] == pytest.approx(0.6)
    assert studio["sent_bytes"] == {
        "predicted": 400, "achieved": 440, "error": pytest.approx(0.1),
    }  # fmt: skip
    assert den_pc["sent_bytes"]["error"] == 0.0


def test_steps_of_other_widths_are_scaled_each_for_itself(tmp_path: Path) -> None:
    """Rows of 8 and of 24 inputs, times and bytes in proportion: the promise was exact."""
    examples = rows([8] * 4 + [24] * 4)
    batches = BatchPlan(examples=examples, batch_size=4, seed=0)
    positions = [
        batches.batch_for_step(step).num_positions(microbatch_size=2, max_seq_length=32)
        for step in range(8)
    ]
    assert len(set(positions)) > 1

    def in_proportion(step: int) -> ScriptedStep:
        share = positions[step - 1] / 64
        return ScriptedStep(
            step_s=share * 2.5,
            busy_s=(share * 2.0, share * 1.25),
            period_s=share * 1.0,
            sent_bytes=(round(share * 400),) * 2,
            peak_memory_bytes=(1000, 2000),
        )

    trainer = run_script(
        in_proportion, tmp_path / "run", num_steps=8, examples=examples, prediction=PROMISE
    )
    found = trainer.progress.reckoning.compared()
    assert found is not None
    compared = [found["step_s"], found["period_s"]]
    for device in found["devices"]:
        compared += [device[k] for k in ("peak_memory_bytes", "bubble_fraction", "sent_bytes")]
    assert [one["error"] for one in compared] == pytest.approx([0.0] * 8, abs=1e-9)


def test_metrics_have_positions_and_the_first_ranks_period(tmp_path: Path) -> None:
    run_script(uneven, tmp_path / "run", num_steps=6, examples=rows([8] * 21 + [3]))
    lines = RunDir(tmp_path / "run").read_metrics()
    assert [line["positions"] for line in lines] == [32] * 5 + [16]
    assert sum(line["tokens"] for line in lines) == 21 * 8 + 3, "padding is no token"
    assert [line["period_s"] for line in lines] == [2.25, 1.25, 0.25, 0.5, 0.375, 0.0]


def test_a_step_of_one_microbatch_is_its_own_period(tmp_path: Path) -> None:
    trainer = run_script(
        lambda step: ScriptedStep(step_s=0.5, busy_s=(0.4, 0.2)),
        tmp_path / "run",
        num_steps=3,
        examples=rows([8, 8]),
        prediction=PROMISE,
    )
    found = trainer.progress.reckoning.compared()
    assert found is not None
    assert found["period_s"]["achieved"] == found["step_s"]["achieved"] == pytest.approx(2.0)


def test_without_a_promise_nothing_is_compared_or_said(tmp_path: Path) -> None:
    notes: list[str] = []
    trainer = run_script(
        uneven, tmp_path / "run", num_steps=5, watcher=Watcher(on_note=notes.append)
    )
    assert summary_of(trainer, tmp_path / "run")["prediction"] is None
    assert notes == []


def test_the_run_ends_with_how_good_the_promise_was(tmp_path: Path) -> None:
    notes: list[str] = []
    run_script(
        uneven, tmp_path / "run", num_steps=5, prediction=PROMISE,
        watcher=Watcher(on_note=notes.append),
    )  # fmt: skip
    assert notes == [
        "predicted 2.5 s a step, achieved 3 s (20 % slower); period 1 s, achieved 0.75 s "
        "(25 % faster); memory within 5 %"
    ]


def test_a_stopped_run_says_it_too_and_that_two_steps_say_little(tmp_path: Path) -> None:
    notes: list[str] = []
    done: list[int] = []
    stopped: list[Trainer] = []
    watcher = Watcher(
        on_step=lambda metrics, remaining_s: done.append(metrics.step),
        on_note=notes.append,
        wants_stop=lambda: len(done) == 2,
    )
    with pytest.raises(InterruptedRunError):
        run_script(
            uneven, tmp_path / "run", num_steps=5, prediction=PROMISE, watcher=watcher,
            on_trainer=stopped.append,
        )  # fmt: skip
    assert len(notes) == 1
    assert notes[0].startswith("predicted 2.5 s a step, achieved 14 s")
    assert notes[0].endswith("; only 2 done, and the first 2 steps are slow")
    found = stopped[0].progress.reckoning.compared()
    assert found is not None
    assert found["step_s"]["achieved"] == 14.0, "what there is: the median of 9 and 5, times 2"


def test_a_resumed_run_compares_its_own_steps(tmp_path: Path) -> None:
    """They may be other devices with another promise; what was before is in its metrics."""
    run_dir = tmp_path / "run"
    done: list[int] = []
    with pytest.raises(InterruptedRunError):
        run_script(
            lambda step: ScriptedStep(step_s=50.0, busy_s=(1, 1)),
            run_dir,
            num_steps=8,
            prediction=PROMISE,
            watcher=Watcher(
                on_step=lambda metrics, remaining_s: done.append(metrics.step),
                wants_stop=lambda: len(done) == 4,
            ),
        )
    trainer = run_script(
        lambda step: ScriptedStep(step_s=1.25, busy_s=(1, 0.5)),
        run_dir,
        num_steps=8,
        prediction=PROMISE,
        resumed=newest_checkpoint(run_dir),
    )
    found = trainer.progress.reckoning.compared()
    assert found is not None
    assert found["steps"] == 2, "of steps 5 to 8, without this start's first two"
    assert found["step_s"]["error"] == pytest.approx(0.0)
