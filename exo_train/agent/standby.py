"""Devices that are here and do not train: would the run be better off with them?

Owns the looking, in a thread of its own, and the judgement of each device that comes. Must not
change the run: that is for the driver, between two steps. Only the newcomer measures anything.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from exo_train.agent.live_plan import Asking
from exo_train.agent.members import candidates_now
from exo_train.agent.planning import Candidate
from exo_train.agent.replanning import replan_run
from exo_train.agent.run_plan import WORTH_A_RESTART, Run, RunPlan
from exo_train.errors import ExoTrainError, InterruptedRunError
from exo_train.plan.plan import Key

LOOK_S = 3.0
# A device that comes and goes must not stop the ring each time, and its links want to be measured.
SETTLE_S = 8.0
# A device that could not be timed, as it trains another model perhaps, is asked again.
ASK_AGAIN_S = 60.0
NO_USE = "it has no room for a layer, or no step gets shorter with it"
RECOVERY_S = 10.0  # while none was measured: half of what one may take
END_TIMEOUT_S = 5.0  # a question to a member ends soon after nobody wants the answer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Devices that a new plan would use, and why; `now_s` and `then_s` are a step's.

    Both are None where it is not for speed that they are to take part.
    """

    candidates: tuple[Candidate, ...]
    why: str
    now_s: float | None = None
    then_s: float | None = None

    @property
    def keys(self) -> frozenset[Key]:
        return frozenset(candidate.key for candidate in self.candidates)

    @property
    def names(self) -> str:
        return " and ".join(candidate.name for candidate in self.candidates)

    @property
    def is_worth(self) -> bool:
        """Tell whether it is worth a stop at all, however much of the run is left."""
        if self.now_s is None or self.then_s is None:
            return True
        return self.now_s >= WORTH_A_RESTART * self.then_s

    def saved_s(self, num_steps: int, step_s: float) -> float:
        """Give what so many steps save that take `step_s` now (0: as long as was predicted)."""
        if self.now_s is None or self.then_s is None:
            return math.inf
        return num_steps * (step_s or self.now_s) * (1 - self.then_s / self.now_s)


