"""A ring that goes on when devices come and go: who is here, a new plan, the state brought there.

Owns the order of a recovery, what is tried how often, and the pause while nothing fits. Must not
know what a step is: `train/loop` says which point of the history it was at.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from exo_train.agent.household_now import HouseholdNow
from exo_train.agent.planning import Candidate, Key
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
from exo_train.plan.plan import RankPlan
from exo_train.train.fault_points import point
from exo_train.train.regrouping import Known, Regrouped, Restored, from_checkpoint
from exo_train.train.ring import START, Ring

# A device that is lost so often within so long is left out until the run ends.
MAX_LOSSES = 3
LOSS_WINDOW_S = 600.0
# An agent that is gone still counts as alive for so long (cluster/member.py).
MOURNING_S = 20.0
MAX_FRUITLESS = 6  # recoveries in a row without a step between them
PAUSE_LOOK_S = 2.0
# What an allocator's failure says was needed is not known: so much of the stage's share more.
MORE_RESERVE = 0.25

_FATAL = (ConfigError, NumericsError, InterruptedRunError, TakenOverError)


@dataclass(slots=True)
class _Losses:
    """How often and when a device was lost; `aside` is why it is left out."""

    at_s: list[float] = field(default_factory=list)
    agent_gone_s: float | None = None
    ran_out: int = 0
    aside: str = ""


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
        self._run = run
        self.chosen = chosen
        self._household = household
        self._on_note = on_note
        self._wants_stop = wants_stop
        self._standbys: StandBys | None = None
        self._clock_s = clock_s
        self._sleep = sleep
        self._losses: dict[Key, _Losses] = {}
        self._fruitless = 0
        self._last_step = -1
        self._recovery_s = RECOVERY_S

    def watch_standbys(self) -> StandBys:
        """Begin to look after devices that do not train; the caller closes what is given."""
        self._standbys = StandBys(
            self._run,
            lambda: self.chosen,
            self._household.asking(from_thread=True),
            set_aside=self._unwanted,
            recovery_s=lambda: self._recovery_s,
        )
        return self._standbys

    @property
    def set_aside(self) -> dict[Key, str]:
        """Give the devices that are left out until the run ends, with the reason."""
        return {key: losses.aside for key, losses in self._losses.items() if losses.aside}

    def _unwanted(self) -> set[Key]:
        """Give those that are set aside or gone a moment ago; also for another thread to ask."""
        now_s = self._clock_s()
        return {
            key
            for key, losses in tuple(self._losses.items())
            if losses.aside
            or (losses.agent_gone_s is not None and now_s - losses.agent_gone_s < MOURNING_S)
        }

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
            self._on_note(f"{reason}; going on with who is left")
        else:
            self._on_note(reason)
        if self._standbys is not None:
            self._standbys.taken()
        while not self._has_succeeded(attempt, known, on_pause):
            pass
        assert attempt.restored is not None
        if not attempt.paused:
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
        except InterruptedRunError:
            if attempt.restored is not None:
                on_pause(attempt.restored)
            raise
        except ExoTrainError as error:
            if error is attempt.hopeless:
                raise
            attempt.hopeless = self._judged(error, known)
            self._on_note(f"{error}; trying again")
            return False
        return True

    def _restore(self, attempt: _Attempt, known: Known) -> None:
        """Stop all ranks, and fetch the state that the run goes on from, once."""
        attempt.generation += 1
        holdings = self._ring.rewind(attempt.generation)
        self._note_losses()
        point("recover")
        if attempt.restored is not None:
            return
        num_layers = self._run.manifest.spec.num_layers
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
                if not attempt.paused:
                    attempt.paused = True
                    on_pause(restored)
                    self._on_note(
                        f"the run is paused after step {restored.at.step}, which is saved: "
                        f"{error}; it goes on by itself when devices or memory are there"
                    )
            if self._wants_stop():
                raise InterruptedRunError(f"stopped while paused after step {restored.at.step}")
            self._sleep(PAUSE_LOOK_S)

    def _planned(self, attempt: _Attempt) -> RunPlan:
        """Plan over those that are known if it can be: timing a new device takes a while."""
        here = self._candidates()
        known_keys = {candidate.key for candidate in self.chosen.candidates}
        known = [candidate for candidate in here if candidate.key in known_keys]

        def planned(candidates: list[Candidate]) -> RunPlan:
            if not candidates:
                raise DoesNotFitError("no device is here that the run may use")
            return replan_run(
                self._run,
                self.chosen,
                candidates,
                self._household.asking(),
                generation=attempt.generation,
                reserve=self._reserves(),
            )

        if attempt.may_grow or len(known) == len(here):
            return planned(here)
        try:
            return planned(known)
        except (DoesNotFitError, PeerError):
            return planned(here)

    def _candidates(self) -> list[Candidate]:
        """Give who is here, without those that are set aside or gone a moment ago."""
        now_s = self._clock_s()
        found = []
        for candidate, live_s in self._household.look():
            losses = self._losses.get(candidate.key) or _Losses()
            gone_s = None if losses.agent_gone_s is None else now_s - losses.agent_gone_s
            is_gone = gone_s is not None and live_s > gone_s and gone_s < MOURNING_S
            if not losses.aside and not is_gone:
                found.append(candidate)
        return found

    def _reserves(self) -> Mapping[Key, int]:
        memory = {_key(rank): rank.memory_bytes for rank in self.chosen.plan.ranks}
        return {
            key: round(MORE_RESERVE * memory.get(key, 0))
            for key, losses in self._losses.items()
            if losses.ran_out
        }

    def _note_losses(self) -> None:
        now_s = self._clock_s()
        for rank, agent_gone in self._ring.losses():
            losses = self._losses.setdefault(_key(rank), _Losses())
            losses.at_s = [t for t in losses.at_s if now_s - t < LOSS_WINDOW_S] + [now_s]
            losses.agent_gone_s = now_s if agent_gone else None
            if len(losses.at_s) >= MAX_LOSSES and not losses.aside:
                losses.aside = (
                    f"it was lost {MAX_LOSSES} times within {LOSS_WINDOW_S / 60:.0f} minutes"
                )
                self._on_note(f"{rank.name} is set aside until the run ends: {losses.aside}")

    def _judged(self, error: ExoTrainError, known: Known) -> ExoTrainError | None:
        """Raise `error` where the state is no use; give one where trying again is none."""
        if isinstance(error, _FATAL):
            raise error
        is_same = known.up_to.step == self._last_step
        self._last_step, self._fruitless = known.up_to.step, self._fruitless * is_same + 1
        hopeless = None
        if self._fruitless > MAX_FRUITLESS:
            said = f"{error}; {MAX_FRUITLESS} recoveries in a row brought no step"
            hopeless = type(error)(said)
        for rank in self._ring.out_of_memory():
            losses = self._losses.setdefault(_key(rank), _Losses())
            losses.ran_out += 1
            if losses.ran_out > 1:  # planned with more reserve it ran out again
                hopeless = error
        return hopeless


@dataclass(slots=True)
class _Attempt:
    generation: int
    may_grow: bool  # new devices are what it is for
    restored: Restored | None = None
    paused: bool = False
    hopeless: ExoTrainError | None = None  # to be raised as soon as the state is saved


def _from_driver(known: Known, generation: int) -> Restored | None:
    """Give the newest state that this process or its disk has."""
    checkpoint = known.newest_checkpoint()
    if known.held is not None and (checkpoint is None or known.held[0].step >= checkpoint.step):
        return Restored(at=known.held[0], state=known.held[1])
    return from_checkpoint(checkpoint, generation=generation) if checkpoint is not None else None


def _key(rank: RankPlan) -> Key:
    return rank.node_id, rank.device


def _keys(ranks: tuple[RankPlan, ...]) -> dict[Key, str]:
    return {_key(rank): rank.name for rank in ranks}
