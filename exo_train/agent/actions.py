"""What commands of this home may ask of the running agent.

Owns inviting, removing and leaving as the user means them, and the agent's part of `doctor`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from exo_train.agent.examining import examine
from exo_train.errors import ConfigError
from exo_train.peer import NodeId, devices_called, short_id
from exo_train.train.messages import to_endpoints
from exo_train.wire.pb import control_pb2 as pb

if TYPE_CHECKING:
    from exo_train.agent.agent import Agent


class AgentActions:
    """Implements `local_service.Actions`."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def status_json(self) -> str:
        return json.dumps(self._agent.status())

    def examine_json(self) -> str:
        return json.dumps(examine(self._agent))

    def invite(self) -> pb.InviteReply:
        made = self._agent.invite()
        return pb.InviteReply(
            code=made.code, expires_s=made.expires_s, endpoints=to_endpoints(made.addresses)
        )

    def remove(self, device: str) -> pb.RemoveReply:
        """End another device's membership, and tell all members that are here."""
        node_id = self._find(device)
        name, invited = self._name(node_id), self._agent.admissions.invited_by(node_id)
        invited_names = [self._name(other) for other in invited if other != self._agent.node_id]
        self._agent.admissions.remove(node_id)
        self._agent.meeting.spread_roster()
        return pb.RemoveReply(node_id=node_id, name=name, invited=invited_names)

    def leave(self) -> pb.LeaveReply:
        """End this device's membership: the others are told, its keys deleted, the agent ended."""
        agent = self._agent
        if any(copy.node_id == agent.node_id for copy in agent.meeting.duplicates()):
            raise ConfigError(
                "another device runs with this one's identity, and leaving would end its "
                "membership too; on the copy, end `exo-train join` and run `exo-train leave "
                "--forget`"
            )
        agent.admissions.note_own_removal(agent.node_id)
        told = [self._name(node_id) for node_id in agent.meeting.spread_roster()]
        agent.leave()
        return pb.LeaveReply(told=told)

    def _find(self, device: str) -> NodeId:
        """Give the member of that name, or whose id starts so; raises ConfigError."""
        own = self._agent.introduce().facts
        names = {m: self._name(m) for m in self._agent.admissions.members() if m != own.node_id}
        found = devices_called(device, names)
        if len(found) == 1:
            return found[0]
        if found:
            ids = ", ".join(short_id(node_id) for node_id in found)
            raise ConfigError(
                f"{len(found)} devices are called '{device}'; name one by the start of its id: "
                f"{ids}"
            )
        if devices_called(device, {own.node_id: own.name}):
            raise ConfigError(f"'{device}' is this device; run `exo-train leave` instead")
        listed = ", ".join(f"{name} ({short_id(m)})" for m, name in names.items())
        raise ConfigError(f"no member is called '{device}'; there are: {listed or 'no others'}")

    def _name(self, node_id: NodeId) -> str:
        """Give the name of a member, also of one that is away."""
        told = self._agent.meeting.told(node_id)
        if told is not None:
            return told.facts.name
        return self._agent.home.remembered_names().get(node_id, short_id(node_id))
