"""The ring as the run's driver sees it: all ranks told, all ranks heard.

Owns the conversation with the ranks: who must answer what until when, and which failure is the
cause when several arrive. Must not know how messages travel (`RankChannel` does) nor what a step
means for training (`loop` does).
"""

from __future__ import annotations

import contextlib
import functools
import math
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from exo_train.backends.base import Arrays
from exo_train.errors import ExoTrainError, InterruptedRunError, PeerLostError, ProtocolError
from exo_train.models.manifest import ModelManifest
from exo_train.peer import Address, NodeId
from exo_train.plan.plan import Plan, RankPlan
from exo_train.train.batches import Microbatch
from exo_train.train.messages import (
    StateAssembler,
    from_endpoints,
    from_failure,
    to_endpoints,
    to_failure,
    to_microbatch_data,
    to_state_arrays,
)
from exo_train.train.stage_loading import LOAD_TIMEOUT_S
from exo_train.wire.pb import control_pb2 as pb

PREPARE_TIMEOUT_S = 120.0  # importing a framework on a slow disk
STATE_TIMEOUT_S = 600.0
SILENCE_TIMEOUT_S = 15.0  # no sign of life from a rank's agent
# A gap this long between two looks means that the driver itself was asleep or busy: what the
# ranks said meanwhile has not been read yet, so silence proves nothing.
OWN_PAUSE_S = 5.0
STEP_PIECE_BYTES = 4 << 20
# After the first failure, others are collected for so long: the cause may arrive second.
CAUSE_WINDOW_S = 1.5
POLL_S = 0.5

Event = pb.RunMessage | ExoTrainError


