"""The measured plan in cases one can reckon by hand, and at the edges of the world."""

from __future__ import annotations

import dataclasses
import itertools
import time

import numpy as np
import pytest

from exo_train.errors import ConfigError, DoesNotFitError, PeerError
from exo_train.plan.chains import Chains
from exo_train.plan.exact import exact_plan, plan_with_layers, plans_by_size
from exo_train.plan.memory import LayerCost
from exo_train.plan.profiles import (
    DeviceProfile,
    Household,
    LinkProfile,
    StageCosts,
    Workload,
)
from tests.property.plan_cases import home_workload, random_home


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
    with pytest.raises(DoesNotFitError, match="more on every split"):
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
    with pytest.raises(DoesNotFitError, match=r"needs 0\.1 GB more on every split \(usable: d0"):
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


def with_device(home, index, **changes):
    devices = list(home.devices)
    devices[index] = dataclasses.replace(devices[index], **changes)
    return dataclasses.replace(home, devices=tuple(devices))


def test_the_stage_with_the_head_has_its_own_time_for_a_layer():
    """Two equal devices, 30 layers; with half the time a layer there, the last does 20 of them."""
    home = simple_home(1.0, 1.0)
    for index in (0, 1):
        home = with_device(home, index, head_layer_s=0.5)
    plan = exact_plan(home, simple_workload(30), at_least=2)
    assert [s.stage.num_layers for s in plan.stages] == [10, 20]
    assert [s.time_s for s in plan.stages] == [10.0, 10.0]
    alone = plans_by_size(home, simple_workload(30))[0]
    assert alone.stages[0].time_s == 15.0


def test_what_any_stage_adds_to_a_microbatch_is_reckoned_with():
    """9 + 9 layers with 1 s each; a device that adds 4 s gets 7."""
    plan = exact_plan(with_device(simple_home(1.0, 1.0), 0, overhead_s=4.0), simple_workload(18))
    counts = {s.device: s.stage.num_layers for s in plan.stages}
    assert counts == {0: 7, 1: 11}
    assert plan.period_s == pytest.approx(11.0)


def test_the_longest_update_follows_the_last_backward():
    home = with_device(simple_home(1.0, 1.0), 0, layer_update_s=2.0)
    workload = simple_workload(10, num_microbatches=8)
    plan = plan_with_layers(home, workload, (0, 1), (4, 6))
    without = plan_with_layers(simple_home(1.0, 1.0), workload, (0, 1), (4, 6))
    assert plan.update_s == 8.0
    assert plan.step_s == pytest.approx(without.step_s + 8.0)
    assert plan.pace_s == without.pace_s == pytest.approx(6.0, rel=1e-6)
    # Eight microbatches of 4 layers are 32 s; the step 4 + 8 x 6 and the update.
    assert plan.stages[0].busy_share == pytest.approx(32 / (4 + 48 + 8), rel=1e-6)


def test_a_step_of_one_microbatch_is_its_own_pace():
    home = with_device(simple_home(1.0), 0, layer_update_s=0.5)
    plan = exact_plan(home, simple_workload(10, num_microbatches=1))
    assert plan.pace_s == plan.step_s == pytest.approx(15.0)


def own_costs(*, layer_bytes, process_bytes=0):
    nothing = LayerCost(static_bytes=0, per_microbatch_bytes=0)
    return StageCosts(
        embedding=nothing,
        layer=LayerCost(static_bytes=layer_bytes, per_microbatch_bytes=0),
        head=nothing,
        per_stage=LayerCost(static_bytes=process_bytes, per_microbatch_bytes=0),
    )


def test_a_device_that_stores_layers_larger_holds_fewer():
    """Equal memory for 10 layers of 100; in fp32, they are 200 each, and only 5 fit."""
    home = simple_home(1.0, 1.0, usable_bytes=1000)
    home = with_device(home, 0, costs=own_costs(layer_bytes=200))
    plan = exact_plan(home, simple_workload(15))
    assert {s.device: s.stage.num_layers for s in plan.stages} == {0: 5, 1: 10}
    assert {s.memory_bytes for s in plan.stages} == {1000}
    with pytest.raises(DoesNotFitError, match="more on every split"):
        exact_plan(home, simple_workload(16))


def test_what_a_process_takes_leaves_less_for_layers():
    home = simple_home(1.0, 1.0, usable_bytes=1000)
    home = with_device(home, 0, costs=own_costs(layer_bytes=100, process_bytes=650))
    plan = exact_plan(home, simple_workload(13))
    assert {s.device: s.stage.num_layers for s in plan.stages} == {0: 3, 1: 10}
    assert {s.device: s.memory_bytes for s in plan.stages} == {0: 950, 1: 1000}


