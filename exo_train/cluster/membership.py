"""Who is in the cluster: events with times in, effects out.

Owns the rules for alive, suspect, suspended, dead and left, and for what is asked after what.
Pure: no socket, no clock, no randomness. Absence comes from our own calls and heartbeats; mDNS
and gossip only suggest whom to ask (records outlive crashed devices).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from exo_train.cluster.member import (
    DEAD_AFTER_S,
    SUSPECT_AFTER_S,
    Member,
    MemberState,
    after_hello,
    after_silence,
    gone,
    is_copy,
    is_echo,
)
from exo_train.cluster.whom_to_ask import (
    MAX_ADDRESSES,
    NEVER_S,
    Ask,
    Failure,
    Need,
    Target,
    Tries,
    WhomToAsk,
)
from exo_train.peer import Address, DeviceFacts, NodeId

REFUSED_DEAD_AFTER_S = 3.0  # with two refusals where it used to answer: its agent has ended
SLOW_RTT_S = 1.0
ASLEEP_AFTER_S = 6.0  # this long without a tick, this device slept or was stopped
FORGET_AFTER_S = 600.0
MAX_MEMBERS = 64
MAX_PROVEN = 8
MAX_REMOVED = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """State, incarnation, slow or answers differ; before None: new; after None: forgotten."""

    before: Member | None
    after: Member | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicate:
    """Two agents run with one identity: a home folder was copied, or an old one restored."""

    node_id: NodeId
    instance: str  # the one that is not taken in
    addresses: tuple[Address, ...]


Effect = Ask | Changed | Duplicate


class Membership:
    """All times are seconds of one monotonic clock, given by the caller; not thread-safe.

    The caller ticks every 0.5 s, carries out each Ask, and tells its end by `heard(proven=…)` or
    `failed(…)` with the very address. Addresses are as dialled: IPv6 link-local with its zone.
    """

    def __init__(self, self_id: NodeId, *, incarnation: int, instance: str, now_s: float) -> None:
        self.self_id = self_id
        self.incarnation = incarnation
        self.instance = instance
        self.members: dict[NodeId, Member] = {}
        self.duplicates: dict[NodeId, Duplicate] = {}  # as last heard
        self.is_revalidating = False
        self.roster: frozenset[NodeId] = frozenset()  # who belongs here, met or not
        self._whom = WhomToAsk()
        self._pins: dict[NodeId, Address] = {}
        self._removed: set[NodeId] = set()
        self._last_tick_s = now_s
        self._woke_s = NEVER_S

    def live(self) -> list[Member]:
        """Members that count, in id order."""
        return [m for _, m in sorted(self.members.items()) if m.is_live]

    def view(self) -> list[tuple[NodeId, int]]:
        """Node id and incarnation of all that are live, this device included, in id order."""
        others = [(m.facts.node_id, m.incarnation) for m in self.live()]
        return sorted([*others, (self.self_id, self.incarnation)])

    def suggestions(self) -> tuple[Target, ...]:
        return tuple(self._whom.suggestions)

    def suggested(
        self, address: Address, node_id: NodeId | None, *, now_s: float, lasting: bool = False
    ) -> list[Effect]:
        """Take in that an agent may answer at the address; a lasting one is never forgotten."""
        effects = self._notice_sleep(now_s)
        if node_id == self.self_id or node_id in self._removed:
            return effects
        target = Target(address, node_id)
        member = self.members.get(node_id) if node_id is not None else None
        if member is not None and address in (*member.proven, *member.addresses) and not lasting:
            self._whom.hasten(target)
            if member.state is not MemberState.LEFT:
                return effects + self._ask(self._wanted_of(member), now_s)
        if not self._whom.suggest(target, now_s=now_s, is_lasting=lasting):
            return effects
        return effects + self._ask([w for w in self._suggested() if w[0] == target], now_s)

    def heard(
        self,
        facts: DeviceFacts,
        *,
        incarnation: int,
        instance: str,
        addresses: tuple[Address, ...],
        now_s: float,
        proven: Address | None = None,
        rtt_s: float | None = None,
    ) -> list[Effect]:
        """Take in an authentic sign of life: a hello, or the answer of `proven` to ours.

        An echo of an earlier start, or of the time before a goodbye, changes nothing.
        """
        effects = self._notice_sleep(now_s)
        node_id = facts.node_id
        tries = self._whom.tries(Target(proven, node_id)) if proven else None
        is_fresh = proven is not None and self._whom.answered(proven, node_id, now_s=now_s)
        if node_id == self.self_id and instance == self.instance:
            if proven is not None:
                self._whom.drop(proven)
            return effects
        known = self.members.get(node_id)
        # One's own instance was let through above.
        if node_id == self.self_id or (known and is_copy(known, incarnation, instance, now_s)):
            return effects + self._take_copy(node_id, instance, addresses, proven, now_s)
        if node_id in self._removed or (known and is_echo(known, incarnation, now_s)):
            return effects
        if known is None and not self._has_room():
            return effects
        member = after_hello(
            known,
            facts,
            incarnation=incarnation,
            instance=instance,
            addresses=addresses,
            now_s=now_s,
        )
        if proven is not None and tries is not None:
            is_slow = (rtt_s or 0.0) > SLOW_RTT_S
            is_slow |= tries.last in (Failure.SILENT, Failure.ACCEPTED)
            ways = self._with_winner(member, proven)
            member = replace(member, proven=ways, slow=is_slow, answers=True, last_answered_s=now_s)
            if is_fresh:
                self.is_revalidating = False
        effects += self._put(known, member)
        targets = [Target(address, node_id) for address in self._ways_to(member)]
        has_moved = known is None or not known.is_live or known.addresses != member.addresses
        if has_moved or member.met_s == now_s:
            for target in targets:
                if target.address != proven:
                    self._whom.hasten(target)
        return effects + self._ask(self._wanted_of(member), now_s)

    def failed(
        self, address: Address, node_id: NodeId | None, how: Failure, *, now_s: float
    ) -> list[Effect]:
        """Take in that a call brought no hello; other ways to the device are tried at once."""
        effects = self._notice_sleep(now_s)
        self._whom.failed(address, node_id, how, now_s=now_s)
        member = self.members.get(node_id) if node_id is not None else None
        if member is not None:
            effects += self._judge(member, now_s)
            judged = self.members.get(member.facts.node_id)
            # Further failures wait for the tick, where all members' addresses have their turn.
            is_first = self._whom.tries(Target(address, node_id)).failures == 1
            if judged is not None and is_first and address in judged.proven[:1]:
                effects += self._ask(self._wanted_of(judged), now_s)
        self._end_vain_revalidation(now_s)
        return effects

    def left(self, node_id: NodeId, *, incarnation: int, now_s: float) -> list[Effect]:
        """Take in an orderly goodbye; one of an earlier start says nothing."""
        effects = self._notice_sleep(now_s)
        known = self.members.get(node_id)
        if known is None or incarnation < known.incarnation or known.state is MemberState.LEFT:
            return effects
        self._whom.forget(node_id, with_lasting=False)
        leaver = known
        if incarnation > known.incarnation:  # of its instance nothing was heard
            leaver = replace(known, incarnation=incarnation, instance="", met_s=now_s)
        return effects + self._put(known, gone(leaver, MemberState.LEFT, now_s=now_s))

    def removed(self, node_id: NodeId) -> list[Effect]:
        """Take in that the device belongs to the cluster no more; it never comes back."""
        if len(self._removed) < MAX_REMOVED:  # beyond, the transport alone refuses it
            self._removed.add(node_id)
        self._whom.forget(node_id, with_lasting=True)
        self._pins.pop(node_id, None)
        self.duplicates.pop(node_id, None)
        known = self.members.pop(node_id, None)
        return [] if known is None else [Changed(before=known, after=None)]

    def pin(self, node_id: NodeId, address: Address | None) -> None:
        """Ask the member there first, as long as it answers there; None takes the pin away."""
        if address is None:
            self._pins.pop(node_id, None)
        elif node_id in self.members:
            self._pins[node_id] = address

    def woke(self, *, now_s: float, asleep_s: float) -> list[Effect]:
        """Take in that this device slept: the others were not silent, we did not listen.

        Until one of them answers a call begun after the sleep, or none does, we revalidate.
        """
        for node_id, member in self.members.items():
            if member.is_live:
                self.members[node_id] = replace(
                    member,
                    last_heard_s=min(member.last_heard_s + asleep_s, now_s),
                    last_answered_s=min(member.last_answered_s + asleep_s, now_s),
                )
        self._last_tick_s = self._woke_s = now_s
        self._whom.woke(now_s=now_s)
        self.is_revalidating = True
        self._end_vain_revalidation(now_s)
        return self._ask(self._wanted(), now_s)

    def tick(self, *, now_s: float) -> list[Effect]:
        """Let time pass: judge the silent, and ask whoever is due."""
        effects = self._notice_sleep(now_s)
        self._last_tick_s = now_s
        for member in list(self.members.values()):
            effects += self._judge(member, now_s)
        wanted = self._wanted()
        self._whom.forget_old(wanted, now_s=now_s)
        self._end_vain_revalidation(now_s)
        return effects + self._ask(wanted, now_s)

    def _notice_sleep(self, now_s: float) -> list[Effect]:
        """A gap between ticks is our own absence; no silence is judged before it is told."""
        gap_s = now_s - self._last_tick_s
        return self.woke(now_s=now_s, asleep_s=gap_s) if gap_s >= ASLEEP_AFTER_S else []

    def _end_vain_revalidation(self, now_s: float) -> None:
        """End it when every way to every live member was tried since, or has had its time."""
        if self.is_revalidating and now_s - self._woke_s < DEAD_AFTER_S:
            for member in self.live():
                for address in self._ways_to(member):
                    tries = self._whom.tries(Target(address, member.facts.node_id))
                    if tries.failed_s < self._woke_s:
                        return
        self.is_revalidating = False

    def _take_copy(
        self,
        node_id: NodeId,
        instance: str,
        addresses: tuple[Address, ...],
        proven: Address | None,
        now_s: float,
    ) -> list[Effect]:
        if proven is not None:
            self._whom.failed(proven, node_id, Failure.FOREIGN, now_s=now_s)
        is_new = node_id not in self.duplicates
        if is_new and len(self.duplicates) > MAX_MEMBERS:
            return []
        copy = Duplicate(node_id=node_id, instance=instance, addresses=addresses[:MAX_ADDRESSES])
        self.duplicates[node_id] = copy
        return [copy] if is_new else []

    def _has_room(self) -> bool:
        """Make room for a newcomer at the cost of the one that is gone for longest."""
        if len(self.members) < MAX_MEMBERS:
            return True
        absent = [m for m in self.members.values() if not m.is_live]
        if absent:
            del self.members[min(absent, key=lambda m: m.last_heard_s).facts.node_id]
        return bool(absent)

    def _with_winner(self, member: Member, winner: Address) -> tuple[Address, ...]:
        """The first to answer stays first until it fails, or the pinned one answers."""
        node_id = member.facts.node_id
        others = tuple(a for a in member.proven if a != winner)
        keeps_head = (
            bool(others)
            and others[0] == member.proven[0]
            and winner != self._pins.get(node_id)
            and not self._whom.tries(Target(others[0], node_id)).failures
        )
        ordered = (others[0], winner, *others[1:]) if keeps_head else (winner, *others)
        return ordered[:MAX_PROVEN]

    def _ways_to(self, member: Member) -> tuple[Address, ...]:
        """Where it may answer, the likeliest first."""
        node_id = member.facts.node_id
        pinned = [self._pins[node_id]] if node_id in self._pins else []
        suggested = self._whom.suggested_for(node_id)
        ways = dict.fromkeys((*pinned, *member.proven, *member.addresses, *suggested))
        return tuple(ways)[:MAX_ADDRESSES]

    def _wanted_of(self, member: Member) -> list[tuple[Target, Need]]:
        """A live member is asked where it answered last; when that fails, everywhere at once."""
        node_id = member.facts.node_id
        if member.state is MemberState.LEFT:
            return []
        need = Need.LIVE if member.is_live else Need.KNOWN
        if member.is_live and member.proven:
            head = Target(member.proven[0], node_id)
            if not self._whom.tries(head).failures:
                pinned = self._pins.get(node_id, head.address)
                others = [] if pinned == head.address else [(Target(pinned, node_id), need)]
                return [(head, Need.HEARTBEAT), *others]
        return [(Target(address, node_id), need) for address in self._ways_to(member)]

    def _suggested(self) -> list[tuple[Target, Need]]:
        """Suggestions that no live member answers for yet."""
        met = {m.facts.node_id: m.proven for m in self.live() if m.answers}
        places = {address for proven in met.values() for address in proven}
        wanted = []
        for target, suggestion in self._whom.suggestions.items():
            is_met = target.address in places if target.node_id is None else target.node_id in met
            if not is_met:
                belongs = target.node_id in self.members or target.node_id in self.roster
                is_known = suggestion.is_lasting or belongs
                wanted.append((target, Need.KNOWN if is_known else Need.STRANGER))
        return wanted

    def _wanted(self) -> list[tuple[Target, Need]]:
        of_members = [w for m in self.members.values() for w in self._wanted_of(m)]
        wanted = dict(self._suggested())
        wanted.update(of_members)
        return list(wanted.items())

    def _ask(self, wanted: Iterable[tuple[Target, Need]], now_s: float) -> list[Effect]:
        return list(self._whom.choose(list(wanted), now_s=now_s))

    def _judge(self, member: Member, now_s: float) -> list[Effect]:
        after: Member | None
        if member.state in (MemberState.DEAD, MemberState.LEFT):
            after = None if now_s - member.last_heard_s >= FORGET_AFTER_S else member
        elif self._has_ended(member, now_s):
            after = gone(member, MemberState.DEAD, now_s=now_s)
        else:
            tried = self._tried(member).values()
            is_there = any(
                tries.last is Failure.ACCEPTED and now_s - tries.failed_s < DEAD_AFTER_S
                for tries in tried
            )
            after = after_silence(member, takes_connections=is_there, now_s=now_s)
        return self._put(member, after)

    def _has_ended(self, member: Member, now_s: float) -> bool:
        """Tell whether its agent ended: refused twice where it used to answer, and no other way.

        A firewall that rejects us from the start proves nothing: such a member never answered.
        """
        used_to_answer = member.last_heard_s - member.last_answered_s < SUSPECT_AFTER_S
        if now_s - member.last_heard_s < REFUSED_DEAD_AFTER_S or not used_to_answer:
            return False
        tried = self._tried(member)
        last_way, *other_ways = member.proven
        return (
            last_way in tried
            and tried[last_way].refusals >= 2
            and all(way in tried for way in other_ways if way in member.addresses)
            and all(tries.last is not Failure.ACCEPTED for tries in tried.values())
        )

    def _tried(self, member: Member) -> dict[Address, Tries]:
        """Give the ways to the member that failed since it was last heard."""
        node_id = member.facts.node_id
        tried = {way: self._whom.tries(Target(way, node_id)) for way in self._ways_to(member)}
        return {w: tries for w, tries in tried.items() if tries.failed_s >= member.last_heard_s}

    def _put(self, before: Member | None, after: Member | None) -> list[Effect]:
        if after is not None:
            self.members[after.facts.node_id] = after
        elif before is not None:
            del self.members[before.facts.node_id]
            self._pins.pop(before.facts.node_id, None)
        is_same = _what_matters(before) == _what_matters(after)
        return [] if is_same else [Changed(before=before, after=after)]


def _what_matters(member: Member | None) -> tuple[object, ...]:
    return (member.state, member.incarnation, member.slow, member.answers) if member else ()
