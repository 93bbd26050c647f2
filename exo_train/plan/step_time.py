"""How long a pipelined step takes. Owns an event simulation of a schedule over stages and links.

Pure: times in, time out. Must not choose anything.

A stage does its schedule's actions in their order, each as soon as its input is there; sending
does not hold it up. A message waits until its wire is free, occupies it for `serial_s`, and
arrives `latency_s` later. Hops over one shared medium are one wire.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from exo_train.plan.schedule import Action, Schedule

# Under LoRA a backward costs as much as a forward (no weight gradients of the frozen base).
# Steps hardly depend on it: every cycle of a schedule has both.
FORWARD_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """One direction between two stages; equal `medium` (if any): they take turns."""

    latency_s: float
    serial_s: float
    medium: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """`end_s` is when the last action ends, `busy_s` what each rank computes until then.

    `pace_s` is the mean time between the ends of rank 0's backwards; with one microbatch there is
    none, and it is 0.
    """

    end_s: float
    pace_s: float
    busy_s: tuple[float, ...]


def simulate_step(
    schedule: Schedule, stage_s: Sequence[float], up: Sequence[Wire], down: Sequence[Wire]
) -> SimulatedStep:
    """Play a step; `up[i]` goes from rank i to i + 1, `down[i]` back."""
    simulation = _Simulation(schedule, stage_s, up, down)
    end_s = simulation.run()
    first_s, *others_s = simulation.backwards_ended_s
    pace_s = (others_s[-1] - first_s) / len(others_s) if others_s else 0.0
    return SimulatedStep(end_s=end_s, pace_s=pace_s, busy_s=tuple(simulation.busy_s))


class _Simulation:
    def __init__(
        self, schedule: Schedule, stage_s: Sequence[float], up: Sequence[Wire], down: Sequence[Wire]
    ) -> None:
        self.schedule = schedule
        self.duration_s = [
            {"F": FORWARD_SHARE * time_s, "B": (1 - FORWARD_SHARE) * time_s} for time_s in stage_s
        ]
        self.wires = {"F": up, "B": down}
        self.wire_free_s: dict[object, float] = {}
        self.next_index = [0] * len(schedule)
        self.idle = [True] * len(schedule)
        self.arrived: set[tuple[int, Action]] = set()
        self.backwards_ended_s: list[float] = []  # of rank 0
        self.busy_s = [0.0] * len(schedule)
        # Ends of actions (True) and arrivals of messages (False), by time; the number keeps the
        # order of equal times the order in which they were foreseen.
        self.events: list[tuple[float, int, bool, int, Action]] = []
        self.num_events = 0

    def run(self) -> float:
        now_s = 0.0
        for rank in range(len(self.schedule)):
            self._start_next(rank, now_s)
        while self.events:
            now_s, _, is_end, rank, action = heapq.heappop(self.events)
            if is_end:
                self.idle[rank] = True
                self._send(rank, action, now_s)
                if rank == 0 and action.kind == "B":
                    self.backwards_ended_s.append(now_s)
            else:
                self.arrived.add((rank, action))
            self._start_next(rank, now_s)
        return now_s

    def _start_next(self, rank: int, now_s: float) -> None:
        index = self.next_index[rank]
        if not self.idle[rank] or index == len(self.schedule[rank]):
            return
        action = self.schedule[rank][index]
        first = rank == (0 if action.kind == "F" else len(self.schedule) - 1)
        if first or (rank, action) in self.arrived:
            self.idle[rank] = False
            self.next_index[rank] = index + 1
            duration_s = self.duration_s[rank][action.kind]
            self.busy_s[rank] += duration_s
            self._foresee(now_s + duration_s, True, rank, action)

    def _send(self, rank: int, action: Action, now_s: float) -> None:
        forward = action.kind == "F"
        target = rank + 1 if forward else rank - 1
        if not 0 <= target < len(self.schedule):
            return
        wire = self.wires[action.kind][min(rank, target)]
        key = wire.medium or (rank, target)
        sent_s = max(now_s, self.wire_free_s.get(key, 0.0)) + wire.serial_s
        self.wire_free_s[key] = sent_s
        self._foresee(sent_s + wire.latency_s, False, target, action)

    def _foresee(self, time_s: float, is_end: bool, rank: int, action: Action) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (time_s, self.num_events, is_end, rank, action))