def test_equal_devices_of_which_one_has_costs_of_its_own_have_an_order():
    home = simple_home(1.0, 1.0, 1.0)
    devices = [dataclasses.replace(d, name="same") for d in home.devices]
    devices[0] = dataclasses.replace(devices[0], costs=own_costs(layer_bytes=100))
    devices[1] = dataclasses.replace(devices[1], head_layer_s=1.0)
    plans = [
        exact_plan(dataclasses.replace(home, devices=tuple(order)), simple_workload(9))
        for order in itertools.permutations(devices)
    ]
    assert {plan.step_s for plan in plans} == {plans[0].step_s}


def test_as_many_devices_as_asked_for_take_part():
    home = simple_home(1.0, 100.0, 100.0)
    workload = simple_workload(30)
    assert exact_plan(home, workload).devices == (0,)
    assert len(exact_plan(home, workload, at_least=2).stages) == 2
    assert len(exact_plan(home, workload, at_least=3).stages) == 3
    assert [len(p.stages) for p in plans_by_size(home, workload, at_least=2)] == [2, 3]


def test_where_so_many_cannot_take_part_the_most_do():
    home = simple_home(1.0, 1.0, 1.0)
    assert len(exact_plan(home, simple_workload(2), at_least=5).stages) == 2
    home = with_device(home, 2, usable_bytes=50)  # less than a layer
    assert len(exact_plan(home, simple_workload(9), at_least=3).stages) == 2


def test_a_split_by_hand_is_predicted_whatever_it_is_like():
    plan = plan_with_layers(simple_home(4.0, 2.0, 1.0), simple_workload(28), (0, 1, 2), (9, 9, 10))
    assert [s.time_s for s in plan.stages] == [36.0, 18.0, 10.0]
    assert plan.period_s == 36.0
    assert not plan.exact


@pytest.mark.parametrize(
    ("order", "layers", "words"),
    [
        ((0, 1), (4, 7), r"layers 4 \+ 7 are 11, the model has 10; they must add up"),
        ((0, 1), (10, 0), "d1 is to have 0 layers"),
        ((0, 1), (10,), "1 numbers of layers are given for d0, d1"),
        ((0, 0), (5, 5), "each device once"),
    ],
)
def test_what_is_no_split_is_refused(order, layers, words):
    with pytest.raises(ConfigError, match=words):
        plan_with_layers(simple_home(1.0, 1.0), simple_workload(10), order, layers)


def test_a_split_by_hand_that_does_not_fit_names_the_device():
    home = simple_home(1.0, 1.0, usable_bytes=700_000_000)
    workload = simple_workload(10, layer_bytes=100_000_000)
    with pytest.raises(
        DoesNotFitError, match=r"d1 needs 0\.8 GB for layers 2\.\.9, usable are 0\.7"
    ):
        plan_with_layers(home, workload, (0, 1), (2, 8))
    apart = dataclasses.replace(home, links={})
    with pytest.raises(PeerError, match="no measured link from d0 to d1"):
        plan_with_layers(apart, workload, (0, 1), (5, 5))


def test_more_devices_than_memory_is_reckoned_for_are_planned_still():
    home = simple_home(*[1.0] * 18, usable_bytes=300)
    plan = exact_plan(home, simple_workload(40, num_microbatches=4))
    assert sum(s.stage.num_layers for s in plan.stages) == 40
    with pytest.raises(DoesNotFitError, match="more on every split"):
        exact_plan(home, simple_workload(60))


@pytest.mark.parametrize(("num_devices", "limit_s"), [(8, 1.0), (16, 5.0)])
def test_130_pseudo_layers_are_planned_in_time(num_devices, limit_s):
    """0.5 s and 1.5 s measured; processor time, as the machine may have other things to do."""
    own = own_costs(layer_bytes=280_000_000, process_bytes=400_000_000)
    home = with_device(random_home(num_devices, 3), 1, costs=own, head_layer_s=0.02)
    took_s = []
    while not took_s or (took_s[-1] >= limit_s and len(took_s) < 3):
        started_s = time.process_time()
        exact_plan(home, home_workload(128), at_least=2)
        took_s.append(time.process_time() - started_s)
    assert min(took_s) < limit_s


def test_the_estimate_that_picks_orders_to_simulate_has_the_update_in_it():
    home, chain = simple_home(1.0, 1.0), np.array([[0, 1]])
    slow = with_device(home, 1, layer_update_s=7.0)
    without, with_update = (
        Chains(each, simple_workload(10)).estimate(chain).step_s[0] for each in (home, slow)
    )
    assert with_update - without == pytest.approx(5 * 7.0)