class StandBys:
    """Looks after devices that do not train; `wanted` is for the driver to ask between steps.

    `current` gives the plan that trains now, `set_aside` the devices that the driver does not want,
    `recovery_s` how long it takes to form the ring anew. The first two are called from a thread of
    this object, and so are the functions of `asking`. Ends with `close`.
    """

    def __init__(
        self,
        run: Run,
        current: Callable[[], RunPlan],
        asking: Asking,
        *,
        set_aside: Callable[[], Collection[Key]] = tuple,
        recovery_s: Callable[[], float] = lambda: RECOVERY_S,
        look_s: float = LOOK_S,
        settle_s: float = SETTLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._current = current
        self._asking = asking
        self._set_aside = set_aside
        self._recovery_s = recovery_s
        self._look_s = look_s
        self._settle_s = settle_s
        self._clock = clock
        self._closing = threading.Event()
        self._offer: Offer | None = None
        self._generation = -1  # of the plan that devices were judged against
        self._judged: dict[Key, float] = {}  # when to judge again
        self._told: set[Key] = set()  # of whom it was said that they wait
        self._thread = threading.Thread(target=self._look_on, name="stand-bys", daemon=True)
        self._thread.start()

    def wanted(self, *, steps_left: int, step_s: float) -> str:
        """Say who is worth forming the ring anew for, at this boundary; empty: nobody.

        `step_s` is what a step takes now; 0: not known yet.
        """
        offer = self._offer
        if offer is None or not steps_left:
            return ""
        saved_s, recovery_s = offer.saved_s(steps_left, step_s), self._recovery_s()
        if saved_s > recovery_s:
            return f"{offer.names} can take part: {offer.why}"
        for candidate in offer.candidates:
            self._tell(
                candidate,
                f"{candidate.name} waits: {offer.why}, but in the {steps_left} left that saves "
                f"{saved_s:.0f} s, and taking it in takes {recovery_s:.0f} s",
            )
        return ""

    def taken(self) -> None:
        """Forget who was wanted: the ring was formed anew, or cannot be."""
        self._offer = None

    def close(self) -> None:
        self._closing.set()
        self._thread.join(END_TIMEOUT_S)

    def _look_on(self) -> None:
        while not self._closing.wait(self._look_s):
            try:
                self.look()
            except InterruptedRunError:
                return
            except ExoTrainError as error:  # the agent may be starting again
                log.info("stand-by devices are not known now: %s", error)

    def look(self) -> None:
        """Judge whoever has come since the last look, against the plan that trains now."""
        before = self._current()
        if before.plan.generation != self._generation:
            self._generation = before.plan.generation
            self._judged.clear()
            self.taken()
        status = self._asking.status()
        here = candidates_now(status, self._run.config)
        waiting = self._waiting(here, before, since_s=_since(status))
        self._forget_gone({c.key for c in waiting})
        now_s = self._clock()
        if any(self._judged.get(c.key, now_s) <= now_s for c in waiting):
            self._judge(here, waiting, before)

    def _waiting(
        self, here: Sequence[Candidate], before: RunPlan, *, since_s: Mapping[str, float]
    ) -> list[Candidate]:
        """Give those that might take part, and that the plan was not chosen among already."""
        known = {c.key for c in before.candidates} | set(self._set_aside())
        return [c for c in here if c.key not in known and since_s[c.node_id] >= self._settle_s]

    def _forget_gone(self, keys: Collection[Key]) -> None:
        for key in [key for key in self._judged if key not in keys]:
            del self._judged[key]
        self._told &= set(keys)
        if self._offer and not self._offer.keys <= set(keys):
            self.taken()

    def _judge(
        self, here: Sequence[Candidate], waiting: Sequence[Candidate], before: RunPlan
    ) -> None:
        """Plan as if the ring were formed anew now, with all who wait, and see what it is worth."""
        keys = {c.key for c in waiting}
        training = {r.key for r in before.plan.ranks}
        taking_part = [c for c in here if c.key in keys or c.key in training]
        if not training <= {c.key for c in taking_part}:
            return  # a device was just lost: the ring is planned anew anyway
        notes: list[str] = []
        asking = replace(self._asking, on_note=notes.append, wants_stop=self._closing.is_set)
        try:
            found = replan_run(
                self._run, before, taking_part, asking, generation=before.plan.generation + 1
            )
        except InterruptedRunError:
            raise
        except ExoTrainError as error:
            notes.append(str(error))
            self._conclude(waiting, before, None, notes)
        else:
            self._conclude(waiting, before, found, notes)

    def _conclude(
        self,
        waiting: Sequence[Candidate],
        before: RunPlan,
        found: RunPlan | None,
        notes: Sequence[str],
    ) -> None:
        """Offer those who are worth it, and say of the others why they are not."""
        if self._current().plan.generation != before.plan.generation:
            return  # the ring was formed anew meanwhile
        offer = self._offered(waiting, before, found) if found else None
        for candidate in waiting:
            self._judged[candidate.key] = math.inf
            left_out = [note for note in notes if note.startswith(f"{candidate.name} is left out")]
            if left_out or found is None:
                self._judged[candidate.key] = self._clock() + ASK_AGAIN_S
                self._tell(candidate, left_out[0] if left_out else notes[-1])
            elif offer is None or candidate.key not in offer.keys:
                self._tell(candidate, f"{candidate.name} waits: {NO_USE}")
            elif not offer.is_worth:
                self._tell(candidate, f"{candidate.name} waits: {offer.why}, hardly faster")
        self._offer = offer if offer and offer.is_worth else None

    def _offered(
        self, waiting: Sequence[Candidate], before: RunPlan, found: RunPlan
    ) -> Offer | None:
        """Say who is used and what it is good for; the user's wish goes before speed."""
        used = {r.key for r in found.plan.ranks}
        joining = tuple(c for c in waiting if c.key in used)
        if not joining:
            return None
        if self._run.config.layers or len(before.plan.ranks) < self._run.at_least:
            return Offer(candidates=joining, why="the run was asked to have it")
        if before.prediction is None or found.prediction is None:
            return Offer(candidates=joining, why="layers are shared out by memory")
        now_s, then_s = before.prediction.step_s, found.prediction.step_s
        why = f"a step would take {then_s:.3g} s instead of {now_s:.3g} s"
        return Offer(candidates=joining, why=why, now_s=now_s, then_s=then_s)

    def _tell(self, candidate: Candidate, said: str) -> None:
        """Say it once while the device stays, whatever the numbers in it become."""
        if candidate.key not in self._told:
            self._told.add(candidate.key)
            self._asking.on_note(said)


def _since(status: Mapping[str, Any]) -> dict[str, float]:
    """Give for how many seconds each member has been as it is now."""
    return {m["id"]: m["since_s"] for m in status["members"]}
