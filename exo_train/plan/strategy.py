"""Is the ring worth it? Owns the comparison of strategies and the verdict in one sentence.

Pure. Must not split layers: that is `exact`. Training does one device and pipelines today; data
parallel and islands are estimated, so that the verdict is honest, and never chosen.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from exo_train.errors import DoesNotFitError, PeerError
from exo_train.plan.chains import serial_s
from exo_train.plan.exact import TIE, ExactPlan, plans_by_size, shortest
from exo_train.plan.profiles import Household, LinkProfile, Workload

Strategy = Literal["one device", "pipeline", "data parallel", "islands"]

# Every way to make two islands of 5 devices is 15 pairs of plans, and takes 0.4 s.
MAX_DEVICES_FOR_ISLANDS = 5
NOT_YET_AVAILABLE = "not yet available"
# Steps that differ by less are called about the same.
ABOUT = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyCandidate:
    """One way to train; `devices` index the household.

    `step_s` is None where it cannot be done, and `note` says why, or why it may not be chosen.
    `plan` is there where training supports the strategy. `exchange_s` is the part of the step
    that exchanges gradients.
    """

    strategy: Strategy
    devices: tuple[int, ...]
    step_s: float | None
    available: bool
    note: str = ""
    plan: ExactPlan | None = None
    exchange_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`chosen` is available; `reason` is one sentence with numbers.

    `runner_up` is the best available candidate of another strategy, or another device alone; where
    more devices were asked for than are best, it is the best.
    """

    chosen: StrategyCandidate
    plan: ExactPlan
    reason: str
    runner_up: StrategyCandidate | None
    candidates: tuple[StrategyCandidate, ...]

    @property
    def strategy(self) -> Strategy:
        return self.chosen.strategy


def compare(
    household: Household, workload: Workload, *, gradient_bytes: int, at_least: int = 1
) -> Verdict:
    """Compare all strategies by predicted step time; the chosen one is available.

    `gradient_bytes` is what replicas exchange a step: the whole adapter's gradient. The chosen
    plan has `at_least` so many devices, or the most that are possible. Raises DoesNotFitError, or
    PeerError where links are missing.
    """
    plans = plans_by_size(household, workload)
    alone = [_alone(household, workload, index) for index in range(len(household.devices))]
    rings = [
        StrategyCandidate(
            strategy="pipeline", devices=p.devices, step_s=p.step_s, available=True, plan=p
        )
        for p in plans
        if len(p.stages) > 1
    ]
    replicas = _replicas(household, workload, alone, gradient_bytes)
    most = max(len(plan.stages) for plan in plans)
    fewest = min(at_least, most)
    candidates = [
        dataclasses.replace(c, note=f"asked for at least {at_least} devices")
        if c.plan is not None and len(c.devices) < fewest
        else c
        for c in (*alone, *rings, *replicas, *_islands(household, workload, gradient_bytes))
    ]
    possible = [c for c in candidates if c.plan is not None]
    fastest = _best(possible)
    chosen = _best([c for c in possible if len(c.devices) >= fewest])
    assert chosen.plan is not None
    runner_up = _runner_up(possible, chosen) if chosen is fastest else fastest
    if chosen is fastest:
        reason = _reason(household, chosen, runner_up)
    else:
        reason = _reason_if_asked_for(household, chosen, fastest, at_least)
    if most < at_least:
        limit = _limit(household, workload, most)
        reason = f"at least {at_least} devices were asked for, but {limit}; {reason}"
    return Verdict(
        chosen=chosen,
        plan=chosen.plan,
        reason=reason + _replicas_reason(household, chosen, candidates),
        runner_up=runner_up,
        candidates=tuple(sorted(candidates, key=_step_s)),
    )


def _best(possible: Sequence[StrategyCandidate]) -> StrategyCandidate:
    best = shortest([c.plan for c in possible if c.plan is not None])
    return next(c for c in possible if c.plan is best)


def _step_s(candidate: StrategyCandidate) -> float:
    return float("inf") if candidate.step_s is None else candidate.step_s


def _runner_up(
    possible: Sequence[StrategyCandidate], chosen: StrategyCandidate
) -> StrategyCandidate | None:
    """Take the best of another strategy, else another device alone; never just another ring."""
    others = [c for c in possible if c.strategy != chosen.strategy]
    if not others and chosen.strategy == "one device":
        others = [c for c in possible if c is not chosen]
    return min(others, key=_step_s, default=None)


