"""The ring as the run's driver sees it: all ranks told, all ranks heard.

Owns what is said for a step, for state, and when the ring is formed anew. Deadlines and causes are
`conversation`'s; what a step means for training is `loop`'s.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from exo_train.backends.base import Arrays
from exo_train.backends.full import is_on
from exo_train.errors import DoesNotFitError, ExoTrainError, ProtocolError, TakenOverError
from exo_train.models.manifest import ModelManifest
from exo_train.models.spec import ModelSpec
from exo_train.peer import Address, NodeId
from exo_train.plan.history import Holding, StepId, shadow_holder
from exo_train.plan.plan import Key, Plan, RankPlan
from exo_train.train.awaited_copies import LateCopy, wait_copies
from exo_train.train.batches import Microbatch
from exo_train.train.collecting import STATE_TIMEOUT_S, collect, layouts, merged, split_state
from exo_train.train.conversation import (
    Conversation,
    Event,
    LostRankError,
    Rank,
    RankChannel,
)
from exo_train.train.messages import (
    from_endpoints,
    from_step_id,
    to_endpoints,
    to_failure,
    to_microbatch_data,
    to_state_arrays,
    to_step_id,
)
from exo_train.train.snapshots import MAX_METRICS_LINES
from exo_train.train.stage_loading import LOAD_TIMEOUT_S
from exo_train.train.step_pieces import STEP_PIECE_BYTES, checked_report, step_pieces
from exo_train.wire.pb import control_pb2 as pb

__all__ = ["Event", "LostRankError", "RankChannel", "Ring", "WeightsAccess"]

PREPARE_TIMEOUT_S = 120.0  # importing a framework on a slow disk
# A rank answers a rewind between two microbatches, and one takes long on a slow device.
REWIND_TIMEOUT_S = 60.0
MAX_HOLDINGS = 64  # of one rank; an honest one has three for each range of layers
START = StepId(generation=0, step=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsAccess:
    """Where ranks fetch tensors, and the secret they show there and to each other."""

    manifest: ModelManifest
    endpoints: tuple[Address, ...]
    token: str
    coordinator_name: str
    coordinator_id: NodeId


class Ring:
    """Context manager; leaving it ends all workers. Not thread-safe: the driver's thread only.

    With `spec` the state that ranks give is checked against it before memory is taken.
    """

    def __init__(
        self,
        plan: Plan,
        channels: Sequence[RankChannel],
        *,
        wants_stop: Callable[[], bool] = lambda: False,
        best_host: Callable[[NodeId, NodeId], str] = lambda dialler, target: "",
        on_note: Callable[[str], None] = lambda note: None,
        spec: ModelSpec | None = None,
    ) -> None:
        self.plan = plan
        self._spec = spec
        # What whoever takes the run over needs beside the state; goes with the next mark.
        self.metrics_lines: deque[str] = deque(maxlen=MAX_METRICS_LINES)
        self.metrics_left: list[str] = []  # what went with marks, as the last rewind found it
        self._lost: list[tuple[RankPlan, bool]] = []
        self._best_host = best_host
        self._talk = Conversation(
            plan.run_id, plan.generation, wants_stop=wants_stop, on_note=on_note
        )
        self._talk.ranks = [
            Rank(rank, channel) for rank, channel in zip(plan.ranks, channels, strict=True)
        ]

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close(error if isinstance(error, ExoTrainError) else None)

    def losses(self) -> list[tuple[RankPlan, bool]]:
        """Give the ranks that the last rewind found gone, and whether their agents are, too."""
        return list(self._lost)

    def out_of_memory(self) -> list[RankPlan]:
        """Give the ranks that complained of that since the ring was formed or rewound."""
        return [r.plan for r in self._talk.ranks if isinstance(r.failure, DoesNotFitError)]

    def blamed(self) -> list[RankPlan]:
        """Give the ranks that failed themselves since the ring was formed or rewound.

        One that complains of another's loss is none of them. What failed on a rank is no error of
        the driver's own, whatever its kind.
        """
        return [rank.plan for rank in self._talk.ranks if rank.has_failed_itself]

    def idle(self) -> None:
        """Read what ranks say while nothing is asked of them; to be called now and then.

        Those that are gone meanwhile are ended, and no longer in the ring.
        """
        self._talk.drain()
        self._talk.drop_gone()

    def prepare(self) -> Plan:
        """Start a worker on every rank that has none; gives the plan with all data addresses."""
        new = [rank for rank in self._talk.ranks if not rank.started]
        for rank in new:
            self._begin_with(rank)
        answers = self._talk.wait_all(
            "prepared",
            timeout_s=PREPARE_TIMEOUT_S,
            what="starting a worker",
            ranks=new,
            may_stop=_at_once,
        )
        for rank, answer in zip(new, answers, strict=True):
            addresses = from_endpoints(answer.prepared.data_endpoints)
            rank.plan = replace(rank.plan, addresses=addresses)
        for below, rank in zip(self._talk.ranks, self._talk.ranks[1:], strict=False):
            # The rank below dials: its best link to this one goes first.
            best = self._best_host(below.plan.node_id, rank.plan.node_id)
            addresses = tuple(sorted(rank.plan.addresses, key=lambda a: a.host != best))
            rank.plan = replace(rank.plan, addresses=addresses)
        self.plan = replace(self.plan, ranks=tuple(rank.plan for rank in self._talk.ranks))
        self.plan.validate()
        return self.plan

    def _begin_with(self, rank: Rank, *, adopt: bool = False) -> None:
        """Open the rank's channel and ask for a worker; raises LostRankError."""
        self._talk.admit(rank)
        body = pb.Prepare(
            backend=rank.plan.backend,
            device=rank.plan.device,
            node_id=rank.plan.node_id,
            cluster=self.plan.cluster,
            adopt=adopt,
        )
        self._talk.tell(rank, prepare=body)

    def load(
        self,
        access: WeightsAccess,
        *,
        step_timeout_s: float,
        at: StepId = START,
        capture_boundaries: bool = False,
    ) -> list[pb.Loaded]:
        """Give every rank the plan and its tensors' manifest; all must confirm the same hash.

        `at` is the point of the history that the ring goes on after; its state follows.
        """
        plan_json = self.plan.to_json()
        for rank in self._talk.ranks:
            stage = rank.plan.stage
            part = access.manifest.subset(
                start=stage.start, end=stage.end, embedding=stage.embedding, head=stage.head
            )
            self._talk.tell(
                rank,
                load=pb.Load(
                    plan_json=plan_json,
                    manifest_json=part.to_json(),
                    weights_endpoints=to_endpoints(access.endpoints),
                    token=access.token,
                    coordinator_name=access.coordinator_name,
                    coordinator_id=access.coordinator_id,
                    step_timeout_s=step_timeout_s,
                    committed_step=at.step,
                    committed_generation=at.generation,
                    capture_boundaries=capture_boundaries,
                ),
            )
        answers = self._talk.wait_all(
            "loaded", timeout_s=LOAD_TIMEOUT_S, what="loading tensors", may_stop=_at_once
        )
        for rank, answer in zip(self._talk.ranks, answers, strict=True):
            if answer.loaded.plan_hash != self.plan.hash:
                raise ProtocolError(
                    f"{rank.name} confirmed plan {answer.loaded.plan_hash[:12]}, the ring's is "
                    f"{self.plan.hash[:12]}; do all devices run the same version?"
                )
        return [answer.loaded for answer in answers]

    def run_step(
        self,
        step: int,
        microbatches: Sequence[Microbatch],
        *,
        loss_scale: float,
        evaluation: bool = False,
        timeout_s: float,
        may_stop: Callable[[], bool] = lambda: False,
    ) -> list[pb.StepReport]:
        """Have all ranks do forward and backward (or forward only); nothing is applied yet.

        Raises InterruptedRunError when a stop is wanted and `may_stop`; the ring must be rewound
        then.
        """
        last = len(self._talk.ranks) - 1
        for index, rank in enumerate(self._talk.ranks):
            data = [
                to_microbatch_data(m, with_tokens=index == 0, with_targets=index == last)
                for m in microbatches
            ]
            for piece in step_pieces(data, STEP_PIECE_BYTES):
                piece.step, piece.evaluation, piece.loss_scale = step, evaluation, loss_scale
                self._talk.tell(rank, step_input=piece)
        answers = self._talk.wait_all(
            "step_report", timeout_s=timeout_s, what=f"step {step}", may_stop=may_stop
        )
        return [
            checked_report(rank.name, answer.step_report, step)
            for rank, answer in zip(self._talk.ranks, answers, strict=True)
        ]

    def commit(
        self, step: int, *, apply: bool, learning_rate: float, grad_scale: float, timeout_s: float
    ) -> None:
        """Have all ranks apply the step, or all drop it."""
        body = pb.Commit(step=step, apply=apply, learning_rate=learning_rate, grad_scale=grad_scale)
        for rank in self._talk.ranks:
            self._talk.tell(rank, commit=body)
        self._talk.wait_all("committed", timeout_s=timeout_s, what=f"the commit of step {step}")

    @property
    def has_shadows(self) -> bool:
        """Tell whether ranks' state is copied to other computers; else there is only one."""
        return all(shadow_holder(self.plan, rank) is not None for rank in range(len(self)))

    def mark(self, at: StepId, *, safe: StepId) -> None:
        """Have all ranks keep the state of `at`, which all have committed, and copy it.

        What is older than `safe` may be forgotten.
        """
        body = pb.Mark(
            at=to_step_id(at),
            safe=to_step_id(safe),
            copy=self.has_shadows,
            metrics_lines=self.metrics_lines,
        )
        self.metrics_lines.clear()
        for rank in self._talk.ranks:
            self._talk.tell(rank, mark=body)

    def wait_shadowed(self, at: StepId, *, timeout_s: float) -> list[LateCopy]:
        """Wait for all ranks' copies of `at`; gives those that are not there, and why."""
        return wait_copies(self._talk, self.plan, at, timeout_s=timeout_s)

    def collect(self, kind: pb.StateKind) -> list[Arrays]:
        """Fetch one kind of state from every rank, by rank."""
        return self._collect(pb.StateRequest(kind=kind))

    def collect_state(self) -> Arrays:
        """Fetch adapter and optimizer state of all layers, in one dictionary."""
        return merged([*self.collect(pb.ADAPTER), *self.collect(pb.OPTIMIZER)])

    def collect_held(self, at: StepId) -> Arrays:
        """Fetch the state of `at` from all who hold a part of it, after a rewind."""
        return merged(self._collect(pb.StateRequest(kind=pb.HELD, at=to_step_id(at))))

    def _collect(self, request: pb.StateRequest) -> list[Arrays]:
        layout_of = layouts(request, self._spec, self.plan.lora, self.plan.optimizer)
        return collect(self._talk, request, layout_of)

    def store_state(self, state: Mapping[str, Any]) -> None:
        """Set what `collect_state` or `collect_held` gave, or another ring's."""
        adapter, optimizer = split_state(state)
        self.store(pb.ADAPTER, adapter)
        self.store(pb.OPTIMIZER, optimizer)

    def store(self, kind: pb.StateKind, arrays: Mapping[str, Any]) -> None:
        """Set one kind of state: each rank gets what its stage has, and what is of no stage."""
        for rank in self._talk.ranks:
            tied = self._spec is None or self._spec.tied_embeddings
            own = {
                name: array
                for name, array in arrays.items()
                if is_on(name, rank.plan.stage, tied=tied)
            }
            for message in to_state_arrays(kind, own):
                self._talk.tell(rank, state_array=message)
        stored = self._talk.wait_all("state_stored", timeout_s=STATE_TIMEOUT_S, what="taking state")
        if any(answer.state_stored.kind != kind for answer in stored):
            raise ProtocolError("a rank took another kind of state than was sent last")

    def rewind(self, generation: int) -> list[Holding]:
        """Have all that are left stop and forget what is not committed; gives what they hold.

        Who does not answer is gone. `generation` is that of the ring that will be formed next.
        """
        self._talk.drain()
        self._talk.generation = generation
        self._talk.forget_failures()
        for rank in self._talk.ranks:
            rank.shadowed = rank.copy_failure = None
            rank.holdings = []
            if not rank.gone:
                self._talk.tell(rank, rewind=pb.Rewind())
        answers = self._talk.hear_out(
            "rewound", timeout_s=REWIND_TIMEOUT_S, what="going back to the last whole step"
        )
        for rank in self._talk.ranks:
            if isinstance(rank.failure, TakenOverError):
                raise rank.failure
        self._lost = [(rank.plan, rank.agent_gone) for rank in self._talk.drop_gone()]
        self.metrics_left = [line for _, a in answers for line in a.rewound.metrics_lines]
        for rank, answer in answers:
            rank.holdings = [
                Holding(at=from_step_id(h.at), start=h.start, end=h.end)
                for h in answer.rewound.holdings[-MAX_HOLDINGS:]
            ]
        return [holding for rank, _ in answers for holding in rank.holdings]

    def reform(self, plan: Plan, channels: Mapping[Key, RankChannel]) -> None:
        """Take the ranks of `plan`: those that are left as they are, others over `channels`.

        `prepare` and `load` must follow. Raises LostRankError where one cannot be reached.
        """
        left = {rank.plan.key: rank for rank in self._talk.ranks if not rank.gone}
        ranks = []
        for rank_plan in plan.ranks:
            rank = left.pop(rank_plan.key, None)
            if rank is None:
                ranks.append(Rank(rank_plan, channels[rank_plan.key]))
            else:
                rank.plan = replace(rank_plan, addresses=rank.plan.addresses)
                ranks.append(rank)
        for rank in left.values():
            self._talk.tell(rank, finish=pb.Finish())
            rank.channel.close()
        self.plan = replace(plan, ranks=tuple(rank.plan for rank in ranks))
        self._talk.ranks = ranks
        self._talk.generation = plan.generation

    def be_patient(self, step_s: float) -> None:
        """Tell the user whom all wait for when a step takes five times as long as usual."""
        self._talk.be_patient(step_s)

    def tell_end(self, error: ExoTrainError | None = None) -> None:
        """Tell all ranks that the run is over: whose driver just goes may be taken over."""
        for rank in self._talk.ranks:
            with contextlib.suppress(ExoTrainError):
                if error is None:
                    self._talk.tell(rank, finish=pb.Finish(is_over=True))
                else:
                    self._talk.tell(rank, failure=to_failure(error))

    def close(self, error: ExoTrainError | None = None) -> None:
        """End the run on every rank, with the reason when there is one."""
        self.tell_end(error)
        for rank in self._talk.ranks:
            rank.channel.close()

    def __len__(self) -> int:
        return len(self._talk.ranks)


def _at_once() -> bool:
    return True
