"""Schedules a person can draw, and how a wrong one is refused."""

from __future__ import annotations

import pytest

from exo_train.errors import ConfigError
from exo_train.plan.schedule import build_schedule, draw, parse_schedule, validate_schedule


def test_1f1b_is_the_textbook_picture():
    schedule = build_schedule("1f1b", num_ranks=3, num_microbatches=4)
    assert schedule == parse_schedule(
        """
        F0 F1 F2 B0 F3 B1 B2 B3
        F0 F1 B0 F2 B1 F3 B2 B3
        F0 B0 F1 B1 F2 B2 F3 B3
        """
    )
    assert draw(schedule) == (
        "rank  0 | F0  F1  F2  ..  ..  B0  F3  B1  ..  B2  ..  B3\n"
        "rank  1 | ..  F0  F1  ..  B0  F2  B1  F3  B2  ..  B3\n"
        "rank  2 | ..  ..  F0  B0  F1  B1  F2  B2  F3  B3"
    )


def test_gpipe_runs_all_forwards_first():
    schedule = build_schedule("gpipe", num_ranks=2, num_microbatches=2)
    assert schedule == parse_schedule("F0 F1 B0 B1\nF0 F1 B0 B1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0 B0\nF0 F0", "rank 1: F0 comes twice"),
        ("B0 F0", "rank 0: B0 comes before F0"),
        ("F0 B0\nF0", "rank 1: B0 is missing"),
        ("F0 B0 F1 B1", "rank 0: F1 is outside the 1 microbatches"),
    ],
)
def test_incomplete_schedules_are_refused_with_the_grid(text, message):
    with pytest.raises(ConfigError) as caught:
        validate_schedule(parse_schedule(text), num_microbatches=1)
    assert message in str(caught.value)
    assert "\nrank  0 | " in str(caught.value)


def test_deadlock_is_refused_and_drawn():
    text = "F0 B0 F1 B1\nF0 F1 B0 B1"
    with pytest.raises(ConfigError) as caught:
        validate_schedule(parse_schedule(text), num_microbatches=2)
    assert str(caught.value) == (
        "schedule of rank 0: B0 waits for ever for B0 of rank 1\n"
        "rank  0 | F0  !B0\n"
        "rank  1 | ..  F0  !F1"
    )


def test_too_many_in_flight_is_refused():
    schedule = parse_schedule("F0 F1 B0 B1")
    with pytest.raises(ConfigError, match="2 microbatches are in flight, the limit is 1"):
        validate_schedule(schedule, num_microbatches=2, max_in_flight=[1])


def test_depths_that_grow_along_the_ring_cannot_run():
    with pytest.raises(ConfigError, match="waits for ever"):
        build_schedule("1f1b", num_ranks=2, num_microbatches=4, depths=[1, 3])


@pytest.mark.parametrize("word", ["X0", "F", "F-1", "F0B0", "f0", "F9999999999"])
def test_words_that_are_no_actions(word):
    with pytest.raises(ConfigError, match="line 2"):
        parse_schedule(f"F0 B0\n{word}")


def test_unknown_schedule_lists_the_known():
    with pytest.raises(ConfigError, match="known: 1f1b, gpipe"):
        build_schedule("zb", num_ranks=1, num_microbatches=1)
