"""Households and workloads for the planner's tests, and the slow and plain way to reckon them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

from hypothesis import strategies as st

from exo_train.plan.memory import LayerCost
from exo_train.plan.profiles import (
    DeviceProfile,
    Household,
    LinkProfile,
    StageCosts,
    Workload,
)

costs = st.builds(
    LayerCost,
    static_bytes=st.integers(0, 1000),
    per_microbatch_bytes=st.integers(0, 100),
    workspace_bytes=st.integers(0, 300),
)
heads = costs.flatmap(
    lambda head: st.builds(
        dataclasses.replace, st.just(head), tied_bytes=st.integers(0, head.static_bytes)
    )
)
stage_costs = st.builds(StageCosts, embedding=costs, layer=costs, head=heads, per_stage=costs)
times_s = st.floats(0.001, 0.1)
devices = st.builds(
    DeviceProfile,
    name=st.just("device"),
    usable_bytes=st.one_of(st.integers(0, 9000), st.integers(0, 200_000)),
    layer_s=times_s,
    embedding_s=times_s,
    head_s=times_s,
    head_layer_s=st.none() | times_s,
    overhead_s=st.just(0.0) | times_s,
    layer_update_s=st.just(0.0) | times_s,
    costs=st.none() | stage_costs,
)
links = st.builds(
    LinkProfile,
    latency_s=st.floats(0, 0.1),
    bytes_per_s=st.floats(1e3, 1e6),
    medium=st.sampled_from(["", "", "2.4 GHz", "5 GHz"]),
)


@st.composite
def households(draw: st.DrawFn, *, max_devices: int = 4) -> Household:
    found = draw(st.lists(devices, min_size=1, max_size=max_devices))
    named = tuple(dataclasses.replace(d, name=f"d{i}") for i, d in enumerate(found))
    pairs = itertools.permutations(range(len(named)), 2)
    return Household(devices=named, links={pair: draw(links) for pair in pairs})


@st.composite
def workloads(draw: st.DrawFn, *, max_layers: int = 8, max_microbatches: int = 10) -> Workload:
    return Workload(
        costs=(draw(costs), *[draw(costs)] * draw(st.integers(1, max_layers)), draw(heads)),
        boundary_bytes=draw(st.integers(0, 10_000)),
        num_microbatches=draw(st.integers(1, max_microbatches)),
        schedule=draw(st.sampled_from(["1f1b", "gpipe"])),
        per_stage=LayerCost(static_bytes=7, per_microbatch_bytes=3, workspace_bytes=2),
    )


def depth(workload, rank, num_ranks):
    held = num_ranks - rank if workload.schedule == "1f1b" else workload.num_microbatches
    return min(held, workload.num_microbatches)


def stage_bytes(workload, rank, num_ranks, count, own=None):
    """Count one stage's bytes the slow and plain way; `own` are the device's costs, if any."""
    embedding, layer, head = workload.costs[0], workload.costs[1], workload.costs[-1]
    per_stage = workload.per_stage
    if own is not None:
        embedding, layer, head, per_stage = own.embedding, own.layer, own.head, own.per_stage
    parts = [layer] * count
    parts += [embedding] if rank == 0 else []
    parts += [head] if rank == num_ranks - 1 else []
    held = depth(workload, rank, num_ranks)
    total = sum(c.static_bytes + held * c.per_microbatch_bytes for c in [*parts, per_stage])
    total += max(c.workspace_bytes for c in parts) + per_stage.workspace_bytes
    return total - (head.tied_bytes if num_ranks == 1 else 0)


def stage_time(device, rank, num_ranks, count):
    has_head = rank == num_ranks - 1
    own = has_head and device.head_layer_s is not None
    total = count * (device.head_layer_s if own else device.layer_s) + device.overhead_s
    return total + (rank == 0) * device.embedding_s + has_head * device.head_s


def link_period(household, workload, chain):
    """Give the longest turn of a wire or of a shared medium."""
    wires, media = [0.0], {}
    for a, b in itertools.pairwise(chain):
        for pair in ((a, b), (b, a)):
            link = household.links[pair]
            wires.append(workload.boundary_bytes / link.bytes_per_s)
            if link.medium:
                media[link.medium] = media.get(link.medium, 0.0) + wires[-1]
    return max([*wires, *media.values()])


def splits(num_layers, num_ranks):
    for inner in itertools.combinations(range(1, num_layers), num_ranks - 1):
        bounds = [0, *inner, num_layers]
        yield [b - a for a, b in itertools.pairwise(bounds)]


def smallest_stage_period(household, workload, chain):
    """Try every split that fits; inf: none does."""
    best = math.inf
    for counts in splits(workload.num_layers, len(chain)):
        stages = [
            (household.devices[d], r, len(chain), n)
            for r, (d, n) in enumerate(zip(chain, counts, strict=True))
        ]
        if all(stage_bytes(workload, r, p, n, d.costs) <= d.usable_bytes for d, r, p, n in stages):
            best = min(best, max(stage_time(*stage) for stage in stages))
    return best


def every_chain(household):
    indices = range(len(household.devices))
    for size in range(1, len(household.devices) + 1):
        yield from itertools.permutations(indices, size)


def random_home(num_devices, seed):
    rng = random.Random(seed)
    wireless = [rng.random() < 0.5 for _ in range(num_devices)]
    found = tuple(
        DeviceProfile(
            name=f"d{i}",
            usable_bytes=int(rng.uniform(3e9, 24e9)),
            layer_s=rng.uniform(0.01, 0.1),
            embedding_s=0.001,
            head_s=rng.uniform(0.02, 0.2),
            overhead_s=0.002,
            layer_update_s=0.001,
        )
        for i in range(num_devices)
    )
    wire = LinkProfile(latency_s=0.0005, bytes_per_s=1.1e8)
    air = LinkProfile(latency_s=0.004, bytes_per_s=2e7, medium="wi-fi")
    pairs = itertools.permutations(range(num_devices), 2)
    return Household(
        devices=found,
        links={(a, b): air if wireless[a] or wireless[b] else wire for a, b in pairs},
    )


def home_workload(num_layers):
    """About Llama 3.1 8B in 4 bit, microbatches of 1 x 1024 tokens."""
    layer = LayerCost(
        static_bytes=140_000_000, per_microbatch_bytes=8_400_000, workspace_bytes=300_000_000
    )
    end = LayerCost(static_bytes=1_050_000_000, per_microbatch_bytes=0)
    return Workload(
        costs=(end, *[layer] * num_layers, end), boundary_bytes=8_400_000, num_microbatches=16
    )
