"""What the agent says when something changes among the members, in words for people. Pure."""

from __future__ import annotations

from exo_train.cluster.member import DEAD_AFTER_S, MemberState
from exo_train.cluster.membership import Changed, Duplicate
from exo_train.peer import NodeId, short_id


def changed_sentence(change: Changed) -> str:
    """Say what a change means; empty when it needs no words."""
    before, after = change.before, change.after
    if after is None:
        is_removed = before is not None and before.is_live
        return f"{before.facts.name} is a member no more" if before and is_removed else ""
    name = after.facts.name
    was_here = before is not None and before.is_live
    is_restarted = before is not None and before.incarnation != after.incarnation
    match after.state:
        case MemberState.ALIVE if not was_here or is_restarted:
            facts = after.facts
            gb = facts.usable_memory_bytes / 1e9
            return f"{name} is here: {facts.backend} on {facts.chip}, {gb:.1f} GB usable"
        case MemberState.DEAD:
            silent_s = after.since_s - after.last_heard_s
            if silent_s < DEAD_AFTER_S - 1:
                return f"{name} ended: its machine is there, its agent is not"
            return f"{name} has not answered for {DEAD_AFTER_S:.0f} s: taken as gone"
        case MemberState.SUSPENDED:
            return (
                f"{name} has not answered for {DEAD_AFTER_S:.0f} s though its machine takes "
                f"connections: its agent is stopped, stuck or asleep"
            )
        case MemberState.LEFT:
            return f"{name} left"
        case _ if before is not None and after.slow and not before.slow:
            return f"{name} answers slowly (busy, or a poor link); it stays a member"
        case _:
            return ""


def duplicate_sentence(copy: Duplicate, self_id: NodeId) -> str:
    where = ", ".join(str(address) for address in copy.addresses) or "an unknown address"
    if copy.node_id == self_id:
        return (
            f"another device runs with this one's identity ({where}): its home folder was copied; "
            f"on the copy, end `exo-train join`, run `exo-train leave --forget`, and pair it anew "
            f"with a code"
        )
    return (
        f"two devices run with the identity {short_id(copy.node_id)} ({where}): a home folder was "
        f"copied; on the copy, end `exo-train join`, run `exo-train leave --forget`, and pair it "
        f"anew with a code"
    )


def skew_sentence(name: str, skew_s: float) -> str:
    way = "ahead of" if skew_s > 0 else "behind"
    return (
        f"the clock of {name} is {abs(skew_s):.0f} s {way} this device's; nothing here depends on "
        f"it, but let both set their time automatically"
    )
