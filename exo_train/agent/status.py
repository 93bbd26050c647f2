"""What `exo-train status --json` says: the same story from every member.

Owns the JSON's shape. Must not ask anything over the network: it puts together what is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from exo_train.agent.meeting import Meeting
from exo_train.agent.protocol import Introduction
from exo_train.cluster.link_facts import PairLink
from exo_train.cluster.member import DEAD_AFTER_S, Member, MemberState
from exo_train.peer import Address, NodeId
from exo_train.wire.pb import control_pb2 as pb

STATUS_SCHEMA = 1


def describe(
    own: Introduction,
    meeting: Meeting,
    *,
    links: Iterable[PairLink],
    other_clusters: int,
    worker_pid: int | None,
    age_s: float,
) -> dict[str, Any]:
    """Give the contract's `status --json`; members are in id order, this device included."""
    now_s = meeting.now_s()
    members = [_member(own, own.addresses, state="alive", age_s=age_s)]
    skews_s = meeting.noticed.skews_s()
    for member in meeting.members():
        told = meeting.told(member.facts.node_id)
        if told is not None:
            row = _member(
                told,
                _in_order(member),
                state=member.state.value,
                age_s=now_s - member.since_s,
                slow=member.slow,
            )
            row["waiting"] = _waiting(member, now_s)
            row["clock_skew_s"] = _rounded(skews_s.get(member.facts.node_id))
            members.append(row)
    members.sort(key=lambda row: str(row["id"]))
    names = {NodeId(row["id"]): str(row["name"]) for row in members}
    return {
        "schema": STATUS_SCHEMA,
        "cluster": meeting.cluster,
        "self": own.facts.node_id,
        "members": members,
        "links": [_link(link, names) for link in links],
        "view_hash": meeting.view_hash(),
        "other_clusters": other_clusters,
        "run": _run([row for row in members if row["state"] in ("alive", "suspect")], worker_pid),
    }


def _member(
    told: Introduction,
    addresses: tuple[Address, ...],
    *,
    state: str,
    age_s: float,
    slow: bool = False,
) -> dict[str, Any]:
    facts = told.facts
    return {
        "id": facts.node_id,
        "name": facts.name,
        "state": state,
        "since_s": round(age_s, 1),
        "slow": slow,
        "unreachable": told.unreachable,
        "waiting": "",
        "backend": facts.backend,
        "device": facts.device,
        "chip": facts.chip,
        "memory_bytes": facts.memory_bytes,
        "free_memory_bytes": facts.free_memory_bytes,
        "usable_memory_bytes": facts.usable_memory_bytes,
        "dtypes": list(facts.dtypes),
        "version": facts.version,
        "clock_skew_s": 0.0,
        "addresses": [str(address) for address in addresses],
        "run": _run_of(told.run),
    }


def _in_order(member: Member) -> tuple[Address, ...]:
    """Give what it advertises, where it has answered first."""
    return tuple(dict.fromkeys((*member.proven, *member.addresses)))


def _waiting(member: Member, now_s: float) -> str:
    if member.state is not MemberState.SUSPECT:
        return ""
    silent_s = now_s - member.last_heard_s
    return f"silent for {silent_s:.0f} s; taken as gone in {max(0, DEAD_AFTER_S - silent_s):.0f} s"


def _run_of(run: pb.RunFacts | None) -> dict[str, Any] | None:
    if run is None:
        return None
    return {
        "id": run.run_id,
        "generation": run.generation,
        "rank": run.rank,
        "phase": run.phase,
        "phase_age_s": round(run.phase_age_s, 1),
        "phase_left_s": round(max(0.0, run.phase_limit_s - run.phase_age_s), 1)
        if run.phase_limit_s
        else None,
    }


def _run(rows: list[dict[str, Any]], worker_pid: int | None) -> dict[str, Any] | None:
    """Put the ranks of the run with the latest id together; every member comes to the same."""
    running = [row for row in rows if row["run"] is not None]
    if not running:
        return None
    newest = max((row["run"]["id"], row["run"]["generation"]) for row in running)
    ranks = [
        {"name": row["name"], "node_id": row["id"], **row["run"]}
        for row in running
        if (row["run"]["id"], row["run"]["generation"]) == newest
    ]
    return {
        "id": newest[0],
        "generation": newest[1],
        "ranks": sorted(ranks, key=lambda rank: int(rank["rank"])),
        "worker_pid": worker_pid,  # of this device's own part
    }


def _link(pair: PairLink, names: dict[NodeId, str]) -> dict[str, Any]:
    link = pair.link
    return {
        "ends": [
            {
                "id": pair.measurer_id,
                "name": names.get(pair.measurer_id, ""),
                "host": link.local_host,
            },
            {"id": link.peer_id, "name": names.get(link.peer_id, ""), "host": link.remote_host},
        ],
        "kind": link.kind,
        "interface": link.interface,
        "rtt_s": link.rtt_s,
        "jitter_s": link.jitter_s,
        "bytes_per_s": [link.to_peer_bytes_per_s, link.from_peer_bytes_per_s],
        "trouble": link.trouble,
        "line": pair.line(names),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)
