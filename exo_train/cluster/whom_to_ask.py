"""Which address is asked next: suggestions, calls under way, back-off.

Owns what is known of addresses. Must not decide who is alive: membership.py does. Pure: no
socket, no clock, no randomness.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass

from exo_train.peer import Address, NodeId

HEARTBEAT_S = 2.0
FIRST_RETRY_S = 1.0  # doubled at each failure; also the least time between calls to one address
MAX_RETRY_S = 5.0
LOST_AFTER_S = 10.0  # a call of which nobody told the end counts as ended
FORGET_SUGGESTION_AFTER_S = 120.0
MAX_SUGGESTIONS = 256
MAX_LASTING = 128
MAX_ADDRESSES = 16  # of one device
# Calls under way that are no heartbeats. Each kind has its own places: neither strangers'
# addresses that swallow packets nor a member's dead ones keep the others from being asked.
MAX_MEMBER_SEARCHES = 12
MAX_STRANGER_SEARCHES = 8
NEVER_S = float("-inf")


class Failure(enum.Enum):
    """How a call ended that brought no hello."""

    REFUSED = "refused"  # TCP is refused: no agent listens there
    ACCEPTED = "accepted"  # TCP is accepted and nothing answers: stopped, suspended or stuck
    SILENT = "silent"  # nothing comes back
    NO_ROUTE = "no route"
    FOREIGN = "foreign"  # another device answers, or it refuses the hello


class Need(enum.IntEnum):
    """Why an address is wanted, most urgent first."""

    HEARTBEAT = 0  # where a live member answered last
    LIVE = 1  # another way to a live member
    KNOWN = 2  # a member that is gone, or an address that the user named or the home remembers
    STRANGER = 3


@dataclass(frozen=True, slots=True)
class Target:
    """An address, and the device expected there; None: whoever answers."""

    address: Address
    node_id: NodeId | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Call this address. The end must be told by `heard(proven=address)` or `failed(address)`.

    A heartbeat must not queue behind other calls.
    """

    address: Address
    node_id: NodeId | None
    is_heartbeat: bool


@dataclass(slots=True)
class Tries:
    """What calls to one target brought since it last answered."""

    failures: int = 0
    refusals: int = 0  # the latest in a row
    last: Failure | None = None
    failed_s: float = NEVER_S
    waits: int = 0  # the back-off's exponent
    due_s: float = NEVER_S


@dataclass(slots=True)
class Call:
    """The latest call to an address, by the clock of the events."""

    target: Target
    asked_s: float
    need: Need
    is_ended: bool = False
    is_stale: bool = False  # begun before this device slept: its end says nothing


@dataclass(frozen=True, slots=True)
class Suggestion:
    since_s: float
    is_lasting: bool


