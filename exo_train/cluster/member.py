"""One member as this device sees it, and how a hello, silence or a goodbye changes that.

Owns the states and their times. Must not know addresses' back-off (whom_to_ask.py) nor the other
members (membership.py). Pure: no socket, no clock, no randomness.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

from exo_train.cluster.whom_to_ask import MAX_ADDRESSES, NEVER_S
from exo_train.peer import Address, DeviceFacts, NodeId

SUSPECT_AFTER_S = 6.0  # three heartbeats missed
DEAD_AFTER_S = 15.0
# A hello sent just before the goodbye may come in this much later; it must not undo it.
LEFT_ECHO_S = 5.0
# One sent before a restart may, too; a lower incarnation later than this is a second device.
RESTART_ECHO_S = 15.0


class MemberState(enum.Enum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    SUSPENDED = "suspended"  # silent, but its machine takes connections
    DEAD = "dead"
    LEFT = "left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    facts: DeviceFacts
    incarnation: int
    instance: str  # empty: only its goodbye was heard
    addresses: tuple[Address, ...]  # as the member advertises them
    proven: tuple[Address, ...]  # where it answered with its own id; the first one is asked
    state: MemberState
    since_s: float  # of the state; a suspect counts as alive
    met_s: float  # when this incarnation was first heard
    last_heard_s: float
    last_answered_s: float  # a call of ours, not a hello of its own
    slow: bool  # live, but its answers take long, or several calls
    answers: bool  # calls of ours; False while only its own hellos come (one-way link, NAT)

    @property
    def is_live(self) -> bool:
        return self.state in (MemberState.ALIVE, MemberState.SUSPECT)


def after_hello(
    known: Member | None,
    facts: DeviceFacts,
    *,
    incarnation: int,
    instance: str,
    addresses: tuple[Address, ...],
    now_s: float,
) -> Member:
    """Give the member alive; where an earlier start answered, another process may be now."""
    is_same = known is not None and (known.incarnation, known.instance) == (incarnation, instance)
    same = known if is_same else None
    return Member(
        facts=facts,
        incarnation=incarnation,
        instance=instance,
        addresses=addresses[:MAX_ADDRESSES],
        proven=same.proven if same else (),
        state=MemberState.ALIVE,
        since_s=same.since_s if same and same.is_live else now_s,
        met_s=same.met_s if same else now_s,
        last_heard_s=now_s,
        last_answered_s=same.last_answered_s if same else NEVER_S,
        slow=bool(same and same.slow),
        answers=bool(same and same.answers),
    )


def after_silence(member: Member, *, takes_connections: bool, now_s: float) -> Member:
    """Give its state after this much silence; only a hello makes one that is gone live again."""
    silent_s = now_s - member.last_heard_s
    if silent_s >= DEAD_AFTER_S:
        state = MemberState.SUSPENDED if takes_connections else MemberState.DEAD
        return gone(member, state, now_s=now_s)
    return replace(
        member,
        state=MemberState.SUSPECT if silent_s >= SUSPECT_AFTER_S else MemberState.ALIVE,
        answers=now_s - member.last_answered_s < SUSPECT_AFTER_S,
    )


def gone(member: Member, state: MemberState, *, now_s: float) -> Member:
    """Give the member suspended, dead or left."""
    if member.state is state:
        return member
    return replace(member, state=state, since_s=now_s, slow=False, answers=False)


def is_echo(known: Member, incarnation: int, now_s: float) -> bool:
    """Tell whether a hello is of an earlier start, or of before a goodbye."""
    if is_long_gone(known, now_s):
        return False
    if incarnation == known.incarnation and known.state is MemberState.LEFT:
        return True
    return incarnation < known.incarnation


def is_long_gone(known: Member, now_s: float) -> bool:
    """Tell whether nothing of what it said can still be on the way."""
    return not known.is_live and now_s - known.since_s >= LEFT_ECHO_S


def is_copy(known: Member, incarnation: int, instance: str, now_s: float) -> bool:
    """Tell whether a second agent runs with this identity; starts never share an incarnation.

    When the one that was taken in is long gone, the other is taken in: a copy may have been ended,
    or the home restored from a backup, which counts anew.
    """
    if is_long_gone(known, now_s):
        return False
    if incarnation == known.incarnation:
        return known.instance not in ("", instance)
    return incarnation < known.incarnation and now_s - known.met_s >= RESTART_ECHO_S


def view_hash(view: Iterable[tuple[NodeId, int]]) -> str:
    """Digest of (node id, incarnation) of all live members, oneself included."""
    text = "\n".join(f"{node_id} {incarnation}" for node_id, incarnation in sorted(view))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
