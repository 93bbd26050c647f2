"""Ranks with real stages, driven by their executors in threads, over links through memory.

Owns the way from faults to what each rank reports of a step. For tests only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from exo_train.backends.base import MicrobatchInput, Stage, StageOptions
from exo_train.train.executor import StageExecutor, StepOutcome
from exo_train.train.faults import with_fault
from exo_train.transport.base import LinkIdentity
from exo_train.transport.local import LocalLink, local_link_pair
from tests.backends.hand_ring import OPTIONS, load_ring, microbatches, rows

TIMEOUT_S = 60.0
NUM_MICROBATCHES = 4


class ExecutorRing:
    """Rank i has the layers bounds[i]..bounds[i+1] on backends[i] (the last one repeats)."""

    def __init__(
        self,
        backends: Sequence[str],
        bounds: Sequence[int],
        *,
        options: StageOptions = OPTIONS,
        faults: Mapping[int, str] | None = None,
    ) -> None:
        num_ranks = len(bounds) - 1
        self.names = [f"device{rank}" for rank in range(num_ranks)]
        self.stages: list[Stage] = [
            with_fault(stage, (faults or {}).get(rank, ""), rank=rank, in_process=True)
            for rank, stage in enumerate(load_ring("llama", backends, bounds, options=options))
        ]
        pairs = [self._pair(rank, rank + 1) for rank in range(num_ranks - 1)]
        self.executors = [
            StageExecutor(
                stage=stage,
                rank=rank,
                num_ranks=num_ranks,
                schedule_name="1f1b",
                timeout_s=TIMEOUT_S,
                below=pairs[rank - 1][1] if rank else None,
                above=pairs[rank][0] if rank + 1 < num_ranks else None,
            )
            for rank, stage in enumerate(self.stages)
        ]

    def step(self, step: int, *, loss_scale: float = 0.01) -> list[StepOutcome]:
        """Give what each rank knows after its part of the step."""
        return self._all(lambda e, given: e.run_step(step, given, loss_scale=loss_scale))

    def evaluate(self, step: int) -> list[StepOutcome]:
        return self._all(lambda e, given: e.run_evaluation(step, given))

    def _all(
        self, run: Callable[[StageExecutor, list[MicrobatchInput]], StepOutcome]
    ) -> list[StepOutcome]:
        given = list(microbatches(rows(), 1))
        assert len(given) == NUM_MICROBATCHES
        with ThreadPoolExecutor(len(self.executors)) as pool:
            running = [pool.submit(run, executor, given) for executor in self.executors]
            return [result.result(timeout=TIMEOUT_S) for result in running]

    def close(self) -> None:
        for executor in self.executors:
            for link in (executor.below, executor.above):
                if link is not None:
                    link.close()

    def _pair(self, low: int, high: int) -> tuple[LocalLink, LocalLink]:
        ends = [
            LinkIdentity(
                cluster="c",
                run="r",
                generation=1,
                rank=rank,
                name=self.names[rank],
                peer_rank=peer,
                peer_name=self.names[peer],
                token="t",
            )
            for rank, peer in itertools.permutations((low, high))
        ]
        return local_link_pair(*ends)
