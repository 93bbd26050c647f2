"""A household on paper: status rows as an agent gives them, and members that say how fast they are.

The members that time layers are servers on loopback that know the answer. For tests only.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from exo_train.agent.live_plan import Asking
from exo_train.agent.planning import Candidate
from exo_train.errors import PeerError
from exo_train.peer import Address
from exo_train.plan.block_times import BlockTimes
from exo_train.train.messages import to_failure
from exo_train.transport.tls import PeerTls
from exo_train.wire.pb import control_pb2 as pb
from exo_train.wire.pb.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server


class Member(ControlServicer):
    """Times a layer in no time, or says why not."""

    def __init__(self, times: BlockTimes | None, reason: str = "") -> None:
        self.times = times
        self.reason = reason
        self.num_asked = 0
        self.was_asked_fresh = False  # in any of the questions

    def Profile(self, request: pb.ProfileRequest, context: Any) -> pb.ProfileReply:  # noqa: N802
        self.num_asked += 1
        self.was_asked_fresh |= request.fresh
        if self.times is None:
            return pb.ProfileReply(failure=to_failure(PeerError(self.reason)))
        return pb.ProfileReply(json=json.dumps(self.times.to_fields()))


@contextlib.contextmanager
def serving(member: Member) -> Iterator[tuple[Address, ...]]:
    """Let it be asked; gives where."""
    server = grpc.server(ThreadPoolExecutor(2))
    add_ControlServicer_to_server(member, server)
    port = server.add_secure_port("127.0.0.1:0", grpc.local_server_credentials())
    server.start()
    try:
        yield (Address("127.0.0.1", port),)
    finally:
        server.stop(None).wait()


class Household:
    """What an agent's status says of devices that come, change and go; the first is its own."""

    def __init__(self, *candidates: Candidate) -> None:
        self.here = {c.name: c for c in candidates}
        self.own = candidates[0].node_id
        self.since_s = dict.fromkeys(self.here, 100.0)
        self.states = dict.fromkeys(self.here, "alive")
        self.notes: list[str] = []
        self.is_away = False  # the agent, which may be starting again

    def come(self, candidate: Candidate, *, since_s: float = 100.0) -> None:
        self.here[candidate.name] = candidate
        self.since_s[candidate.name] = since_s
        self.states[candidate.name] = "alive"

    def go(self, name: str) -> None:
        del self.here[name]

    def asking(self, **changes: Any) -> Asking:
        values: dict[str, Any] = {
            "status": self.status,
            "tls_to": lambda node_id: PeerTls(grpc.local_channel_credentials(), "member"),
            "on_note": self.notes.append,
        }
        return Asking(**{**values, **changes})

    def status(self) -> dict[str, Any]:
        if self.is_away:
            raise PeerError("this home's agent does not answer")
        here = list(self.here.values())
        pairs = [(a, b) for i, a in enumerate(here) for b in here[i + 1 :]]
        return {
            "self": self.own,
            "cluster": "c",
            "members": [self._row(c) for c in here],
            "links": [_link(a, b) for a, b in pairs],
        }

    def _row(self, candidate: Candidate) -> dict[str, Any]:
        return {
            "id": candidate.node_id,
            "name": candidate.name,
            "state": self.states[candidate.name],
            "since_s": self.since_s[candidate.name],
            "unreachable": False,
            "backend": candidate.backend,
            "device": candidate.device,
            "usable_memory_bytes": candidate.usable_memory_bytes,
            "dtypes": list(candidate.dtypes),
            "version": "1",
            "addresses": [str(address) for address in candidate.addresses],
            "wifi_hosts": [],
        }


def _link(a: Candidate, b: Candidate) -> dict[str, Any]:
    return {
        "ends": [{"id": c.node_id, "host": "10.0.0.1"} for c in (a, b)],
        "bytes_per_s": [1e9, 1e9],
        "rtt_s": 2e-4,
        "jitter_s": 0.0,
        "kind": "ethernet",
    }
