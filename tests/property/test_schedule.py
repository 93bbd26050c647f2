"""Schedules of any size: complete, free of deadlock, within depth, with the known bubble."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exo_train.errors import ConfigError
from exo_train.plan.schedule import (
    Action,
    bubble_fraction,
    build_schedule,
    max_held,
    parse_schedule,
    validate_schedule,
)

sizes = st.tuples(st.integers(1, 16), st.integers(1, 64))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["1f1b", "gpipe"]), sizes)
def test_complete_and_with_the_closed_form_bubble(name, size):
    p, m = size
    schedule = build_schedule(name, num_ranks=p, num_microbatches=m)
    every = {Action(kind, k) for kind in ("F", "B") for k in range(m)}
    for rank, actions in enumerate(schedule):
        assert set(actions) == every
        assert len(actions) == 2 * m
        assert max_held(actions) == (min(p - rank, m) if name == "1f1b" else m)
    assert bubble_fraction(schedule) == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(sizes, st.data())
def test_deeper_1f1b_runs_when_depths_do_not_grow_along_the_ring(size, data):
    p, m = size
    depths = sorted(data.draw(st.lists(st.integers(1, 20), min_size=p, max_size=p)), reverse=True)
    schedule = build_schedule("1f1b", num_ranks=p, num_microbatches=m, depths=depths)
    assert [max_held(actions) for actions in schedule] == [min(d, m) for d in depths]
    text = "\n".join(" ".join(map(str, actions)) for actions in schedule)
    assert parse_schedule(text) == schedule


@settings(max_examples=60, deadline=None)
@given(st.tuples(st.integers(1, 6), st.integers(1, 6)), st.data())
def test_a_shuffled_rank_is_refused_or_runs_to_the_end(size, data):
    """Execute with real blocking semantics, one action at a time, in a random order of ranks."""
    p, m = size
    schedule = list(build_schedule("1f1b", num_ranks=p, num_microbatches=m))
    rank = data.draw(st.integers(0, p - 1))
    schedule[rank] = tuple(data.draw(st.permutations(schedule[rank])))
    done = [0] * p

    def ready(r: int) -> bool:
        if done[r] == len(schedule[r]):
            return False
        action = schedule[r][done[r]]
        source = r - 1 if action.kind == "F" else r + 1
        own_forward = action.kind == "F" or Action("F", action.microbatch) in schedule[r][: done[r]]
        arrived = not 0 <= source < p or action in schedule[source][: done[source]]
        return own_forward and arrived

    while candidates := [r for r in range(p) if ready(r)]:
        done[data.draw(st.sampled_from(candidates))] += 1
    runs = done == [2 * m] * p
    try:
        validate_schedule(schedule, num_microbatches=m)
        accepted = True
    except ConfigError:
        accepted = False
    assert accepted == runs
