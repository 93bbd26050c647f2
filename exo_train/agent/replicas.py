"""Copies of other devices' runs on this one: what an agent keeps for its cluster.

Owns the folder `<home>/replicas/<run id>/`, laid out like a run's own directory, and the checks of
what is sent for it. Must not decide who keeps what: the run's driver does.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from exo_train.agent.run_session import MAX_RUN_ID_CHARS
from exo_train.agent.succession import TAKEOVER_FILE
from exo_train.errors import ConfigError, PeerError, ProtocolError
from exo_train.peer import NodeId, short_id
from exo_train.train import checkpoint
from exo_train.train.durable import (
    DiskError,
    disk_errors,
    require_free_bytes,
    sync_directory,
    write_durable,
)
from exo_train.train.kept_rows import ROWS_FILE
from exo_train.train.rundir import (
    CONFIG_FILE,
    LOCK_FILE,
    METRICS_FILE,
    PLAN_FILE,
    SUMMARY_FILE,
    TEMPLATE_FILE,
    RunDir,
)
from exo_train.wire.pb import control_pb2 as pb

# No other name is ever written, so that none can lead out of the folder or into its workings.
RUN_FILES = (CONFIG_FILE, PLAN_FILE, METRICS_FILE, ROWS_FILE, TEMPLATE_FILE, TAKEOVER_FILE)
CHECKPOINT_FILES = (
    checkpoint.ADAPTER_FILE,
    checkpoint.OPTIMIZER_FILE,
    checkpoint.MANIFEST_FILE,
)

MAX_KEEP_S = 3600.0  # for one call
MAX_PIECE_BYTES = 4 << 20
MAX_KEPT_STEPS = 10_000
MAX_RUNS = 64
MAX_AGE_S = 30 * 24 * 3600.0
# A copy for others must not take the last of this device's disk.
SPARE_BYTES = 256 << 20

_WRITER_FILE = ".writer"
_INCOMING = ".incoming"
_MAX_WRITER_BYTES = 256
_SHA256 = re.compile(r"[0-9a-f]{64}")

log = logging.getLogger(__name__)


class Replicas:
    """Thread-safe; `device` is this device's name, `now_s` the wall clock.

    A run's copy belongs to the member that wrote it first, known by its certificate: no other may
    change it. Another member that resumes the run, and says so, takes it over; from then on the
    one before is refused, so that a coordinator which was only asleep cannot undo what its
    successor saved. Members trust each other not to say so without need.
    """

    def __init__(
        self,
        folder: Path,
        *,
        device: str,
        spare_bytes: int = SPARE_BYTES,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._device = device
        self._spare_bytes = spare_bytes
        self._now_s = now_s
        self._lock = threading.Lock()  # for making and deleting runs

    def keep(self, pieces: Iterator[pb.ReplicaPiece], caller: NodeId) -> None:
        """Take what a member sends; when this returns it is on the disk, verified.

        Raises ProtocolError for what breaks the rules, PeerError with a reason for the run's user
        when it cannot be kept. What was there before stays until the new is whole.
        """
        first = next(pieces, pb.ReplicaPiece())
        head = first.head
        _check_head(first)
        run = self._folder / head.run_id
        try:
            self._make(run)
            with _only_writer(run, self._device):
                self._check_untrained(run)
                self._check_writer(run, caller, takes_over=head.takes_over)
                self._receive(run, head, pieces)
                with disk_errors(_WRITER_FILE, run):
                    write_durable(run / _WRITER_FILE, caller.encode())
        except DiskError as error:
            raise PeerError(f"the disk of {self._device} {error.obstacle}") from None

    def _make(self, run: Path) -> None:
        with self._lock, disk_errors("a copy of a run", self._folder):
            if run.exists():
                return
            self._folder.mkdir(parents=True, exist_ok=True)
            self._forget_old()
            if sum(1 for _ in self._folder.iterdir()) >= MAX_RUNS:
                raise PeerError(
                    f"{self._device} keeps copies of {MAX_RUNS} runs already, which is the limit; "
                    f"delete some in {self._folder}"
                )
            run.mkdir()

    def _forget_old(self) -> None:
        """Delete copies of runs that nobody has touched for long, to make room for a new one.

        What was trained on here is no copy any more: its results are in it.
        """
        for run in list(self._folder.iterdir()):
            age_s = self._now_s() - _touched_s(run)
            if age_s < MAX_AGE_S or (run / SUMMARY_FILE).exists():
                continue
            with contextlib.suppress(PeerError, OSError):
                with _only_writer(run, self._device):
                    log.warning(
                        "the copy of run %s is deleted: it was not touched for %.0f days",
                        run.name,
                        age_s / (24 * 3600),
                    )
                    _delete_all(run, but=LOCK_FILE)
                # Windows deletes, and renames, no folder with an open file in it.
                shutil.rmtree(run)

    def _check_untrained(self, run: Path) -> None:
        """Keep results safe from a coordinator that wakes up when its successor is done."""
        if (run / SUMMARY_FILE).exists():
            raise PeerError(
                f"run {run.name} was trained on here, by {self._device}, whose results are in "
                f"{run}; to go on with it, resume it there"
            )

    def _check_writer(self, run: Path, caller: NodeId, *, takes_over: bool) -> None:
        try:
            writer = (run / _WRITER_FILE).read_bytes()[:_MAX_WRITER_BYTES].decode("ascii")
        except (OSError, ValueError):
            return  # nothing was ever whole here
        if writer == caller:
            return
        if not takes_over:
            raise PeerError(
                f"{self._device} keeps run {run.name} for device {short_id(writer)}, which started "
                f"it or has taken it over; stop the run here, or resume it from there"
            )
        log.warning(
            "run %s is now led by device %s, before by %s",
            run.name,
            short_id(caller),
            short_id(writer),
        )

    def _receive(self, run: Path, head: pb.ReplicaHead, pieces: Iterator[pb.ReplicaPiece]) -> None:
        what = f"a copy of step {head.step} of run {run.name}"
        incoming = run / _INCOMING
        if _is_checkpoint(head) and not (run / CONFIG_FILE).is_file():  # nobody could go on with it
            raise PeerError(f"{self._device} has no {CONFIG_FILE} of run {run.name}")
        with disk_errors(what, run):
            shutil.rmtree(incoming, ignore_errors=True)
            require_free_bytes(
                run,
                needed_bytes=sum(file.size_bytes for file in head.files) + self._spare_bytes,
                what=what,
            )
            incoming.mkdir()
            try:
                for file in head.files:
                    _receive_file(incoming / file.name, file, pieces)
                if next(pieces, None) is not None:
                    raise ProtocolError(f"{what} has more bytes than its head says")
                sync_directory(incoming)
                _place(run, incoming, head)
            finally:
                shutil.rmtree(incoming, ignore_errors=True)


@contextlib.contextmanager
def _only_writer(run: Path, device: str) -> Iterator[None]:
    """Keep others out of a run's copy: a second sender, and a `train --resume` on this device."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(RunDir(run).in_use())
        except ConfigError as error:
            raise PeerError(f"{device} cannot keep a copy of run {run.name}: {error}") from None
        yield


