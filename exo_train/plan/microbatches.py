"""How a step's sequences are cut into microbatches. Owns the choice of their size.

Pure. Must not know formulas: what a size means for devices and memory is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from exo_train.errors import DoesNotFitError
from exo_train.plan.exact import TIE, ExactPlan, plan_for_order, plans_by_size, shortest
from exo_train.plan.profiles import Household, Workload

# With 64 microbatches even 8 stages idle less than 10 % of a step: (p - 1) / (m + p - 1).
MAX_MICROBATCHES = 64

Problem = Callable[[int], tuple[Household, Workload]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeCandidate:
    """One way to cut the step; `step_s` is None where no split of it fits."""

    microbatch_size: int
    num_microbatches: int
    step_s: float | None


def sizes_to_try(batch_size: int) -> list[int]:
    """Give divisors of `batch_size`, smallest first: all that make at most 64 microbatches.

    Where that leaves only the whole batch (a prime), the next smaller divisor too.
    """
    smaller, sizes = _divisors(batch_size)
    return sizes if len(sizes) > 1 or not smaller else [smaller[-1], *sizes]


def _divisors(batch_size: int) -> tuple[list[int], list[int]]:
    """Give those that make more microbatches than the limit, and the others."""
    every = [size for size in range(1, batch_size + 1) if batch_size % size == 0]
    few = [size for size in every if batch_size // size <= MAX_MICROBATCHES]
    return every[: len(every) - len(few)], few


def choose_size(
    batch_size: int, problem: Problem, *, at_least: int = 1
) -> tuple[int, tuple[SizeCandidate, ...]]:
    """Choose the size with the shortest step; within 1 % the smallest, which needs least memory.

    The smallest size that fits is planned in full; the others only for the device orders that
    were best there, one for each number of devices: they differ in little else. `at_least` as for
    `plans_by_size`. Raises like `exact_plan` where not even microbatches of one sequence fit.
    """
    first, plans = _first_that_fits(batch_size, problem, at_least)
    found = [_candidate(batch_size, first, plans)]
    orders = [plan.devices for plan in plans]
    for size in sizes_to_try(batch_size):
        if size > first:
            household, workload = problem(size)
            others = [plan_for_order(household, workload, order) for order in orders]
            found.append(_candidate(batch_size, size, [plan for plan in others if plan]))
    limit_s = TIE * min(c.step_s for c in found if c.step_s is not None)
    chosen = next(c for c in found if c.step_s is not None and c.step_s <= limit_s)
    return chosen.microbatch_size, tuple(found)


def _first_that_fits(
    batch_size: int, problem: Problem, at_least: int
) -> tuple[int, tuple[ExactPlan, ...]]:
    """Plan the smallest size to try, or where memory forbids it the largest below that fits.

    More sequences in a microbatch never need less memory, so larger sizes are not worth a try.
    """
    first = sizes_to_try(batch_size)[0]
    smaller = [size for size in _divisors(batch_size)[0] if size < first]
    for size in (first, *reversed(smaller[1:])):
        try:
            return size, plans_by_size(*problem(size), at_least=at_least)
        except DoesNotFitError:
            continue
    return 1, plans_by_size(*problem(1), at_least=at_least)


def _candidate(batch_size: int, size: int, plans: Sequence[ExactPlan]) -> SizeCandidate:
    return SizeCandidate(
        microbatch_size=size,
        num_microbatches=batch_size // size,
        step_s=shortest(plans).step_s if plans else None,
    )
