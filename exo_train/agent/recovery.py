"""A ring that goes on when devices come and go: who is here, a new plan, the state brought there.

Owns the order of a recovery, what is tried how often, and the pause while nothing fits. Must not
know what a step is: `train/loop` says which point of the history it was at.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from exo_train.agent.household_now import HouseholdNow
from exo_train.agent.losses import Losses
from exo_train.agent.planning import Candidate
from exo_train.agent.replanning import replan_run
from exo_train.agent.run_plan import Run, RunPlan
from exo_train.agent.standby import RECOVERY_S, StandBys
from exo_train.errors import (
    ConfigError,
    DoesNotFitError,
    ExoTrainError,
    InterruptedRunError,
    NumericsError,
    PeerError,
    TakenOverError,
)
from exo_train.plan.history import newest_whole
from exo_train.plan.plan import Key, RankPlan
from exo_train.train.fault_points import point
from exo_train.train.regrouping import Known, Regrouped, Restored, from_checkpoint
from exo_train.train.ring import START, Ring

MAX_FRUITLESS = 6  # recoveries in a row without a step between them, before it waits
PAUSE_LOOK_S = 2.0
MAX_LOOKS_LEFT_OUT = 30  # of a pause that lasts: then it looks once a minute

_FATAL = (ConfigError, NumericsError, InterruptedRunError, TakenOverError)


class Recovery:
    """Implements `Regrouping` over the members of the household."""

    def __init__(
        self,
        ring: Ring,
        run: Run,
        chosen: RunPlan,
        household: HouseholdNow,
        *,
        on_note: Callable[[str], None],
        wants_stop: Callable[[], bool],
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._ring = ring
        self.run = run
        self.chosen = chosen
        self._household = household
        self._on_note = on_note
        self._wants_stop = wants_stop
        self._standbys: StandBys | None = None
        self._clock_s = clock_s
        self._sleep = sleep
        self._losses = Losses(on_note, clock_s=clock_s)
        self._all_known = {candidate.key: candidate for candidate in chosen.candidates}
        self._fruitless = 0
        self._last_step = -1
        self._recovery_s = RECOVERY_S

    def watch_standbys(self) -> StandBys:
        """Begin to look after devices that do not train; the caller closes what is given."""
        self._standbys = StandBys(
            self.run,
            lambda: self.chosen,
            self._household.asking(from_thread=True),
            set_aside=self._losses.unwanted,
            recovery_s=lambda: self._recovery_s,
        )
        return self._standbys

    def wanted(self, *, steps_left: int, step_s: float) -> str:
        if self._standbys is None:
            return ""
        return self._standbys.wanted(steps_left=steps_left, step_s=step_s)

    def form_anew(
        self,
        reason: ExoTrainError | str,
        known: Known,
        *,
        on_pause: Callable[[Restored], None],
    ) -> Regrouped:
        ranks_before = self._ring.plan.ranks
        started_s = self._clock_s()
        attempt = _Attempt(self._ring.plan.generation, may_grow=isinstance(reason, str))
        if isinstance(reason, ExoTrainError):
            attempt.hopeless = self._judged(reason, known)
            for rank in self._ring.out_of_memory():
                self._losses.ran_out(rank)
            self._on_note(f"{reason}; going on with who is left")
        else:
            self._on_note(reason)
        if self._standbys is not None:
            self._standbys.taken()
        while not self._has_succeeded(attempt, known, on_pause):
            pass
        assert attempt.restored is not None
        if not attempt.pauses:
            self._recovery_s = self._clock_s() - started_s
        before, after = _keys(ranks_before), _keys(self._ring.plan.ranks)
        return Regrouped(
            restored=attempt.restored,
            lost=tuple(name for key, name in before.items() if key not in after),
            joined=tuple(name for key, name in after.items() if key not in before),
            prediction=self.chosen.prediction,
            advise=self.chosen.advise,
        )

    def _has_succeeded(
        self, attempt: _Attempt, known: Known, on_pause: Callable[[Restored], None]
    ) -> bool:
        """Try once; False: once more. Whoever ends it finds the state saved."""
        try:
            self._restore(attempt, known)
            assert attempt.restored is not None
            if attempt.hopeless is not None:
                on_pause(attempt.restored)
                raise attempt.hopeless
            self._plan(attempt, attempt.restored, on_pause)
            self._ring.reform(self.chosen.plan, self._household.channels(self.chosen.plan))
            self._household.bring_up(self._ring, at=attempt.restored.at)
            if attempt.restored.state:
                self._ring.store_state(attempt.restored.state)
        except ExoTrainError as error:
            if error is attempt.hopeless:
                raise
            self._note_short(error)
            try:
                attempt.hopeless = self._judged(error, known)
            except ExoTrainError:
                if attempt.restored is not None:
                    on_pause(attempt.restored)
                raise
            self._on_note(f"{error}; trying again")
            if attempt.restored is not None and self._fruitless > MAX_FRUITLESS:
                self._pause(attempt, attempt.restored, error, on_pause)
            return False
        return True

    def _restore(self, attempt: _Attempt, known: Known) -> None:
        """Stop all ranks, and fetch the state that the run goes on from, once."""
        attempt.generation += 1
        holdings = self._ring.rewind(attempt.generation)
        for rank, agent_gone in self._ring.losses():
            self._losses.lost(rank, agent_gone=agent_gone)
        point("recover")
        if attempt.restored is not None:
            return
        num_layers = self.run.manifest.spec.num_layers
        at = newest_whole(holdings, num_layers=num_layers, up_to=known.up_to)
        own = None if at == known.up_to else _from_driver(known, attempt.generation)
        if at is not None and (own is None or own.at.step < at.step):
            own = Restored(at=at, state=self._ring.collect_held(at))
        attempt.restored = own or Restored(at=START, state={})

    def _plan(
        self, attempt: _Attempt, restored: Restored, on_pause: Callable[[Restored], None]
    ) -> None:
        """Plan over who is here; while nothing fits, all is saved and the run waits."""
        while True:
            point("replan")
            try:
                self.chosen = self._planned(attempt)
                return
            except TakenOverError:
                raise
            except (DoesNotFitError, PeerError) as error:
                if asides := self._nobody_can_come():
                    on_pause(restored)
                    attempt.hopeless = type(error)(f"{error}; set aside: {'; '.join(asides)}")
                    raise attempt.hopeless from None
                self._pause(attempt, restored, error, on_pause)

    def _pause(
        self,
        attempt: _Attempt,
        restored: Restored,
        error: ExoTrainError,
        on_pause: Callable[[Restored], None],
    ) -> None:
        """Have the state saved, once, and wait a while; longer each time."""
        if not attempt.pauses:
            on_pause(restored)
            self._on_note(
                f"the run is paused after step {restored.at.step}, which is saved: {error}; it "
                f"goes on by itself when devices or memory are there"
            )
        attempt.pauses += 1
        for _ in range(min(MAX_LOOKS_LEFT_OUT, 2 ** (attempt.pauses // 10))):
            self._ring.idle()
            if self._wants_stop():
                raise InterruptedRunError(f"stopped while paused after step {restored.at.step}")
            self._sleep(PAUSE_LOOK_S)

    def _nobody_can_come(self) -> list[str]:
        """Say why all devices that the run has had are set aside; empty: some are not."""
        asides = [self._losses.aside(c.key) for c in self._all_known.values()]
        return [] if not all(asides) else asides

    def _planned(self, attempt: _Attempt) -> RunPlan:
        """Plan over those that are known if it can be: timing a new device takes a while."""
        here = self._candidates()
        known_keys = {candidate.key for candidate in self.chosen.candidates}
        known = [candidate for candidate in here if candidate.key in known_keys]

        def planned(candidates: list[Candidate]) -> RunPlan:
            if not candidates:
                raise DoesNotFitError("no device is here that the run may use")
            return replan_run(
                self.run,
                self.chosen,
                candidates,
                self._household.asking(),
                generation=attempt.generation,
                reserve=self._losses.reserves(self.chosen.plan.ranks),
            )

        if attempt.may_grow or len(known) == len(here):
            return planned(here)
        try:
            return planned(known)
        except (DoesNotFitError, PeerError):
            return planned(here)

    def _candidates(self) -> list[Candidate]:
        """Give who is here, without those that are set aside or gone a moment ago."""
        here = self._household.look()
        self._all_known |= {candidate.key: candidate for candidate, _ in here}
        return [c for c, live_s in here if self._losses.is_usable(c.key, live_s=live_s)]

    def _note_short(self, error: ExoTrainError) -> None:
        """A device that refused to load for want of memory is left out for a while."""
        if isinstance(error, DoesNotFitError):
            for rank in self._ring.out_of_memory():
                self._losses.short(rank)

    def _judged(self, error: ExoTrainError, known: Known) -> ExoTrainError | None:
        """Raise `error` where the state is no use; give one where trying again is none."""
        blamed = self._ring.blamed()
        if isinstance(error, ConfigError) and blamed:
            for rank in blamed:  # its disk or its processor: the others can go on
                self._losses.set_aside(rank, str(error))
        elif isinstance(error, _FATAL):
            raise error
        is_same = known.up_to.step == self._last_step
        self._last_step, self._fruitless = known.up_to.step, self._fruitless * is_same + 1
        if self._fruitless > MAX_FRUITLESS and not isinstance(error, PeerError | DoesNotFitError):
            return type(error)(f"{error}; {MAX_FRUITLESS} recoveries in a row brought no step")
        return None


@dataclass(slots=True)
class _Attempt:
    generation: int
    may_grow: bool  # new devices are what it is for
    restored: Restored | None = None
    pauses: int = 0
    hopeless: ExoTrainError | None = None  # to be raised as soon as the state is saved


def _from_driver(known: Known, generation: int) -> Restored | None:
    """Give the newest state that this process or its disk has."""
    checkpoint = known.newest_checkpoint()
    if known.held is not None and (checkpoint is None or known.held[0].step >= checkpoint.step):
        return Restored(at=known.held[0], state=known.held[1])
    return from_checkpoint(checkpoint, generation=generation) if checkpoint is not None else None


def _keys(ranks: tuple[RankPlan, ...]) -> dict[Key, str]:
    return {rank.key: rank.name for rank in ranks}
