"""The worker process: one rank of one run, spoken to by its agent over pipes.

Owns this process: its pipes, its threads, its end. It ends when its standard input does, so it
cannot outlive its agent. Holds the tensor framework; the agent does not.
"""

from __future__ import annotations

import argparse
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from exo_train.backends.base import Stage
from exo_train.cluster.hardware import free_now_bytes
from exo_train.cluster.home import Home
from exo_train.cluster.interfaces import all_dialable
from exo_train.errors import DoesNotFitError, ExoTrainError, PeerLostError
from exo_train.models.manifest import ModelManifest
from exo_train.models.open import open_model
from exo_train.models.spec import ModelSpec
from exo_train.models.tensors import TensorInfo, TensorSource
from exo_train.peer import Address, NodeId
from exo_train.plan.history import shadow_holder
from exo_train.plan.plan import Plan, RankPlan
from exo_train.train import faults
from exo_train.train.messages import to_failure
from exo_train.train.meter import open_meter
from exo_train.train.snapshots import Snapshot, SnapshotStore
from exo_train.train.stage_loading import (
    LINK_TIMEOUT_S,
    link_identity,
    link_limits,
    load_planned_stage,
)
from exo_train.train.stage_runner import StageRunner
from exo_train.train.state_copies import copy_identity, shadow_sources, to_copy_messages
from exo_train.train.surroundings import interrupt_early
from exo_train.transport.base import Link
from exo_train.transport.data_server import DataServer
from exo_train.transport.dial import dial
from exo_train.transport.shadow import send_shadow
from exo_train.transport.stopping import EVERY_GENERATION, Generations, Stopper
from exo_train.transport.tls import MemberTls
from exo_train.transport.weight_cache import WeightCache
from exo_train.transport.weights import RemoteSource
from exo_train.wire.framing import frame, read_message
from exo_train.wire.pb import control_pb2 as pb
from exo_train.wire.tensor import Bytes

PROGRESS_S = 1.0
LAST_WORDS_S = 1.0


