"""What `exo-train status --json` says: the same story from every member.

Owns the JSON's shape. Must not ask anything over the network: it puts together what is known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from exo_train.agent.meeting import Meeting
from exo_train.agent.protocol import Introduction
from exo_train.cluster.home import RememberedPeer
from exo_train.cluster.link_facts import PairLink
from exo_train.cluster.member import DEAD_AFTER_S, Member, MemberState
from exo_train.peer import Address, ComputeDevice, DeviceFacts, NodeId, short_id
from exo_train.wire.pb import control_pb2 as pb

STATUS_SCHEMA = 1
# A member of the roster that was not met since this agent started; in no view, and never live.
AWAY = "away"


def describe(
    own: Introduction,
    meeting: Meeting,
    *,
    roster: Iterable[NodeId],
    remembered: Iterable[RememberedPeer],
    links: Iterable[PairLink],
    other_clusters: int,
    worker_pid: int | None,
    age_s: float,
    takeovers: Sequence[str] = (),
) -> dict[str, Any]:
    """Give the contract's `status --json`; members are in id order, this device included."""
    now_s = meeting.now_s()
    members = [member_row(own, own.addresses, state="alive", age_s=age_s)]
    skews_s = meeting.noticed.skews_s()
    for member in meeting.members():
        told = meeting.told(member.facts.node_id)
        if told is not None:
            row = member_row(
                told,
                _in_order(member),
                state=member.state.value,
                age_s=now_s - member.since_s,
                slow=member.slow,
            )
            row["waiting"] = _waiting(member, now_s)
            row["clock_skew_s"] = _rounded(skews_s.get(member.facts.node_id))
            members.append(row)
    met = {row["id"] for row in members}
    names_before = {peer.node_id: peer.name for peer in remembered}
    members += [_away(n, names_before, age_s=age_s) for n in roster if n not in met]
    members.sort(key=lambda row: str(row["id"]))
    names = {NodeId(row["id"]): str(row["name"]) for row in members}
    live = [row for row in members if row["state"] in ("alive", "suspect")]
    runs = _runs(live, own_id=own.facts.node_id, worker_pid=worker_pid)
    return {
        "schema": STATUS_SCHEMA,
        "cluster": meeting.cluster,
        "self": own.facts.node_id,
        "members": members,
        "links": [_link(link, names) for link in links],
        "view_hash": meeting.view_hash(),
        "other_clusters": other_clusters,
        "run": runs[0] if runs else None,
        **({"runs": runs} if len(runs) > 1 else {}),
        **({"takeovers": list(takeovers)} if takeovers else {}),
    }


def member_row(
    told: Introduction,
    addresses: tuple[Address, ...],
    *,
    state: str,
    age_s: float,
    slow: bool = False,
) -> dict[str, Any]:
    """Give one entry of `members`; its memory is the first device's."""
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
        **_device(facts),
        "more_devices": [_device(device) for device in facts.more_devices],
        "version": facts.version,
        "clock_skew_s": 0.0,
        "addresses": [str(address) for address in addresses],
        "wifi_hosts": list(told.wifi_hosts),
        "run": _run_of(told.run),
    }


def _device(device: DeviceFacts | ComputeDevice) -> dict[str, Any]:
    """Give one processor; memory is its own, of no other."""
    return {
        "device": device.device,
        "chip": device.chip,
        "memory_bytes": device.memory_bytes,
        "free_memory_bytes": device.free_memory_bytes,
        "usable_memory_bytes": device.usable_memory_bytes,
        "dtypes": list(device.dtypes),
    }


def _away(node_id: NodeId, names: Mapping[NodeId, str], *, age_s: float) -> dict[str, Any]:
    """Give the row of a member of which nothing is known but that it belongs here."""
    facts = DeviceFacts(
        node_id=node_id,
        name=names.get(node_id, short_id(node_id)),
        backend="",
        device="",
        chip="",
        memory_bytes=0,
        usable_memory_bytes=0,
        dtypes=(),
        version="",
    )
    told = Introduction(facts=facts, incarnation=0, instance="", addresses=())
    return {**member_row(told, (), state=AWAY, age_s=age_s), "clock_skew_s": None}


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
        "coordinator": run.coordinator_id,
        "orphaned": run.orphaned,
        "phase": run.phase,
        "phase_age_s": round(run.phase_age_s, 1),
        "phase_left_s": round(max(0.0, run.phase_limit_s - run.phase_age_s), 1)
        if run.phase_limit_s
        else None,
    }


def _runs(
    rows: list[dict[str, Any]], *, own_id: NodeId, worker_pid: int | None
) -> list[dict[str, Any]]:
    """Put the ranks of each run together, each in its latest generation, the largest run first.

    All members that see the same rows give the same order: between runs of one size the id
    decides, since ages differ from member to member.
    """
    by_run: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["run"] is not None:
            rank = {"name": row["name"], "node_id": row["id"], **row["run"]}
            by_run[rank["id"]].append(rank)
    runs = []
    for run_id, told in by_run.items():
        generation = max(rank["generation"] for rank in told)
        ranks = [rank for rank in told if rank["generation"] == generation]
        is_own = own_id in (rank["node_id"] for rank in ranks)
        runs.append(
            {
                "id": run_id,
                "generation": generation,
                "ranks": sorted(ranks, key=lambda rank: int(rank["rank"])),
                "worker_pid": worker_pid if is_own else None,  # of this device's own part
            }
        )
    return sorted(runs, key=lambda run: (-len(run["ranks"]), run["id"]))


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
