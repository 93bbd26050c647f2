"""The simulated step, against values reckoned by hand."""

from __future__ import annotations

import pytest

from exo_train.plan.schedule import build_schedule
from exo_train.plan.step_time import Wire, simulate_step

INSTANT = Wire(latency_s=0.0, serial_s=0.0)


def step(stage_s, num_microbatches, wire=INSTANT, *, name="1f1b", depths=None):
    schedule = build_schedule(
        name, num_ranks=len(stage_s), num_microbatches=num_microbatches, depths=depths
    )
    wires = [wire] * (len(stage_s) - 1)
    return simulate_step(schedule, stage_s, up=wires, down=wires)


def step_s(*args, **options):
    return step(*args, **options).end_s


@pytest.mark.parametrize(("name", "pace_s"), [("1f1b", 4.0), ("gpipe", 2.0)])
def test_pace_is_the_time_between_backwards_of_rank_0(name, pace_s):
    """GPipe's backwards follow each other, with no forwards between them."""
    found = step([1.0, 4.0], 10, name=name)
    assert found.pace_s == pytest.approx(pace_s)


def test_one_microbatch_has_no_pace_and_ranks_are_busy_for_their_actions():
    assert step([1.0, 4.0], 1).pace_s == 0.0
    assert step([1.0, 4.0], 10).busy_s == pytest.approx((10.0, 40.0))
    assert step([1.0, 4.0], 10).end_s == pytest.approx(41.0)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 1), (2, 3), (4, 4), (4, 16)])
def test_equal_stages_and_instant_links_have_the_flush_bubble(name, num_ranks, num_microbatches):
    """m + p - 1 periods: the bubble is (p - 1) / (m + p - 1)."""
    expected_s = 2.0 * (num_microbatches + num_ranks - 1)
    assert step_s([2.0] * num_ranks, num_microbatches, name=name) == pytest.approx(expected_s)


def test_one_microbatch_goes_all_the_way_up_and_down():
    wire = Wire(latency_s=0.25, serial_s=0.5)
    assert step_s([1.0, 2.0, 3.0], 1, wire) == pytest.approx(6.0 + 4 * 0.75)


def test_a_slow_stage_sets_the_pace():
    assert step_s([1.0, 4.0], 10) == pytest.approx(10 * 4.0 + 1.0)


SLOW_WIRE = Wire(latency_s=0.0, serial_s=3.0)
SLOW_AIR = Wire(latency_s=0.0, serial_s=3.0, medium="wi-fi")


def test_depth_decides_whether_a_slow_wire_or_its_round_trip_sets_the_pace():
    """Two in flight share a round trip of 2 + 6 s; four keep the wire busy, 3 s a message."""
    assert step_s([1.0, 1.0], 100, SLOW_WIRE) == pytest.approx(100 * 4.0, rel=0.02)
    deeper = step_s([1.0, 1.0], 100, SLOW_WIRE, depths=[4, 1])
    assert deeper == pytest.approx(100 * 3.0, rel=0.04)


def test_a_shared_medium_carries_one_message_at_a_time():
    """Both ways take turns: 6 s for each microbatch."""
    shared = step_s([1.0, 1.0], 100, SLOW_AIR, depths=[4, 1])
    assert shared == pytest.approx(100 * 6.0, rel=0.02)


@pytest.mark.parametrize(("latency", "efficiency"), [(0.5, 0.667), (1.0, 0.5)])
def test_latency_collapses_plain_1f1b(latency, efficiency):
    """Eight stages with F = B = 1: rank i holds p - i, too few to hide messages of 0.5 or 1."""
    found_s = step_s([2.0] * 8, 400, Wire(latency_s=latency, serial_s=0.0))
    assert 400 * 2.0 / found_s == pytest.approx(efficiency, abs=0.03)