class GrpcSurroundings:
    """Implements `Surroundings` with gRPC links and tensors from the coordinator."""

    def __init__(
        self,
        home: Home,
        *,
        listen_hosts: list[str],
        hosts: list[str],
        model: Path | None,
        trust_memory: bool = False,
        free_bytes: Callable[[str], int | None] = free_now_bytes,
    ) -> None:
        self._listen_hosts = listen_hosts
        self._hosts = hosts  # where others reach this device
        self._cache = home.cache
        identity = home.paired_identity()
        self._tls = MemberTls(identity, home.roster(identity).certificate)
        self._trust_memory = trust_memory  # the user said how much there is
        self._free_bytes = free_bytes
        self._model = model  # when the model lies on this device's own disk
        self._server: DataServer | None = None
        self._links: list[Link] = []
        self._own: TensorSource | None = None  # that model, once opened
        self._source: RemoteSource | None = None
        self._store = SnapshotStore()
        self._generations = Generations()
        self._stopper = Stopper()  # of the generation that is loaded

    def open_data(self, store: SnapshotStore) -> tuple[Address, ...]:
        self._store = store
        self._server = DataServer(self._listen_hosts, credentials=self._tls.server())
        return tuple(Address(host, self._server.port) for host in self._hosts)

    def hold_shadows(self, plan: Plan, rank: int, spec: ModelSpec, token: str) -> None:
        assert self._server is not None
        self._server.shadows.expect(shadow_sources(plan, rank, spec, token, self._store))

    def connect(self, plan: Plan, rank: int, token: str) -> tuple[Link | None, Link | None]:
        assert self._server is not None
        self._links = []
        self._stopper = self._generations.stopper(plan.generation)
        self._stopper.check()
        limits = link_limits(plan)
        above: Link | None = None
        below: Link | None = None
        if rank + 1 < len(plan.ranks):
            identity = link_identity(plan, rank, rank + 1, token)
            tls = self._tls.to(identity.peer_id)
            above = dial(
                all_dialable(plan.ranks[rank + 1].addresses),
                identity,
                timeout_s=LINK_TIMEOUT_S,
                limits=limits,
                credentials=tls.credentials,
                tls_name=tls.name,
                stopper=self._stopper,
            )
            self._keep(above)
        if rank > 0:
            identity = link_identity(plan, rank, rank - 1, token)
            below = self._server.wait_link(identity, timeout_s=LINK_TIMEOUT_S, limits=limits)
            self._keep(below)
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
        self._stopper.check()
        if self._model is not None:
            if self._own is None:  # a GGUF takes seconds to open, for its vocabulary
                _, self._own = open_model(self._model)
            return StoppableSource(self._own, self._stopper)
        tls = self._tls.to(peer_id)
        self._source = RemoteSource(
            all_dialable(addresses),
            peer=peer,
            token=token,
            infos=manifest.infos,
            digests=manifest.digests,
            cache=WeightCache(self._cache / "tensors"),
            credentials=tls.credentials,
            tls_name=tls.name,
            stopper=self._stopper,
        )
        self._source.prefetch(list(manifest.infos))
        return self._source

    def load_stage(
        self, plan: Plan, rank: int, manifest: ModelManifest, source: TensorSource
    ) -> Stage:
        mine = plan.ranks[rank]
        self._stopper.check()
        open_meter(mine.backend, mine.device).release()  # what an earlier stage has left
        if not self._trust_memory:
            check_room(mine, self._free_bytes(mine.device))
        faults.point("loading", rank=rank)
        stage = load_planned_stage(plan, rank, manifest, source)
        return faults.with_fault(stage, os.environ.get(faults.VARIABLE, ""), rank=rank)

    def fetched_bytes(self) -> tuple[int, int]:
        if self._source is None:
            return 0, 0
        return self._source.fetched_bytes, self._source.cached_bytes

    def send_shadow(self, plan: Plan, rank: int, snapshot: Snapshot, token: str) -> None:
        holder = shadow_holder(plan, rank)
        assert holder is not None
        tls = self._tls.to(plan.ranks[holder].node_id)
        send_shadow(
            all_dialable(plan.ranks[holder].addresses),
            copy_identity(plan, rank, holder, token),
            lambda: to_copy_messages(snapshot),
            num_bytes=snapshot.num_bytes,
            stopper=self._generations.stopper(plan.generation),
            credentials=tls.credentials,
            tls_name=tls.name,
        )

    def check(self, plan: Plan) -> None:
        self._generations.stopper(plan.generation).check()

    def interrupt(self, reason: ExoTrainError, *, before: int) -> None:
        self._generations.end_before(before, reason)
        if self._server is not None:
            self._server.end_before(before, reason)

    def close(self) -> None:
        for link in self._links:
            link.close()
        self._generations.end_before(EVERY_GENERATION, PeerLostError("the run was ended"))
        if self._server is not None:
            self._server.close()

    def _keep(self, link: Link) -> None:
        self._links.append(link)
        self._stopper.on_stop(link.fail)


class StoppableSource:
    """Tensors from this device's own disk; none is read for a generation that is over."""

    def __init__(self, source: TensorSource, stopper: Stopper) -> None:
        self._source = source
        self._stopper = stopper

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        return self._source.infos

    def read(self, name: str) -> Bytes:
        self._stopper.check()
        return self._source.read(name)


def check_room(rank: RankPlan, free_bytes: int | None) -> None:
    """Refuse a stage that memory has no room for any more; the plan was made a while ago.

    No reserve is kept: it is there for what changed since. Ranks that share one memory are each
    compared with all of it. A plan that does not say what a stage needs says 0.
    """
    if free_bytes is None or rank.memory_bytes <= free_bytes:
        return
    start, end = rank.stage.start, rank.stage.end
    layers = f"layer {start} needs" if end - start == 1 else f"layers {start}..{end - 1} need"
    raise DoesNotFitError(
        f"{rank.name} (rank {rank.rank}) has {free_bytes / 1e9:.1f} GB free now on {rank.device}, "
        f"{layers} {rank.memory_bytes / 1e9:.1f} GB; close programs there, or start again so that "
        f"the run is planned anew"
    )