class WhomToAsk:
    """At most one call per address is under way, and none sooner than FIRST_RETRY_S after it."""

    def __init__(self) -> None:
        self.suggestions: dict[Target, Suggestion] = {}
        self._tries: dict[Target, Tries] = {}
        self._calls: dict[Address, Call] = {}

    def suggest(self, target: Target, *, now_s: float, is_lasting: bool) -> bool:
        """Take in that the target may answer; False when there is no room for it.

        What was suggested again is asked again soon, however long its back-off had become.
        """
        known = self.suggestions.get(target)
        if known is None and not self._has_room(target):
            return False
        if is_lasting and sum(s.is_lasting for s in self.suggestions.values()) >= MAX_LASTING:
            is_lasting = False
        is_lasting = is_lasting or (known is not None and known.is_lasting)
        self.suggestions[target] = Suggestion(now_s, is_lasting)
        self.hasten(target)
        return True

    def suggested_for(self, node_id: NodeId) -> tuple[Address, ...]:
        return tuple(t.address for t in self.suggestions if t.node_id == node_id)

    def drop(self, address: Address) -> None:
        """Forget an address that turned out to be this device's own."""
        for target in [t for t in self.suggestions if t.address == address]:
            del self.suggestions[target]

    def forget(self, node_id: NodeId, *, with_lasting: bool) -> None:
        """Forget what was suggested for a device that left, or was removed."""
        for target, suggestion in list(self.suggestions.items()):
            if target.node_id == node_id and (with_lasting or not suggestion.is_lasting):
                del self.suggestions[target]

    def tries(self, target: Target) -> Tries:
        return self._tries.get(target) or Tries()

    def hasten(self, target: Target) -> None:
        """Undo the back-off; the next call comes as a heartbeat's would."""
        tries = self._tries.get(target)
        if tries is not None:
            call = self._calls.get(target.address)
            tries.waits = 0
            tries.due_s = min(tries.due_s, call.asked_s + HEARTBEAT_S if call else NEVER_S)

    def answered(self, address: Address, node_id: NodeId, *, now_s: float) -> bool:
        """Take in that the device answered there; False when asked before this device slept."""
        call = self._end(address)
        asked_s = call.asked_s if call else now_s
        anyone = Target(address, None)
        for target in (Target(address, node_id), anyone):
            self._tries[target] = Tries(due_s=asked_s + HEARTBEAT_S)
        if anyone in self.suggestions and not self.suggestions[anyone].is_lasting:
            del self.suggestions[anyone]  # it is known now who that is
        if call is not None and call.target.node_id not in (None, node_id):
            self._take_failure(call.target, Failure.FOREIGN, asked_s=asked_s, now_s=now_s)
        return call is None or not call.is_stale

    def failed(
        self, address: Address, node_id: NodeId | None, how: Failure, *, now_s: float
    ) -> None:
        """Take in that a call brought nothing; the next one waits longer."""
        call = self._end(address)
        target = call.target if call else Target(address, node_id)
        if call is not None and call.is_stale:
            self._tries.setdefault(target, Tries()).due_s = NEVER_S
            return
        self._take_failure(target, how, asked_s=call.asked_s if call else now_s, now_s=now_s)

    def woke(self, *, now_s: float) -> None:
        """Ask everybody anew: calls begun before the sleep say nothing, and end only now."""
        for call in self._calls.values():
            if not call.is_ended:
                call.is_stale = True
                call.asked_s = now_s
        for tries in self._tries.values():
            tries.waits = 0
            tries.due_s = NEVER_S

    def choose(self, wanted: Collection[tuple[Target, Need]], *, now_s: float) -> list[Ask]:
        """Begin the calls that are due: by need, then what was not asked for longest."""
        under_way = [c for c in self._calls.values() if self._is_under_way(c, now_s)]
        strangers = sum(c.need is Need.STRANGER for c in under_way)
        members = sum(c.need in (Need.LIVE, Need.KNOWN) for c in under_way)
        asks = []
        for target, need in sorted(wanted, key=lambda w: (w[1], self._asked_s(w[0].address))):
            if not self._is_due(target, now_s):
                continue
            if need is Need.STRANGER:
                if strangers >= MAX_STRANGER_SEARCHES:
                    continue
                strangers += 1
            elif need is not Need.HEARTBEAT:
                if members >= MAX_MEMBER_SEARCHES:
                    continue
                members += 1
            self._calls[target.address] = Call(target, now_s, need)
            asks.append(
                Ask(
                    address=target.address,
                    node_id=target.node_id,
                    is_heartbeat=need is Need.HEARTBEAT,
                )
            )
        return asks

    def forget_old(self, wanted: Collection[tuple[Target, Need]], *, now_s: float) -> None:
        """Drop old suggestions, and what is known of addresses that nobody wants any more."""
        for target, suggestion in list(self.suggestions.items()):
            is_old = now_s - suggestion.since_s >= FORGET_SUGGESTION_AFTER_S
            if is_old and not suggestion.is_lasting:
                del self.suggestions[target]
        targets = {target for target, _ in wanted}
        places = {target.address for target in targets}
        self._tries = {t: tries for t, tries in self._tries.items() if t in targets}
        self._calls = {
            address: call
            for address, call in self._calls.items()
            if address in places
            or self._is_under_way(call, now_s)
            or now_s - call.asked_s < FIRST_RETRY_S
        }

    def _take_failure(self, target: Target, how: Failure, *, asked_s: float, now_s: float) -> None:
        tries = self._tries.setdefault(target, Tries())
        tries.failures += 1
        tries.refusals = tries.refusals + 1 if how is Failure.REFUSED else 0
        tries.last = how
        tries.failed_s = now_s
        tries.due_s = asked_s + min(FIRST_RETRY_S * 2**tries.waits, MAX_RETRY_S)
        tries.waits = min(tries.waits + 1, 8)

    def _has_room(self, target: Target) -> bool:
        """Make room at the cost of what failed most; nothing untried gives way."""
        of_device = [t for t in self.suggestions if t.node_id == target.node_id]
        if target.node_id is not None and len(of_device) >= MAX_ADDRESSES:
            return self._give_up_one(of_device)
        return len(self.suggestions) < MAX_SUGGESTIONS or self._give_up_one(list(self.suggestions))

    def _give_up_one(self, targets: list[Target]) -> bool:
        failed = [
            (self.tries(target).failures, -number, target)
            for number, target in enumerate(targets)
            if self.tries(target).failures and not self.suggestions[target].is_lasting
        ]
        if failed:
            del self.suggestions[max(failed, key=lambda f: f[:2])[2]]
        return bool(failed)

    def _end(self, address: Address) -> Call | None:
        call = self._calls.get(address)
        if call is None or call.is_ended:
            return None
        call.is_ended = True
        return call

    def _asked_s(self, address: Address) -> float:
        call = self._calls.get(address)
        return call.asked_s if call else NEVER_S

    def _is_due(self, target: Target, now_s: float) -> bool:
        call = self._calls.get(target.address)
        is_free = call is None or not (
            self._is_under_way(call, now_s) or now_s - call.asked_s < FIRST_RETRY_S
        )
        return is_free and self.tries(target).due_s <= now_s

    @staticmethod
    def _is_under_way(call: Call, now_s: float) -> bool:
        return not call.is_ended and now_s - call.asked_s < LOST_AFTER_S
