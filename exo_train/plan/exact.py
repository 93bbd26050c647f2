"""The measured plan: which devices, in which order, with which layers, for the shortest step.

Owns the choice and its prediction. Pure. Must not measure: profiles and costs are arguments.

What is exact: the split of each ordered choice of devices has the smallest largest stage time
that memory allows. Up to 8 devices every ordered choice is judged, so for each number of devices
the one with the shortest estimated step is found, and the best few are simulated; beyond, ordered
choices come from a beam search. The simulated step decides, also between numbers of devices: a
short step of few microbatches is better off with fewer stages than the smallest period has.
The update after the last backward is in the step, but no split is chosen for it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from exo_train.errors import ConfigError, DoesNotFitError, PeerError
from exo_train.plan.chain_search import MAX_DEVICES_FOR_ALL, chains_by_length
from exo_train.plan.chains import Chains, Ints, depth
from exo_train.plan.partition import ADVICE, gigabytes
from exo_train.plan.profiles import DeviceProfile, Household, Workload
from exo_train.plan.schedule import Schedule, build_schedule
from exo_train.plan.shortfall import MAX_DEVICES, Shortfall, lacking
from exo_train.plan.stages import StageSpec
from exo_train.plan.step_time import Wire, simulate_step

# Measurements are no better than this: within it, the simpler plan wins.
TIE = 1.01
# Of each number of devices; all there are for up to 4 devices.
MAX_SIMULATED = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """`device` indexes the household; `time_s` is of one microbatch, forward and backward.

    `busy_share` is the part of a step in which the device computes microbatches.
    """

    device: int
    stage: StageSpec
    time_s: float
    memory_bytes: int
    usable_bytes: int
    in_flight: int
    busy_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactPlan:
    """A ring and its prediction.

    `period_s` is the largest of the stages' times, the messages' times on a wire, and their sum
    on a shared medium; `steady_s`, at least as long, is the time per microbatch that the schedule
    settles to (1F1B has few microbatches in flight). `step_s` is the simulated time of all
    microbatches and of the update after them, `update_s`. `pace_s` is the mean time between the
    ends of rank 0's backwards in it, which a run can measure (one microbatch: `step_s`). `exact`
    tells that all orders were tried; `shared_hops` are those over a shared medium.
    """

    stages: tuple[PlannedStage, ...]
    period_s: float
    steady_s: float
    step_s: float
    pace_s: float
    update_s: float
    shared_hops: int
    exact: bool

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(stage.device for stage in self.stages)


def exact_plan(household: Household, workload: Workload, *, at_least: int = 1) -> ExactPlan:
    """Find the plan with the shortest step; within 1 % the one with fewer devices.

    `at_least` as for `plans_by_size`. Raises DoesNotFitError, or PeerError where links are
    missing.
    """
    return shortest(plans_by_size(household, workload, at_least=at_least))


def shortest(plans: Sequence[ExactPlan]) -> ExactPlan:
    """Take the shortest step; within 1 % fewest devices, then fewest hops on a shared medium."""
    limit_s = TIE * min(plan.step_s for plan in plans)
    tied = [plan for plan in plans if plan.step_s <= limit_s]
    return min(tied, key=lambda plan: (len(plan.stages), plan.shared_hops, plan.step_s))


def plans_by_size(
    household: Household, workload: Workload, *, at_least: int = 1
) -> tuple[ExactPlan, ...]:
    """Find the best plan for each number of devices that can do it, smallest number first.

    Only numbers from `at_least` on, or the largest that is possible. Does not depend on the order
    of devices that differ. Raises like `exact_plan`.
    """
    order, canonical = _canonical(household)
    if not order:
        raise DoesNotFitError(
            "no device has memory to plan with; start `exo-train join` on one that has, or give "
            "one more with --memory"
        )
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
        raise _nothing_found(canonical, workload)
    return tuple(large_enough(plans, at_least))


def large_enough(plans: Sequence[ExactPlan], at_least: int) -> list[ExactPlan]:
    """Keep the plans with so many devices, or those with most where none has."""
    wanted = min(at_least, max(len(plan.stages) for plan in plans))
    return [plan for plan in plans if len(plan.stages) >= wanted]


def plan_for_order(
    household: Household, workload: Workload, order: Sequence[int]
) -> ExactPlan | None:
    """Plan for just these devices in just this order; None where that does not fit."""
    chain = np.array(order, dtype=np.int64)
    chains = Chains(household, workload)
    return _best_plan(chains, chain[None, :], range(len(household.devices)))


def plan_with_layers(
    household: Household, workload: Workload, order: Sequence[int], layers: Sequence[int]
) -> ExactPlan:
    """Predict a split given by hand: `layers` decoder layers by rank, on the devices of `order`.

    Raises ConfigError where that is no split of the model, DoesNotFitError where a device lacks
    memory, and PeerError where a link is missing.
    """
    devices = [household.devices[index] for index in order]
    if len(set(order)) != len(order) or len(layers) != len(order):
        names = ", ".join(device.name for device in devices)
        raise ConfigError(
            f"{len(layers)} numbers of layers are given for {names}; give one number for each "
            f"device, and each device once"
        )
    _check_layers(devices, layers, workload.num_layers)
    chains = Chains(household, workload)
    for rank, (device, count) in enumerate(zip(devices, layers, strict=True)):
        needed_bytes = chains.memory_bytes(order[rank], rank, len(order), count)
        if needed_bytes > device.usable_bytes:
            start = sum(layers[:rank])
            raise DoesNotFitError(
                f"{device.name} needs {gigabytes(needed_bytes)} for layers "
                f"{start}..{start + count - 1}, usable are {gigabytes(device.usable_bytes)}; "
                f"give it fewer layers, or {ADVICE}"
            )
    for a, b in itertools.pairwise(order):
        for pair in ((a, b), (b, a)):
            if pair not in household.links or household.links[pair].bytes_per_s <= 0:
                source, target = (household.devices[index].name for index in pair)
                raise PeerError(
                    f"there is no measured link from {source} to {target}; check the network "
                    f"between them, or put them in another order"
                )
    chain, counts = np.array(order, dtype=np.int64), np.array(layers, dtype=np.int64)
    schedule = _schedule(workload, len(order))
    plan = _plan(chains, chain, counts, range(len(household.devices)), schedule)
    return dataclasses.replace(plan, exact=False)


def _check_layers(devices: Sequence[DeviceProfile], layers: Sequence[int], num_layers: int) -> None:
    for device, count in zip(devices, layers, strict=True):
        if count < 1:
            raise ConfigError(f"{device.name} is to have {count} layers; each has 1 or more")
    if sum(layers) != num_layers:
        given = " + ".join(map(str, layers))
        raise ConfigError(
            f"layers {given} are {sum(layers)}, the model has {num_layers}; they must add up to it"
        )


def _canonical(household: Household) -> tuple[list[int], Household]:
    """Sort the devices that have memory, so that the input's order decides nothing."""
    devices = household.devices
    order = sorted(
        (index for index, device in enumerate(devices) if device.usable_bytes > 0),
        key=lambda index: _sort_key(devices[index]),
    )
    return order, household.part(order)


