"""The driver's talk with the ranks: who must answer what until when, and who is gone.

Owns deadlines, signs of life, the dropping of what is of an earlier generation, and which failure
is the cause when several arrive. Must not know how messages travel (`RankChannel` does) nor what
they mean for a step (`ring` does).
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from exo_train.errors import ExoTrainError, InterruptedRunError, PeerLostError, ProtocolError
from exo_train.plan.history import Holding, StepId
from exo_train.plan.plan import RankPlan
from exo_train.train.messages import from_failure, from_step_id
from exo_train.wire.pb import control_pb2 as pb

SILENCE_TIMEOUT_S = 10.0  # no sign of life from a rank's agent: five heartbeats
# The worker's own report comes every second, from a thread that computing does not hold up for
# long, but the import of a framework from a slow disk may; the agent goes on when a worker was
# stopped.
WORKER_SILENCE_S = 8.0
STARTING_SILENCE_S = 20.0
# A gap this long between two looks means that the driver itself was asleep or busy: what the
# ranks said meanwhile has not been read yet, so silence proves nothing.
OWN_PAUSE_S = 5.0
# After the first failure, others are collected for so long: the cause may arrive second.
CAUSE_WINDOW_S = 1.5
LOSS_WINDOW_S = 0.3  # when the first one says itself that a rank is gone
POLL_S = 0.5
PATIENCE_S = 60.0  # then the user is told whom all wait for

Event = pb.RunMessage | ExoTrainError


class LostRankError(PeerLostError):
    """The rank itself is gone, as told by its own agent, its stream or its silence."""


class LeftRankError(LostRankError):
    """Its device left on purpose: its agent is ending."""


class RankChannel(Protocol):
    """Carries run messages to one rank; events arrive through the callback, from any thread."""

    def start(self, on_event: Callable[[Event], None]) -> None: ...

    def send(self, message: pb.RunMessage) -> None: ...

    def close(self) -> None:
        """End the rank's worker and release everything; may be called twice."""
        ...


@dataclass(slots=True, eq=False)
class Rank:
    """One rank as the driver knows it; `gone` ranks have no worker any more."""

    plan: RankPlan
    channel: RankChannel
    last_heard_s: float = field(default_factory=time.monotonic)
    progress: pb.Progress = field(default_factory=lambda: pb.Progress(phase="starting"))
    failure: ExoTrainError | None = None
    started: bool = False
    gone: bool = False
    agent_gone: bool = False
    shadowed: StepId | None = None  # the newest copy that its holder has
    copy_failure: tuple[StepId, ExoTrainError] | None = None  # the newest that could not be made
    holdings: list[Holding] = field(default_factory=list)  # as the last rewind found it

    @property
    def name(self) -> str:
        return f"{self.plan.name} (rank {self.plan.rank})"

    @property
    def is_waiting(self) -> bool:
        return "waiting for" in self.progress.phase

    @property
    def is_in_step(self) -> bool:
        return self.progress.phase.startswith("step ")

    @property
    def has_failed_itself(self) -> bool:
        """Tell a failure of its own from a complaint that another rank was lost."""
        is_own = isinstance(self.failure, LostRankError)
        return self.failure is not None and (is_own or not isinstance(self.failure, PeerLostError))


