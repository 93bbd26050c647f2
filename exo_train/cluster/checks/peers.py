"""What this device and the others find out about each other: reach, identity, versions, clocks.

Owns the sentences about other devices. Pure: the running agent's examination gives the facts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from exo_train.cluster.checks.finding import Finding, Verdict
from exo_train.peer import short_id

CLOCK_SKEW_NOTE_S = 5.0
DOCTOR_THERE = "run `exo-train doctor` on {name}"

# "mute": it takes connections and says nothing. "foreign": something answered, but not as a
# member of this cluster.
DialFailure = Literal["refused", "timed out", "mute", "no route", "foreign"]
DialOutcome = Literal["connected", "refused", "timed out", "no route"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFacts:
    node_id: str
    name: str
    version: str
    state: str  # "alive", "suspect", "suspended", "dead", "left", "away"
    hosts: tuple[str, ...] = ()
    is_self: bool = False
    is_unreachable: bool = False  # it can call, not be called

    @property
    def is_live(self) -> bool:
        return self.state not in ("dead", "left", "away")


@dataclass(frozen=True, slots=True, kw_only=True)
class NotMet:
    """An address where a device should be that could not be met."""

    device: str  # a name, or the start of an id
    address: str
    failure: DialFailure
    is_expected: bool = True  # it announces itself or was named by --peer: not just switched off

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0].strip("[]")


@dataclass(frozen=True, slots=True, kw_only=True)
class NotAnnounced:
    """A member reached by address of which mDNS has told nothing."""

    member: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DialBack:
    """How a member's attempt to connect to this device went."""

    member: str
    address: str  # of this device
    outcome: DialOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicate:
    """Two devices that show the same identity."""

    node_id: str
    addresses: tuple[str, ...]
    is_self: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLine:
    said: str  # as in `status`: both names, kind, speed, trouble
    trouble: str  # empty: none


def check_not_met(failures: Sequence[NotMet], *, is_running: bool) -> list[Finding]:
    """Give each kind of failure its own sentence; "no route" is told with the routes.

    It is wrong of those that should be there; without an agent of one's own (`is_running`),
    nobody is expected.
    """
    found = []
    for failure in failures:
        device, address = failure.device, failure.address
        port = address.rpartition(":")[2]
        there = DOCTOR_THERE.format(name=device)
        if failure.failure == "refused":
            said = (
                f"{device} refuses connections at {address}: nothing listens on port {port} there, "
                f"or its firewall rejects it"
            )
            fix = f"start `exo-train join` on {device}; if it runs, {there}"
        elif failure.failure == "timed out":
            said = (
                f"{device} at {address} does not answer: the connection to port {port} timed out; "
                f"it sleeps or is off, or a firewall there or an access point drops the packets"
            )
            fix = f"wake it up; if it is awake, {there} and let port {port} in"
        elif failure.failure == "mute":
            said = (
                f"{device} takes connections at {address} and then says nothing: its agent is "
                f"stopped or stuck, or large packets are lost on the way (MTU)"
            )
            fix = f"start exo-train anew on {device}; if that does not help, {there}"
        elif failure.failure == "foreign":
            said = f"what answers at {address} is not {device} of this cluster"
            fix = f"if {device} left or was removed, pair it again: exo-train invite"
        else:
            continue
        verdict: Verdict = "wrong" if is_running and failure.is_expected else "note"
        found.append(Finding("not met", verdict, said, fix))
    return found


def check_not_announced(silent: Sequence[NotAnnounced], interfaces: Sequence[str]) -> list[Finding]:
    """Tell of members that are reached by address but never heard by mDNS."""
    where = ", ".join(interfaces) or "this network"
    return [
        Finding(
            "not announced",
            "note",
            f"{s.member} is reached at {s.address} but not announced: no mDNS (UDP 5353) of it is "
            f"heard on {where}; once its address changes it will be lost",
            f"{DOCTOR_THERE.format(name=s.member)} and let UDP 5353 through; until then use "
            f"exo-train join --peer {s.address}",
        )
        for s in silent
    ]


def check_access_point(
    failures: Sequence[NotMet],
    *,
    num_met: int,
    num_heard: int,
    wifi_interfaces: Sequence[str],
    is_running: bool,
) -> list[Finding]:
    """Recognise an access point that keeps its devices apart; `failures` are in its network.

    The sign: on Wi-Fi, mDNS packets come in, but every device's address times out, and none is met.
    """
    if not wifi_interfaces or num_met:
        return []
    silent = [f for f in failures if f.failure in ("timed out", "no route")]
    if not silent or len(silent) < len(failures) or not num_heard:
        return []
    said = (
        f"mDNS is heard on {', '.join(wifi_interfaces)} ({num_heard} packets), but none of "
        f"{len({f.device for f in silent})} known devices can be reached: the access point seems "
        f"to keep its devices apart"
    )
    fix = (
        'switch off "AP isolation" (also "client isolation") in the router\'s Wi-Fi settings, and '
        "do not use its guest network"
    )
    return [Finding("access point", "wrong" if is_running else "note", said, fix)]


