"""Who gets which layers. Owns the exact split of pseudo-layers over devices in a given order.

Pure. Must not measure or know formulas: costs and budgets are arguments.

The split minimises the largest load over the used devices; a stage's load is its bytes over the
device's weight. It is for splits by memory; those by measured time are `exact`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from exo_train.errors import DoesNotFitError
from exo_train.plan.memory import LayerCost
from exo_train.plan.stages import StageSpec

InFlight = Callable[[int, int], int]
Matrix = npt.NDArray[np.float64]

ADVICE = (
    "use a smaller max_seq_length or microbatch_size, turn on checkpoint_activations, "
    "or add a device"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBudget:
    """A device's share (`weight`, 0: must stay unused) and how many bytes it may use."""

    name: str
    weight: float
    usable_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAssignment:
    """`device` indexes the sequence of budgets; `needed_bytes` counts `in_flight` microbatches."""

    device: int
    stage: StageSpec
    needed_bytes: int
    in_flight: int


def one_f_one_b_depth(num_microbatches: int) -> InFlight:
    """Give 1F1B's rule: rank i of p holds min(p - i, microbatches) microbatches."""
    return lambda rank, num_ranks: min(num_ranks - rank, num_microbatches)


def gpipe_depth(num_microbatches: int) -> InFlight:
    """Give GPipe's rule: every rank holds all microbatches of the step."""
    return lambda rank, num_ranks: num_microbatches


def partition(
    costs: Sequence[LayerCost],
    devices: Sequence[DeviceBudget],
    *,
    in_flight: InFlight,
    per_stage: LayerCost | None = None,
) -> list[StageAssignment]:
    """Split `costs` (embedding, decoder layers, head) over `devices`, kept in their order.

    Uses as many devices as can hold at least one decoder layer each; among those splits takes
    the smallest largest load, then the most even one. `in_flight(rank, num_ranks)` is the number
    of microbatches a stage holds; `per_stage` is added to every stage. Raises DoesNotFitError.
    """
    if len(costs) < 3:
        raise ValueError(f"need embedding, a decoder layer and head, got {len(costs)} costs")
    split = _Split(costs, devices, in_flight, per_stage)
    for num_ranks in range(min(len(split.usable), len(costs) - 2), 0, -1):
        chain = split.best_chain(num_ranks, split.within_budget)
        if chain is not None:
            return split.assignments(chain)
    raise DoesNotFitError(_refusal(split))


@dataclass(frozen=True, slots=True)
class _Link:
    """One stage of a chain: pseudo-layers [first, end) on `device`."""

    device: int
    first: int
    end: int


class _Split:
    """The search: dynamic programming over (rank, device, first pseudo-layer)."""

    def __init__(
        self,
        costs: Sequence[LayerCost],
        devices: Sequence[DeviceBudget],
        in_flight: InFlight,
        per_stage: LayerCost | None,
    ) -> None:
        self.costs = costs
        self.devices = devices
        self.in_flight = in_flight
        self.per_stage = per_stage or LayerCost(static_bytes=0, per_microbatch_bytes=0)
        self.usable = [i for i, device in enumerate(devices) if device.weight > 0]
        self._bytes_by_depth: dict[int, Matrix] = {}

    def stage_bytes(self, depth: int) -> Matrix:
        """Give bytes of every stage [first, end) with `depth` microbatches; inf: not a stage."""
        if depth not in self._bytes_by_depth:
            self._bytes_by_depth[depth] = _stage_bytes(self.costs, self.per_stage, depth)
        return self._bytes_by_depth[depth]

    def within_budget(self, needed: Matrix, device: DeviceBudget) -> Matrix:
        """Give the load of every stage on `device`; inf where it does not fit."""
        return np.where(needed <= device.usable_bytes, needed / device.weight, np.inf)

    def best_chain(
        self, num_ranks: int, load: Callable[[Matrix, DeviceBudget], Matrix]
    ) -> list[_Link] | None:
        """Find the chain of `num_ranks` stages with the smallest largest load, then most even."""
        loads = {
            (rank, device): load(
                self.stage_bytes(self.in_flight(rank, num_ranks)), self.devices[device]
            )
            for rank in range(num_ranks)
            for device in self._devices_for(rank, num_ranks)
        }
        limit, _ = self._search(num_ranks, loads, np.maximum)
        if not np.isfinite(limit):
            return None
        # Squares, each weighted by the device's weight, are smallest when loads are equal.
        evenness = {
            (rank, device): np.where(
                matrix <= limit, matrix * matrix * self.devices[device].weight, np.inf
            )
            for (rank, device), matrix in loads.items()
        }
        _, chain = self._search(num_ranks, evenness, np.add)
        return chain

    def _devices_for(self, rank: int, num_ranks: int) -> list[int]:
        """Devices that leave enough others before and after for the remaining ranks."""
        return self.usable[rank : len(self.usable) - (num_ranks - rank - 1)]

    def _search(
        self, num_ranks: int, values: dict[tuple[int, int], Matrix], combine: Any
    ) -> tuple[float, list[_Link]]:
        """Fill from the last rank; `combine` joins a stage's value with that of the rest."""
        size = len(self.costs) + 1
        after = np.full(size, np.inf)
        after[-1] = 0.0
        rest: dict[int, Matrix] = {len(self.devices): after}  # by the device the rest starts at
        ends: list[dict[int, npt.NDArray[np.int64]]] = []
        starts: list[dict[int, Matrix]] = []
        for rank in reversed(range(num_ranks)):
            found: dict[int, Matrix] = {}
            end_of: dict[int, npt.NDArray[np.int64]] = {}
            for device in self._devices_for(rank, num_ranks):
                later = np.min([v for d, v in rest.items() if d > device], axis=0)
                total = combine(values[rank, device], later[None, :])
                end_of[device] = np.argmin(total, axis=1)
                found[device] = np.min(total, axis=1)
            starts.append(found)
            ends.append(end_of)
            rest = found
        starts.reverse()
        ends.reverse()
        return self._walk(starts, ends)

    def _walk(
        self, starts: list[dict[int, Matrix]], ends: list[dict[int, npt.NDArray[np.int64]]]
    ) -> tuple[float, list[_Link]]:
        """Read the chain back from the tables; the first of equal devices wins."""
        chain: list[_Link] = []
        first, last_device = 0, -1
        value = min(float(found[0]) for found in starts[0].values())
        for found, end_of in zip(starts, ends, strict=True):
            device = min((d for d in found if d > last_device), key=lambda d: (found[d][first], d))
            end = int(end_of[device][first])
            chain.append(_Link(device, first, end))
            first, last_device = end, device
        return value, chain

    def assignments(self, chain: list[_Link]) -> list[StageAssignment]:
        num_layers = len(self.costs) - 2
        result = []
        for rank, link in enumerate(chain):
            depth = self.in_flight(rank, len(chain))
            stage = StageSpec(
                start=max(link.first - 1, 0),
                end=min(link.end - 1, num_layers),
                embedding=link.first == 0,
                head=link.end == len(self.costs),
            )
            needed = int(self.stage_bytes(depth)[link.first, link.end])
            result.append(
                StageAssignment(
                    device=link.device, stage=stage, needed_bytes=needed, in_flight=depth
                )
            )
        return result


