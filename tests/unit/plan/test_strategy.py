"""The verdict: the fastest way that training supports, and its reason in numbers."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from exo_train.errors import DoesNotFitError
from exo_train.plan.memory import LayerCost
from exo_train.plan.profiles import DeviceProfile, Household, LinkProfile, Workload
from exo_train.plan.strategy import all_reduce_s, compare, share_microbatches

FAST_WIRE = LinkProfile(latency_s=0.0, bytes_per_s=1e9)
LAYER = LayerCost(static_bytes=100_000_000, per_microbatch_bytes=0)
NOTHING = LayerCost(static_bytes=0, per_microbatch_bytes=0)
# 3 GB, ten messages a step of 1 MB each way.
WORKLOAD = Workload(
    costs=(NOTHING, *[LAYER] * 30, NOTHING), boundary_bytes=1_000_000, num_microbatches=10
)


def household(*devices: tuple[str, float, int], link: LinkProfile = FAST_WIRE) -> Household:
    """Give each device a name, seconds for the whole model, and GB."""
    found = tuple(
        DeviceProfile(
            name=name,
            usable_bytes=gb * 10**9,
            layer_s=model_s / 30,
            embedding_s=0.0,
            head_s=0.0,
        )
        for name, model_s, gb in devices
    )
    pairs = itertools.permutations(range(len(found)), 2)
    return Household(devices=found, links=dict.fromkeys(pairs, link))


def by_strategy(verdict, strategy):
    return [c for c in verdict.candidates if c.strategy == strategy]


def test_a_fast_device_alone_beats_a_ring_over_slow_links():
    wifi = LinkProfile(latency_s=0.01, bytes_per_s=2e6, medium="wi-fi")
    verdict = compare(
        household(("den-pc", 0.3, 9), ("old-mac", 0.9, 9), link=wifi),
        WORKLOAD,
        gradient_bytes=10**9,
    )
    assert verdict.strategy == "one device"
    assert verdict.chosen.devices == (0,)
    assert verdict.chosen.step_s == pytest.approx(3.0)
    assert verdict.runner_up is not None
    assert verdict.runner_up.strategy == "pipeline"
    ring_s = verdict.runner_up.step_s
    assert verdict.reason == (
        f"den-pc alone is {ring_s / 3.0:.1f}x faster than the best ring old-mac > den-pc: 3.0 s "
        f"against {ring_s:.1f} s a step; add devices for what needs more than its 9.0 GB"
    )


def test_a_ring_is_for_what_does_not_fit():
    verdict = compare(household(("a", 1.0, 2), ("b", 1.0, 2)), WORKLOAD, gradient_bytes=10_000_000)
    assert verdict.strategy == "pipeline"
    assert verdict.runner_up is None
    # Ten microbatches and one more for the bubble, half a second each; messages add 2 ms.
    assert verdict.plan.step_s == pytest.approx(5.5, rel=0.01)
    assert "no device has room for the model alone; the ring a > b takes 5.5 s" in verdict.reason
    alone = by_strategy(verdict, "one device")
    assert [c.step_s for c in alone] == [None, None]
    assert "needs 1.0 GB more than the 2.0 GB of a" in alone[0].note
    assert not by_strategy(verdict, "data parallel")


def test_data_parallel_is_named_when_faster_and_never_chosen():
    verdict = compare(household(("a", 1.0, 9), ("b", 1.0, 9)), WORKLOAD, gradient_bytes=100_000_000)
    (replicas,) = by_strategy(verdict, "data parallel")
    # Five microbatches each; two rounds of 50 MB on a link of 1 GB/s.
    assert replicas.step_s == pytest.approx(5.0 + 0.1)
    assert not replicas.available
    assert replicas.plan is None
    assert replicas.note == "not yet available; 0.1 s of it exchange gradients"
    assert verdict.strategy == "pipeline"
    assert verdict.chosen.available
    assert verdict.candidates[0] is replicas
    assert "the ring a > b is 1.8x faster than a alone: 5.5 s against 10.0 s" in verdict.reason
    assert "data parallel over a, b would take 5.1 s but is not yet available" in verdict.reason


def test_a_ring_is_for_links_too_slow_for_gradients():
    """Both hold the model, but 30 GB of gradients take 30 s."""
    verdict = compare(household(("a", 1.0, 9), ("b", 1.0, 9)), WORKLOAD, gradient_bytes=30 * 10**9)
    assert verdict.strategy == "pipeline"
    assert verdict.reason == (
        "the ring a > b is 1.8x faster than a alone: 5.5 s against 10.0 s a step; the links are "
        "too slow for gradients: data parallel over a, b would take 35.0 s a step"
    )


@pytest.mark.parametrize(
    ("gradient_bytes", "words"),
    [
        (400_000_000, "data parallel over a, b would take 5.4 s but is not yet available"),
        (600_000_000, "would take 5.6 s, about the same, but is not yet available"),
        (900_000_000, "the links are too slow for gradients: data parallel over a, b"),
    ],
)
def test_what_exchanges_gradients_is_judged_fairly(gradient_bytes, words):
    """The ring takes 5.52 s, data parallel 5 s and as much as the gradients take at 1 GB/s."""
    home = household(("a", 1.0, 9), ("b", 1.0, 9))
    verdict = compare(home, WORKLOAD, gradient_bytes=gradient_bytes)
    assert verdict.strategy == "pipeline"
    assert words in verdict.reason


def test_slow_replicas_are_not_the_links_fault():
    """Each island does one of 2 microbatches; gradients take no time at all."""
    workload = dataclasses.replace(WORKLOAD, num_microbatches=2)
    home = household(("a", 1.0, 2), ("b", 1.2, 2), ("c", 9.0, 9), ("d", 9.0, 9))
    verdict = compare(home, workload, gradient_bytes=0)
    assert verdict.strategy == "pipeline"
    assert "; islands over c, a, b, d would take 3.8 s a step" in verdict.reason
    assert "links" not in verdict.reason


def test_two_devices_alone_are_no_islands():
    """A third that helps neither: what is left is data parallel, and listed once."""
    home = household(("a", 1.0, 9), ("b", 1.0, 9), ("pi", 500.0, 9))
    verdict = compare(home, WORKLOAD, gradient_bytes=0)
    for candidate in by_strategy(verdict, "islands"):
        assert len(candidate.devices) > 2
    assert by_strategy(verdict, "data parallel")


def test_a_ring_may_help_a_device_that_alone_holds_the_model():
    verdict = compare(household(("a", 1.0, 9), ("b", 1.0, 2)), WORKLOAD, gradient_bytes=0)
    assert verdict.strategy == "pipeline"
    assert verdict.reason.endswith(
        "a step; no second device holds the whole model, so they cannot share out the data"
    )


def test_islands_are_estimated_where_two_rings_fit():
    verdict = compare(
        household(*[(name, 1.0, 2) for name in "abcd"]), WORKLOAD, gradient_bytes=1_000_000
    )
    (islands,) = by_strategy(verdict, "islands")
    # Two rings of two, five microbatches and a bubble of one each, half a second per microbatch.
    assert islands.step_s == pytest.approx(3.0, rel=0.02)
    assert sorted(islands.devices) == [0, 1, 2, 3]
    assert not islands.available
    assert verdict.strategy == "pipeline"


def test_a_device_that_holds_the_model_is_an_island_beside_a_ring():
    home = household(("big", 1.0, 9), ("b", 1.0, 2), ("c", 1.0, 2))
    (islands,) = by_strategy(compare(home, WORKLOAD, gradient_bytes=0), "islands")
    # The ring does 7 of 10 microbatches in 8 periods of 0.5 s, the big one 3 in 3 s.
    assert islands.step_s == pytest.approx(4.0, rel=0.01)
    assert islands.devices[0] == 0


def test_one_device_has_nothing_to_be_compared_with():
    verdict = compare(household(("only", 1.0, 9)), WORKLOAD, gradient_bytes=0)
    assert verdict.reason == "only alone is the only way that fits: 10.0 s a step"
    assert verdict.runner_up is None


def test_a_slow_device_stays_out():
    verdict = compare(household(("pi", 200.0, 9), ("pc", 0.3, 9)), WORKLOAD, gradient_bytes=0)
    assert verdict.chosen.devices == verdict.plan.devices == (1,)


def test_the_verdict_is_the_shortest_available_step():
    home = household(("a", 1.0, 2), ("b", 0.5, 4), ("c", 2.0, 1), ("d", 0.7, 3))
    verdict = compare(home, WORKLOAD, gradient_bytes=10**6)
    possible = [c.step_s for c in verdict.candidates if c.available and c.step_s is not None]
    assert verdict.plan.step_s <= 1.01 * min(possible)
    steps = [float("inf") if c.step_s is None else c.step_s for c in verdict.candidates]
    assert steps == sorted(steps)


def test_nothing_fits():
    with pytest.raises(DoesNotFitError, match=r"needs 0\.5 GB more on every split"):
        compare(household(("a", 1.0, 1), ("b", 1.0, 1)), WORKLOAD, gradient_bytes=0)


def test_microbatches_go_to_whoever_is_done_first():
    assert share_microbatches(7, [1.0, 2.0, 4.0]) == [4, 2, 1]
    assert share_microbatches(2, [1.0, 100.0]) == [2, 0]


def test_all_reduce_reckons_with_shared_air_and_missing_links():
    wire = household(("a", 1, 1), ("b", 1, 1), ("c", 1, 1))
    # 4 rounds of a third of 300 MB at 1 GB/s.
    assert all_reduce_s(wire, (0, 1, 2), 300_000_000) == pytest.approx(0.4)
    air = LinkProfile(latency_s=0.01, bytes_per_s=1e9, medium="wi-fi")
    shared = dataclasses.replace(wire, links=dict.fromkeys(wire.links, air))
    assert all_reduce_s(shared, (0, 1, 2), 300_000_000) == pytest.approx(4 * (0.01 + 0.3))
    assert all_reduce_s(dataclasses.replace(wire, links={}), (0, 1), 1) == float("inf")


WIFI = LinkProfile(latency_s=0.01, bytes_per_s=2e6, medium="wi-fi")


def test_a_ring_that_was_asked_for_is_chosen_and_its_price_is_told():
    home = household(("den-pc", 0.3, 9), ("old-mac", 0.9, 9), ("laptop", 0.9, 9), link=WIFI)
    verdict = compare(home, WORKLOAD, gradient_bytes=10**9, at_least=3)
    assert verdict.strategy == "pipeline"
    assert sorted(verdict.chosen.devices) == [0, 1, 2]
    assert verdict.plan is verdict.chosen.plan
    names = " > ".join(home.devices[index].name for index in verdict.chosen.devices)
    assert verdict.reason.startswith(
        f"the ring {names} was asked for (at least 3 devices): {verdict.plan.step_s:.1f} s a step; "
        f"den-pc alone would take 3.0 s"
    )
    assert verdict.runner_up.devices == (0,)
    notes = {c.devices: c.note for c in verdict.candidates if c.available}
    assert notes.pop(verdict.chosen.devices) == ""
    assert set(notes.values()) == {"asked for at least 3 devices"}
    assert len(notes) == 4  # each alone, and the best pair


def test_what_is_best_anyway_is_not_said_to_be_asked_for():
    home = household(("a", 1.0, 9), ("b", 1.0, 2))
    freely = compare(home, WORKLOAD, gradient_bytes=0)
    asked = compare(home, WORKLOAD, gradient_bytes=0, at_least=2)
    assert asked.reason == freely.reason
    assert asked.plan == freely.plan


@pytest.mark.parametrize(
    ("home", "num_layers", "limit"),
    [
        (household(("a", 1.0, 9), ("b", 1.0, 0)), 30, "only 1 device has memory"),
        (household(("a", 1.0, 9), ("b", 1.0, 9), ("c", 1.0, 9)), 2, "the model has only 2 layers"),
    ],
)
def test_where_so_many_cannot_take_part_the_most_do_and_the_reason_says_why(
    home, num_layers, limit
):
    workload = dataclasses.replace(WORKLOAD, costs=(NOTHING, *[LAYER] * num_layers, NOTHING))
    verdict = compare(home, workload, gradient_bytes=0, at_least=3)
    assert len(verdict.chosen.devices) == min(2, num_layers, len(verdict.plan.stages))
    assert verdict.reason.startswith(f"at least 3 devices were asked for, but {limit}; ")
    assert verdict.chosen.note == ""


def test_memory_may_allow_fewer_than_asked_for_and_the_price_is_told_too():
    """Two take part; the third, with memory for no layer, does not, and links are slow."""
    layer = dataclasses.replace(LAYER, static_bytes=2_000_000_000)
    workload = dataclasses.replace(WORKLOAD, costs=(NOTHING, *[layer] * 2, NOTHING))
    home = household(("a", 1.0, 9), ("b", 50.0, 9), ("c", 1.0, 1), link=WIFI)
    verdict = compare(home, workload, gradient_bytes=0, at_least=3)
    assert sorted(verdict.chosen.devices) == [0, 1]
    assert "asked for, but the model has only 2 layers; the ring" in verdict.reason
    assert "a alone would take" in verdict.reason
    workload = dataclasses.replace(workload, costs=(NOTHING, *[layer] * 3, NOTHING))
    verdict = compare(home, workload, gradient_bytes=0, at_least=3)
    assert "asked for, but memory and links allow no more than 2; the ring" in verdict.reason