def check_reachable(outcomes: Sequence[DialBack], open_lines: str) -> list[Finding]:
    """Judge what the others saw when they dialled this device."""
    if not outcomes:
        said = "no other member could be asked to dial this device"
        return [Finding("reachable", "unknown", said)]
    found = []
    for member in dict.fromkeys(o.member for o in outcomes):
        own = [o for o in outcomes if o.member == member]
        connected = [o.address for o in own if o.outcome == "connected"]
        failed = ", ".join(f"{o.address} ({o.outcome})" for o in own if o.outcome != "connected")
        if connected:
            said = f"{member} can connect to this device at {', '.join(connected)}"
            if failed:
                said += f"; not at {failed}"
            found.append(Finding("reachable", "ok", said))
        else:
            said = f"{member} cannot connect to this device at any of its addresses: {failed}"
            fix = open_lines or "let exo-train's port in, in this device's firewall"
            found.append(Finding("reachable", "wrong", said, fix))
    return found


def check_members(members: Sequence[MemberFacts]) -> list[Finding]:
    """Find members that cannot be called, and names that several of them have."""
    live = [m for m in members if m.is_live]
    found = [
        Finding(
            "members",
            "wrong",
            f"others cannot connect to {m.name}: it can call, not be called, and gets no place "
            f"in a run",
            DOCTOR_THERE.format(name=m.name) if not m.is_self else "see the findings on reach",
        )
        for m in live
        if m.is_unreachable
    ]
    names = [m.name for m in live]
    for name in dict.fromkeys(n for n in names if names.count(n) > 1):
        ids = ", ".join(short_id(m.node_id) for m in live if m.name == name)
        said = f"{names.count(name)} devices are called {name} ({ids}); they are told apart by id"
        found.append(Finding("members", "note", said, "exo-train join --name ANOTHER"))
    others = [m.name for m in live if not m.is_self]
    if others:
        found.append(Finding("members", "ok", f"met: {', '.join(others)}"))
    else:
        said = "no other device of this cluster is here"
        fix = (
            "on another device: exo-train join (the first time with the code of: exo-train invite)"
        )
        found.append(Finding("members", "note", said, fix))
    return found


def check_duplicates(duplicates: Sequence[Duplicate]) -> list[Finding]:
    """Find home folders that were copied to another device, identity and all."""
    found = []
    for duplicate in duplicates:
        at = ", ".join(duplicate.addresses) or "an unknown address"
        whose = "this device's identity" if duplicate.is_self else "one identity"
        said = (
            f"{whose} ({short_id(duplicate.node_id)}) is also used at {at}: the home folder "
            f"of exo-train was copied from one device to another"
        )
        fix = (
            "on the copy, end its exo-train join, then: exo-train leave --forget; then pair it "
            "anew: exo-train join --code CODE"
        )
        found.append(Finding("identity", "wrong", said, fix, "configuration"))
    return found


def check_versions(members: Sequence[MemberFacts], own_version: str) -> list[Finding]:
    """Compare the members' versions with this device's, and the agent's with this command's."""
    found = []
    for member in members:
        if not member.is_live or member.version == own_version:
            continue
        if member.is_self:
            said = (
                f"the agent that runs here is exo-train {member.version}, this command is "
                f"{own_version}: it was not started anew after an upgrade"
            )
            found.append(
                Finding("versions", "wrong", said, "stop the agent and run: exo-train join")
            )
        else:
            said = f"{member.name} has exo-train {member.version}, this device {own_version}"
            newer = max(member.version, own_version, key=_release)
            fix = f"on the older one: pip install 'exo-train=={newer}'"
            found.append(Finding("versions", "wrong", said, fix))
    live = [m for m in members if m.is_live]
    if live and not found:
        found.append(Finding("versions", "ok", f"all members have exo-train {own_version}"))
    return found


def _release(version: str) -> tuple[int, ...]:
    numbers = version.replace("-", ".").split(".")
    return tuple(int(n) for n in numbers if n.isdecimal())


def check_clock(skews_s: Mapping[str, float]) -> list[Finding]:
    """Tell of clocks that differ; nothing depends on them but the reading of logs."""
    found = [
        Finding(
            "clock",
            "note",
            f"the clock of {member} is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'}"
            f" this device's; training does not care, but times in logs will not fit",
            "switch on automatic time in the date settings of both devices",
            "configuration",
        )
        for member, skew_s in skews_s.items()
        if abs(skew_s) > CLOCK_SKEW_NOTE_S
    ]
    if skews_s and not found:
        largest_s = max(abs(skew_s) for skew_s in skews_s.values())
        said = f"all clocks agree within {largest_s:.1f} s"
        found.append(Finding("clock", "ok", said, area="configuration"))
    return found


def check_links(links: Sequence[LinkLine]) -> list[Finding]:
    """Tell of measured links with trouble, like a path that swallows large packets."""
    return [
        Finding(
            "links",
            "wrong" if link.trouble else "ok",
            link.said if link.trouble in link.said else f"{link.said}: {link.trouble}",
            "use another cable, port or network between the two, or name a better interface: "
            "exo-train join --interface NAME"
            if link.trouble
            else "",
        )
        for link in links
    ]


def check_strangers(num_other_clusters: int, refused_calls: Mapping[str, int]) -> list[Finding]:
    """Tell of other clusters on the network and of calls that were refused."""
    found = []
    if num_other_clusters:
        plural = "clusters" if num_other_clusters > 1 else "cluster"
        said = (
            f"{num_other_clusters} other {plural} of exo-train on this network; a device that is "
            f"missing here may belong to one of them"
        )
        fix = "to move a device here: exo-train leave on it, then exo-train join --code CODE"
        found.append(Finding("other clusters", "note", said, fix))
    counts = ", ".join(f"{count} × {why}" for why, count in refused_calls.items() if count)
    if counts:
        said = f"calls from outside the cluster were refused: {counts}"
        found.append(Finding("refused calls", "note", said))
    return found
