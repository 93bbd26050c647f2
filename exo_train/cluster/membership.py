"""Who is in the cluster, as a pure table: events with times in, states out.

Owns the rules for alive, suspect and dead. Pure: no socket, no clock, no randomness. Absence
comes from our own heartbeat; mDNS only suggests whom to ask (records outlive crashed devices).
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field, replace

from exo_train.peer import Address, DeviceFacts, NodeId

SUSPECT_AFTER_S = 6.0  # three heartbeats missed
DEAD_AFTER_S = 15.0
FORGET_AFTER_S = 600.0
MAX_MEMBERS = 64
# A hello sent just before the goodbye may come in this much later; it must not undo it.
LEFT_ECHO_S = 5.0


class MemberState(enum.Enum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    facts: DeviceFacts
    incarnation: int
    addresses: tuple[Address, ...]  # as the member advertises them
    proven: tuple[Address, ...]  # where it answered us with its own id, latest first
    state: MemberState
    since_s: float
    last_heard_s: float


@dataclass(slots=True)
class MembershipTable:
    """All times are seconds of one monotonic clock, given by the caller."""

    self_id: NodeId
    members: dict[NodeId, Member] = field(default_factory=dict)

    def heard(
        self,
        facts: DeviceFacts,
        *,
        incarnation: int,
        addresses: tuple[Address, ...],
        proven: Address | None,
        now_s: float,
    ) -> bool:
        """Take in an authentic sign of life; True when the member is new or came back.

        A lower incarnation is an echo of an earlier start and is ignored; so is the same one
        for a moment after its goodbye.
        """
        node_id = facts.node_id
        if node_id == self.self_id:
            return False
        known = self.members.get(node_id)
        if known is None and len(self.members) >= MAX_MEMBERS:
            return False
        if known and _is_echo(known, incarnation, now_s):
            return False
        was_live = known is not None and known.state in (MemberState.ALIVE, MemberState.SUSPECT)
        restarted = known is not None and incarnation > known.incarnation
        earlier = known.proven if known and not restarted else ()
        if proven is not None:
            earlier = (proven, *(a for a in earlier if a != proven))[:8]
        self.members[node_id] = Member(
            facts=facts,
            incarnation=incarnation,
            addresses=addresses,
            proven=earlier,
            state=MemberState.ALIVE,
            since_s=known.since_s if known and was_live and not restarted else now_s,
            last_heard_s=now_s,
        )
        return not was_live or restarted

    def left(self, node_id: NodeId, *, now_s: float) -> bool:
        """Take in an orderly goodbye; True when it changed something."""
        known = self.members.get(node_id)
        if known is None or known.state is MemberState.LEFT:
            return False
        self.members[node_id] = replace(known, state=MemberState.LEFT, since_s=now_s)
        return True

    def tick(self, *, now_s: float) -> list[Member]:
        """Let time pass; gives the members whose state changed."""
        changed = []
        for node_id, member in list(self.members.items()):
            silent_s = now_s - member.last_heard_s
            state = member.state
            if state in (MemberState.ALIVE, MemberState.SUSPECT):
                if silent_s >= DEAD_AFTER_S:
                    state = MemberState.DEAD
                elif silent_s >= SUSPECT_AFTER_S:
                    state = MemberState.SUSPECT
            elif silent_s >= FORGET_AFTER_S:
                del self.members[node_id]
                continue
            if state is not member.state:
                since_s = member.since_s if state is MemberState.SUSPECT else now_s
                self.members[node_id] = replace(member, state=state, since_s=since_s)
                changed.append(self.members[node_id])
        return changed

    def live(self) -> list[Member]:
        """Members that answered lately, in id order."""
        wanted = (MemberState.ALIVE, MemberState.SUSPECT)
        return [m for _, m in sorted(self.members.items()) if m.state in wanted]


def _is_echo(known: Member, incarnation: int, now_s: float) -> bool:
    if incarnation == known.incarnation and known.state is MemberState.LEFT:
        return now_s - known.since_s < LEFT_ECHO_S
    return incarnation < known.incarnation


def view_hash(ids: list[tuple[NodeId, int]]) -> str:
    """Digest of (node id, incarnation) of all live members, oneself included."""
    text = "\n".join(f"{node_id} {incarnation}" for node_id, incarnation in sorted(ids))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
