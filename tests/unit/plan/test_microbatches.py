"""The choice of the microbatch size: the shortest step, and of equal ones the least memory."""

from __future__ import annotations

import pytest

from exo_train.errors import DoesNotFitError
from exo_train.plan.exact import TIE, exact_plan
from exo_train.plan.memory import LayerCost
from exo_train.plan.microbatches import choose_size, sizes_to_try
from exo_train.plan.profiles import Workload
from tests.property.plan_cases import random_home
from tests.unit.plan.test_exact_cases import simple_home

NOTHING = LayerCost(static_bytes=0, per_microbatch_bytes=0)


def problem(home, *, batch_size=16, bytes_per_sequence=0, layer_bytes=0, num_layers=8):
    def sized(size):
        layer = LayerCost(static_bytes=layer_bytes, per_microbatch_bytes=size * bytes_per_sequence)
        workload = Workload(
            costs=(NOTHING, *[layer] * num_layers, NOTHING),
            boundary_bytes=1000 * size,
            num_microbatches=batch_size // size,
        )
        return home.with_times(size), workload

    return sized


@pytest.mark.parametrize(
    ("batch_size", "sizes"),
    [(1, [1]), (8, [1, 2, 4, 8]), (128, [2, 4, 8, 16, 32, 64, 128]), (127, [1, 127]), (7, [1, 7])],
)
def test_divisors_that_make_not_too_many_microbatches(batch_size, sizes):
    assert sizes_to_try(batch_size) == sizes


def test_two_devices_take_the_most_microbatches():
    """The bubble is (p - 1) periods: the smaller they are, the better."""
    size, found = choose_size(16, problem(simple_home(1.0, 1.0)))
    assert size == 1
    assert [c.num_microbatches for c in found] == [16, 8, 4, 2, 1]
    assert found[0].step_s == pytest.approx(4.0 * 17, rel=1e-6)
    assert found[2].step_s == pytest.approx(4.0 * 4 * 5, rel=1e-6)


def test_slow_answers_take_larger_microbatches():
    """Each message takes 10 s whatever is in it, and neither device has room for all layers.

    One sequence each: two microbatches are under way in 2 x 4 s of work and two messages, 28 s,
    eight times, and 4 s to end. All at once: 2 x 64 s and two messages. In two halves of 2 x 32 s
    the first device waits twice, 116 s (drawn by hand).
    """
    home = simple_home(1.0, 1.0, latency_s=10.0, usable_bytes=500)
    size, found = choose_size(16, problem(home, layer_bytes=100))
    steps = {c.microbatch_size: c.step_s for c in found}
    assert steps[1] == pytest.approx(8 * 28 + 4)
    assert steps[16] == pytest.approx(2 * 64 + 20)
    assert steps[8] == pytest.approx(116)
    assert size == 8


def test_of_equal_steps_the_smallest_size_wins():
    """One device alone takes as long however the batch is cut."""
    size, found = choose_size(16, problem(simple_home(1.0)))
    assert {c.step_s for c in found} == {128.0}
    assert size == 1


def test_sizes_that_do_not_fit_have_no_step():
    home = simple_home(1.0, usable_bytes=8 * 2 * 100)
    size, found = choose_size(16, problem(home, bytes_per_sequence=100))
    assert [c.step_s is None for c in found] == [False, False, True, True, True]
    assert size == 1


def test_a_large_batch_is_cut_small_where_memory_asks_for_it():
    home = simple_home(1.0, usable_bytes=8 * 3 * 100)
    size, found = choose_size(512, problem(home, batch_size=512, bytes_per_sequence=100))
    assert size == 2
    assert found[0].num_microbatches == 256


def test_nothing_fits():
    with pytest.raises(DoesNotFitError):
        choose_size(16, problem(simple_home(1.0, usable_bytes=10), layer_bytes=100))


@pytest.mark.parametrize("seed", range(6))
def test_no_size_planned_in_full_is_better(seed):
    """Other sizes are judged for a few orders only; here every order of every size is tried."""
    home = random_home(5, seed)
    sized = problem(home, bytes_per_sequence=50_000_000, layer_bytes=500_000_000, num_layers=32)
    size, _ = choose_size(16, sized)
    steps = {}
    for other in sizes_to_try(16):
        try:
            steps[other] = exact_plan(*sized(other)).step_s
        except DoesNotFitError:
            continue
    assert steps[size] <= TIE * min(steps.values())


def test_sizes_are_compared_for_as_many_devices_as_asked_for():
    """Alone, all sizes take 128 s; a ring that must be, over slow answers, wants large ones."""
    home = simple_home(1.0, 1000.0, latency_s=1.0)
    alone = choose_size(16, problem(home))
    asked = choose_size(16, problem(home), at_least=2)
    assert {c.step_s for c in alone[1]} == {128.0}
    assert min(c.step_s for c in asked[1]) > 1000.0
    assert choose_size(16, problem(simple_home(1.0)), at_least=2)[0] == 1  # there is just one
