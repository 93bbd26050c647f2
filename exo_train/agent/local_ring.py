"""A ring inside one process: a thread per rank, links through memory.

Owns the in-process counterparts of agent streams and workers. Part of the product: the oracle
that other rings are compared with, and the way to use exo_train as a library.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path

from exo_train.backends.base import Stage
from exo_train.errors import ExoTrainError
from exo_train.models.manifest import ModelManifest
from exo_train.models.open import open_model
from exo_train.models.tensors import TensorSource
from exo_train.peer import Address, NodeId
from exo_train.plan.plan import Plan
from exo_train.train import faults
from exo_train.train.messages import from_failure
from exo_train.train.ring import Event
from exo_train.train.stage_loading import link_identity, link_limits, load_planned_stage
from exo_train.train.stage_runner import StageRunner
from exo_train.transport.base import Link
from exo_train.transport.local import LocalLink, local_link_pair
from exo_train.wire.pb import control_pb2 as pb

CLOSE_TIMEOUT_S = 10.0


class LocalNetwork:
    """The links between this process' ranks, made in pairs when the first end is asked for."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, int], LocalLink] = {}
        self._lock = threading.Lock()

    def link(self, plan: Plan, rank: int, peer_rank: int, token: str) -> LocalLink:
        with self._lock:
            if (rank, peer_rank) not in self._ends:
                low, high = sorted((rank, peer_rank))
                lower = link_identity(plan, low, high, token)
                upper = link_identity(plan, high, low, token)
                ends = local_link_pair(lower, upper, limits=link_limits(plan))
                self._ends[low, high], self._ends[high, low] = ends
            return self._ends[rank, peer_rank]


class LocalSurroundings:
    """Implements `Surroundings` without a network; tensors come straight from the model's files."""

    def __init__(self, network: LocalNetwork, model: Path, *, fault: str = "") -> None:
        self._network = network
        self._model = model
        self._fault = fault
        self._links: list[Link] = []

    def open_data(self) -> tuple[Address, ...]:
        return ()

    def connect(self, plan: Plan, rank: int, token: str) -> tuple[Link | None, Link | None]:
        below = self._network.link(plan, rank, rank - 1, token) if rank > 0 else None
        has_above = rank + 1 < len(plan.ranks)
        above = self._network.link(plan, rank, rank + 1, token) if has_above else None
        self._links = [link for link in (below, above) if link is not None]
        return below, above

    def tensors(
        self,
        manifest: ModelManifest,
        addresses: tuple[Address, ...],
        *,
        token: str,
        peer: str,
        peer_id: NodeId,
    ) -> TensorSource:
        _, source = open_model(self._model)
        return source

    def load_stage(
        self, plan: Plan, rank: int, manifest: ModelManifest, source: TensorSource
    ) -> Stage:
        return faults.with_fault(load_planned_stage(plan, rank, manifest, source), self._fault)

    def fetched_bytes(self) -> tuple[int, int]:
        return 0, 0

    def abort(self, error: ExoTrainError) -> None:
        for link in self._links:
            link.fail(error)

    def close(self) -> None:
        for link in self._links:
            link.close()


class LocalRank:
    """Implements `RankChannel` with a thread; `fault` is for tests (see train/faults.py)."""

    def __init__(self, network: LocalNetwork, model: Path, *, fault: str = "") -> None:
        self._surroundings = LocalSurroundings(network, model, fault=fault)
        self._inbox: queue.SimpleQueue[pb.RunMessage | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, on_event: Callable[[Event], None]) -> None:
        runner = StageRunner(self._surroundings, send=on_event)
        self._thread = threading.Thread(target=self._run, args=(runner, on_event), daemon=True)
        self._thread.start()

    def send(self, message: pb.RunMessage) -> None:
        if message.WhichOneof("body") == "failure":
            self._surroundings.abort(from_failure(message.failure, where="the run"))
        self._inbox.put(message)

    def close(self) -> None:
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join(timeout=CLOSE_TIMEOUT_S)

    def _run(self, runner: StageRunner, on_event: Callable[[Event], None]) -> None:
        try:
            while (message := self._inbox.get()) is not None and runner.handle(message):
                pass
        except Exception as error:  # the boundary of the thread: the driver must hear why
            on_event(ExoTrainError(f"{type(error).__name__}: {error}"))
        finally:
            runner.close()
