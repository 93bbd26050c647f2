"""The next generation of a run that goes on: the same run, over the devices that are here now.

Owns what is kept of the plan before: the split where nothing has changed, else the measured times,
the microbatch size while it fits, and the memory that the run itself holds. Must not choose when.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from exo_train.agent.deciding import Decision, decide_for_size
from exo_train.agent.live_plan import Asking, LiveProblem, as_sent, with_more
from exo_train.agent.planning import Candidate, compute_dtype, make_plan, ring_order
from exo_train.agent.run_plan import (
    Given,
    Run,
    RunPlan,
    as_before,
    by_memory,
    laid_down,
    written,
)
from exo_train.errors import ConfigError, DoesNotFitError, PeerError
from exo_train.plan.exact import plan_with_layers
from exo_train.plan.plan import Key, Plan

NOT_LAID_DOWN = "the split that --layers lays down cannot be had, so another is planned"
NO_RESERVE: Mapping[Key, int] = MappingProxyType({})


def replan_run(
    run: Run,
    before: RunPlan,
    candidates: Sequence[Candidate],
    asking: Asking,
    *,
    generation: int,
    reserve: Mapping[Key, int] = NO_RESERVE,
) -> RunPlan:
    """Plan the run's next `generation` over `candidates`, as they are now.

    While all devices of the plan `before` are here as they were and none is new, its split stays,
    so that losses are those of an undisturbed run to the last digit. Fewer devices than the user
    asked for may go on. What was measured is not asked again; a new device is timed. `reserve`
    gives devices that ran out of memory, and how many bytes less than in the plan before each may
    take from now on; of one that has had less already nothing more is taken. Raises
    DoesNotFitError that says who is gone and how much is missing, PeerError where links are
    missing, and InterruptedRunError; notes are given only where there is a plan, as who waits for
    one tries again and again.
    """
    notes: list[str] = []
    quiet = replace(asking, fresh=False, on_note=notes.append)
    here = _able(run, candidates, notes.append)
    caps = {**_new_caps(before, here, reserve), **before.caps}
    room = [
        replace(c, usable_memory_bytes=min(c.usable_memory_bytes, caps[c.key]))
        if c.key in caps
        else c
        for c in with_freed(here, before)
    ]
    chosen = _kept(run, before, room, notes.append)
    try:
        chosen = chosen or _anew(run, before, room, quiet)
    except DoesNotFitError as error:
        raise DoesNotFitError(f"{_gone(before.plan, room)}{error}") from None
    for note in notes:
        asking.on_note(note)
    most, considered = _most_bytes(before), {c.key for c in chosen.candidates}
    return replace(
        chosen,
        plan=_next(before.plan, chosen.plan, generation),
        candidates=tuple(
            replace(c, usable_memory_bytes=max(c.usable_memory_bytes, most.get(c.key, 0)))
            for c in here
            if c.key in considered
        ),
        caps=caps,
    )


def _next(before: Plan, chosen: Plan, generation: int) -> Plan:
    """Give what was chosen as a generation of the same run; its workers listen anew."""
    return replace(
        chosen,
        run_id=before.run_id,
        generation=generation,
        adapter_init=before.adapter_init,
        ranks=tuple(replace(rank, addresses=()) for rank in chosen.ranks),
    )


def with_freed(candidates: Sequence[Candidate], before: RunPlan) -> list[Candidate]:
    """Give what each device will have when the run's stage there is gone, which it holds now.

    No more than it has had before: of what a user gives with --memory nothing is seen to be taken.
    """
    most = _most_bytes(before)
    stage_bytes = {r.key: r.memory_bytes for r in before.plan.ranks}

    def freed(candidate: Candidate) -> Candidate:
        now_bytes = candidate.usable_memory_bytes
        most_bytes = max(now_bytes, most.get(candidate.key, 0))
        held_bytes = stage_bytes.get(candidate.key)
        if held_bytes is None:
            return candidate
        then_bytes = now_bytes + held_bytes if held_bytes else most_bytes  # 0: not known
        return replace(candidate, usable_memory_bytes=min(then_bytes, most_bytes))

    return [freed(candidate) for candidate in candidates]


def _most_bytes(before: RunPlan) -> dict[Key, int]:
    return {c.key: c.usable_memory_bytes for c in before.candidates}


def _able(
    run: Run, candidates: Sequence[Candidate], on_note: Callable[[str], None]
) -> list[Candidate]:
    """Leave out who cannot compute in the run's format: nobody is here to change the options."""
    able = []
    for candidate in candidates:
        try:
            compute_dtype(candidate, run.config.dtype)
            able.append(candidate)
        except ConfigError as error:
            on_note(f"{candidate.name} is left out: {error}")
    if not able:
        raise PeerError("no device is here that can go on with the run")
    return able


