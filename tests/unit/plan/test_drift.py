"""When a run says that it has become slower, whom it names, and what planning anew would gain."""

from __future__ import annotations

import math

import pytest

from exo_train.errors import DoesNotFitError
from exo_train.plan.drift import MAX_DRIFTS, WARM_UP_STEPS, WINDOW, DriftWatch, replan
from exo_train.plan.exact import exact_plan
from tests.unit.plan.test_exact_cases import simple_home, simple_workload, with_device


class Run:
    """Feeds steps to a watch and keeps what it says, by step."""

    def __init__(self, num_ranks=3):
        self.watch = DriftWatch()
        self.num_ranks = num_ranks
        self.step = 0
        self.said = {}

    def steps(self, count, ratio=1.0, ranks=None):
        busy = ranks or [0.5] * self.num_ranks
        for _ in range(count):
            drift = self.watch.observe(ratio, busy)
            if drift is not None:
                self.said[self.step] = drift
            self.step += 1
        return self


def started(ratio=1.0, ranks=None):
    return Run().steps(WARM_UP_STEPS + WINDOW, ratio, ranks)


def test_a_steady_run_says_nothing_however_wrong_the_prediction():
    assert not started(3.0).steps(200, 3.0).said


def test_a_slow_start_is_not_the_baseline():
    """With the two first steps the median of ten would be 1.4, without them it is 1."""
    run = Run().steps(WARM_UP_STEPS, 9.0).steps(4, 1.4).steps(6, 1.0).steps(3 * WINDOW, 1.4)
    (drift,) = run.said.values()
    assert drift.factor == pytest.approx(1.4)


def test_it_is_said_once_with_the_device_that_became_slow():
    run = started(2.0, [0.5, 0.8, 0.4]).steps(100, 2.8, [0.5, 1.28, 0.44])
    (drift,) = run.said.values()
    assert drift.factor == pytest.approx(1.4)
    assert drift.rank == 1
    assert drift.rank_factor == pytest.approx(1.6)
    (step,) = run.said
    # It has to last: half a window until the median tells, and a window more.
    assert WINDOW <= step - (WARM_UP_STEPS + WINDOW) <= 2 * WINDOW


def test_no_rank_is_named_where_none_computes_longer():
    run = started().steps(100, 1.5, [0.5, 0.55, 0.5])
    (drift,) = run.said.values()
    assert drift.rank is None
    assert drift.rank_factor is None


def test_what_ranks_do_not_report_names_none():
    run = Run()
    for ratio in [1.0] * (WARM_UP_STEPS + WINDOW) + [1.5] * 30:
        run.steps(1, ratio, [0.0, 0.0, 0.0])
    (drift,) = run.said.values()
    assert drift.rank is None


@pytest.mark.parametrize("ratio", [1.1, 1.15])
def test_up_to_15_percent_is_no_drift(ratio):
    assert not started().steps(100, ratio).said


def test_a_hiccup_of_half_a_window_is_no_drift():
    run = started()
    for _ in range(10):
        run.steps(WINDOW // 2, 5.0).steps(WINDOW, 1.0)
    assert not run.said


def test_it_is_said_again_when_it_gets_worse_still_not_when_it_wavers():
    run = started().steps(50, 1.4).steps(50, 1.5).steps(50, 1.4)
    assert len(run.said) == 1
    run.steps(50, 1.7)
    assert [round(drift.factor, 2) for drift in run.said.values()] == [1.4, 1.7]
    run.steps(50, 1.4).steps(50, 1.7)
    assert len(run.said) == 2


def test_it_is_said_again_when_it_came_back():
    run = started().steps(50, 1.4).steps(50, 1.0).steps(50, 1.4)
    assert len(run.said) == 2


def test_a_run_that_goes_to_and_fro_for_days_is_not_told_forever():
    run = started()
    for _ in range(2 * MAX_DRIFTS):
        run.steps(30, 1.5).steps(30, 1.0)
    assert len(run.said) == MAX_DRIFTS


@pytest.mark.parametrize("broken", [math.nan, math.inf, -1.0, 0.0])
def test_steps_without_a_time_are_left_out(broken):
    run = Run()
    for _ in range(WARM_UP_STEPS + WINDOW):
        run.steps(1, broken).steps(1, 1.0)
    for _ in range(3 * WINDOW):
        run.steps(1, broken).steps(1, 1.4)
    (drift,) = run.said.values()
    assert drift.factor == pytest.approx(1.4)


def test_a_rank_without_a_number_names_nobody_by_chance():
    run = started().steps(50, 1.4, [0.5, math.nan, 0.5])
    assert not run.said
    assert run.steps(50, 1.4, [0.5, 0.7, 0.5]).said


def test_a_slowed_device_gives_layers_away():
    """Three equal devices with 10 layers each; one now takes thrice as long."""
    home, workload = simple_home(1.0, 1.0, 1.0), simple_workload(30)
    plan = exact_plan(home, workload)
    slow = plan.devices[1]
    slowdowns = [3.0 if index == slow else 1.0 for index in range(3)]
    found = replan(home, workload, plan, slowdowns)
    assert found.current_step_s == pytest.approx(5 + 100 * 30.0 + 5, rel=1e-3)
    counts = {s.device: s.stage.num_layers for s in found.plan.stages}
    assert counts[slow] == 4
    assert found.best_step_s == found.plan.step_s == pytest.approx(102 * 13.0, rel=0.01)


def test_a_device_too_slow_to_help_is_left_out_unless_it_was_asked_for():
    home, workload = simple_home(1.0, 1.0), simple_workload(10)
    plan = exact_plan(home, workload)
    slow = plan.devices[0]
    slowdowns = [100.0 if index == slow else 1.0 for index in range(2)]
    assert slow not in replan(home, workload, plan, slowdowns).plan.devices
    asked = replan(home, workload, plan, slowdowns, at_least=2)
    assert {s.device: s.stage.num_layers for s in asked.plan.stages}[slow] == 1


def test_where_all_are_as_slow_nothing_is_gained():
    home = with_device(simple_home(1.0, 2.0), 0, head_layer_s=0.9, overhead_s=0.5)
    home = with_device(home, 1, layer_update_s=0.3)
    workload = simple_workload(12)
    plan = exact_plan(home, workload)
    found = replan(home, workload, plan, [1.5, 1.5])
    assert found.current_step_s == found.best_step_s == pytest.approx(1.5 * plan.step_s)
    assert [s.stage for s in found.plan.stages] == [s.stage for s in plan.stages]


def test_a_plan_that_no_longer_fits_is_told():
    home, workload = simple_home(1.0, 1.0), simple_workload(10)
    plan = exact_plan(home, workload)
    for index in range(2):
        home = with_device(home, index, usable_bytes=200)
    with pytest.raises(DoesNotFitError, match=r"d\d needs"):
        replan(home, workload, plan, [1.0, 1.0])
