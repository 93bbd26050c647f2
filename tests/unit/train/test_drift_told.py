"""A run that slows down says so while it goes on: when, how much, who, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from exo_train.errors import DoesNotFitError
from exo_train.plan.drift import Drift
from exo_train.plan.prediction import Prediction, RankPrediction
from exo_train.train.batches import StepBatch, TokenSequence
from exo_train.train.watcher import Watcher
from tests.unit.train.scripted_run import Script, ScriptedStep, rows, run_script

SLOW_FROM = 20


def slowing(*, step_factor: float, busy_factors: Sequence[float], until: int = 10**9) -> Script:
    """Steps of 1 s that take longer from step 20 on, and which ranks compute longer then."""

    def script(step: int) -> ScriptedStep:
        slow = SLOW_FROM <= step < until
        return ScriptedStep(
            step_s=step_factor if slow else 1.0,
            busy_s=[0.5 * (factor if slow else 1.0) for factor in busy_factors],
        )

    return script


def notes_of(
    script: Script, tmp_path: Path, *, num_steps: int = 60, **options: Any
) -> list[tuple[int, str]]:
    """Give each note with the step after which it came."""
    notes: list[tuple[int, str]] = []
    seen: list[int] = []
    watcher = Watcher(
        on_step=lambda metrics, remaining_s: seen.append(metrics.step),
        on_note=lambda note: notes.append((seen[-1], note)),
    )
    run_script(script, tmp_path / "run", num_steps=num_steps, watcher=watcher, **options)
    return notes


def test_a_device_that_slows_down_is_named_once_with_both_factors(tmp_path: Path) -> None:
    script = slowing(step_factor=1.4, busy_factors=(1.0, 1.6))
    ((step, note),) = notes_of(script, tmp_path)
    assert SLOW_FROM + 10 <= step <= SLOW_FROM + 20, "after it has lasted, and not much later"
    assert note == (
        f"step {step}: steps take 1.4 times as long as at the start; den-pc computes 1.6 times as "
        f"slowly (hot, or busy with something else?)"
    )


@pytest.mark.parametrize(
    ("num_ranks", "cause"),
    [
        (3, "no device computes more slowly, so it is a link (weak Wi-Fi, or busy?)"),
        (1, "studio does not compute more slowly, but waits longer"),
    ],
)
def test_no_device_is_blamed_for_a_link(num_ranks: int, cause: str, tmp_path: Path) -> None:
    script = slowing(step_factor=2.0, busy_factors=(1.0,) * num_ranks)
    ((_, note),) = notes_of(script, tmp_path, num_ranks=num_ranks)
    assert note.endswith(f"steps take 2.0 times as long as at the start; {cause}")


@pytest.mark.parametrize(
    "script",
    [
        slowing(step_factor=1.1, busy_factors=(1.0, 1.1)),
        slowing(step_factor=9.0, busy_factors=(9.0, 1.0), until=SLOW_FROM + 4),
    ],
    ids=["a little", "not for long"],
)
def test_what_is_no_drift_is_not_told(script: Script, tmp_path: Path) -> None:
    assert notes_of(script, tmp_path) == []


class LongerLater:
    """Data whose rows are three times as long from step 20 on."""

    steps_per_epoch = 60

    def batch_for_step(self, index: int) -> StepBatch:
        examples = rows([8 if index + 1 < SLOW_FROM else 24] * 4)
        sequences = tuple(
            TokenSequence(row_keys=(key,), examples=(row,)) for key, row in enumerate(examples)
        )
        return StepBatch(step=index, epoch=0, sequences=sequences)


def test_longer_rows_are_no_drift(tmp_path: Path) -> None:
    script = slowing(step_factor=3.0, busy_factors=(3.0, 3.0))
    assert notes_of(script, tmp_path, batches=LongerLater()) == []


def test_factors_are_of_equal_work(tmp_path: Path) -> None:
    """Rows are three times as long, steps take 4.5 times, and one device 6 times as long."""
    script = slowing(step_factor=4.5, busy_factors=(3.0, 6.0))
    ((_, note),) = notes_of(script, tmp_path, batches=LongerLater())
    assert "steps take 1.5 times as long" in note
    assert "den-pc computes 2.0 times as slowly" in note


def test_the_advice_follows_and_is_asked_for_what_was_seen(tmp_path: Path) -> None:
    asked: list[Drift] = []

    def advise(drift: Drift) -> str:
        asked.append(drift)
        return "planned anew a step would take 1.1 s instead of 1.4 s: stop with Ctrl-C"

    script = slowing(step_factor=1.4, busy_factors=(1.6, 1.0))
    ((_, note),) = notes_of(script, tmp_path, advise=advise)
    assert note.endswith(
        "(hot, or busy with something else?); planned anew a step would take 1.1 s instead of "
        "1.4 s: stop with Ctrl-C"
    )
    assert len(asked) == 1
    assert (asked[0].rank, asked[0].factor) == (0, pytest.approx(1.4))
    assert asked[0].rank_factor == pytest.approx(1.6)


def test_advice_that_is_empty_or_fails_does_not_end_the_run(tmp_path: Path) -> None:
    script = slowing(step_factor=1.4, busy_factors=(1.6, 1.0))

    def fail(drift: Drift) -> str:
        raise DoesNotFitError("does not fit: needs 1.0 GB more")

    ((_, note),) = notes_of(script, tmp_path / "empty", advise=lambda drift: "")
    assert note.endswith("something else?)")
    ((_, note),) = notes_of(script, tmp_path / "failing", advise=fail)
    assert note.endswith("what a new plan would gain is not known: does not fit: needs 1.0 GB more")


def test_a_promise_that_was_off_from_the_start_is_no_drift(tmp_path: Path) -> None:
    """The run is compared with its own beginning; how wrong the promise was is told at the end."""
    promise = Prediction(
        positions=32,
        step_s=0.1,
        period_s=0.05,
        ranks=tuple(
            RankPrediction(name=name, busy_share=1.0, peak_memory_bytes=0, sent_bytes=0)
            for name in ("studio", "den-pc")
        ),
    )
    script = slowing(step_factor=1.0, busy_factors=(1.0, 1.0))
    ((step, note),) = notes_of(script, tmp_path, prediction=promise)
    assert step == 60
    assert note.startswith("predicted 0.1 s a step, achieved 1 s (900 % slower)")
