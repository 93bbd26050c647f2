"""Copies of trainable state between ranks: what one consists of, and sending it in the background.

Owns the messages of a copy after its Hello, and every check of one that arrives. Must not know
what carries them (`transport.shadow` does) nor when a copy is made (`stage_runner` does).
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator

from google.protobuf.message import DecodeError

from exo_train.backends.lora import adapter_shapes
from exo_train.backends.optimizers import state_shapes
from exo_train.errors import ExoTrainError, ProtocolError
from exo_train.lora_config import LoraConfig
from exo_train.models.spec import ModelSpec
from exo_train.optimizer_config import OptimizerConfig
from exo_train.plan.history import StepId, shadow_holder
from exo_train.plan.plan import Plan
from exo_train.plan.stages import StageSpec
from exo_train.train.messages import StateAssembler, to_state_arrays
from exo_train.train.snapshots import Snapshot, SnapshotStore
from exo_train.train.stage_loading import identity_of
from exo_train.transport.base import PeerIdentity
from exo_train.transport.shadow import ShadowSource
from exo_train.wire.pb import control_pb2 as pb
from exo_train.wire.pb import data_pb2

# By name: NumPy's dtype as StateArray writes it, and the shape.
Layout = dict[str, tuple[str, tuple[int, ...]]]

log = logging.getLogger(__name__)


def state_layout(
    spec: ModelSpec, lora: LoraConfig, optimizer: OptimizerConfig, stage: StageSpec
) -> Layout:
    """Give every array of the stage's adapter and optimizer state, as the plan has them."""
    adapter = adapter_shapes(spec, stage, lora)
    floats = adapter | state_shapes(optimizer, adapter)
    return {"step": ("<i8", ())} | {name: ("<f4", shape) for name, shape in floats.items()}


def layout_bytes(layout: Layout) -> int:
    return sum(math.prod(shape) * int(dtype[-1]) for dtype, shape in layout.values())


def to_copy_messages(snapshot: Snapshot) -> Iterator[bytes]:
    """Give the messages of a copy after its Hello."""
    yield data_pb2.ShadowHead(
        generation=snapshot.at.generation,
        step=snapshot.at.step,
        start=snapshot.start,
        end=snapshot.end,
    ).SerializeToString()
    for array in to_state_arrays(pb.HELD, snapshot.arrays):
        yield array.SerializeToString()


def from_copy_messages(
    messages: Iterator[bytes], stage: StageSpec, layout: Layout, *, generation: int
) -> Snapshot:
    """Read a copy of the stage's state; memory is taken only for what `layout` has.

    Raises ProtocolError when the copy is of other layers, of a point after `generation`, or when
    an array is missing, unknown, cut short or of another size.
    """
    head = data_pb2.ShadowHead()
    try:
        head.ParseFromString(next(messages, b""))
    except DecodeError:
        raise ProtocolError("a copy of state begins with no ShadowHead") from None
    if (head.start, head.end) != (stage.start, stage.end):
        raise ProtocolError(
            f"a copy of layers {head.start}..{head.end - 1} came, expected "
            f"{stage.start}..{stage.end - 1}"
        )
    if head.generation > generation:
        raise ProtocolError(f"a copy of generation {head.generation} came in {generation}")
    assembler = StateAssembler()
    for message in messages:
        piece = pb.StateArray()
        try:
            piece.ParseFromString(message)
        except DecodeError:
            raise ProtocolError(
                f"{len(message)} bytes in a copy of state are no StateArray"
            ) from None
        check_piece(piece, layout, pb.HELD)
        arrays = assembler.add(piece)
        if arrays is None:
            continue
        if missing := layout.keys() - arrays.keys():
            raise ProtocolError(f"a copy of state has no '{min(missing)}'")
        if next(messages, None) is not None:
            raise ProtocolError("a copy of state goes on after its end")
        at = StepId(generation=head.generation, step=head.step)
        return Snapshot(at=at, start=stage.start, end=stage.end, arrays=arrays)
    raise ProtocolError("a copy of state was cut short")


def check_piece(piece: pb.StateArray, layout: Layout, kind: pb.StateKind) -> None:
    """Raise ProtocolError unless `piece` is of an array that `layout` has, and no larger."""
    like = (piece.dtype, tuple(piece.shape))
    expected = layout.get(piece.name)
    if piece.kind != kind or expected != like:
        raise ProtocolError(f"array '{piece.name[:80]}' is not of the state that is wanted")
    if not 0 < len(piece.data) <= layout_bytes({piece.name: like}):
        raise ProtocolError(f"a piece of array '{piece.name}' has {len(piece.data)} bytes")


def copy_identity(plan: Plan, rank: int, peer_rank: int, token: str) -> PeerIdentity:
    """Name both ends of a copy, seen from `rank`: sender or holder."""
    return identity_of(PeerIdentity, plan, rank, peer_rank, token)


def shadow_sources(
    plan: Plan, rank: int, spec: ModelSpec, token: str, store: SnapshotStore
) -> list[ShadowSource]:
    """Give the ranks whose shadow `rank` holds; what they send goes into `store`."""
    senders = [r for r in range(len(plan.ranks)) if shadow_holder(plan, r) == rank]
    return [_source(plan, rank, sender, spec, token, store) for sender in senders]


def _source(
    plan: Plan, rank: int, sender: int, spec: ModelSpec, token: str, store: SnapshotStore
) -> ShadowSource:
    stage = plan.ranks[sender].stage
    layout = state_layout(spec, plan.lora, plan.optimizer, stage)

    def take(messages: Iterator[bytes]) -> Callable[[], None]:
        snapshot = from_copy_messages(messages, stage, layout, generation=plan.generation)
        return lambda: store.put(snapshot)

    return ShadowSource(
        identity=copy_identity(plan, rank, sender, token),
        num_bytes=layout_bytes(layout),
        take=take,
    )


class BackgroundCopies:
    """Runs one copy at a time in a thread of its own; a newer one replaces one that waits."""

    def __init__(self) -> None:
        self._waiting: Callable[[], None] | None = None
        self._is_running = False
        self._lock = threading.Lock()

    def begin(self, copy: Callable[[], None]) -> None:
        with self._lock:
            self._waiting = copy
            if self._is_running:
                return
            self._is_running = True
        threading.Thread(target=self._run, name="shadow", daemon=True).start()

    def forget(self) -> None:
        """Drop the one that waits; what runs is ended by whoever carries it."""
        with self._lock:
            self._waiting = None

    def _run(self) -> None:
        while True:
            with self._lock:
                copy, self._waiting = self._waiting, None
                self._is_running = copy is not None
            if copy is None:
                return
            try:
                copy()
            except ExoTrainError as error:  # no failure of this rank: the next mark tries again
                log.warning("a copy of the state was not made: %s", error)
            except Exception:  # the boundary of the thread: the next copy needs it
                log.exception("a copy of the state was not made")