def _sort_key(device: DeviceProfile) -> tuple[Any, ...]:
    """Give what two devices that differ differ in; None has no order of its own."""
    return tuple(
        (value is not None, () if value is None else value) for value in dataclasses.astuple(device)
    )


def _best_plan(chains: Chains, candidates: Ints, order: Sequence[int]) -> ExactPlan | None:
    """Simulate the chains with the best estimates and take the shortest step."""
    found = chains.estimate(candidates)
    best = found.better_first()[:MAX_SIMULATED]
    best = best[np.isfinite(found.step_s[best])]
    if not len(best):
        return None
    schedule = _schedule(chains.workload, candidates.shape[1])
    splits = chains.splits(candidates[best])
    return shortest(
        [
            _plan(chains, candidates[row], counts, order, schedule)
            for row, counts in zip(best, splits, strict=True)
        ]
    )


def _schedule(workload: Workload, num_ranks: int) -> Schedule:
    return build_schedule(
        workload.schedule, num_ranks=num_ranks, num_microbatches=workload.num_microbatches
    )


def _plan(
    chains: Chains, chain: Ints, counts: Ints, order: Sequence[int], schedule: Schedule
) -> ExactPlan:
    """Predict a step of `chain`, whose ranks have `counts` decoder layers."""
    times_s = chains.stage_times(chain, counts)
    num_ranks = len(chain)
    found = chains.judge(chain[None, :], counts[None, :])
    update_s = float(chains.update_s(chain[None, :], counts[None, :])[0])
    hops = list(itertools.pairwise(chain.tolist()))
    step = simulate_step(
        schedule,
        times_s,
        up=[_repeated(chains.wire(a, b), chains.workload.num_forwards) for a, b in hops],
        down=[chains.wire(b, a) for a, b in hops],
    )
    step_s = step.end_s + update_s
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
            memory_bytes=chains.memory_bytes(chain[rank], rank, num_ranks, int(counts[rank])),
            usable_bytes=chains.devices[chain[rank]].usable_bytes,
            in_flight=depth(chains.workload, rank, num_ranks),
            busy_share=step.busy_s[rank] / step_s if step_s > 0 else 0.0,
        )
        for rank in range(num_ranks)
    )
    return ExactPlan(
        stages=stages,
        period_s=float(found.period_s[0]),
        steady_s=float(found.steady_s[0]),
        step_s=step_s,
        pace_s=step.pace_s if chains.workload.num_microbatches > 1 else step_s,
        update_s=update_s,
        shared_hops=int(found.shared_hops[0]),
        exact=len(chains.devices) <= MAX_DEVICES_FOR_ALL,
    )


def _repeated(wire: Wire, times: int) -> Wire:
    return dataclasses.replace(wire, serial_s=times * wire.serial_s)


def _order_that_fits(household: Household, workload: Workload) -> tuple[int, ...]:
    """Give some order that fits, for the beam to start from; raises DoesNotFitError."""
    largest, shortfall = _shortfall(household, workload)
    order = shortfall.fitting_order()
    if not order and len(largest) == len(household.devices):
        raise _nothing_found(household, workload)
    return tuple(largest[index] for index in order)


def _shortfall(household: Household, workload: Workload) -> tuple[list[int], Shortfall]:
    """Reckon with memory alone, of the largest devices where there are too many for all."""
    devices = household.devices
    by_memory = sorted(range(len(devices)), key=lambda index: -devices[index].usable_bytes)
    largest = sorted(by_memory[:MAX_DEVICES])
    chosen = [devices[index] for index in largest]
    return largest, Shortfall(
        [device.usable_bytes for device in chosen],
        workload,
        costs=[workload.costs_of(device) for device in chosen],
    )


def _nothing_found(household: Household, workload: Workload) -> Exception:
    """Tell missing memory from missing links."""
    largest, shortfall = _shortfall(household, workload)
    missing_bytes = shortfall.missing_bytes()
    if missing_bytes:
        usable = [(d.name, d.usable_bytes) for d in (household.devices[i] for i in largest)]
        return DoesNotFitError(f"does not fit: {lacking(missing_bytes, usable)}")
    names = ", ".join(device.name for device in household.devices)
    return PeerError(
        f"the model fits on {names}, but in no order has every neighbour a measured link to "
        f"the next; check the network between them, or leave one out with --devices"
    )
