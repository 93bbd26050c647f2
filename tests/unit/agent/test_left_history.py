"""Metrics and totals of a run that another driver goes on with: none missing, none twice."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from exo_train.agent.adopting import History, check_still_led
from exo_train.errors import TakenOverError
from exo_train.train.rundir import RunDir


def row(step: int, *, generation: int = 1, loss: float | None = 2.0) -> dict[str, Any]:
    return {
        "step": step,
        "generation": generation,
        "loss": loss,
        "grad_norm": 1.0,
        "tokens": 10,
        "step_s": 0.5,
    }


def lines(*rows: dict[str, Any]) -> list[str]:
    return [json.dumps(each) for each in rows]


def test_the_last_step_is_the_one_before_the_first_gap() -> None:
    history = History.of([row(1), row(2)], lines(row(3), row(5)))
    assert history.last_step(since=0) == 3


def test_a_line_that_was_lost_before_the_checkpoint_holds_nothing_up(tmp_path: Path) -> None:
    """One flipped byte must not cost what is still in memory."""
    history = History.of([row(1), row(3), row(4)], lines(row(5), row(6)))
    assert history.last_step(since=4) == 6
    assert history.state({"tokens": 40}, since=4, step=6)["tokens"] == 60
    history.write(tmp_path, last_step=5)
    assert [each["step"] for each in RunDir(tmp_path).read_metrics()] == [1, 3, 4, 5]


@pytest.mark.parametrize(
    "bad",
    [
        row(3) | {"tokens": None},
        row(3) | {"tokens": "10"},
        row(3) | {"step_s": math.inf},
        row(3) | {"loss": [1]},
        row(3) | {"generation": 2.5},
        row(3) | {"step": True},
        *({k: v for k, v in row(3).items() if k != key} for key in row(3)),
        {"held_out_step": 3, "loss": "x"},
        {"held_out_step": -1, "loss": 1.0},
        [],
    ],
    ids=repr,
)
def test_lines_that_a_member_made_up_are_passed_over(bad: Any) -> None:
    history = History.of([row(1)], [*lines(row(2), bad), "[" * 100_000])
    assert history.last_step(since=0) == 2
    assert history.state({}, since=0, step=2)["tokens"] == 20
    assert history.held_out == {}


def test_of_a_step_that_was_done_again_the_later_history_counts() -> None:
    """Whichever of them came first, and also over what was copied before."""
    history = History.of(
        [row(1), row(2, loss=9.0)],
        lines(row(2, generation=3, loss=4.0), row(2, generation=2, loss=5.0)),
    )
    assert history.rows[2]["loss"] == 4.0


def test_a_checkpoint_of_memory_counts_on_from_the_one_before() -> None:
    told = {
        "tokens": 100,
        "seconds": 7.0,
        "num_dropped": 1,
        "held_out_losses": [[0, 3.0]],
        "best": {"step": 0, "metric": 3.0},
    }
    history = History.of(
        [row(1), row(2)],
        [*lines(row(3, loss=None), row(4)), '{"held_out_step": 4, "loss": 1.5}', "no json"],
    )
    state = history.state(told, since=2, step=4)
    assert state == {
        "tokens": 120,
        "seconds": 8.0,
        "num_dropped": 2,
        "held_out_losses": [[0, 3.0], [4, 1.5]],
        "best": {"step": 4, "metric": 1.5},
        "loss_scale": {"value": 2048.0, "num_good": 1},  # step 3 was dropped
    }
    settled = told | {"loss_scale": {"value": 256.0, "num_good": 7}}
    after = history.state(settled, since=2, step=4)["loss_scale"]
    assert after == {"value": 128.0, "num_good": 1}


def test_who_leads_a_later_ring_of_the_run_has_taken_it_over() -> None:
    run = {"id": "r1", "generation": 1002, "coordinator": "b"}
    status: dict[str, Any] = {
        "self": "a",
        "members": [
            {"id": "a", "name": "attic", "state": "alive", "run": {**run, "generation": 2}},
            {"id": "b", "name": "hall", "state": "alive", "run": run},
        ],
    }
    with pytest.raises(TakenOverError, match="taken over by hall and is at generation 1002"):
        check_still_led(status, "r1", 2)
    check_still_led(status, "r1", 1002)  # hall's own look
    check_still_led(status, "r2", 2)
    status["members"][1]["state"] = "dead"
    check_still_led(status, "r1", 2)
