"""How near a model comes to fitting. Owns the question of memory alone, over all orders at once.

Pure. Must not look at speed, and must not say what to change: that is `suggestions`.

Which devices hold the model together, and how much the tightest of them lacks at best, is found
by a dynamic programme over sets of devices: the most layers that a set can hold as ranks 0, 1, ...
is the best over its last device of what the others hold, and what that one does in its rank. It
covers every order of every choice, as `exact` does up to 8 devices, in 2^n n steps instead of n!.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from exo_train.plan.chains import stage_bytes
from exo_train.plan.partition import gigabytes
from exo_train.plan.profiles import StageCosts, Workload

Ints = npt.NDArray[np.int64]
Layers = npt.NDArray[np.int32]

MAX_DEVICES = 16
# How many bisections `missing_bytes` takes at most; its answer is above the true one by at most
# 2^-12 of the largest possible one, which is what the largest device lacks alone.
MAX_BISECTIONS = 12
# Beyond so many devices sets are many (16 devices: 65,536), and 2^-7 has to do.
MAX_DEVICES_FOR_ALL_BISECTIONS = 10
BISECTIONS_BEYOND = 7

_NEVER = -(2**24)  # more layers missing than any chain can make up for; 16 of them fit int32


class Shortfall:
    """Devices' memory against one workload; devices without memory count as absent.

    `costs` are what stages take on each of the devices, where that is not what the workload says.
    """

    def __init__(
        self,
        usable_bytes: Sequence[int],
        workload: Workload,
        *,
        costs: Sequence[StageCosts] | None = None,
    ) -> None:
        self._devices = [i for i, memory in enumerate(usable_bytes) if memory > 0]
        self._usable = np.array([usable_bytes[i] for i in self._devices], dtype=np.int64)
        size = len(self._usable)
        if not 1 <= size <= MAX_DEVICES:
            raise ValueError(f"need 1 to {MAX_DEVICES} devices with memory, got {size}")
        self._num_layers = workload.num_layers
        lengths = range(1, min(size, workload.num_layers) + 1)
        # By (number of ranks - 1, rank, device); ranks that a chain does not have cost nothing
        # here and are left out in `_most_layers`.
        self._fixed = np.zeros((len(lengths), len(lengths), size), dtype=np.int64)
        self._layer = np.zeros_like(self._fixed)
        costs = costs or [workload.stage_costs] * len(usable_bytes)
        for num_ranks in lengths:
            for rank in range(num_ranks):
                place = (num_ranks - 1, rank)
                pairs = [stage_bytes(workload, costs[i], rank, num_ranks) for i in self._devices]
                self._fixed[place], self._layer[place] = zip(*pairs, strict=True)
        masks = np.arange(2**size)
        counts = sum((masks >> device) & 1 for device in range(size))
        # By rank: for each device, the sets of rank + 1 devices that it can be the last of.
        self._sets = [
            [masks[(counts == rank + 1) & ((masks >> device) & 1 == 1)] for device in range(size)]
            for rank in range(len(lengths))
        ]

    @property
    def num_devices(self) -> int:
        return len(self._usable)

    def fewest_devices(self, *, extra_bytes: int = 0) -> int | None:
        """Give how many devices hold the model at least, each with `extra_bytes` more."""
        best = self._most_layers(self._layers_by_device(extra_bytes))
        for rank, sets in enumerate(self._sets):
            if max(best[with_it, rank].max() for with_it in sets) >= self._num_layers:
                return rank + 1
        return None

    def fitting_order(self) -> tuple[int, ...]:
        """Give the fewest devices that hold the model, in an order in which they do; else ()."""
        num_ranks = self.fewest_devices()
        if num_ranks is None:
            return ()
        held = self._layers_by_device(0)
        best = self._most_layers(held)[:, num_ranks - 1]
        every = np.concatenate(self._sets[num_ranks - 1])
        left = int(every[best[every].argmax()])
        order: list[int] = []
        for rank in reversed(range(num_ranks)):
            device = next(
                d
                for d in range(self.num_devices)
                if left >> d & 1
                and best[left ^ (1 << d)] + held[num_ranks - 1, rank, d] == best[left]
            )
            order.insert(0, self._devices[device])
            left ^= 1 << device
        return tuple(order)

    def missing_bytes(self) -> int:
        """Give what the tightest device lacks on the best split; 0 when the model fits."""
        if self.fewest_devices() is not None:
            return 0
        alone = self._fixed[0, 0] + self._num_layers * self._layer[0, 0] - self._usable
        low, high = 0, int(alone.min())  # `high` always suffices
        few = self.num_devices <= MAX_DEVICES_FOR_ALL_BISECTIONS
        for _ in range(MAX_BISECTIONS if few else BISECTIONS_BEYOND):
            middle = (low + high) // 2
            if self.fewest_devices(extra_bytes=middle) is None:
                low = middle
            else:
                high = middle
        return high

    def _most_layers(self, held: Layers) -> Layers:
        """Tabulate by (set of devices as bits, number of ranks - 1) the most layers.

        Of a set of n devices they are what its devices hold as ranks 0 to n - 1; negative where
        some rank cannot hold one layer.
        """
        best = np.full((2**self.num_devices, len(self._fixed)), _NEVER, dtype=np.int32)
        best[0] = 0
        for rank, sets in enumerate(self._sets):
            for device, with_it in enumerate(sets):
                total = best[with_it ^ (1 << device), rank:] + held[rank:, rank, device]
                best[with_it, rank:] = np.maximum(best[with_it, rank:], total)
        return best

    def _layers_by_device(self, extra_bytes: int) -> Layers:
        """Tabulate by (number of ranks - 1, rank, device) the most layers in memory."""
        free = self._usable + extra_bytes - self._fixed
        whole = np.where(self._layer > 0, free // np.maximum(self._layer, 1), self._num_layers)
        held = np.where(free >= 0, np.minimum(whole, self._num_layers), 0)
        return np.where(held >= 1, held, _NEVER).astype(np.int32)


def lacking(missing_bytes: int, usable_bytes: Sequence[tuple[str, int]]) -> str:
    """Say how much more devices, by name, need until the model fits."""
    if len(usable_bytes) == 1:
        ((name, memory),) = usable_bytes
        return f"needs {gigabytes(missing_bytes)} more than the {gigabytes(memory)} of {name}"
    names = ", ".join(f"{name} {gigabytes(memory)}" for name, memory in usable_bytes)
    return f"needs {gigabytes(missing_bytes)} more on every split (usable: {names})"
