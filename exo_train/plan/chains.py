"""What a chain of devices can do at best. Owns periods, caps and splits of many chains at once.

Pure. Must not choose chains: that is `chain_search` and `exact`.

A chain is devices in ring order, without repeats: rank 0 has the embedding, the last the head,
each at least one decoder layer. As decoder layers are alike, a split is a number of layers per
rank, and a period T is possible exactly when the most layers that each rank can do in T and hold
in its memory add up to the model. T is the time of some stage, so the smallest T of a chain is
found by bisection over the finite set of all stage times: exactly, not to a tolerance.

Arrays have one row per chain (C) and one column per rank (P) or hop (P - 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from exo_train.plan.memory import LayerCost
from exo_train.plan.partition import gpipe_depth, one_f_one_b_depth
from exo_train.plan.profiles import DeviceProfile, Household, LinkProfile, Workload
from exo_train.plan.step_time import Wire

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_NO_LINK = LinkProfile(latency_s=np.inf, bytes_per_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """By chain: `missing_layers` that no rank has memory for (if any, the times are inf).

    `period_s` is the largest of stage times, message times on one wire, and their sum on one
    shared medium. `step_s` bounds a whole step from above (see `Chains.estimate`).
    """

    missing_layers: Ints
    period_s: Floats
    step_s: Floats
    shared_hops: Ints

    def better_first(self) -> Ints:
        """Order chains by what is missing, then by step time."""
        return np.lexsort((self.step_s, self.missing_layers))


class Chains:
    """Tables over the devices of a household for one workload."""

    def __init__(self, household: Household, workload: Workload) -> None:
        self.devices = household.devices
        self.workload = workload
        self.num_layers = workload.num_layers
        size = len(self.devices)
        pairs = [[household.links.get((a, b), _NO_LINK) for b in range(size)] for a in range(size)]
        self.links = household.links
        latency_s = np.array([[link.latency_s for link in row] for row in pairs])
        self.serial_s = np.array(
            [[serial_s(link, workload.boundary_bytes) for link in row] for row in pairs]
        )
        self.round_trip_s = latency_s + self.serial_s + (latency_s + self.serial_s).T
        media = np.array([[link.medium for link in row] for row in pairs])
        self.shared = (media != "") | (media.T != "")
        self.on_medium_s = [
            np.where(media == name, self.serial_s, 0) + np.where(media == name, self.serial_s, 0).T
            for name in sorted(set(media.flat) - {""})
        ]
        self.stage_s = np.array([_stage_times(d, self.num_layers) for d in self.devices])
        self.periods_s = np.unique(self.stage_s[..., 1:])
        self.layers_in_time = np.array(
            [
                [
                    [np.searchsorted(row[1:], self.periods_s, side="right") for row in rows]
                    for rows in tables
                ]
                for tables in self.stage_s
            ]
        )
        self._layers_in_memory: dict[int, Ints] = {}

    def estimate(self, chains: Ints) -> Estimates:
        """Judge chains of one length by their best splits.

        With T the period and R a hop's round trip, a step of m microbatches takes at most
        (m - 1) (T + H) + P T + sum of R. H is what 1F1B waits because rank i holds only P - i
        microbatches: the largest, over neighbouring ranks i..j, of their hops' R over the number
        of ranks. (Derived: F and B of these ranks make a cycle that takes their stage times and
        these R, and moves j - i + 1 microbatches on; with delays alone there are no others.)
        """
        hops = (chains[:, :-1], chains[:, 1:])
        back = (hops[1], hops[0])
        compute_s = self.smallest_stage_period(chains)
        wires_s = [self.serial_s[hops], self.serial_s[back]]
        media_s = [table[hops].sum(axis=1, keepdims=True) for table in self.on_medium_s]
        period_s = np.max(np.hstack([compute_s[:, None], *wires_s, *media_s]), axis=1)
        round_trips_s = self.round_trip_s[hops]
        possible = np.isfinite(period_s) & np.isfinite(round_trips_s).all(axis=1)
        steps_s = self._steps(
            np.where(possible, period_s, 0.0), np.where(possible[:, None], round_trips_s, 0.0)
        )
        in_memory = self._most_layers(chains, len(self.periods_s) - 1)
        return Estimates(
            missing_layers=np.maximum(self.num_layers - in_memory.sum(axis=1), 0)
            + (in_memory < 1).sum(axis=1),
            period_s=period_s,
            step_s=np.where(possible, steps_s, np.inf),
            shared_hops=self.shared[hops].sum(axis=1),
        )

    def _steps(self, period_s: Floats, round_trips_s: Floats) -> Floats:
        num_ranks = round_trips_s.shape[1] + 1
        stall_s = _stalls(round_trips_s) if self.workload.schedule == "1f1b" else 0.0
        repeats = self.workload.num_microbatches - 1
        filling_s = num_ranks * period_s + round_trips_s.sum(axis=1)
        return np.asarray(repeats * (period_s + stall_s) + filling_s)

    def smallest_stage_period(self, chains: Ints) -> Floats:
        """Give the smallest largest stage time of each chain; inf where no split fits."""
        index = self._smallest_index(chains)
        return np.append(self.periods_s, np.inf)[index]

    def split(self, chain: Ints) -> list[int]:
        """Give the decoder layers of each rank, at the chain's smallest stage period.

        What ranks could do beyond the model is taken from where it shortens the longest stage.
        """
        row = chain[None, :]
        counts = self._most_layers(row, int(self._smallest_index(row)[0]))[0].tolist()
        for _ in range(sum(counts) - self.num_layers):
            slowest = max(
                (rank for rank in range(len(counts)) if counts[rank] > 1),
                key=lambda rank: self.time_s(chain, rank, counts[rank]),
            )
            counts[slowest] -= 1
        return [int(count) for count in counts]

    def time_s(self, chain: Ints, rank: int, num_layers: int) -> float:
        head = rank == len(chain) - 1
        return float(self.stage_s[chain[rank], int(rank == 0), int(head), num_layers])

    def wire(self, source: int, target: int) -> Wire:
        link = self.links[source, target]
        return Wire(
            latency_s=link.latency_s,
            serial_s=serial_s(link, self.workload.boundary_bytes),
            medium=link.medium,
        )

    def depth(self, rank: int, num_ranks: int) -> int:
        """Give how many microbatches a rank holds under the workload's schedule."""
        rule = one_f_one_b_depth if self.workload.schedule == "1f1b" else gpipe_depth
        return rule(self.workload.num_microbatches)(rank, num_ranks)

    def memory_bytes(self, rank: int, num_ranks: int, num_layers: int) -> int:
        """Give what a stage needs; the formula is that of `partition`."""
        fixed_bytes, layer_bytes = self._memory(rank, num_ranks)
        return fixed_bytes + num_layers * layer_bytes

    def _memory(self, rank: int, num_ranks: int) -> tuple[int, int]:
        """Give what a stage needs before its first decoder layer, and for each."""
        depth = self.depth(rank, num_ranks)
        embedding, layer, *_, head = self.workload.costs
        extra = self.workload.per_stage
        parts = [layer] + [embedding] * (rank == 0) + [head] * (rank == num_ranks - 1)
        fixed = sum(_held_bytes(part, depth) for part in parts[1:])
        fixed += _held_bytes(extra, depth) + extra.workspace_bytes
        fixed += max(part.workspace_bytes for part in parts)
        fixed -= head.tied_bytes if num_ranks == 1 else 0
        return fixed, _held_bytes(layer, depth)

    def _caps(self, num_ranks: int) -> Ints:
        """Tabulate by (rank, device) the most decoder layers that fit in memory."""
        if num_ranks not in self._layers_in_memory:
            rows = []
            for rank in range(num_ranks):
                fixed_bytes, layer_bytes = self._memory(rank, num_ranks)
                free = [device.usable_bytes - fixed_bytes for device in self.devices]
                rows.append(
                    [
                        max(-1, min(self.num_layers, bytes_ // layer_bytes))
                        if layer_bytes
                        else (self.num_layers if bytes_ >= 0 else -1)
                        for bytes_ in free
                    ]
                )
            self._layers_in_memory[num_ranks] = np.array(rows)
        return self._layers_in_memory[num_ranks]

    def _most_layers(self, chains: Ints, index: Ints | int) -> Ints:
        """Give by (chain, rank) the most layers within periods_s[index] and memory; 0: none."""
        num_ranks = chains.shape[1]
        in_memory = self._caps(num_ranks)
        columns = []
        for rank in range(num_ranks):
            device = chains[:, rank]
            head = int(rank == num_ranks - 1)
            in_time = self.layers_in_time[device, int(rank == 0), head, index]
            columns.append(np.minimum(in_time, in_memory[rank, device]))
        return np.maximum(np.stack(columns, axis=1), 0)

    def _smallest_index(self, chains: Ints) -> Ints:
        """Bisect periods_s for each chain; its length where none will do."""
        low = np.zeros(len(chains), dtype=np.int64)
        high = np.full(len(chains), len(self.periods_s))
        if chains.shape[1] > self.num_layers:
            return high
        while (low < high).any():
            middle = np.minimum((low + high) // 2, len(self.periods_s) - 1)
            most = self._most_layers(chains, middle)
            enough = (most.sum(axis=1) >= self.num_layers) & (most > 0).all(axis=1)
            open_ = low < high
            high = np.where(open_ & enough, middle, high)
            low = np.where(open_ & ~enough, middle + 1, low)
        return low


def serial_s(link: LinkProfile, num_bytes: int) -> float:
    """Give how long `num_bytes` occupy a link; inf on one that carries nothing."""
    return num_bytes / link.bytes_per_s if link.bytes_per_s > 0 else np.inf


def _stage_times(device: DeviceProfile, num_layers: int) -> Floats:
    """Tabulate by (embedding, head, number of decoder layers)."""
    times_s = (device.layer_s, device.embedding_s, device.head_s)
    if not all(0 <= time_s < np.inf for time_s in times_s):
        raise ValueError(f"{device.name}: measured times must be finite, got {times_s}")
    layers_s = device.layer_s * np.arange(num_layers + 1)
    return np.array(
        [[layers_s + e * device.embedding_s + h * device.head_s for h in (0, 1)] for e in (0, 1)]
    )


def _held_bytes(cost: LayerCost, depth: int) -> int:
    return cost.static_bytes + depth * cost.per_microbatch_bytes


def _stalls(round_trips_s: Floats) -> Floats:
    """Give the largest sum over neighbouring hops, each over its number of ranks."""
    num_hops = round_trips_s.shape[1]
    sums = np.cumsum(np.hstack([np.zeros((len(round_trips_s), 1)), round_trips_s]), axis=1)
    means = [
        (sums[:, length:] - sums[:, : num_hops - length + 1]) / (length + 1)
        for length in range(1, num_hops + 1)
    ]
    return np.max(np.hstack(means), axis=1) if means else np.zeros(len(round_trips_s))
