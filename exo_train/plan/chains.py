"""What a chain of devices can do at best. Owns splits, periods and estimates of many chains.

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
from exo_train.plan.profiles import DeviceProfile, Household, LinkProfile, StageCosts, Workload
from exo_train.plan.step_time import FORWARD_SHARE, Wire

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_NO_LINK = LinkProfile(latency_s=np.inf, bytes_per_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """By chain: `missing_layers` that no rank has memory for (if any, the times are inf).

    `period_s` is the largest of stage times, message times on one wire, and their sum on one
    shared medium: no schedule can be faster. `steady_s` is what the schedule settles to, `step_s`
    the time of all microbatches and of the update after them.
    """

    missing_layers: Ints
    period_s: Floats
    steady_s: Floats
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
        self.layer_update_s = np.array([device.layer_update_s for device in self.devices])
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
        """Judge chains of one length by the split with the smallest period."""
        return self.judge(chains, self.splits(chains))

    def judge(self, chains: Ints, counts: Ints) -> Estimates:
        """Judge chains with `counts` decoder layers by (chain, rank).

        1F1B waits because rank i holds only P - i microbatches: forwards and backwards of
        neighbouring ranks i..j make a cycle that takes their stage times and their hops' round
        trips, and moves on by j - i + 1 microbatches (derived; with delays alone there are no
        other cycles). GPipe does all forwards first, so its two ways never overlap. A step is the
        way of one microbatch, then a period for each other, then the longest update.
        """
        hops = (chains[:, :-1], chains[:, 1:])
        back = (hops[1], hops[0])
        missing = self.num_layers - counts.sum(axis=1) + (counts < 1).sum(axis=1)
        media_s = [table[hops].sum(axis=1, keepdims=True) for table in self.on_medium_s]
        compute_s = self._times(chains, counts)
        busy_s = np.hstack([compute_s, self.serial_s[hops], self.serial_s[back], *media_s])
        round_trips_s = self.round_trip_s[hops]
        possible = (missing == 0) & np.isfinite(np.hstack([busy_s, round_trips_s])).all(axis=1)
        round_trips_s = np.where(possible[:, None], round_trips_s, 0.0)
        period_s = np.where(possible, busy_s.max(axis=1), np.inf)
        if self.workload.schedule == "1f1b":
            pace_s = _slowest_cycle(compute_s, round_trips_s)
        else:
            pace_s = _pace_of_phases(compute_s, self.serial_s[hops], self.serial_s[back])
        steady_s = np.maximum(period_s, pace_s)
        repeats = self.workload.num_microbatches - 1
        step_s = np.where(possible, steady_s, 0.0) * repeats
        step_s += compute_s.sum(axis=1) + round_trips_s.sum(axis=1) + self.update_s(chains, counts)
        return Estimates(
            missing_layers=missing,
            period_s=period_s,
            steady_s=steady_s,
            step_s=np.where(possible, step_s, np.inf),
            shared_hops=self.shared[hops].sum(axis=1),
        )

    def splits(self, chains: Ints) -> Ints:
        """Give the decoder layers by (chain, rank) with the smallest largest stage time.

        What memory cannot hold is left out. Where ranks could do more than the model in that
        time, the excess is taken from the slowest, so that the rest is even too.
        """
        if chains.shape[1] > self.num_layers:
            return np.zeros_like(chains)
        counts = self._most_layers(chains, self._smallest_index(chains))
        while (excess := counts.sum(axis=1) > self.num_layers).any():
            times_s = np.where(counts > 1, self._times(chains, counts), -1.0)
            rows = np.flatnonzero(excess)
            counts[rows, times_s[rows].argmax(axis=1)] -= 1
        return counts

    def update_s(self, chains: Ints, counts: Ints) -> Floats:
        """Give what follows a step's last backward: all ranks update at once."""
        return np.asarray((counts * self.layer_update_s[chains]).max(axis=1))

    def stage_times(self, chain: Ints, counts: Ints) -> list[float]:
        return [float(time_s) for time_s in self._times(chain[None, :], counts[None, :])[0]]

    def wire(self, source: int, target: int) -> Wire:
        link = self.links[source, target]
        return Wire(
            latency_s=link.latency_s,
            serial_s=serial_s(link, self.workload.boundary_bytes),
            medium=link.medium,
        )

    def memory_bytes(self, device: int, rank: int, num_ranks: int, num_layers: int) -> int:
        """Give what a stage needs on `device`; the formula is that of `partition`."""
        costs = self.workload.costs_of(self.devices[device])
        fixed_bytes, layer_bytes = stage_bytes(self.workload, costs, rank, num_ranks)
        return fixed_bytes + num_layers * layer_bytes

    def _caps(self, num_ranks: int) -> Ints:
        """Tabulate by (rank, device) the most decoder layers that fit in memory."""
        if num_ranks not in self._layers_in_memory:
            self._layers_in_memory[num_ranks] = np.array(
                [
                    [self._most_in_memory(device, rank, num_ranks) for device in self.devices]
                    for rank in range(num_ranks)
                ]
            )
        return self._layers_in_memory[num_ranks]

    def _most_in_memory(self, device: DeviceProfile, rank: int, num_ranks: int) -> int:
        costs = self.workload.costs_of(device)
        fixed_bytes, layer_bytes = stage_bytes(self.workload, costs, rank, num_ranks)
        free_bytes = device.usable_bytes - fixed_bytes
        if free_bytes < 0:
            return 0
        return min(self.num_layers, free_bytes // layer_bytes) if layer_bytes else self.num_layers

    def _most_layers(self, chains: Ints, index: Ints) -> Ints:
        """Give by (chain, rank) what memory allows of one layer and more in periods_s[index]."""
        in_memory = self._caps(chains.shape[1])
        columns = []
        for rank in range(chains.shape[1]):
            device = chains[:, rank]
            head = int(rank == chains.shape[1] - 1)
            in_time = self.layers_in_time[device, int(rank == 0), head, index]
            columns.append(np.minimum(np.maximum(in_time, 1), in_memory[rank, device]))
        return np.stack(columns, axis=1)

    def _smallest_index(self, chains: Ints) -> Ints:
        """Bisect periods_s for each chain; the last one where no split will do."""
        low = np.zeros(len(chains), dtype=np.int64)
        high = np.full(len(chains), len(self.periods_s) - 1)
        while (low < high).any():
            middle = (low + high) // 2
            enough = self._most_layers(chains, middle).sum(axis=1) >= self.num_layers
            high = np.where(enough, middle, high)
            low = np.where(enough, low, np.minimum(middle + 1, high))
        return low

    def _times(self, chains: Ints, counts: Ints) -> Floats:
        rank = np.arange(chains.shape[1])
        first, last = (rank == 0).astype(int), (rank == chains.shape[1] - 1).astype(int)
        return np.asarray(self.stage_s[chains, first, last, counts])


def depth(workload: Workload, rank: int, num_ranks: int) -> int:
    """Give how many microbatches a rank holds under the workload's schedule."""
    rule = one_f_one_b_depth if workload.schedule == "1f1b" else gpipe_depth
    return rule(workload.num_microbatches)(rank, num_ranks)


def stage_bytes(
    workload: Workload, costs: StageCosts, rank: int, num_ranks: int
) -> tuple[int, int]:
    """Give what a stage needs before its first decoder layer, and for each."""
    held = depth(workload, rank, num_ranks)
    layer, head, extra = costs.layer, costs.head, costs.per_stage
    parts = [layer] + [costs.embedding] * (rank == 0) + [head] * (rank == num_ranks - 1)
    fixed = sum(_held_bytes(part, held) for part in parts[1:])
    fixed += _held_bytes(extra, held) + extra.workspace_bytes
    fixed += max(part.transient_bytes for part in parts)
    fixed -= head.tied_bytes if num_ranks == 1 else 0
    return fixed, _held_bytes(layer, held)


def serial_s(link: LinkProfile, num_bytes: float) -> float:
    """Give how long `num_bytes` occupy a link; inf on one that carries nothing."""
    return num_bytes / link.bytes_per_s if link.bytes_per_s > 0 else np.inf


def _stage_times(device: DeviceProfile, num_layers: int) -> Floats:
    """Tabulate by (embedding, head, number of decoder layers).

    Each row grows with the layers, or `layers_in_time` could not be looked up by bisection.
    """
    head_layer_s = device.layer_s if device.head_layer_s is None else device.head_layer_s
    times_s = (
        *(device.layer_s, head_layer_s, device.embedding_s, device.head_s),
        *(device.overhead_s, device.layer_update_s),
    )
    if not all(0 <= time_s < np.inf for time_s in times_s):
        raise ValueError(f"{device.name}: measured times must be finite, got {times_s}")
    layers = np.arange(num_layers + 1)
    inner_s = device.overhead_s + device.layer_s * layers
    last_s = device.overhead_s + head_layer_s * layers + device.head_s
    return np.array(
        [[inner_s, last_s], [inner_s + device.embedding_s, last_s + device.embedding_s]]
    )


def _held_bytes(cost: LayerCost, held: int) -> int:
    return cost.static_bytes + held * cost.per_microbatch_bytes


def _slowest_cycle(compute_s: Floats, round_trips_s: Floats) -> Floats:
    """Give the largest, over neighbouring ranks, of their times and round trips per rank."""
    zero = np.zeros((len(compute_s), 1))
    ranks_s = np.cumsum(np.hstack([zero, compute_s]), axis=1)
    hops_s = np.cumsum(np.hstack([zero, round_trips_s]), axis=1)
    num_ranks = compute_s.shape[1]
    means = [
        (ranks_s[:, n:] - ranks_s[:, :-n] + hops_s[:, n - 1 :] - hops_s[:, : num_ranks - n + 1]) / n
        for n in range(1, num_ranks + 1)
    ]
    return np.asarray(np.hstack(means).max(axis=1))


def _pace_of_phases(compute_s: Floats, up_s: Floats, down_s: Floats) -> Floats:
    """Give the slowest forward or message up, plus the slowest backward or message down."""
    forward_s = np.hstack([FORWARD_SHARE * compute_s, up_s]).max(axis=1)
    backward_s = np.hstack([(1 - FORWARD_SHARE) * compute_s, down_s]).max(axis=1)
    return np.asarray(forward_s + backward_s)
