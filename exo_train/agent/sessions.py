"""The ranks of runs on this device, and who may lead them.

Owns which driver a worker is given to: a new one, the one that its lost driver left, or none,
because another driver leads the run. Must not know gRPC nor what a worker does.

Members trust each other: any of them may take up a run whose driver is lost. A driver that was
only asleep meanwhile is told that the run goes on elsewhere, and who leads it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from exo_train.agent.protocol import MAX_ENDED
from exo_train.agent.run_session import LEASE_S, RunSession, WorkerSettings, check_prepare
from exo_train.errors import PeerError, TakenOverError
from exo_train.peer import NodeId
from exo_train.wire.pb import control_pb2 as pb

MAX_SESSIONS = 16
MAX_LEADS = 64  # runs of which this device remembers who led them last


class RunPoint(Protocol):
    @property
    def run_id(self) -> str: ...

    @property
    def generation(self) -> int: ...


def is_over(run: RunPoint, ended: Mapping[str, int]) -> bool:
    """Tell whether a run was ended by its driver, in this generation or later."""
    return ended.get(run.run_id, -1) >= run.generation


class TooManyRunsError(PeerError):
    """This device takes part in as many runs as it can."""


@dataclass(slots=True)
class _Lead:
    """Who leads a run, in which generation, and who led it before."""

    driver: NodeId
    generation: int
    before: set[NodeId] = field(default_factory=set)


class Sessions:
    """Thread-safe; `settings` is asked at each run's start, `name_of` gives a member's name."""

    def __init__(
        self,
        settings: Callable[[], WorkerSettings],
        *,
        name_of: Callable[[NodeId], str],
        lease_s: float = LEASE_S,
    ) -> None:
        self._settings = settings
        self._name_of = name_of
        self._lease_s = lease_s
        self._sessions: list[RunSession] = []
        self._leads: dict[str, _Lead] = {}  # by run id, the newest last
        self._ended: deque[tuple[str, int]] = deque(maxlen=MAX_ENDED)
        self._lock = threading.Lock()

    def ended(self) -> tuple[pb.EndedRun, ...]:
        """Give the newest runs that their drivers have ended here."""
        with self._lock:
            return tuple(pb.EndedRun(run_id=r, generation=g) for r, g in self._ended)

    def end_left(self, ended: Mapping[str, int]) -> None:
        """End what is kept of runs that others know to be over; by run id, the generation."""
        with self._lock:
            over = [s for s in self._sessions if s.is_orphaned and is_over(s, ended)]
        for session in over:
            session.stop()
            self._drop(session)

    def open(self, first: pb.RunMessage, driver: NodeId) -> RunSession:
        """Give the session whose stream begins with `first`.

        Raises ProtocolError for what does not fit this device, TakenOverError where another driver
        leads the run, TooManyRunsError.
        """
        settings = self._settings()  # before the lock: it may ask us
        check_prepare(settings, first)
        with self._lock:
            self._check_lead(first, driver)
            before = next((s for s in self._sessions if _is_of(s, first)), None)
            if before is not None and first.prepare.adopt and before.is_orphaned:
                before.adopt(first, driver)
                self._note_lead(first, driver)
                return before
            if len(self._sessions) - (before is not None) >= MAX_SESSIONS:
                raise TooManyRunsError(f"takes part in {MAX_SESSIONS} runs already")
        if before is not None:
            before.stop()  # this driver begins anew here
            self._drop(before)
        with self._lock:
            self._check_lead(first, driver)
            session = RunSession(settings, first, driver, lease_s=self._lease_s, on_over=self._drop)
            self._sessions.append(session)
            self._note_lead(first, driver)
            return session

    def left(self, session: RunSession) -> None:
        """Forget a session whose stream has ended, unless its worker is kept."""
        if session.is_over:
            self._drop(session)

    def facts(self) -> pb.RunFacts | None:
        """Give the newest run that this device takes part in, or None."""
        with self._lock:
            session = self._sessions[-1] if self._sessions else None
        if session is None:
            return None
        return pb.RunFacts(
            run_id=session.run_id,
            generation=session.generation,
            rank=session.rank,
            phase=session.phase,
            phase_age_s=session.phase_age_s,
            phase_limit_s=session.phase_limit_s,
            coordinator_id=session.driver,
            orphaned=session.is_orphaned,
        )

    def worker_pid(self) -> int | None:
        with self._lock:
            return self._sessions[-1].worker_pid if self._sessions else None

    def end_runs_of(self, node_id: NodeId) -> None:
        """End this device's part in the runs that a removed device leads."""
        with self._lock:
            sessions = [session for session in self._sessions if session.driver == node_id]
        for session in sessions:
            session.stop()

    def close(self) -> None:
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            session.stop()

    def _drop(self, session: RunSession) -> None:
        with self._lock:
            if session in self._sessions:
                self._sessions.remove(session)
                self._follow(session)
                if session.is_ended:
                    self._ended.append((session.run_id, session.generation))

    def _check_lead(self, first: pb.RunMessage, driver: NodeId) -> None:
        """Refuse a driver while another one leads the run, or has taken it over from it."""
        for session in self._sessions:
            self._follow(session)
        lead = self._leads.get(first.run_id)
        if lead is None or lead.driver == driver:
            return
        name = self._name_of(lead.driver)
        at = f"is at generation {lead.generation}"
        if driver in lead.before:
            is_led = any(s.run_id == first.run_id and not s.is_orphaned for s in self._sessions)
            if is_led or first.generation <= lead.generation:
                raise TakenOverError(
                    f"this run was taken over by {name} and {at}; it goes on there, and its "
                    f"results are there"
                )
        for session in self._sessions:
            if session.run_id == first.run_id and not session.is_orphaned:
                raise TakenOverError(
                    f"this run is led by {name} and {at}; stop it there before another device "
                    f"goes on with it"
                )

    def _follow(self, session: RunSession) -> None:
        """Take over the generation that the run has come to here."""
        lead = self._leads.get(session.run_id)
        if lead is not None and lead.driver == session.driver:
            lead.generation = max(lead.generation, session.generation)

    def _note_lead(self, first: pb.RunMessage, driver: NodeId) -> None:
        lead = self._leads.pop(first.run_id, None) or _Lead(driver, first.generation)
        if lead.driver != driver:
            lead.before.add(lead.driver)
            lead.before.discard(driver)
        lead.driver = driver
        lead.generation = max(lead.generation, first.generation)
        self._leads[first.run_id] = lead
        while len(self._leads) > MAX_LEADS:
            del self._leads[next(iter(self._leads))]


def _is_of(session: RunSession, first: pb.RunMessage) -> bool:
    """Tell whether it is the same processor's part; several ranks of one ring may share one."""
    if (session.run_id, session.device) != (first.run_id, first.prepare.device):
        return False
    return session.rank == first.rank or session.generation != first.generation