def _delete_all(folder: Path, *, but: str) -> None:
    for path in [path for path in folder.iterdir() if path.name != but]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _touched_s(run: Path) -> float:
    """Give when anything was written there last, by whomever."""
    touched_s = [0.0]
    for path in (
        run,
        run / checkpoint.FOLDER,
        *(run / name for name in (_WRITER_FILE, *RUN_FILES)),
    ):
        with contextlib.suppress(OSError):
            touched_s.append(path.stat().st_mtime)
    return max(touched_s)


def _is_checkpoint(head: pb.ReplicaHead) -> bool:
    """Tell one from the run's own files; one of step 0 is the adapter that the run starts from."""
    return head.step > 0 or any(file.name in CHECKPOINT_FILES for file in head.files)


def _check_head(first: pb.ReplicaPiece) -> None:
    """Refuse what could name a file elsewhere, or take memory or disk without end."""
    head = first.head
    names = [file.name for file in head.files]
    is_checkpoint = _is_checkpoint(head)
    allowed = CHECKPOINT_FILES if is_checkpoint else RUN_FILES
    if not first.HasField("head") or first.data:
        raise ProtocolError("a replica must begin with its head, and nothing else")
    is_plain = head.run_id.isascii() and head.run_id.isalnum()
    if not is_plain or len(head.run_id) > MAX_RUN_ID_CHARS:
        raise ProtocolError(
            f"a run's id must be up to {MAX_RUN_ID_CHARS} letters and digits, got "
            f"{head.run_id[:MAX_RUN_ID_CHARS]!r}"
        )
    if not names or len(set(names)) != len(names) or not set(names) <= set(allowed):
        raise ProtocolError(f"a replica of step {head.step} may have just {', '.join(allowed)}")
    if is_checkpoint and set(names) != set(allowed):
        raise ProtocolError(f"a replica of step {head.step} must have all of {', '.join(allowed)}")
    if head.step > checkpoint.MAX_STEP or len(head.keep_steps) > MAX_KEPT_STEPS:
        raise ProtocolError(
            f"a replica may be of step {checkpoint.MAX_STEP} at most and keep {MAX_KEPT_STEPS} "
            f"steps, got step {head.step} and {len(head.keep_steps)} steps"
        )
    if not all(_SHA256.fullmatch(file.sha256) for file in head.files):
        raise ProtocolError("a replica's file comes without its SHA-256")


def _receive_file(path: Path, file: pb.ReplicaFile, pieces: Iterator[pb.ReplicaPiece]) -> None:
    digest = hashlib.sha256()
    left_bytes = file.size_bytes
    with path.open("xb") as out:
        while left_bytes:
            piece = next(pieces, pb.ReplicaPiece())
            num_bytes = len(piece.data)
            if piece.HasField("head") or not 0 < num_bytes <= min(left_bytes, MAX_PIECE_BYTES):
                raise ProtocolError(
                    f"a piece of {num_bytes} bytes came where {file.name} lacks {left_bytes}"
                )
            out.write(piece.data)
            digest.update(piece.data)
            left_bytes -= num_bytes
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != file.sha256:
        raise ProtocolError(f"{file.name} arrived, but not with its SHA-256")


def _place(run: Path, incoming: Path, head: pb.ReplicaHead) -> None:
    """Let what has arrived count, and delete the checkpoints that the run keeps no more."""
    if not _is_checkpoint(head):
        for file in head.files:
            (incoming / file.name).replace(run / file.name)
        sync_directory(run)
        return
    folder = run / checkpoint.FOLDER
    folder.mkdir(exist_ok=True)
    unfinished = folder / checkpoint.unfinished_name(head.step)
    shutil.rmtree(unfinished, ignore_errors=True)
    incoming.rename(unfinished)
    digests = {file.name: file.sha256 for file in head.files}
    del digests[checkpoint.MANIFEST_FILE]
    try:
        checkpoint.check_manifest(unfinished, digests)
    except ConfigError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise ProtocolError(f"what was sent is no checkpoint: {error}") from None
    checkpoint.publish_checkpoint(unfinished)
    checkpoint.delete_steps(run, spare={head.step, *head.keep_steps})