def _stage_bytes(costs: Sequence[LayerCost], per_stage: LayerCost, depth: int) -> Matrix:
    """Tabulate by (first, end); a stage without a decoder layer is inf.

    Float64 is exact up to 2^53 bytes (9 PB).
    """
    always = [cost.static_bytes + depth * cost.per_microbatch_bytes for cost in costs]
    sums = np.concatenate([[0.0], np.cumsum(np.array(always, dtype=np.float64))])
    workspaces = np.array([cost.transient_bytes for cost in costs], dtype=np.float64)
    size = len(costs) + 1
    table = np.full((size, size), np.inf)
    extra = per_stage.static_bytes + depth * per_stage.per_microbatch_bytes
    for first in range(len(costs) - 1):
        # The smallest end includes decoder layer max(first, 1), counted as pseudo-layers.
        smallest = max(first, 1) + 1
        workspace = np.maximum.accumulate(workspaces[first:])
        row = sums[first + 1 :] - sums[first] + workspace + extra + per_stage.workspace_bytes
        table[first, smallest:] = row[smallest - first - 1 :]
    table[0, -1] -= costs[-1].tied_bytes
    return table


def _refusal(split: _Split) -> str:
    """Say what is needed, what there is, and what is missing where."""
    if not split.usable:
        return "no device may hold layers (all weights are 0); add a device"
    needed = int(split.stage_bytes(1)[0, -1])
    budgets = [split.devices[index] for index in split.usable]
    have = sum(max(budget.usable_bytes, 0) for budget in budgets)
    names = ", ".join(f"{b.name} {gigabytes(max(b.usable_bytes, 0))}" for b in budgets)
    text = (
        f"the model needs at least {gigabytes(needed)} with one microbatch in flight; "
        f"usable: {names}"
    )
    if needed > have:
        missing = f"{gigabytes(have)} in all, {gigabytes(needed - have)} too little"
        return f"{text}: {missing}; {ADVICE}"
    return f"{text}: {gigabytes(have)} in all, but {_tightest(split)}; {ADVICE}"


def _tightest(split: _Split) -> str:
    """Describe the split that comes nearest to fitting, by its tightest device."""

    def overrun(needed: Matrix, device: DeviceBudget) -> Matrix:
        return needed / max(device.usable_bytes, 1)

    nearest: tuple[float, StageAssignment] | None = None
    for num_ranks in range(1, min(len(split.usable), len(split.costs) - 2) + 1):
        chain = split.best_chain(num_ranks, overrun)
        assert chain is not None  # without a budget every split is allowed
        for_each = [
            (a.needed_bytes / max(split.devices[a.device].usable_bytes, 1), a)
            for a in split.assignments(chain)
        ]
        worst = max(for_each, key=lambda pair: pair[0])
        if nearest is None or worst[0] < nearest[0]:
            nearest = worst
    assert nearest is not None
    tight = nearest[1]
    device = split.devices[tight.device]
    missing = tight.needed_bytes - device.usable_bytes
    plural = "" if tight.in_flight == 1 else "es"
    return (
        f"no split fits: in the nearest one {device.name} needs {gigabytes(tight.needed_bytes)} "
        f"for layers {tight.stage.start}..{tight.stage.end - 1} with {tight.in_flight} "
        f"microbatch{plural} in flight, {gigabytes(missing)} more than it has"
    )


def gigabytes(num_bytes: int) -> str:
    """Round to what a reader can use: GB from 0.1 GB on, else MB, at least 0.1."""
    if num_bytes >= 100_000_000:
        return f"{num_bytes / 1e9:.1f} GB"
    return f"{max(num_bytes / 1e6, 0.1 if num_bytes else 0):.1f} MB"