class Worker:
    """Messages in from the pipe, messages out to the pipe; one thread computes."""

    def __init__(
        self, surroundings: GrpcSurroundings, pipe_in: BinaryIO, pipe_out: BinaryIO
    ) -> None:
        self._surroundings = surroundings
        self._pipe_in = pipe_in
        self._pipe_out = pipe_out
        self._inbox: queue.SimpleQueue[pb.RunMessage] = queue.SimpleQueue()
        self._write_lock = threading.Lock()
        self._identity = pb.RunMessage()
        self._phase, self._phase_limit_s = "starting", 0.0

    def run(self) -> int:
        threading.Thread(target=self._read, name="pipe", daemon=True).start()
        threading.Thread(target=self._report, name="progress", daemon=True).start()
        runner = StageRunner(self._surroundings, send=self._send, on_phase=self._set_phase)
        try:
            while runner.handle(self._inbox.get()):
                pass
        except Exception as error:  # the boundary of the process: the agent must hear why
            traceback.print_exc()
            self._fail(f"{type(error).__name__}: {error}")
            return 1
        finally:
            runner.close()
        return 0

    def _read(self) -> None:
        while (raw := read_message(self._pipe_in)) is not None:
            message = pb.RunMessage.FromString(raw)
            if message.WhichOneof("body") in ("prepare", "rewind", "load"):
                self._identity.run_id = message.run_id
                self._identity.generation = message.generation
                self._identity.rank = message.rank
            interrupt_early(self._surroundings, message)
            self._inbox.put(message)
        # The agent is gone, or has closed the pipe to end us; whoever waits is told first.
        self._surroundings.interrupt(PeerLostError("the run was ended"), before=EVERY_GENERATION)
        time.sleep(LAST_WORDS_S)
        os._exit(0)

    def _report(self) -> None:
        while True:
            message = pb.RunMessage()
            message.CopyFrom(self._identity)
            message.progress.CopyFrom(
                pb.Progress(phase=self._phase, phase_limit_s=self._phase_limit_s)
            )
            self._send(message)
            time.sleep(PROGRESS_S)

    def _fail(self, text: str) -> None:
        message = pb.RunMessage()
        message.CopyFrom(self._identity)
        message.failure.CopyFrom(to_failure(ExoTrainError(text)))
        self._send(message)

    def _set_phase(self, phase: str, limit_s: float = 0.0) -> None:
        self._phase, self._phase_limit_s = phase, limit_s

    def _send(self, message: pb.RunMessage) -> None:
        data = frame(message.SerializeToString())
        try:
            with self._write_lock:
                self._pipe_out.write(data)
                self._pipe_out.flush()
        except OSError:
            os._exit(0)  # the agent is gone


def main() -> int:
    parser = argparse.ArgumentParser(prog="exo_train.worker")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--listen", action="append", default=[])
    parser.add_argument("--host", action="append", default=[])
    parser.add_argument("--trust-memory", action="store_true")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    # Ctrl-C in the agent's terminal reaches this process too; the agent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Libraries print to standard output, which is the pipe: give them standard error instead.
    pipe_out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    surroundings = GrpcSurroundings(
        Home(options.home),
        listen_hosts=options.listen,
        hosts=options.host,
        model=options.model,
        trust_memory=options.trust_memory,
    )
    return Worker(surroundings, sys.stdin.buffer, pipe_out).run()


if __name__ == "__main__":
    # Not sys.exit: the thread that reads the pipe would abort the interpreter's end.
    code = main()
    sys.stderr.flush()
    os._exit(code)
