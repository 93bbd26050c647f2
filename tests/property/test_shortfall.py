"""What is missing until a model fits, against every order and every split tried one by one."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exo_train.errors import DoesNotFitError
from exo_train.plan.chains import stage_bytes as planner_stage_bytes
from exo_train.plan.exact import exact_plan
from exo_train.plan.shortfall import MAX_BISECTIONS, Shortfall
from tests.property.plan_cases import households, splits, stage_bytes, stage_costs, workloads

# Each device's memory, and its own costs if it has any.
homes = st.lists(st.tuples(st.integers(1, 9000), st.none() | stage_costs), min_size=1, max_size=4)


def shortfall_of(home, workload):
    return Shortfall(
        [memory for memory, _ in home],
        workload,
        costs=[own or workload.stage_costs for _, own in home],
    )


def smallest_deficits(home, workload):
    """Try every split of every order: by number of devices, what the tightest one lacks."""
    deficits = {}
    for size in range(1, min(len(home), workload.num_layers) + 1):
        for chain in itertools.permutations(home, size):
            lacking = smallest_deficit_in_order(chain, workload)
            deficits[size] = min(deficits.get(size, math.inf), lacking)
    return deficits


def smallest_deficit_in_order(chain, workload):
    return min(
        max(
            stage_bytes(workload, rank, len(chain), count, own) - memory
            for rank, ((memory, own), count) in enumerate(zip(chain, counts, strict=True))
        )
        for counts in splits(workload.num_layers, len(chain))
    )


@settings(max_examples=300, deadline=None)
@given(homes, workloads(max_layers=6))
def test_missing_bytes_and_fewest_devices_are_what_brute_force_finds(home, workload):
    deficits = smallest_deficits(home, workload)
    found = shortfall_of(home, workload)
    least = min(deficits.values())
    fitting = [size for size, lacking in deficits.items() if lacking <= 0]
    assert found.fewest_devices() == (min(fitting) if fitting else None)
    order = found.fitting_order()
    assert len(order) == (min(fitting) if fitting else 0)
    if fitting:
        in_order = smallest_deficit_in_order([home[index] for index in order], workload)
        assert in_order <= 0
    alone = deficits[1]
    if least <= 0:
        assert found.missing_bytes() == 0
    else:
        assert least <= found.missing_bytes() <= least + alone / 2**MAX_BISECTIONS + 1


@settings(max_examples=100, deadline=None)
@given(homes, workloads(max_layers=6), st.integers(0, 9000))
def test_what_is_missing_is_enough(home, workload, extra):
    """Each device with so much more holds the model; with more than that, no device is needed."""
    missing = shortfall_of(home, workload).missing_bytes()
    richer = [(memory + missing + extra, own) for memory, own in home]
    assert shortfall_of(richer, workload).fewest_devices() is not None


@settings(max_examples=150, deadline=None)
@given(households(max_devices=3), workloads(max_layers=6))
def test_the_planner_and_the_shortfall_agree_on_what_fits(household, workload):
    home = [(d.usable_bytes, d.costs) for d in household.devices]
    fits = any(memory > 0 for memory, _ in home) and (
        shortfall_of(home, workload).fewest_devices() is not None
    )
    if fits:
        exact_plan(household, workload)  # does not raise
    else:
        with pytest.raises(DoesNotFitError, match="more"):
            exact_plan(household, workload)


@settings(max_examples=100, deadline=None)
@given(workloads(), st.none() | stage_costs, st.integers(1, 4), st.integers(1, 8))
def test_a_stages_bytes_are_counted_as_the_planner_counts_them(workload, own, num_ranks, count):
    for rank in range(num_ranks):
        fixed, layer = planner_stage_bytes(workload, own or workload.stage_costs, rank, num_ranks)
        assert fixed + count * layer == stage_bytes(workload, rank, num_ranks, count, own)


@settings(max_examples=20, deadline=None)
@given(workloads())
def test_devices_without_memory_are_absent(workload):
    assert Shortfall([0, 5000, 0], workload).num_devices == 1
    with pytest.raises(ValueError, match="1 to 16 devices with memory, got 0"):
        Shortfall([0, 0], workload)