def _alone(household: Household, workload: Workload, index: int) -> StrategyCandidate:
    try:
        (plan,) = plans_by_size(household.part([index]), workload)
    except DoesNotFitError as error:
        return StrategyCandidate(
            strategy="one device", devices=(index,), step_s=None, available=True, note=str(error)
        )
    stages = (dataclasses.replace(plan.stages[0], device=index),)
    return StrategyCandidate(
        strategy="one device",
        devices=(index,),
        step_s=plan.step_s,
        available=True,
        plan=dataclasses.replace(plan, stages=stages),
    )


def _replicas(
    household: Household,
    workload: Workload,
    alone: Sequence[StrategyCandidate],
    gradient_bytes: int,
) -> Iterator[StrategyCandidate]:
    """Estimate data parallel over the fastest 2, 3, ... devices that hold the whole model."""
    holders = [c for c in alone if c.plan is not None]
    holders.sort(key=lambda c: (_step_s(c), household.devices[c.devices[0]].name))
    for count in range(2, min(len(holders), workload.num_microbatches) + 1):
        used = tuple(c.devices[0] for c in holders[:count])
        periods_s = [c.plan.period_s for c in holders[:count] if c.plan is not None]
        shares = share_microbatches(workload.num_microbatches, periods_s)
        compute_s = max(n * t for n, t in zip(shares, periods_s, strict=True))
        exchange_s = all_reduce_s(household, used, gradient_bytes)
        if exchange_s < float("inf"):
            yield _unavailable("data parallel", used, compute_s, exchange_s)


def _unavailable(
    strategy: Strategy, devices: tuple[int, ...], compute_s: float, exchange_s: float
) -> StrategyCandidate:
    return StrategyCandidate(
        strategy=strategy,
        devices=devices,
        step_s=compute_s + exchange_s,
        exchange_s=exchange_s,
        available=False,
        note=f"{NOT_YET_AVAILABLE}; {_seconds(exchange_s)} of it exchange gradients",
    )


def share_microbatches(num_microbatches: int, periods_s: Sequence[float]) -> list[int]:
    """Give each microbatch to whoever would be done with it first (optimal for equal tasks)."""
    shares = [0] * len(periods_s)
    for _ in range(num_microbatches):
        first = min(range(len(shares)), key=lambda i: ((shares[i] + 1) * periods_s[i], i))
        shares[first] += 1
    return shares


def all_reduce_s(household: Household, devices: Sequence[int], num_bytes: int) -> float:
    """Give the time of a ring all-reduce: 2 (n - 1) rounds of 1 / n of the bytes on each link.

    Patarasuk and Yuan 2009. Reckons with the slowest link between any two of the devices; links
    of one shared medium take turns. inf where a link is missing.
    """
    count = len(devices)
    pairs = list(itertools.permutations(devices, 2))
    if any(pair not in household.links for pair in pairs):
        return float("inf")
    rounds = 2 * (count - 1)
    return max(
        (rounds * _round_s(household.links[pair], num_bytes / count, count) for pair in pairs),
        default=0.0,
    )


def _round_s(link: LinkProfile, num_bytes: float, num_links: int) -> float:
    return link.latency_s + (num_links if link.medium else 1) * serial_s(link, num_bytes)


def _islands(
    household: Household, workload: Workload, gradient_bytes: int
) -> Iterator[StrategyCandidate]:
    """Estimate the best two islands: each a ring (or a device) with the whole model."""
    usable = [i for i, device in enumerate(household.devices) if device.usable_bytes > 0]
    if not 3 <= len(usable) <= MAX_DEVICES_FOR_ISLANDS or workload.num_microbatches < 2:
        return
    found = [
        _two_islands(household, workload, gradient_bytes, first, second)
        for size in range(1, len(usable))
        for first in itertools.combinations(usable[:-1], size)
        for second in [tuple(sorted(set(usable) - set(first)))]
    ]
    best = min((c for c in found if c is not None), key=_step_s, default=None)
    if best is not None:
        yield best


