"""The measured plan: which devices, in which order, with which layers, for the shortest step.

Owns the choice and its prediction. Pure. Must not measure: profiles and costs are arguments.

What is exact, for up to 8 devices: every ordered choice of devices is judged by its best split,
so for each number of devices no plan has a smaller bound on the step (`Chains.estimate`); with
links that cost nothing, that is the smallest period. Between numbers of devices the simulated
step decides. Beyond 8 devices splits are exact too, but orders come from a beam search.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from exo_train.errors import DoesNotFitError, PeerError
from exo_train.plan.chain_search import MAX_DEVICES_FOR_ALL, chains_by_length
from exo_train.plan.chains import Chains, Ints
from exo_train.plan.partition import (
    DeviceBudget,
    StageAssignment,
    gpipe_depth,
    one_f_one_b_depth,
    partition,
)
from exo_train.plan.profiles import Household, Workload
from exo_train.plan.schedule import build_schedule
from exo_train.plan.stages import StageSpec
from exo_train.plan.step_time import Wire, step_time_s

# Measurements are no better than this: within it, the simpler plan wins.
TIE = 1.01


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """`device` indexes the household; `time_s` is of one microbatch, forward and backward."""

    device: int
    stage: StageSpec
    time_s: float
    memory_bytes: int
    usable_bytes: int
    in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactPlan:
    """A ring and its prediction.

    `period_s` is the largest of the stages' times, the messages' times on a wire, and their sum
    on a shared medium; `step_s` is the simulated time of all microbatches, with bubble, latencies
    and the schedule's limited depth. `exact` tells that all orders were tried. `shared_hops` are
    those over a shared medium.
    """

    stages: tuple[PlannedStage, ...]
    period_s: float
    step_s: float
    shared_hops: int
    exact: bool

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(stage.device for stage in self.stages)


def exact_plan(household: Household, workload: Workload) -> ExactPlan:
    """Find the plan with the shortest step; within 1 % the one with fewer devices.

    Raises DoesNotFitError, or PeerError where links are missing.
    """
    return shortest(plans_by_size(household, workload))


def shortest(plans: Sequence[ExactPlan]) -> ExactPlan:
    """Take the shortest step; within 1 % fewest devices, then fewest hops on a shared medium."""
    limit_s = TIE * min(plan.step_s for plan in plans)
    tied = [plan for plan in plans if plan.step_s <= limit_s]
    return min(tied, key=lambda plan: (len(plan.stages), plan.shared_hops, plan.step_s))


def plans_by_size(household: Household, workload: Workload) -> tuple[ExactPlan, ...]:
    """Find the best plan for each number of devices that can do it, smallest number first.

    Does not depend on the order of devices that differ. Raises like `exact_plan`.
    """
    order, canonical = _canonical(household)
    if not order:
        _fit_in_memory(household, workload)
    chains = Chains(canonical, workload)
    seed = np.zeros(0, dtype=np.int64)
    if len(order) > MAX_DEVICES_FOR_ALL:
        seed = np.array([a.device for a in _fit_in_memory(canonical, workload)])
    plans = []
    for candidates in chains_by_length(chains, seed=seed):
        best = _best_chain(chains, candidates)
        if best is not None:
            plans.append(_plan(chains, best, order))
    if not plans:
        _fit_in_memory(canonical, workload)
        names = ", ".join(device.name for device in canonical.devices)
        raise PeerError(
            f"the model fits on {names}, but in no order has every neighbour a measured link to "
            f"the next; check the network between them, or leave one out with --devices"
        )
    return tuple(plans)


def _canonical(household: Household) -> tuple[list[int], Household]:
    """Sort the devices that have memory, so that the input's order decides nothing."""
    devices = household.devices
    order = sorted(
        (index for index, device in enumerate(devices) if device.usable_bytes > 0),
        key=lambda index: dataclasses.astuple(devices[index]),
    )
    place = {index: position for position, index in enumerate(order)}
    links = {
        (place[a], place[b]): link
        for (a, b), link in household.links.items()
        if a in place and b in place
    }
    return order, Household(devices=tuple(devices[index] for index in order), links=links)


def _best_chain(chains: Chains, candidates: Ints) -> Ints | None:
    """Take the smallest step; within 1 % fewest shared hops; then the first."""
    found = chains.estimate(candidates)
    shortest_s = found.step_s.min()
    if not np.isfinite(shortest_s):
        return None
    untied = np.where(found.step_s <= TIE * shortest_s, found.shared_hops, len(chains.devices))
    best: Ints = candidates[np.lexsort((found.step_s, untied))[0]]
    return best


def _plan(chains: Chains, chain: Ints, order: Sequence[int]) -> ExactPlan:
    counts = chains.split(chain)
    ends = np.cumsum(counts).tolist()
    num_ranks = len(counts)
    stages = tuple(
        PlannedStage(
            device=order[chain[rank]],
            stage=StageSpec(
                start=end - count, end=end, embedding=rank == 0, head=rank == num_ranks - 1
            ),
            time_s=chains.time_s(chain, rank, count),
            memory_bytes=chains.memory_bytes(rank, num_ranks, count),
            usable_bytes=chains.devices[chain[rank]].usable_bytes,
            in_flight=chains.depth(rank, num_ranks),
        )
        for rank, (count, end) in enumerate(zip(counts, ends, strict=True))
    )
    found = chains.estimate(chain[None, :])
    return ExactPlan(
        stages=stages,
        period_s=float(found.period_s[0]),
        step_s=_simulated_step_s(chains, chain, [stage.time_s for stage in stages]),
        shared_hops=int(found.shared_hops[0]),
        exact=len(chains.devices) <= MAX_DEVICES_FOR_ALL,
    )


def _simulated_step_s(chains: Chains, chain: Ints, stage_s: Sequence[float]) -> float:
    schedule = build_schedule(
        chains.workload.schedule,
        num_ranks=len(chain),
        num_microbatches=chains.workload.num_microbatches,
    )
    hops = list(zip(chain[:-1].tolist(), chain[1:].tolist(), strict=True))
    return step_time_s(
        schedule,
        stage_s,
        up=[chains.wire(a, b) for a, b in hops],
        down=[chains.wire(b, a) for a, b in hops],
    )


def _fit_in_memory(household: Household, workload: Workload) -> list[StageAssignment]:
    """Split by memory alone, smallest device first; raises DoesNotFitError with the numbers."""
    rule = one_f_one_b_depth if workload.schedule == "1f1b" else gpipe_depth
    order = sorted(
        range(len(household.devices)), key=lambda index: household.devices[index].usable_bytes
    )
    budgets = [
        DeviceBudget(name=d.name, weight=max(d.usable_bytes, 0), usable_bytes=d.usable_bytes)
        for d in (household.devices[index] for index in order)
    ]
    if not budgets:
        raise DoesNotFitError("there is no device to plan for; start `exo-train join` on one")
    split = partition(
        workload.costs,
        budgets,
        in_flight=rule(workload.num_microbatches),
        per_stage=workload.per_stage,
    )
    return [dataclasses.replace(a, device=order[a.device]) for a in split]
