"""What a running agent tells `exo-train doctor` of itself, and how it is read.

Owns the shape of that JSON (Local.Examine) and its translation into the facts of the checks.
Must not judge: `exo_train.cluster.checks` does. An agent of another version may lack keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from exo_train.cluster.checks.network import InterfaceFacts, MulticastFacts
from exo_train.cluster.checks.peers import (
    DialBack,
    DialFailure,
    Duplicate,
    LinkLine,
    MemberFacts,
    NotAnnounced,
    NotMet,
)
from exo_train.peer import Address, short_id

EXAMINATION_SCHEMA = 1
# What could not be met long ago has moved on, or was switched off.
RECENT_FAILURE_S = 300.0


class InterfaceSeen(TypedDict):
    """One address of this device, as the agent judges it."""

    interface: str
    host: str
    kind: str
    is_used: bool
    reason: str  # why it is not used; empty when it is


class NotMetSeen(TypedDict):
    """A device that was suggested (mDNS, remembered, --peer), but could not be met."""

    node_id: str  # empty: not known
    address: str
    failure: DialFailure
    age_s: float  # since the last try
    is_expected: bool  # mDNS tells of it, or --peer named it; else it may just be off


class DuplicateSeen(TypedDict):
    node_id: str
    addresses: list[str]
    is_self: bool


class LinkSeen(TypedDict):
    line: str  # as in `status`: "studio ⇄ laptop  Thunderbolt  1.9 GB/s  0.4 ms"
    trouble: str  # a sentence; empty: none


class Limits(TypedDict):
    open_files: int
    open_files_limit: int | None  # None: the system has none


class Examination(TypedDict):
    """The JSON of Local.Examine; plain rows are the fields of the dataclass that they name."""

    schema: int  # EXAMINATION_SCHEMA
    status: dict[str, Any]  # as `status --json`; members may have "unreachable": true
    interfaces: list[InterfaceSeen]
    multicast: dict[str, dict[str, int]]  # by interface: multicast.MulticastCounts
    multicast_left_out: dict[str, str]  # where mDNS could not be opened → why
    other_clusters: int
    seen_but_not_met: list[NotMetSeen]
    not_announced: list[dict[str, str]]  # NotAnnounced
    dial_back: list[dict[str, str]]  # DialBack
    clock_skew_s: dict[str, float]  # by member name; positive: its clock is ahead of ours
    duplicates: list[DuplicateSeen]
    links: list[LinkSeen]
    refused_calls: dict[str, int]  # by reason, in words
    limits: Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFacts:
    """An Examination as the checks take it."""

    members: tuple[MemberFacts, ...]
    interfaces: tuple[InterfaceFacts, ...]
    multicast: Mapping[str, MulticastFacts]
    multicast_left_out: Mapping[str, str]
    num_other_clusters: int
    not_met: tuple[NotMet, ...]
    not_announced: tuple[NotAnnounced, ...]
    dial_back: tuple[DialBack, ...]
    clock_skew_s: Mapping[str, float]
    duplicates: tuple[Duplicate, ...]
    links: tuple[LinkLine, ...]
    refused_calls: Mapping[str, int]
    open_files: int | None
    open_files_limit: int | None


def read_examination(content: Mapping[str, Any]) -> AgentFacts:
    """Translate; devices are named as people know them, ids are cut short."""
    status = content.get("status", {})
    rows = status.get("members", [])
    names = {row["id"]: row["name"] for row in rows}
    limits = content.get("limits", {})
    return AgentFacts(
        members=tuple(_member(row, own_id=status.get("self", "")) for row in rows),
        interfaces=tuple(InterfaceFacts(**row) for row in content.get("interfaces", [])),
        multicast={
            name: MulticastFacts(**counts) for name, counts in content.get("multicast", {}).items()
        },
        multicast_left_out=content.get("multicast_left_out", {}),
        num_other_clusters=content.get("other_clusters", 0),
        not_met=tuple(
            NotMet(
                device=names.get(row["node_id"], short_id(row["node_id"]) or "a device"),
                address=row["address"],
                failure=row["failure"],
                is_expected=row.get("is_expected", True),
            )
            for row in content.get("seen_but_not_met", [])
            if row.get("age_s", 0.0) <= RECENT_FAILURE_S
        ),
        not_announced=tuple(NotAnnounced(**row) for row in content.get("not_announced", [])),
        dial_back=tuple(DialBack(**row) for row in content.get("dial_back", [])),
        clock_skew_s=content.get("clock_skew_s", {}),
        duplicates=tuple(
            Duplicate(
                node_id=row["node_id"],
                addresses=tuple(row["addresses"]),
                is_self=row["is_self"],
            )
            for row in content.get("duplicates", [])
        ),
        links=tuple(
            LinkLine(said=row["line"], trouble=row["trouble"]) for row in content.get("links", [])
        ),
        refused_calls=content.get("refused_calls", {}),
        open_files=limits.get("open_files"),
        open_files_limit=limits.get("open_files_limit"),
    )


def _member(row: Mapping[str, Any], *, own_id: str) -> MemberFacts:
    return MemberFacts(
        node_id=row["id"],
        name=row["name"],
        version=row.get("version", ""),
        state=row["state"],
        hosts=tuple(Address.parse(text).host for text in row.get("addresses", [])),
        is_self=row["id"] == own_id,
        is_unreachable=bool(row.get("unreachable", False)),
    )