def _new_caps(
    before: RunPlan, candidates: Sequence[Candidate], reserve: Mapping[Key, int]
) -> dict[Key, int]:
    """Count from the stage that was too large, whatever the device says that it has.

    Of a stage whose need is not known, from what the device had.
    """
    stages = {r.key: r.memory_bytes for r in before.plan.ranks}
    had = _most_bytes(before)
    return {
        c.key: max(
            0,
            (stages.get(c.key) or had.get(c.key, c.usable_memory_bytes)) - reserve[c.key],
        )
        for c in candidates
        if c.key in reserve
    }


def _kept(
    run: Run, before: RunPlan, room: Sequence[Candidate], on_note: Callable[[str], None]
) -> RunPlan | None:
    """Give the plan before where nobody is new and all of its devices are here as they were."""
    if not {c.key for c in room} <= {c.key for c in before.candidates}:
        return None
    given = as_before(run, room, before.plan, on_note, at_least=1)
    return before if given is not None else None


def _anew(run: Run, before: RunPlan, room: Sequence[Candidate], asking: Asking) -> RunPlan:
    """Measure who is new, and plan; who cannot be timed has not been considered."""
    problem = None
    if before.problem is not None:
        problem = before.problem.among(room)
        known = {c.key for c in problem.candidates}
        if new := [c for c in room if c.key not in known]:
            problem = with_more(problem, new, asking)
    if problem is None or not problem.candidates:
        chosen = _by_memory(run, before.plan, room, asking.on_note)
        return replace(chosen, candidates=tuple(room))
    chosen = _by_speed(run, before.plan, problem, asking)
    return replace(chosen, candidates=problem.candidates, problem=problem)


def _by_speed(run: Run, before: Plan, problem: LiveProblem, asking: Asking) -> RunPlan:
    given = _laid_down(run, before, problem.candidates, asking.on_note)
    if given is not None:
        part, size = problem.among(given.candidates), given.microbatch_size
        try:
            plan = plan_with_layers(*part.sized(size), range(len(given.layers)), given.layers)
            return written(run, part, size, plan, asking)
        except (DoesNotFitError, PeerError) as error:
            asking.on_note(f"{NOT_LAID_DOWN}: {error}")
    sizes = _sizes_to_try(before.microbatch_size, run.config.batch_size)
    part, decision = _first_that_fits(run, problem, sizes)
    _note_size(decision.microbatch_size, sizes, asking.on_note)
    asking.on_note(f"plan: {decision.verdict.reason}")
    return written(run, part, decision.microbatch_size, decision.verdict.plan, asking)


def _laid_down(
    run: Run, before: Plan, candidates: Sequence[Candidate], on_note: Callable[[str], None]
) -> Given | None:
    """Give the user's own split while all its devices are here."""
    if not run.config.layers:
        return None
    try:
        return replace(laid_down(run, candidates), microbatch_size=before.microbatch_size)
    except ConfigError as error:
        on_note(f"{NOT_LAID_DOWN}: {error}")
        return None


def _sizes_to_try(size: int, batch_size: int) -> list[int]:
    """Give the size as it was, then the divisors of the batch below it, largest first."""
    return [size, *(s for s in range(size - 1, 0, -1) if batch_size % s == 0)]


def _first_that_fits(
    run: Run, problem: LiveProblem, sizes: Sequence[int]
) -> tuple[LiveProblem, Decision]:
    """A wish for so many devices holds as far as those that are here allow."""
    errors = []
    for size in sizes:
        try:
            decision = decide_for_size(problem, size, at_least=run.at_least)
            return as_sent(problem, decision, run.at_least)
        except DoesNotFitError as error:
            errors.append(error)
    raise DoesNotFitError(problem.refusal(str(errors[-1])))


def _by_memory(
    run: Run, before: Plan, room: Sequence[Candidate], on_note: Callable[[str], None]
) -> RunPlan:
    given = _laid_down(run, before, room, on_note)
    if given is not None:
        return by_memory(run, room, given, on_note)
    sizes = _sizes_to_try(before.microbatch_size, run.config.batch_size)
    ordered = ring_order(room, run.coordinator)
    errors = []
    for size in sizes:
        config = replace(run.config, microbatch_size=size)
        try:
            plan = make_plan(ordered, config, run.manifest, cluster=run.cluster, on_note=on_note)
        except DoesNotFitError as error:
            errors.append(error)
        else:
            _note_size(size, sizes, on_note)
            return RunPlan(plan=plan)
    raise errors[-1]


def _note_size(size: int, sizes: Sequence[int], on_note: Callable[[str], None]) -> None:
    if size != sizes[0]:
        on_note(f"microbatches of {size} in place of {sizes[0]} sequences: more do not fit now")


def _gone(before: Plan, room: Sequence[Candidate]) -> str:
    keys = {c.key for c in room}
    names = [r.name for r in before.ranks if r.key not in keys]
    return f"without {' and '.join(names)} the run cannot go on: " if names else ""
