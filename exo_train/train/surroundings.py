"""What a rank needs from the process or thread that it runs in.

Owns the seam between a rank's life and its transport, disk and devices. Must not implement it:
`worker` and `agent.local_ring` do.
"""

from __future__ import annotations

from typing import Protocol

from exo_train.backends.base import Stage
from exo_train.errors import ExoTrainError, PeerLostError
from exo_train.models.manifest import ModelManifest
from exo_train.models.spec import ModelSpec
from exo_train.models.tensors import TensorSource
from exo_train.peer import Address, NodeId
from exo_train.plan.plan import Plan
from exo_train.train.messages import from_failure
from exo_train.train.snapshots import Snapshot, SnapshotStore
from exo_train.transport.base import Link
from exo_train.wire.pb import control_pb2 as pb


class Surroundings(Protocol):
    """What a rank's process (or thread) provides."""

    def open_data(self, store: SnapshotStore) -> tuple[Address, ...]:
        """Listen for neighbours; gives the addresses they may dial. Copies go into `store`."""
        ...

    def hold_shadows(self, plan: Plan, rank: int, spec: ModelSpec, token: str) -> None:
        """Take copies of the ranks whose shadow `rank` holds, until the generation ends."""
        ...

    def connect(self, plan: Plan, rank: int, token: str) -> tuple[Link | None, Link | None]:
        """Prove the links to rank - 1 and rank + 1; raises PeerLostError naming who is missing."""
        ...

    def tensors(
        self,
        manifest: ModelManifest,
        addresses: tuple[Address, ...],
        *,
        token: str,
        peer: str,
        peer_id: NodeId,
    ) -> TensorSource:
        """Give the stage's tensors from this device's disk or from the device `peer`."""
        ...

    def load_stage(
        self, plan: Plan, rank: int, manifest: ModelManifest, source: TensorSource
    ) -> Stage:
        """Load the rank's stage; an earlier one, which does not serve, is gone from memory."""
        ...

    def fetched_bytes(self) -> tuple[int, int]:
        """Give tensor bytes that came over the network, and that lay in the cache."""
        ...

    def send_shadow(self, plan: Plan, rank: int, snapshot: Snapshot, token: str) -> None:
        """Copy the state to the rank that holds this one's shadow; returns when it is stored.

        Called from a thread of its own; raises ExoTrainError when it cannot be copied.
        """
        ...

    def interrupt(self, reason: ExoTrainError, *, before: int) -> None:
        """End all generations before this one: links break, whoever waits gets `reason`.

        May be called from any thread, in any order: a generation that has ended stays so, later
        ones are not touched.
        """
        ...

    def check(self, plan: Plan) -> None:
        """Raise the reason for which the plan's generation was ended, if it was."""
        ...

    def close(self) -> None: ...


def interrupt_early(surroundings: Surroundings, message: pb.RunMessage) -> None:
    """Wake the rank when the driver's `message` ends what it is at.

    To be called as soon as a message arrives: the rank itself handles it only when it is done with
    those before, and may wait for a neighbour that is gone.
    """
    match message.WhichOneof("body"):
        case "rewind":
            surroundings.interrupt(next_generation(message), before=message.generation)
        case "failure":
            reason = from_failure(message.failure, where="the run")
            surroundings.interrupt(reason, before=message.generation + 1)


def next_generation(rewind: pb.RunMessage) -> ExoTrainError:
    """Give the reason for which a rewind ends what a rank is at."""
    return PeerLostError(f"the ring is formed anew as generation {rewind.generation}")