class Conversation:
    """Not thread-safe: the driver's thread only; channels bring events from theirs."""

    def __init__(
        self,
        run_id: str,
        generation: int,
        *,
        wants_stop: Callable[[], bool] = lambda: False,
        on_note: Callable[[str], None] = lambda note: None,
    ) -> None:
        self.generation = generation
        self.ranks: list[Rank] = []
        self._patience_s = PATIENCE_S
        self.wants_stop = wants_stop
        self._run_id = run_id
        self._on_note = on_note
        self._events: queue.SimpleQueue[tuple[Rank, Event]] = queue.SimpleQueue()
        self._looked_s = self._waiting_since_s = time.monotonic()
        self._paused_s = 0.0
        self._told_slow = False

    def admit(self, rank: Rank) -> None:
        """Open the rank's channel; raises LostRankError when it cannot be reached."""
        rank.started = True
        try:
            rank.channel.start(functools.partial(self._arrived, rank))
        except PeerLostError as error:
            rank.gone = rank.agent_gone = True
            rank.failure = LostRankError(str(error))
            raise rank.failure from None

    def tell(self, rank: Rank, **body: Any) -> None:
        rank.channel.send(
            pb.RunMessage(
                run_id=self._run_id, generation=self.generation, rank=rank.plan.rank, **body
            )
        )

    def wait_all(
        self,
        kind: str,
        *,
        timeout_s: float,
        what: str,
        ranks: Sequence[Rank] | None = None,
        may_stop: Callable[[], bool] = lambda: False,
    ) -> list[pb.RunMessage]:
        """Wait until each of `ranks` (all) has sent one message of `kind`; in their order.

        Raises InterruptedRunError when a stop is wanted and may come here, and the cause when a
        rank fails or is silent.
        """
        asked = list(self.ranks if ranks is None else ranks)
        deadline_s = self.deadline_s(timeout_s)
        answers: dict[int, pb.RunMessage] = {}
        while len(answers) < len(asked):
            if may_stop() and self.wants_stop():
                raise InterruptedRunError(f"stopped while {what}")
            missing = [rank for rank in asked if id(rank) not in answers]
            rank, message = self.next(kind, deadline_s, missing, what)
            if rank is not None and message is not None:
                if rank not in missing:
                    raise ProtocolError(f"{rank.name} sent '{kind}' twice while {what}")
                answers[id(rank)] = message
        return [answers[id(rank)] for rank in asked]

    def deadline_s(self, timeout_s: float) -> float:
        """Begin a wait; its deadline is on the clock of time that the driver was there."""
        self._waiting_since_s = time.monotonic()
        self._told_slow = False
        return self._waiting_since_s - self._paused_s + timeout_s

    def is_over(self, deadline_s: float) -> bool:
        return time.monotonic() - self._paused_s > deadline_s

    def be_patient(self, step_s: float) -> None:
        """Let a wait last five times as long as a step does before the user is told."""
        self._patience_s = max(PATIENCE_S, 5 * step_s)

    def next(
        self, kind: str, deadline_s: float, missing: Sequence[Rank], what: str
    ) -> tuple[Rank | None, pb.RunMessage | None]:
        """Give the next message of `kind`, or None now and then, so that the caller can look up.

        Raises the cause when a rank fails or is silent.
        """
        rank, event = self._look(missing)
        self._check_waiting(deadline_s, missing, what)
        if rank is None or not isinstance(event, pb.RunMessage):
            if any(r.failure is not None for r in self.ranks):
                raise self._cause()
            return None, None
        body = event.WhichOneof("body")
        if body != kind:
            raise ProtocolError(f"{rank.name} sent '{body}' while {what}")
        return rank, event

    def hear_out(
        self, kind: str, *, timeout_s: float, what: str
    ) -> list[tuple[Rank, pb.RunMessage]]:
        """Wait for one message of `kind` from all that are left; who fails or is silent is gone.

        A rank that gives signs of life and does not answer within `timeout_s` is gone, too.
        """
        deadline_s = self.deadline_s(timeout_s)
        answers: dict[int, tuple[Rank, pb.RunMessage]] = {}
        while True:
            missing = [r for r in self.ranks if not r.gone and id(r) not in answers]
            if not missing:
                return [answer for answer in answers.values() if not answer[0].gone]
            rank, event = self._look(missing)
            if isinstance(event, pb.RunMessage) and event.WhichOneof("body") == kind:
                assert rank is not None
                answers[id(rank)] = rank, event
            with contextlib.suppress(PeerLostError):
                self._check_waiting(deadline_s, missing, what, all_stuck=True)
            for rank in self.ranks:
                rank.gone = rank.gone or rank.failure is not None

    def drain(self) -> None:
        """Read what has come, without waiting: answers are to nothing that is still asked.

        Failures are kept.
        """
        with contextlib.suppress(queue.Empty):
            while True:
                self._note(*self._events.get(timeout=0))

    def forget_failures(self) -> None:
        """Start anew with those who are left: what they complained of is over.

        Ranks whose turn to be started did not come are none yet.
        """
        self.ranks = [rank for rank in self.ranks if rank.started]
        for rank in self.ranks:
            if not rank.gone:
                rank.failure = None

    def drop_gone(self) -> list[Rank]:
        """End what is left of the ranks that are gone; gives them.

        Their failures are told, and must not end what is done next with those who are left.
        """
        lost = [rank for rank in self.ranks if rank.gone]
        self.ranks = [rank for rank in self.ranks if not rank.gone]
        for rank in lost:
            if rank.agent_gone:  # it may never answer: the others do not wait for that
                threading.Thread(target=rank.channel.close, name="lost-rank", daemon=True).start()
            else:
                rank.channel.close()
        return lost

    def _arrived(self, rank: Rank, event: Event) -> None:
        """Take an event in, from the channel's thread: this is when the rank was heard.

        Of its progress only the last counts, however long the driver does not look.
        """
        rank.last_heard_s = time.monotonic()
        if isinstance(event, pb.RunMessage) and event.WhichOneof("body") == "progress":
            rank.progress = event.progress
        else:
            self._events.put((rank, event))

    def _look(self, missing: Sequence[Rank]) -> tuple[Rank | None, Event | None]:
        """Take one event in; gives it when it is an answer of a rank of the ring."""
        self._blame_still_workers()
        try:
            rank, event = self._events.get(timeout=POLL_S)
        except queue.Empty:
            return None, None
        if self._note(rank, event) or rank not in self.ranks or rank.gone:
            return None, None
        return rank, event

    def _note(self, rank: Rank, event: Event) -> bool:
        """Keep what an event says; False: it is an answer.

        A rank's first failure is kept: what follows (its stream ends) follows from it.
        """
        if isinstance(event, ExoTrainError):
            # Where a failure came before, its stream ends because its worker did.
            rank.agent_gone = rank.agent_gone or not rank.gone
            rank.failure = rank.failure or event
            rank.gone = True
            return True
        body = event.WhichOneof("body")
        if body == "failure":
            failure = from_failure(event.failure, where=rank.plan.name)
            rank.gone = rank.gone or isinstance(failure, LostRankError)
            rank.agent_gone = rank.agent_gone or isinstance(failure, LeftRankError)
            if rank.gone or event.generation >= self.generation:
                rank.failure = rank.failure or failure
            return True
        if event.generation < self.generation:
            return True
        if body == "shadowed":
            told = event.shadowed
            at = from_step_id(told.at)
            if told.HasField("failure"):
                rank.copy_failure = at, from_failure(told.failure, where=rank.plan.name)
            else:
                rank.shadowed = at
            return True
        return False

    def _blame_still_workers(self) -> None:
        was_away = time.monotonic() - self._looked_s > OWN_PAUSE_S
        for rank in self.ranks:
            if was_away:  # what it said before that may be true no more
                rank.progress = pb.Progress(phase=rank.progress.phase)
            silent_s = rank.progress.silent_s
            limit_s = WORKER_SILENCE_S if rank.is_in_step else STARTING_SILENCE_S
            if silent_s > limit_s and not rank.gone:
                rank.gone = True
                rank.failure = rank.failure or LostRankError(
                    f"{rank.name}: its agent answers, but its worker has stood still for "
                    f"{silent_s:.0f} s (limit {limit_s:.0f} s)"
                )

    def _cause(self) -> ExoTrainError:
        """Choose among the failures that arrive together: a neighbour's complaint is no cause."""
        since_s = time.monotonic()
        while True:
            window_s = LOSS_WINDOW_S if any(r.gone for r in self.ranks) else CAUSE_WINDOW_S
            left_s = since_s + window_s - time.monotonic()
            if left_s <= 0:
                break
            with contextlib.suppress(queue.Empty):
                self._note(*self._events.get(timeout=left_s))
        failures = [rank.failure for rank in self.ranks if rank.failure is not None]
        return next((f for f in failures if not isinstance(f, PeerLostError)), None) or next(
            (f for f in failures if isinstance(f, LostRankError)), failures[0]
        )

    def _check_waiting(
        self, deadline_s: float, missing: Sequence[Rank], what: str, *, all_stuck: bool = False
    ) -> None:
        """Raise when a rank of the ring is silent, or those who are waited for take too long.

        Whoever is to blame is marked as gone: silent ones, and of those who take too long the ones
        that do not wait for others themselves (`all_stuck`: all of them).
        """
        now_s = time.monotonic()
        gap_s = now_s - max(self._looked_s, self._waiting_since_s)
        paused = now_s - self._looked_s > OWN_PAUSE_S
        self._looked_s = now_s
        if gap_s > OWN_PAUSE_S:
            self._paused_s += gap_s  # deadlines do not run while the driver itself is away
        for rank in self.ranks:
            if paused:
                rank.last_heard_s = now_s
            silent_s = now_s - rank.last_heard_s
            if silent_s > SILENCE_TIMEOUT_S and not rank.gone:
                rank.gone = rank.agent_gone = True
                rank.failure = rank.failure or LostRankError(
                    f"{rank.name} has not been heard for {silent_s:.0f} s (limit "
                    f"{SILENCE_TIMEOUT_S:.0f} s) while {what}; is it on, and in the network?"
                )
                raise rank.failure
        waiting = "; ".join(f"{r.name}: {r.progress.phase}" for r in missing)
        if now_s - self._paused_s > deadline_s:
            late = LostRankError(f"{what} took too long; still waiting for {waiting}")
            stuck = [r for r in missing if all_stuck or not r.is_waiting]
            for rank in stuck:
                rank.gone, rank.failure = True, rank.failure or late
            raise late if stuck else PeerLostError(str(late))
        waited_s = now_s - self._waiting_since_s
        if waited_s > self._patience_s and not self._told_slow:
            self._told_slow = True
            self._on_note(f"{what} takes long ({waited_s:.0f} s so far); waiting for {waiting}")