class RankChannel(Protocol):
    """Carries run messages to one rank; events arrive through the callback, from any thread."""

    def start(self, on_event: Callable[[Event], None]) -> None: ...

    def send(self, message: pb.RunMessage) -> None: ...

    def close(self) -> None:
        """End the rank's worker and release everything; may be called twice."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsAccess:
    """Where ranks fetch tensors, and the secret they show there and to each other."""

    manifest: ModelManifest
    endpoints: tuple[Address, ...]
    token: str
    coordinator_name: str
    coordinator_id: NodeId


@dataclass(slots=True)
class _Rank:
    plan: RankPlan
    channel: RankChannel
    last_heard_s: float
    phase: str = "starting"
    failure: ExoTrainError | None = None
    assembler: StateAssembler = field(default_factory=StateAssembler)


class Ring:
    """Context manager; leaving it ends all workers. Not thread-safe: the driver's thread only."""

    def __init__(
        self,
        plan: Plan,
        channels: Sequence[RankChannel],
        *,
        wants_stop: Callable[[], bool] = lambda: False,
        best_host: Callable[[NodeId, NodeId], str] = lambda dialler, target: "",
    ) -> None:
        self.plan = plan
        self._best_host = best_host
        self._wants_stop = wants_stop
        self._events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        now_s = self._looked_s = self._waiting_since_s = time.monotonic()
        self._paused_s = 0.0
        self._ranks = [
            _Rank(rank, channel, now_s) for rank, channel in zip(plan.ranks, channels, strict=True)
        ]

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close(error if isinstance(error, ExoTrainError) else None)

    def prepare(self) -> Plan:
        """Start a worker on every rank; gives the plan with everyone's data addresses."""
        for index, rank in enumerate(self._ranks):
            rank.channel.start(functools.partial(self._arrived, index))
            body = pb.Prepare(
                backend=rank.plan.backend,
                device=rank.plan.device,
                node_id=rank.plan.node_id,
                cluster=self.plan.cluster,
            )
            self._send(index, prepare=body)
        answers = self._wait_all(
            "prepared", timeout_s=PREPARE_TIMEOUT_S, what="starting a worker", may_stop=True
        )
        for index, rank in enumerate(self._ranks):
            addresses = from_endpoints(answers[index].prepared.data_endpoints)
            if index:  # the rank below dials: its best link to this one goes first
                best = self._best_host(self.plan.ranks[index - 1].node_id, rank.plan.node_id)
                addresses = tuple(sorted(addresses, key=lambda a: a.host != best))
            rank.plan = replace(rank.plan, addresses=addresses)
        self.plan = replace(self.plan, ranks=tuple(rank.plan for rank in self._ranks))
        self.plan.validate()
        return self.plan

    def load(
        self,
        access: WeightsAccess,
        *,
        step_timeout_s: float,
        committed_step: int = 0,
        capture_boundaries: bool = False,
    ) -> list[pb.Loaded]:
        """Give every rank the plan and its tensors' manifest; all must confirm the same hash.

        `committed_step` is the step that a resumed run goes on after.
        """
        plan_json = self.plan.to_json()
        for index, rank in enumerate(self._ranks):
            stage = rank.plan.stage
            part = access.manifest.subset(
                start=stage.start, end=stage.end, embedding=stage.embedding, head=stage.head
            )
            self._send(
                index,
                load=pb.Load(
                    plan_json=plan_json,
                    manifest_json=part.to_json(),
                    weights_endpoints=to_endpoints(access.endpoints),
                    token=access.token,
                    coordinator_name=access.coordinator_name,
                    coordinator_id=access.coordinator_id,
                    step_timeout_s=step_timeout_s,
                    committed_step=committed_step,
                    capture_boundaries=capture_boundaries,
                ),
            )
        answers = self._wait_all(
            "loaded", timeout_s=LOAD_TIMEOUT_S, what="loading tensors", may_stop=True
        )
        for index, answer in enumerate(answers):
            if answer.loaded.plan_hash != self.plan.hash:
                raise ProtocolError(
                    f"{self._name(index)} confirmed plan {answer.loaded.plan_hash[:12]}, the "
                    f"ring's is {self.plan.hash[:12]}; do all devices run the same version?"
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
    ) -> list[pb.StepReport]:
        """Have all ranks do forward and backward (or forward only); nothing is applied yet."""
        last = len(self._ranks) - 1
        for index in range(len(self._ranks)):
            data = [
                to_microbatch_data(m, with_tokens=index == 0, with_targets=index == last)
                for m in microbatches
            ]
            for piece in _pieces(data):
                piece.step, piece.evaluation, piece.loss_scale = step, evaluation, loss_scale
                self._send(index, step_input=piece)
        answers = self._wait_all(
            "step_report",
            timeout_s=timeout_s,
            what=f"step {step}",
            may_stop=evaluation and step == 0,  # later there is state to be saved first
        )
        return [self._of_step(index, a.step_report, step) for index, a in enumerate(answers)]

    def commit(
        self, step: int, *, apply: bool, learning_rate: float, grad_scale: float, timeout_s: float
    ) -> None:
        """Have all ranks apply the step, or all drop it."""
        body = pb.Commit(step=step, apply=apply, learning_rate=learning_rate, grad_scale=grad_scale)
        for index in range(len(self._ranks)):
            self._send(index, commit=body)
        self._wait_all("committed", timeout_s=timeout_s, what=f"the commit of step {step}")

    def collect(self, kind: pb.StateKind) -> list[Arrays]:
        """Fetch one kind of state from every rank, by rank."""
        for index in range(len(self._ranks)):
            self._send(index, state_request=pb.StateRequest(kind=kind))
        sets: dict[int, Arrays] = {}
        deadline_s = self._deadline_s(STATE_TIMEOUT_S)
        while len(sets) < len(self._ranks):
            missing = [i for i in range(len(self._ranks)) if i not in sets]
            index, message = self._next("state_array", deadline_s, missing, "giving state")
            assert message is not None
            complete = self._ranks[index].assembler.add(message.state_array)
            if complete is not None:
                sets[index] = complete
        return [sets[index] for index in range(len(self._ranks))]

    def store(self, kind: pb.StateKind, arrays: Mapping[str, Any]) -> None:
        """Set one kind of state: each rank gets the arrays of its layers, and those of none."""
        for index, rank in enumerate(self._ranks):
            prefixes = tuple(f"model.layers.{layer}." for layer in rank.plan.stage.layers)
            own = {
                name: array
                for name, array in arrays.items()
                if name.startswith(prefixes) or not name.startswith("model.layers.")
            }
            for message in to_state_arrays(kind, own):
                self._send(index, state_array=message)
        self._wait_all("state_stored", timeout_s=STATE_TIMEOUT_S, what="taking state")

    def close(self, error: ExoTrainError | None = None) -> None:
        """End the run on every rank, with the reason when there is one."""
        for index in range(len(self._ranks)):
            with contextlib.suppress(ExoTrainError):
                if error is None:
                    self._send(index, finish=pb.Finish())
                else:
                    self._send(index, failure=to_failure(error))
        for rank in self._ranks:
            rank.channel.close()

    def _send(self, index: int, **body: Any) -> None:
        message = pb.RunMessage(
            run_id=self.plan.run_id, generation=self.plan.generation, rank=index, **body
        )
        self._ranks[index].channel.send(message)

    def _arrived(self, index: int, event: Event) -> None:
        """Take an event in, from the channel's thread: this is when the rank was heard."""
        self._ranks[index].last_heard_s = time.monotonic()
        self._events.put((index, event))

    def _wait_all(
        self, kind: str, *, timeout_s: float, what: str, may_stop: bool = False
    ) -> list[pb.RunMessage]:
        """Wait until every rank has sent one message of `kind`.

        Raises InterruptedRunError when a stop is wanted and may come here.
        """
        deadline_s = self._deadline_s(timeout_s)
        answers: dict[int, pb.RunMessage] = {}
        while len(answers) < len(self._ranks):
            missing = [i for i in range(len(self._ranks)) if i not in answers]
            if may_stop and self._wants_stop():
                raise InterruptedRunError(f"stopped while {what}")
            index, message = self._next(kind, deadline_s, missing, what, may_stop=may_stop)
            if message is not None:
                answers[index] = message
        return [answers[index] for index in range(len(self._ranks))]

    def _deadline_s(self, timeout_s: float) -> float:
        """Begin a wait; its deadline is on the clock of time that the driver was there."""
        self._waiting_since_s = time.monotonic()
        return self._waiting_since_s - self._paused_s + timeout_s

    def _next(
        self,
        kind: str,
        deadline_s: float,
        missing: list[int],
        what: str,
        *,
        may_stop: bool = False,
    ) -> tuple[int, pb.RunMessage | None]:
        """Give the next message of `kind`; raises the cause when a rank fails or is silent.

        With `may_stop` None comes now and then, so that the caller can look up.
        """
        while True:
            try:
                index, event = self._events.get(timeout=POLL_S)
            except queue.Empty:
                self._check_waiting(deadline_s, missing, what)
                if may_stop:
                    return missing[0], None
                continue
            if self._note(index, event):
                raise self._cause()
            assert isinstance(event, pb.RunMessage)
            body = event.WhichOneof("body")
            if body == kind:
                return index, event
            if body != "progress":
                raise ProtocolError(f"{self._name(index)} sent '{body}' while {what}")
            self._check_waiting(deadline_s, missing, what)
            if may_stop:
                return index, None

    def _note(self, index: int, event: Event) -> bool:
        """Keep what an event says; True when it is a failure.

        A rank's first failure is kept: what follows (its stream ends) follows from it.
        """
        rank = self._ranks[index]
        if isinstance(event, ExoTrainError):
            rank.failure = rank.failure or event
        elif event.WhichOneof("body") == "failure":
            rank.failure = rank.failure or from_failure(event.failure, where=rank.plan.name)
        elif event.WhichOneof("body") == "progress":
            rank.phase = event.progress.phase
        return rank.failure is not None

    def _cause(self) -> ExoTrainError:
        """Choose among the failures that arrive together: a neighbour's complaint is no cause."""
        until_s = time.monotonic() + CAUSE_WINDOW_S
        while (left_s := until_s - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                self._note(*self._events.get(timeout=left_s))
        failures = [rank.failure for rank in self._ranks if rank.failure is not None]
        return next((f for f in failures if not isinstance(f, PeerLostError)), None) or next(
            (f for f in failures if isinstance(f, LostRankError)), failures[0]
        )

    def _check_waiting(self, deadline_s: float, missing: list[int], what: str) -> None:
        now_s = time.monotonic()
        gap_s = now_s - max(self._looked_s, self._waiting_since_s)
        paused = now_s - self._looked_s > OWN_PAUSE_S
        self._looked_s = now_s
        if gap_s > OWN_PAUSE_S:
            self._paused_s += gap_s  # deadlines do not run while the driver itself is away
        for index, rank in enumerate(self._ranks):
            if paused:
                rank.last_heard_s = now_s
            silent_s = now_s - rank.last_heard_s
            if silent_s > SILENCE_TIMEOUT_S:
                raise LostRankError(
                    f"{self._name(index)} has not been heard for {silent_s:.0f} s (limit "
                    f"{SILENCE_TIMEOUT_S:.0f} s) while {what}; is it on, and in the network?"
                )
        if now_s - self._paused_s > deadline_s:
            waiting = "; ".join(f"{self._name(i)}: {self._ranks[i].phase}" for i in missing)
            raise PeerLostError(f"{what} took too long; still waiting for {waiting}")

    def _name(self, index: int) -> str:
        return f"{self._ranks[index].plan.name} (rank {index})"

    def _of_step(self, index: int, report: pb.StepReport, step: int) -> pb.StepReport:
        if report.step != step:
            raise ProtocolError(f"{self._name(index)} reported step {report.step}, not {step}")
        for time_s in (report.busy_s, report.step_s, report.period_s):
            if not 0 <= time_s < math.inf:
                raise ProtocolError(f"{self._name(index)} reported a time of {time_s} s")
        return report


def _pieces(data: Sequence[pb.MicrobatchData]) -> list[pb.StepInput]:
    """Cut a step's microbatches into messages of bounded size; all but the last say `more`."""
    pieces = [pb.StepInput()]
    size_bytes = 0
    for microbatch in data:
        size_bytes += microbatch.ByteSize()
        if pieces[-1].microbatches and size_bytes > STEP_PIECE_BYTES:
            pieces.append(pb.StepInput())
            size_bytes = microbatch.ByteSize()
        pieces[-1].microbatches.append(microbatch)
    for piece in pieces[:-1]:
        piece.more = True
    return pieces


class LostRankError(PeerLostError):
    """The rank itself is gone, as told by its own agent, its stream or its silence."""