def _two_islands(
    household: Household,
    workload: Workload,
    gradient_bytes: int,
    first: tuple[int, ...],
    second: tuple[int, ...],
) -> StrategyCandidate | None:
    islands = [household.part(devices) for devices in (first, second)]
    try:
        guesses = [shortest(plans_by_size(island, workload)) for island in islands]
        shares = share_microbatches(workload.num_microbatches, [g.steady_s for g in guesses])
        if 0 in shares:
            return None  # that is one ring
        plans = [
            shortest(plans_by_size(island, dataclasses.replace(workload, num_microbatches=share)))
            for island, share in zip(islands, shares, strict=True)
        ]
    except (DoesNotFitError, PeerError):
        return None
    if all(len(plan.stages) == 1 for plan in plans):
        return None  # that is data parallel
    used = [
        tuple(devices[position] for position in plan.devices)
        for devices, plan in zip((first, second), plans, strict=True)
    ]
    exchange_s = max(
        (all_reduce_s(household, pair, gradient_bytes) for pair in itertools.product(*used)),
    )
    if exchange_s == float("inf"):
        return None
    compute_s = max(plan.step_s for plan in plans)
    return _unavailable("islands", (*used[0], *used[1]), compute_s, exchange_s)


def _reason(
    household: Household, chosen: StrategyCandidate, runner_up: StrategyCandidate | None
) -> str:
    """Say in one sentence what was chosen and by how much."""
    best_s = _step_s(chosen)
    who = _who(household, chosen)
    if runner_up is None:
        text = f"{who} is the only way that fits: {_seconds(best_s)} a step"
        if chosen.strategy == "pipeline":
            text = f"no device has room for the model alone; {who} takes {_seconds(best_s)} a step"
    else:
        ratio = _step_s(runner_up) / best_s if best_s > 0 else 1.0
        other = _who(household, runner_up, best=True)
        speed = f"{ratio:.1f}x faster than" if ratio >= ABOUT else "about as fast as"
        text = (
            f"{who} is {speed} {other}: {_seconds(best_s)} against "
            f"{_seconds(_step_s(runner_up))} a step"
        )
    if chosen.strategy == "one device" and len(household.devices) > 1:
        usable_gb = household.devices[chosen.devices[0]].usable_bytes / 1e9
        text += f"; add devices for what needs more than its {usable_gb:.1f} GB"
    return text


def _reason_if_asked_for(
    household: Household, chosen: StrategyCandidate, fastest: StrategyCandidate, at_least: int
) -> str:
    """Say what the user's wish for more devices costs."""
    who, takes = _who(household, chosen), _seconds(_step_s(chosen))
    if len(chosen.devices) < at_least:
        text = f"{who} takes {takes} a step"
    else:
        text = f"{who} was asked for (at least {at_least} devices): {takes} a step"
    return f"{text}; {_who(household, fastest)} would take {_seconds(_step_s(fastest))}"


def _limit(household: Household, workload: Workload, most: int) -> str:
    """Say why no more than `most` devices can take part."""
    if workload.num_layers == most:
        return f"the model has only {most} layer{'' if most == 1 else 's'}"
    if sum(device.usable_bytes > 0 for device in household.devices) == most:
        return f"only {most} device{' has' if most == 1 else 's have'} memory"
    return f"memory and links allow no more than {most}"


def _replicas_reason(
    household: Household, chosen: StrategyCandidate, candidates: Sequence[StrategyCandidate]
) -> str:
    """Compare with what exchanges gradients, which is right where model and links allow it."""
    best_s = _step_s(chosen)
    future = min((c for c in candidates if not c.available), key=_step_s, default=None)
    if future is None:
        alone = [c for c in candidates if c.strategy == "one device" and c.step_s is not None]
        if chosen.strategy == "pipeline" and len(alone) == 1:
            return "; no second device holds the whole model, so they cannot share out the data"
        return ""
    future_s = _step_s(future)
    names = ", ".join(household.devices[index].name for index in future.devices)
    what = f"{future.strategy} over {names} would take {_seconds(future_s)}"
    if future_s * TIE < best_s:
        return f"; {what} but is {NOT_YET_AVAILABLE}"
    if chosen.strategy != "pipeline":
        return ""
    if future_s < ABOUT * best_s:
        return f"; {what}, about the same, but is {NOT_YET_AVAILABLE}"
    if future_s - future.exchange_s < best_s:
        return f"; the links are too slow for gradients: {what} a step"
    return f"; {what} a step"


def _who(household: Household, candidate: StrategyCandidate, *, best: bool = False) -> str:
    names = [household.devices[index].name for index in candidate.devices]
    if candidate.strategy == "one device":
        return f"{names[0]} alone"
    return f"the {'best ' if best else ''}ring {' > '.join(names)}"


def _seconds(time_s: float) -> str:
    """Round to two digits, in ms below 0.1 s."""
    if time_s < 0.1:
        return f"{time_s * 1000:.1f} ms"
    return f"{time_s:.1f} s" if time_s < 100 else f"{time_s:.0f} s"
