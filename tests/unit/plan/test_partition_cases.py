"""Splits a person can check by hand, and the words of a refusal."""

from __future__ import annotations

import pytest

from exo_train.errors import DoesNotFitError
from exo_train.plan.memory import LayerCost
from exo_train.plan.partition import DeviceBudget, one_f_one_b_depth, partition

GB = 10**9
NOTHING = LayerCost(static_bytes=0, per_microbatch_bytes=0)


def layer(static_bytes: int, per_microbatch_bytes: int = 0) -> LayerCost:
    return LayerCost(static_bytes=static_bytes, per_microbatch_bytes=per_microbatch_bytes)


def device(name: str, usable_bytes: int, weight: float | None = None) -> DeviceBudget:
    weight = float(usable_bytes) if weight is None else weight
    return DeviceBudget(name=name, weight=weight, usable_bytes=usable_bytes)


def layers_of(costs, devices, microbatches=1):
    result = partition(costs, devices, in_flight=one_f_one_b_depth(microbatches))
    return {devices[a.device].name: (a.stage.start, a.stage.end) for a in result}


def test_layers_follow_the_weights():
    costs = [NOTHING, *[layer(GB)] * 12, NOTHING]
    devices = [device("a", 100 * GB, 1), device("b", 100 * GB, 2), device("c", 100 * GB, 3)]
    assert layers_of(costs, devices) == {"a": (0, 2), "b": (2, 6), "c": (6, 12)}


def test_a_heavy_head_takes_layers_off_the_last_device():
    costs = [NOTHING, *[layer(GB)] * 10, layer(4 * GB)]
    devices = [device("a", 100 * GB, 1), device("b", 100 * GB, 1)]
    assert layers_of(costs, devices) == {"a": (0, 7), "b": (7, 10)}


def test_earlier_ranks_hold_more_microbatches_and_so_fewer_layers():
    costs = [NOTHING, *[layer(0, GB)] * 9, NOTHING]
    devices = [device("a", 100 * GB, 1), device("b", 100 * GB, 1)]
    assert layers_of(costs, devices, microbatches=8) == {"a": (0, 3), "b": (3, 9)}


def test_rest_of_the_ring_is_even_too():
    costs = [NOTHING, *[layer(GB)] * 7, NOTHING]
    devices = [device(name, 100 * GB, 1) for name in "abc"]
    counts = sorted(end - start for start, end in layers_of(costs, devices).values())
    assert counts == [2, 2, 3]  # 3 + 3 + 1 has the same maximum


@pytest.mark.parametrize(
    ("devices", "used"),
    [
        ([device("a", 9 * GB), device("zero", 9 * GB, 0), device("c", 9 * GB)], ["a", "c"]),
        ([device("a", 9 * GB), device("tiny", GB // 2), device("c", 9 * GB)], ["a", "c"]),
        ([device(name, 9 * GB) for name in "abcdef"], ["a", "b", "c", "d"]),
    ],
    ids=["weight 0", "not one layer fits", "more devices than layers"],
)
def test_devices_that_stay_unused(devices, used):
    costs = [NOTHING, *[layer(GB)] * 4, NOTHING]
    assert list(layers_of(costs, devices)) == used


def test_tied_weights_count_once_only_on_a_single_device():
    embedding = layer(4 * GB)
    head = LayerCost(static_bytes=4 * GB, per_microbatch_bytes=0, tied_bytes=4 * GB)
    costs = [embedding, layer(GB), layer(GB), head]
    assert layers_of(costs, [device("a", 6 * GB)]) == {"a": (0, 2)}
    with pytest.raises(DoesNotFitError):
        layers_of(costs, [device("a", 4 * GB), device("b", 5 * GB)])


def test_refusal_counts_what_is_needed_had_and_missing():
    costs = [layer(2 * GB), *[layer(GB)] * 14, layer(2 * GB)]
    devices = [device("attic-pc", 8 * GB), device("kitchen-mac", 7_500_000_000)]
    with pytest.raises(DoesNotFitError) as caught:
        layers_of(costs, devices)
    assert str(caught.value) == (
        "the model needs at least 18.0 GB with one microbatch in flight; usable: attic-pc 8.0 GB, "
        "kitchen-mac 7.5 GB: 15.5 GB in all, 2.5 GB too little; use a smaller max_seq_length or "
        "microbatch_size, turn on checkpoint_activations, or add a device"
    )


def test_refusal_names_the_tightest_device_when_the_sum_would_do():
    costs = [NOTHING, *[layer(4 * GB)] * 3, NOTHING]
    devices = [device("attic-pc", 7 * GB), device("kitchen-mac", 7 * GB)]
    with pytest.raises(DoesNotFitError) as caught:
        layers_of(costs, devices)
    assert (
        "14.0 GB in all, but no split fits: in the nearest one kitchen-mac needs 8.0 GB for "
        "layers 1..2 with 1 microbatch in flight, 1.0 GB more than it has; use a smaller"
    ) in str(caught.value)


def test_no_device_may_hold_layers():
    with pytest.raises(DoesNotFitError, match="all weights are 0"):
        layers_of([NOTHING, layer(1), NOTHING], [device("a", GB, 0)])
