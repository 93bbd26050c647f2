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
from exo_train.errors import ExoTrainError, PeerLostError
from exo_train.models.manifest import ModelManifest
from exo_train.models.open import open_model
from exo_train.models.spec import ModelSpec
from exo_train.models.tensors import TensorSource
from exo_train.peer import Address, NodeId
from exo_train.plan.history import shadow_holder
from exo_train.plan.plan import Plan
from exo_train.train import faults
from exo_train.train.conversation import Event, LostRankError
from exo_train.train.messages import to_failure
from exo_train.train.snapshots import Snapshot, SnapshotStore
from exo_train.train.stage_loading import link_identity, link_limits, load_planned_stage
from exo_train.train.stage_runner import StageRunner
from exo_train.train.surroundings import interrupt_early
from exo_train.transport.base import Link
from exo_train.transport.local import LocalLink, local_link_pair
from exo_train.transport.stopping import EVERY_GENERATION, Generations
from exo_train.wire.pb import control_pb2 as pb

CLOSE_TIMEOUT_S = 10.0
BEAT_S = 2.0


class LocalNetwork:
    """What joins this process' ranks: their links, made in pairs when the first end is asked for,
    and whose shadows each of them holds. Both belong to a generation of the ring.
    """

    def __init__(self) -> None:
        self._ends: dict[tuple[int, int, int], LocalLink] = {}
        self._holders: dict[tuple[int, int], SnapshotStore] = {}
        self._lock = threading.Lock()

    def link(self, plan: Plan, rank: int, peer_rank: int, token: str) -> LocalLink:
        key = (plan.generation, rank, peer_rank)
        with self._lock:
            if key not in self._ends:
                low, high = sorted((rank, peer_rank))
                lower = link_identity(plan, low, high, token)
                upper = link_identity(plan, high, low, token)
                ends = local_link_pair(lower, upper, limits=link_limits(plan))
                self._ends[plan.generation, low, high] = ends[0]
                self._ends[plan.generation, high, low] = ends[1]
            return self._ends[key]

    def hold_shadows(self, generation: int, rank: int, store: SnapshotStore) -> None:
        with self._lock:
            self._holders[generation, rank] = store

    def send_shadow(self, generation: int, holder: int, snapshot: Snapshot) -> None:
        """Give the snapshot itself, whose arrays nobody changes; raises PeerLostError."""
        with self._lock:
            store = self._holders.get((generation, holder))
            if store is None:
                raise PeerLostError(f"rank {holder} takes no copies in generation {generation}")
            store.put(snapshot)

    def forget(self, rank: int, *, before: int) -> None:
        """Take the rank out of earlier generations: it gets no copies of theirs any more."""
        with self._lock:
            self._ends = {k: e for k, e in self._ends.items() if k[1] != rank or k[0] >= before}
            self._holders = {
                k: s for k, s in self._holders.items() if k[1] != rank or k[0] >= before
            }


class LocalSurroundings:
    """Implements `Surroundings` without a network; tensors come straight from the model's files."""

    def __init__(self, network: LocalNetwork, model: Path, *, fault: str = "") -> None:
        self._network = network
        self._model = model
        self._fault = fault
        self._store: SnapshotStore | None = None
        self._generations = Generations()
        self._links: list[Link] = []

    def open_data(self, store: SnapshotStore) -> tuple[Address, ...]:
        self._store = store
        return ()

    def hold_shadows(self, plan: Plan, rank: int, spec: ModelSpec, token: str) -> None:
        assert self._store is not None, "its data side is opened before a plan comes"
        self._network.hold_shadows(plan.generation, rank, self._store)
        stopper = self._generations.stopper(plan.generation)
        stopper.on_stop(lambda reason: self._network.forget(rank, before=plan.generation + 1))

    def connect(self, plan: Plan, rank: int, token: str) -> tuple[Link | None, Link | None]:
        stopper = self._generations.stopper(plan.generation)
        stopper.check()
        below = self._network.link(plan, rank, rank - 1, token) if rank > 0 else None
        has_above = rank + 1 < len(plan.ranks)
        above = self._network.link(plan, rank, rank + 1, token) if has_above else None
        self._links = [link for link in (below, above) if link is not None]
        for link in self._links:
            stopper.on_stop(link.fail)
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
        faults.point("loading", rank=rank, setting=self._fault)
        stage = load_planned_stage(plan, rank, manifest, source)
        return faults.with_fault(stage, self._fault, rank=rank, in_process=True)

    def fetched_bytes(self) -> tuple[int, int]:
        return 0, 0

    def send_shadow(self, plan: Plan, rank: int, snapshot: Snapshot, token: str) -> None:
        self._generations.stopper(plan.generation).check()
        holder = shadow_holder(plan, rank)
        assert holder is not None
        self._network.send_shadow(plan.generation, holder, snapshot)

    def check(self, plan: Plan) -> None:
        self._generations.stopper(plan.generation).check()

    def interrupt(self, reason: ExoTrainError, *, before: int) -> None:
        self._generations.end_before(before, reason)

    def close(self) -> None:
        for link in self._links:
            link.close()
        self.interrupt(PeerLostError("the run was ended"), before=EVERY_GENERATION)
        # Whoever still knows this rank must not keep the run's state in memory with it.
        self._links, self._store = [], None


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
        threading.Thread(target=self._beat, args=(self._thread, on_event), daemon=True).start()

    def send(self, message: pb.RunMessage) -> None:
        interrupt_early(self._surroundings, message)
        self._inbox.put(message)

    def close(self) -> None:
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join(timeout=CLOSE_TIMEOUT_S)

    def _beat(self, thread: threading.Thread, on_event: Callable[[Event], None]) -> None:
        """Give signs of life, as an agent does while a framework is imported."""
        while thread.is_alive():
            on_event(pb.RunMessage(progress=pb.Progress(phase="working")))
            thread.join(BEAT_S)

    def _run(self, runner: StageRunner, on_event: Callable[[Event], None]) -> None:
        try:
            while (message := self._inbox.get()) is not None and runner.handle(message):
                pass
        except faults.KilledError as error:
            # As an agent says it of its worker, or the connection of both.
            lost = LostRankError(f"its worker was killed: {error}")
            if "agent" not in str(error) and "both" not in str(error):
                on_event(pb.RunMessage(failure=to_failure(lost)))
            on_event(lost)
        except Exception as error:  # the boundary of the thread: the driver must hear why
            on_event(ExoTrainError(f"{type(error).__name__}: {error}"))
        finally:
            runner.close()
