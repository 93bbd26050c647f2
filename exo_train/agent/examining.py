"""What this running agent tells `exo-train doctor` of itself.

Owns the gathering; the JSON's shape is examination's, the judgement the checks'.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import psutil

from exo_train.agent.examination import (
    EXAMINATION_SCHEMA,
    DuplicateSeen,
    Examination,
    InterfaceSeen,
    Limits,
    LinkSeen,
    NotMetSeen,
)
from exo_train.cluster.checks.peers import DialBack, DialFailure, NotAnnounced
from exo_train.cluster.interfaces import local_addresses
from exo_train.cluster.member import MemberState
from exo_train.cluster.whom_to_ask import Failure
from exo_train.peer import Address, short_id

if TYPE_CHECKING:
    from exo_train.agent.agent import Agent

_LEFT = MemberState.LEFT
FAILURES: dict[Failure, DialFailure] = {
    Failure.REFUSED: "refused",
    Failure.ACCEPTED: "mute",
    Failure.SILENT: "timed out",
    Failure.NO_ROUTE: "no route",
    Failure.FOREIGN: "foreign",
}


def examine(agent: Agent) -> Examination:
    """Put together what only the running agent knows."""
    heard, now_s = agent.announcer.heard(), time.monotonic()
    status = agent.status()
    names = {row["id"]: row["name"] for row in status["members"]}
    announced = {seen.node_id for seen in heard.seen}
    # Met at another address, gone with a goodbye, or removed.
    not_missed = {m.facts.node_id for m in agent.meeting.members() if m.answers or m.state is _LEFT}
    not_missed |= set(agent.admissions.removed())
    content: Examination = {
        "schema": EXAMINATION_SCHEMA,
        "status": status,
        "interfaces": _interfaces(agent),
        "multicast": {name: asdict(counts) for name, counts in heard.interfaces.items()},
        "multicast_left_out": dict(heard.left_out),
        "other_clusters": len(heard.other_clusters),
        "seen_but_not_met": [
            NotMetSeen(
                node_id=one.node_id or "",
                address=str(one.address),
                failure=FAILURES[one.failure],
                age_s=now_s - one.failed_s,
                is_expected=not one.node_id or one.node_id in announced,
            )
            for one in agent.meeting.noticed.not_met()
            if one.node_id not in not_missed
        ],
        "not_announced": [
            asdict(NotAnnounced(member=m.facts.name, address=str(m.proven[0])))
            for m in agent.meeting.live()
            if m.proven and m.facts.node_id not in announced
        ],
        "dial_back": [
            asdict(DialBack(member=one.member, address=str(one.address), outcome=one.outcome))
            for one in agent.survey.dial_backs()
        ],
        "clock_skew_s": {
            names.get(node_id, node_id): skew_s
            for node_id, skew_s in agent.meeting.noticed.skews_s().items()
        },
        "duplicates": _duplicates(agent, heard.copies),
        "links": [
            *(LinkSeen(line=row["line"], trouble=row["trouble"]) for row in status["links"]),
            *_stuck(agent, names),
        ],
        "refused_calls": {**agent.gate.counts(), **_strangers(agent)},
        "limits": _limits(),
    }
    return content


def _interfaces(agent: Agent) -> list[InterfaceSeen]:
    used = {address.host for address in agent.device.usable()}
    return [
        InterfaceSeen(
            interface=a.interface,
            host=a.host,
            kind=a.kind,
            is_used=a.host in used,
            reason="" if a.host in used else a.reason or "another one is named",
        )
        for a in local_addresses()
    ]


def _duplicates(agent: Agent, copies: tuple[Address, ...]) -> list[DuplicateSeen]:
    """Give copied home folders: those that answered, and those that only mDNS told of."""
    found = [
        DuplicateSeen(
            node_id=copy.node_id,
            addresses=[str(address) for address in copy.addresses],
            is_self=copy.node_id == agent.node_id,
        )
        for copy in agent.meeting.duplicates()
    ]
    if copies and not any(one["is_self"] for one in found):
        addresses = [str(address) for address in copies]
        found.append(DuplicateSeen(node_id=agent.node_id, addresses=addresses, is_self=True))
    return found


def _stuck(agent: Agent, names: dict[str, str]) -> list[LinkSeen]:
    return [
        LinkSeen(line=f"{names.get(node_id, short_id(node_id))} at {address}", trouble=why)
        for (node_id, address), why in agent.survey.stuck().items()
    ]


def _strangers(agent: Agent) -> dict[str, int]:
    return {f"connections from {host}": count for host, count in agent.strangers.counts().items()}


def _limits() -> Limits:
    process = psutil.Process()
    if sys.platform == "win32":
        return Limits(open_files=process.num_handles(), open_files_limit=None)
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = None if soft == resource.RLIM_INFINITY else soft
    return Limits(open_files=process.num_fds(), open_files_limit=limit)
