"""Copying a run's files to another device: the driver's side of `replicas`.

Owns the choice of the device, the stream and its deadlines. gRPC's errors end here.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from exo_train.agent.dialling import calling
from exo_train.agent.replicas import CHECKPOINT_FILES, RUN_FILES
from exo_train.cluster.interfaces import all_dialable
from exo_train.errors import PeerError
from exo_train.peer import Address, NodeId
from exo_train.train.messages import from_failure
from exo_train.transport.channel import open_channel
from exo_train.transport.reach import Reach, reach_all
from exo_train.transport.tls import PeerTls
from exo_train.wire.pb import control_pb2 as pb
from exo_train.wire.pb.control_pb2_grpc import ControlStub

CONNECT_TIMEOUT_S = 5.0
# A slow link is fine, a silent one is not: the run waits for its copies. The other device also
# flushes its disk in this time.
STALL_TIMEOUT_S = 30.0
SEND_TIMEOUT_S = 1800.0  # for one call, however it moves; within what `replicas` allows
POLL_S = 0.25
# Below what one message may have, so that a slow link is seen to move.
PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A member that may keep copies; `addresses` are its Control service's."""

    node_id: NodeId
    name: str
    addresses: tuple[Address, ...]
    tls: PeerTls


class Replicator:
    """Keeps a run's files on one other device, and on the next one when that fails.

    `holders` gives the other devices as they are now, the best first. `takes_over`: the run was
    resumed, maybe by another device than the one that led it before. `first` is the checkpoint of
    step 0 of a run that starts from an adapter, which nobody else has.
    """

    def __init__(
        self,
        run_id: str,
        run_dir: Path,
        *,
        holders: Callable[[], Sequence[Holder]],
        on_note: Callable[[str], None],
        takes_over: bool = False,
        first: Path | None = None,
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        self._run_id = run_id
        self._run_dir = run_dir
        self._holders = holders
        self._on_note = on_note
        self._takes_over = takes_over
        self._first = first  # until a later checkpoint is there
        self._stall_timeout_s = stall_timeout_s
        self._chosen: NodeId | None = None
        self._has: dict[str, str] = {}  # SHA-256 of the run's own files on the chosen device
        self._led: set[NodeId] = set()  # where this run has written before

    def replicate(self, folder: Path, step: int, keep_steps: Sequence[int]) -> None:
        """Copy a checkpoint, after the run's own files as they are now.

        Raises PeerError when no other device has confirmed it; otherwise one has it on its disk,
        verified, and beside it all that `train --resume` needs there.
        """
        self._to_one(folder, step, keep_steps)
        self._first = None

    def try_run_files(self) -> None:
        """Copy the run's own files, as it may have to be taken over before its next checkpoint.

        Where that fails it is said with the checkpoint.
        """
        with contextlib.suppress(PeerError):
            # It may have been pruned while nobody was there to keep it.
            self._to_one(self._first if self._first and self._first.is_dir() else None)

    def _to_one(
        self, folder: Path | None = None, step: int = 0, keep_steps: Sequence[int] = ()
    ) -> None:
        """Try the devices in turn, beginning with the one that has the earlier copies."""
        failures = []
        for holder in sorted(self._holders(), key=lambda holder: holder.node_id != self._chosen):
            try:
                with _connected(holder) as (address, channel):
                    stub = ControlStub(channel)
                    self._choose(holder)
                    with calling(address):
                        self._send_run_files(holder, stub)
                        if folder is not None:
                            files = _described([folder / name for name in CHECKPOINT_FILES])
                            self._send(holder, stub, files, step, keep_steps)
            except (PeerError, OSError) as error:
                self._has = {}  # perhaps it has lost them: next time it gets all
                said = str(error)
                failures.append(said if holder.name in said else f"{holder.name}: {said}")
                continue
            return
        reasons = "; ".join(failures) or "there is none in the cluster now"
        raise PeerError(f"no other device keeps a copy: {reasons}")

    def _choose(self, holder: Holder) -> None:
        if holder.node_id != self._chosen:
            self._chosen, self._has = holder.node_id, {}

    def _send_run_files(self, holder: Holder, stub: ControlStub) -> None:
        """Send those of the run's own files that have changed since."""
        paths = [path for name in RUN_FILES if (path := self._run_dir / name).is_file()]
        changed = {
            path: file
            for path, file in _described(paths).items()
            if self._has.get(file.name) != file.sha256
        }
        if not changed:
            return
        is_new = holder.node_id not in self._led
        self._send(holder, stub, changed)
        self._has |= {file.name: file.sha256 for file in changed.values()}
        if is_new:
            self._led.add(holder.node_id)
            self._on_note(f"{holder.name} keeps a copy of the run and of its checkpoints")

    def _send(
        self,
        holder: Holder,
        stub: ControlStub,
        files: dict[Path, pb.ReplicaFile],
        step: int = 0,
        keep_steps: Sequence[int] = (),
    ) -> None:
        """Stream files and wait for the confirmation; raises PeerError, or gRPC's error."""
        head = pb.ReplicaHead(
            run_id=self._run_id,
            step=step,
            files=files.values(),
            keep_steps=keep_steps,
            # Once: a successor elsewhere must not have its copies taken back.
            takes_over=self._takes_over and holder.node_id not in self._led,
        )
        moved_s = time.monotonic()

        def pieces() -> Iterator[pb.ReplicaPiece]:
            nonlocal moved_s
            yield pb.ReplicaPiece(head=head)
            for path, file in files.items():
                for data in _read(path, file.size_bytes):
                    moved_s = time.monotonic()
                    yield pb.ReplicaPiece(data=data)

        call = stub.KeepReplica.future(pieces(), timeout=SEND_TIMEOUT_S)
        while True:
            try:
                answer = call.result(timeout=POLL_S)
                break
            except grpc.FutureTimeoutError:
                if time.monotonic() - moved_s > self._stall_timeout_s:
                    call.cancel()
                    raise PeerError(
                        f"{holder.name} took nothing for {self._stall_timeout_s:.0f} s"
                    ) from None
        if answer.HasField("failure"):
            raise PeerError(str(from_failure(answer.failure, where=holder.name)))


@contextlib.contextmanager
def _connected(holder: Holder) -> Iterator[tuple[Address, grpc.Channel]]:
    """Open a channel to the first address that answers; raises PeerError."""
    addresses = all_dialable(holder.addresses)
    for address, outcome in zip(addresses, reach_all(addresses), strict=False):
        if outcome is not Reach.CONNECTED:
            continue
        channel = open_channel(
            address, credentials=holder.tls.credentials, tls_name=holder.tls.name
        )
        with contextlib.closing(channel):
            try:
                grpc.channel_ready_future(channel).result(timeout=CONNECT_TIMEOUT_S)
            except grpc.FutureTimeoutError:
                continue
            yield address, channel
            return
    tried = ", ".join(map(str, addresses)) or "no address known"
    raise PeerError(f"{holder.name} cannot be reached ({tried})")


def _described(paths: Sequence[Path]) -> dict[Path, pb.ReplicaFile]:
    described = {}
    for path in paths:
        size_bytes = path.stat().st_size
        digest = hashlib.sha256()
        for data in _read(path, size_bytes):
            digest.update(data)
        described[path] = pb.ReplicaFile(
            name=path.name, size_bytes=size_bytes, sha256=digest.hexdigest()
        )
    return described


def _read(path: Path, num_bytes: int) -> Iterator[bytes]:
    """Give the first bytes of a file in pieces; a file that grows meanwhile is cut there."""
    with path.open("rb") as file:
        while num_bytes and (data := file.read(min(PIECE_BYTES, num_bytes))):
            num_bytes -= len(data)
            yield data
