"""What of a device's times grows with a microbatch, and whose costs count."""

from __future__ import annotations

import dataclasses

from exo_train.plan.profiles import DeviceProfile, Household
from tests.unit.plan.test_exact_cases import own_costs, simple_workload

DEVICE = DeviceProfile(
    name="a",
    usable_bytes=100,
    layer_s=1.0,
    embedding_s=2.0,
    head_s=3.0,
    head_layer_s=0.5,
    overhead_s=0.25,
    layer_update_s=0.125,
)


def test_larger_microbatches_do_not_make_the_overhead_or_the_update_longer():
    (scaled,) = Household(devices=(DEVICE,)).with_times(4.0).devices
    assert scaled == dataclasses.replace(
        DEVICE, layer_s=4.0, embedding_s=8.0, head_s=12.0, head_layer_s=2.0
    )
    plain = dataclasses.replace(DEVICE, head_layer_s=None)
    assert Household(devices=(plain,)).with_times(4.0).devices[0].head_layer_s is None


def test_a_devices_own_costs_count_there_and_the_workloads_elsewhere():
    workload = simple_workload(4, layer_bytes=100)
    own = own_costs(layer_bytes=200, process_bytes=50)
    assert workload.costs_of(dataclasses.replace(DEVICE, costs=own)) is own
    assert workload.costs_of(DEVICE).layer == workload.costs[1]
    assert workload.costs_of(DEVICE).per_stage == workload.per_stage
