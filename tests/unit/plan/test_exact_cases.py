"""The measured plan in cases one can reckon by hand, and at the edges of the world."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from exo_train.errors import DoesNotFitError, PeerError
from exo_train.plan.exact import exact_plan, plans_by_size
from exo_train.plan.memory import LayerCost
from exo_train.plan.profiles import DeviceProfile, Household, LinkProfile, Workload


def simple_home(*layer_s, usable_bytes=10**6, latency_s=0.0, bytes_per_s=1e12):
    found = tuple(
        DeviceProfile(
            name=f"d{i}", usable_bytes=usable_bytes, layer_s=s, embedding_s=0.0, head_s=0.0
        )
        for i, s in enumerate(layer_s)
    )
    link = LinkProfile(latency_s=latency_s, bytes_per_s=bytes_per_s)
    return Household(
        devices=found, links=dict.fromkeys(itertools.permutations(range(len(found)), 2), link)
    )


def simple_workload(num_layers, num_microbatches=100, layer_bytes=100):
    layer = LayerCost(static_bytes=layer_bytes, per_microbatch_bytes=0)
    end = LayerCost(static_bytes=0, per_microbatch_bytes=0)
    return Workload(
        costs=(end, *[layer] * num_layers, end),
        boundary_bytes=1000,
        num_microbatches=num_microbatches,
    )


def test_speeds_1_2_4_share_28_layers_4_8_16():
    plan = exact_plan(simple_home(4.0, 2.0, 1.0), simple_workload(28))
    counts = {s.device: s.stage.num_layers for s in plan.stages}
    assert counts == {0: 4, 1: 8, 2: 16}
    assert plan.period_s == pytest.approx(16.0)
    # Every other cut of 28 at these speeds that keeps the order is slower; the even one by 2.3.
    assert plan.step_s == pytest.approx(16.0 * 102)


def test_more_devices_than_layers():
    plan = exact_plan(simple_home(1.0, 1.0, 1.0, 1.0, 1.0), simple_workload(2))
    assert len(plan.stages) == 2


def test_a_device_a_hundred_times_slower_is_left_out():
    plan = exact_plan(simple_home(1.0, 100.0), simple_workload(30))
    assert plan.devices == (0,)


def test_a_device_a_hundred_times_slower_helps_where_it_must():
    plan = exact_plan(simple_home(1.0, 100.0, usable_bytes=2900), simple_workload(30))
    assert {s.device: s.stage.num_layers for s in plan.stages} == {0: 29, 1: 1}


def test_a_2_gb_device_holds_9_layers_of_200_mb_and_not_a_byte_more():
    small = simple_home(1.0, 1.0, usable_bytes=2_000_000_000)
    layers = simple_workload(18, layer_bytes=200_000_000)
    layers = dataclasses.replace(
        layers, per_stage=LayerCost(static_bytes=1, per_microbatch_bytes=0)
    )
    assert [s.stage.num_layers for s in exact_plan(small, layers).stages] == [9, 9]
    with pytest.raises(DoesNotFitError, match=r"no split fits|too little"):
        exact_plan(small, dataclasses.replace(layers, costs=(*layers.costs[:2], *layers.costs[1:])))


def test_few_microbatches_prefer_few_stages():
    """Two equal devices halve the period, but a single microbatch visits one after the other."""
    home = simple_home(1.0, 1.0, latency_s=0.1)
    assert len(exact_plan(home, simple_workload(10, num_microbatches=1)).stages) == 1
    assert len(exact_plan(home, simple_workload(10, num_microbatches=8)).stages) == 2


def test_links_1_to_1000_are_avoided():
    home = simple_home(1.0, 1.0, 1.0, bytes_per_s=1e6)
    slow = LinkProfile(latency_s=0.0, bytes_per_s=1e2)
    home.links.update({(0, 1): slow, (1, 0): slow})
    plan = exact_plan(home, simple_workload(9))
    assert plan.devices in {(0, 2, 1), (1, 2, 0)}
    assert plan.period_s == pytest.approx(3.0)


def test_of_equal_orders_the_one_with_fewer_shared_hops_wins():
    home = simple_home(1.0, 1.0, 1.0)
    air = LinkProfile(latency_s=0.0, bytes_per_s=1e12, medium="wi-fi")
    home.links.update(dict.fromkeys([(0, 1), (1, 0), (1, 2), (2, 1)], air))
    plan = exact_plan(home, simple_workload(9))
    assert plan.shared_hops == 1
    assert 1 in (plan.devices[0], plan.devices[-1])


def test_a_second_device_for_half_a_percent_is_not_worth_it():
    """Alone 200 s a microbatch; a device that can take one layer would make it 199 s."""
    home = simple_home(1.0, 150.0)
    workload = simple_workload(200, num_microbatches=500)
    alone, together = plans_by_size(home, workload)
    assert together.step_s < alone.step_s
    assert exact_plan(home, workload) == alone


def test_equal_devices_are_told_apart_by_name_not_by_place():
    home = simple_home(1.0, 1.0, 1.0)
    turned = dataclasses.replace(home, devices=home.devices[::-1])
    plans = [(h, exact_plan(h, simple_workload(10))) for h in (home, turned)]
    first, second = ([h.devices[d].name for d in plan.devices] for h, plan in plans)
    assert first == second


def test_a_shared_medium_carries_all_its_links_in_turn():
    """Three devices on one air: two hops, two ways, 4 messages of 1 s in each period."""
    home = simple_home(1.0, 1.0, 1.0)
    air = LinkProfile(latency_s=0.0, bytes_per_s=1000.0, medium="wi-fi")
    home.links.update(dict.fromkeys(home.links, air))
    by_size = {len(p.stages): p for p in plans_by_size(home, simple_workload(9))}
    assert by_size[3].period_s == pytest.approx(4.0)
    assert by_size[2].period_s == pytest.approx(5.0)  # five layers on one of two devices


def test_a_device_with_memory_for_nothing_is_left_out():
    home = simple_home(1.0, 1.0)
    useless = dataclasses.replace(home.devices[0], usable_bytes=0)
    home = dataclasses.replace(home, devices=(useless, home.devices[1]))
    assert exact_plan(home, simple_workload(4)).devices == (1,)
    assert exact_plan(home, simple_workload(4, layer_bytes=0)).devices == (1,)
    nothing = dataclasses.replace(home, devices=(useless,))
    with pytest.raises(DoesNotFitError):
        exact_plan(nothing, simple_workload(4))


def test_missing_links_are_told_from_missing_memory():
    apart = dataclasses.replace(simple_home(1.0, 1.0, usable_bytes=1000), links={})
    with pytest.raises(PeerError, match="in no order has every neighbour a measured link"):
        exact_plan(apart, simple_workload(12))
    assert len(exact_plan(apart, simple_workload(10)).stages) == 1


def test_refusal_names_the_missing_bytes():
    with pytest.raises(DoesNotFitError, match=r"0\.9 GB in all, 0\.1 GB too little"):
        exact_plan(
            simple_home(1.0, 1.0, 1.0, usable_bytes=300_000_000),
            simple_workload(10, layer_bytes=100_000_000),
        )


@pytest.mark.parametrize(("schedule", "steady_s"), [("1f1b", 4.0), ("gpipe", 6.0)])
def test_what_a_schedule_settles_to_over_a_slow_wire(schedule, steady_s):
    """Messages of 3 s: 1F1B has two in flight in 8 s, GPipe sends first all up, then all down."""
    home = simple_home(1.0, 1.0, usable_bytes=100, bytes_per_s=1000 / 3)
    plan = exact_plan(home, dataclasses.replace(simple_workload(2), schedule=schedule))
    assert plan.period_s == pytest.approx(3.0)
    assert plan.steady_s == pytest.approx(steady_s)
    assert plan.step_s == pytest.approx(100 * steady_s, rel=0.03)


def test_many_devices_that_fit_in_few_orders_only():
    """Eight small devices hold a layer each, between two that alone hold embedding and head."""
    home = simple_home(*[1.0] * 10, usable_bytes=100)
    large = [dataclasses.replace(d, usable_bytes=700) for d in home.devices[:2]]
    home = dataclasses.replace(home, devices=(*large, *home.devices[2:]))
    end = LayerCost(static_bytes=500, per_microbatch_bytes=0)
    layers = simple_workload(12)
    workload = dataclasses.replace(layers, costs=(end, *layers.costs[1:-1], end))
    plan = exact_plan(home, workload)
    assert [s.stage.num_layers for s in plan.stages] == [2, *[1] * 8, 2]
    assert {plan.devices[0], plan.devices[-1]} == {0, 1}


@pytest.mark.parametrize("num_layers", [1, 2, 126])
def test_one_layer_to_126(num_layers):
    plan = exact_plan(simple_home(1.0, 1.0, 1.0), simple_workload(num_layers))
    assert sum(s.stage.num_layers for s in plan.stages) == num_layers
    assert len(plan.stages) == min(num_layers, 3)
