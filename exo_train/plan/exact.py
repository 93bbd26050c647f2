"""The measured plan: which devices, in which order, with which layers, for the shortest step.

Owns the choice and its prediction. Pure. Must not measure: profiles and costs are arguments.

What is exact: the split of each ordered choice of devices has the smallest largest stage time
that memory allows. Up to 8 devices every ordered choice is judged, so for each number of devices
the one with the shortest estimated step is found, and the best few are simulated; beyond, ordered
choices come from a beam search. The simulated step decides, also between numbers of devices: a
short step of few microbatches is better off with fewer stages than the smallest period has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from exo_train.errors import DoesNotFitError, PeerError
from exo_train.plan.chain_search import MAX_DEVICES_FOR_ALL, chains_by_length
from exo_train.plan.chains import Chains, Ints, depth
from exo_train.plan.partition import (
    DeviceBudget,
    StageAssignment,
    gpipe_depth,
    one_f_one_b_depth,
    partition,
)
from exo_train.plan.profiles import Household, Workload
from exo_train.plan.schedule import Schedule, build_schedule
from exo_train.plan.shortfall import MAX_DEVICES, Shortfall
from exo_train.plan.stages import StageSpec
from exo_train.plan.step_time import step_time_s

# Measurements are no better than this: within it, the simpler plan wins.
TIE = 1.01
# Of each number of devices; all there are for up to 4 devices.
MAX_SIMULATED = 24


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
    on a shared medium; `steady_s`, at least as long, is the time per microbatch that the schedule
    settles to (1F1B has few microbatches in flight). `step_s` is the simulated time of all
    microbatches. `exact` tells that all orders were tried; `shared_hops` are those over a shared
    medium.
    """

    stages: tuple[PlannedStage, ...]
    period_s: float
    steady_s: float
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
        seed = np.array(_order_that_fits(canonical, workload), dtype=np.int64)
    plans = []
    for candidates in chains_by_length(chains, seed=seed):
        plan = _best_plan(chains, candidates, order)
        if plan is not None:
            plans.append(plan)
    if not plans:
        _fit_in_memory(canonical, workload)
        names = ", ".join(device.name for device in canonical.devices)
        raise PeerError(
            f"the model fits on {names}, but in no order has every neighbour a measured link to "
            f"the next; check the network between them, or leave one out with --devices"
        )
    return tuple(plans)


def plan_for_order(
    household: Household, workload: Workload, order: Sequence[int]
) -> ExactPlan | None:
    """Plan for just these devices in just this order; None where that does not fit."""
    chain = np.array(order, dtype=np.int64)
    chains = Chains(household, workload)
    return _best_plan(chains, chain[None, :], range(len(household.devices)))


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


def _best_plan(chains: Chains, candidates: Ints, order: Sequence[int]) -> ExactPlan | None:
    """Simulate the chains with the best estimates and take the shortest step."""
    found = chains.estimate(candidates)
    best = found.better_first()[:MAX_SIMULATED]
    best = best[np.isfinite(found.step_s[best])]
    if not len(best):
        return None
    schedule = build_schedule(
        chains.workload.schedule,
        num_ranks=candidates.shape[1],
        num_microbatches=chains.workload.num_microbatches,
    )
    return shortest([_plan(chains, candidates[row], order, schedule) for row in best])


def _plan(chains: Chains, chain: Ints, order: Sequence[int], schedule: Schedule) -> ExactPlan:
    counts = chains.splits(chain[None, :])[0]
    times_s = chains.stage_times(chain, counts)
    num_ranks = len(chain)
    ends = np.cumsum(counts)
    stages = tuple(
        PlannedStage(
            device=order[chain[rank]],
            stage=StageSpec(
                start=int(ends[rank] - counts[rank]),
                end=int(ends[rank]),
                embedding=rank == 0,
                head=rank == num_ranks - 1,
            ),
            time_s=times_s[rank],
            memory_bytes=chains.memory_bytes(rank, num_ranks, int(counts[rank])),
            usable_bytes=chains.devices[chain[rank]].usable_bytes,
            in_flight=depth(chains.workload, rank, num_ranks),
        )
        for rank in range(num_ranks)
    )
    found = chains.estimate(chain[None, :])
    hops = list(zip(chain[:-1].tolist(), chain[1:].tolist(), strict=True))
    return ExactPlan(
        stages=stages,
        period_s=float(found.period_s[0]),
        steady_s=float(found.steady_s[0]),
        step_s=step_time_s(
            schedule,
            times_s,
            up=[chains.wire(a, b) for a, b in hops],
            down=[chains.wire(b, a) for a, b in hops],
        ),
        shared_hops=int(found.shared_hops[0]),
        exact=len(chains.devices) <= MAX_DEVICES_FOR_ALL,
    )


def _order_that_fits(household: Household, workload: Workload) -> tuple[int, ...]:
    """Give some order that fits, for the beam to start from; raises DoesNotFitError."""
    usable_bytes = [device.usable_bytes for device in household.devices]
    order: tuple[int, ...] = ()
    if len(usable_bytes) <= MAX_DEVICES:
        order = Shortfall(usable_bytes, workload).fitting_order()
    return order or tuple(a.device for a in _fit_in_memory(household, workload))


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
