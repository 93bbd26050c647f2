"""Pipeline schedules as data. Owns building, parsing, checking and drawing them.

Pure. Must not run anything: a rank's list of actions is executed in `train`. Words follow
torch.distributed.pipelining: F forward, B backward, each of one microbatch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from exo_train.errors import ConfigError

Kind = Literal["F", "B"]


@dataclass(frozen=True, slots=True)
class Action:
    """Forward ("F") or backward ("B") of one microbatch."""

    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}"


Schedule = tuple[tuple[Action, ...], ...]  # by rank


def build_schedule(
    name: str, *, num_ranks: int, num_microbatches: int, depths: Sequence[int] | None = None
) -> Schedule:
    """Build "1f1b" (PipeDream-Flush, arXiv:2104.04473) or "gpipe" (arXiv:1811.06965), checked.

    `depths` overrides how many microbatches each rank of 1F1B may have in flight (usual: p - i);
    more hides slow links.
    """
    if num_ranks < 1 or num_microbatches < 1:
        raise ConfigError(
            f"a schedule needs at least 1 rank and 1 microbatch, got {num_ranks} ranks and "
            f"{num_microbatches} microbatches"
        )
    if name == "1f1b":
        limits = list(depths or range(num_ranks, 0, -1))
        if len(limits) != num_ranks or min(limits) < 1:
            raise ConfigError(f"depths must be {num_ranks} numbers of at least 1, got {limits}")
    elif name == "gpipe":
        limits = [num_microbatches] * num_ranks
    else:
        raise ConfigError(f"no schedule is called '{name}'; known: 1f1b, gpipe")
    schedule = tuple(
        _one_f_one_b(min(limit, num_microbatches), num_microbatches) for limit in limits
    )
    validate_schedule(schedule, num_microbatches=num_microbatches, max_in_flight=limits)
    return schedule


def _one_f_one_b(depth: int, num_microbatches: int) -> tuple[Action, ...]:
    """Warm up with depth - 1 forwards, alternate, cool down; depth = all of them is GPipe."""
    warm_up = [Action("F", k) for k in range(depth - 1)]
    steady = [
        action
        for k in range(num_microbatches - depth + 1)
        for action in (Action("F", k + depth - 1), Action("B", k))
    ]
    cool_down = [Action("B", k) for k in range(num_microbatches - depth + 1, num_microbatches)]
    return (*warm_up, *steady, *cool_down)


def parse_schedule(text: str) -> Schedule:
    """Read one line per rank of words like "F0 F1 B0 B1"; blank lines do not count."""
    ranks = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        for word in words:
            if not re.fullmatch(r"[FB][0-9]{1,9}", word):
                raise ConfigError(f"schedule line {number}: '{word}' is not like F0 or B12")
        if words:
            ranks.append(tuple(_action(word) for word in words))
    return tuple(ranks)


def _action(word: str) -> Action:
    return Action("F" if word[0] == "F" else "B", int(word[1:]))


def validate_schedule(
    schedule: Schedule,
    *,
    num_microbatches: int,
    max_in_flight: Sequence[int] | None = None,
) -> None:
    """Refuse a schedule that is incomplete, keeps too much in flight, or would wait for ever.

    Receives block, sends do not. The refusal ends with the grid.
    """
    for rank, actions in enumerate(schedule):
        fault = _fault_of_rank(actions, num_microbatches)
        if fault is None and max_in_flight is not None:
            held = max_held(actions)
            if held > max_in_flight[rank]:
                fault = f"{held} microbatches are in flight, the limit is {max_in_flight[rank]}"
        if fault is not None:
            raise ConfigError(f"schedule of rank {rank}: {fault}\n{draw(schedule)}")
    timeline = _simulate(schedule)
    for rank, done in enumerate(timeline):
        if len(done) < len(schedule[rank]):
            blocked = schedule[rank][len(done)]
            raise ConfigError(
                f"schedule of rank {rank}: {blocked} waits for ever for "
                f"{_waits_for(schedule, rank, blocked)}\n{draw(schedule)}"
            )


def max_held(actions: Sequence[Action]) -> int:
    """Give the most microbatches that are forwarded and not yet backwarded at any time."""
    held = most = 0
    for action in actions:
        held += 1 if action.kind == "F" else -1
        most = max(most, held)
    return most


def _fault_of_rank(actions: Sequence[Action], num_microbatches: int) -> str | None:
    seen: set[Action] = set()
    for action in actions:
        if not 0 <= action.microbatch < num_microbatches:
            return f"{action} is outside the {num_microbatches} microbatches"
        if action in seen:
            return f"{action} comes twice"
        if action.kind == "B" and Action("F", action.microbatch) not in seen:
            return f"{action} comes before F{action.microbatch}"
        seen.add(action)
    for microbatch in range(num_microbatches):
        for action in (Action("F", microbatch), Action("B", microbatch)):
            if action not in seen:
                return f"{action} is missing"
    return None


def _source(schedule: Schedule, rank: int, action: Action) -> int | None:
    """Give the rank whose same action must be done first; None: nothing from a neighbour."""
    neighbour = rank - 1 if action.kind == "F" else rank + 1
    return neighbour if 0 <= neighbour < len(schedule) else None


def _waits_for(schedule: Schedule, rank: int, action: Action) -> str:
    return f"{action} of rank {_source(schedule, rank, action)}"


def _simulate(schedule: Schedule) -> list[list[int]]:
    """Give each action's start with every action one unit long; stops where nothing can go on."""
    finish: list[dict[Action, int]] = [{} for _ in schedule]
    starts: list[list[int]] = [[] for _ in schedule]
    pending = set(range(len(schedule)))
    while pending:
        rank = min(pending)
        pending.discard(rank)
        progressed = False
        for action in schedule[rank][len(starts[rank]) :]:
            source = _source(schedule, rank, action)
            arrival = 0 if source is None else finish[source].get(action)
            if arrival is None:
                break
            free = starts[rank][-1] + 1 if starts[rank] else 0
            starts[rank].append(max(free, arrival))
            finish[rank][action] = starts[rank][-1] + 1
            progressed = True
        if progressed:
            pending.update(r for r in (rank - 1, rank + 1) if 0 <= r < len(schedule))
    return starts


def draw(schedule: Schedule) -> str:
    """Draw ranks against unit time; `..` idles, `!F3` is where a rank waits for ever."""
    width = max((len(str(a)) for actions in schedule for a in actions), default=2) + 1
    lines = []
    for rank, starts in enumerate(_simulate(schedule)):
        actions = schedule[rank]
        cells = [".."] * (starts[-1] + 1 if starts else 0)
        for start, action in zip(starts, actions, strict=False):
            cells[start] = str(action)
        if len(starts) < len(actions):
            cells.append(f"!{actions[len(starts)]}")
        lines.append(f"rank {rank:>2} | " + " ".join(cell.ljust(width) for cell in cells).rstrip())
    return "\n".join(lines)


def bubble_fraction(schedule: Schedule) -> float:
    """Give the idle share of all ranks with unit times; (p-1) / (m+p-1) for both schedules."""
    starts = _simulate(schedule)
    length = max((times[-1] + 1 for times in starts if times), default=0)
    if length == 0:
        return 0.0
    return 1.0 - sum(len(times) for times in starts) / (length * len(schedule))
