"""Numbers both ends of the control plane agree on, and facts to and from protobuf."""

from __future__ import annotations

from exo_train.cluster.hardware import MAX_OVERRIDE_FACTOR
from exo_train.errors import ProtocolError
from exo_train.peer import Address, DeviceFacts, NodeId, has_control_characters
from exo_train.train.messages import from_endpoints, to_endpoints
from exo_train.wire.pb import control_pb2 as pb

PROTOCOL_VERSION = 1
TOKEN_METADATA = "exo-train-token"
HEARTBEAT_S = 2.0
HELLO_TIMEOUT_S = 2.0
MAX_TEXT_CHARS = 200
MAX_ENDPOINTS = 32


def to_node_facts(
    facts: DeviceFacts, *, incarnation: int, addresses: tuple[Address, ...]
) -> pb.NodeFacts:
    return pb.NodeFacts(
        node_id=facts.node_id,
        name=facts.name,
        backend=facts.backend,
        device=facts.device,
        chip=facts.chip,
        memory_bytes=facts.memory_bytes,
        usable_memory_bytes=facts.usable_memory_bytes,
        dtypes=facts.dtypes,
        version=facts.version,
        incarnation=incarnation,
        endpoints=to_endpoints(addresses),
    )


def from_node_facts(message: pb.NodeFacts) -> tuple[DeviceFacts, int, tuple[Address, ...]]:
    """Give facts, incarnation and addresses; raises ProtocolError when they make no sense."""
    texts = (message.name, message.backend, message.device, message.chip, message.version)
    if (
        len(message.node_id) != 32
        or any(len(text) > MAX_TEXT_CHARS or has_control_characters(text) for text in texts)
        or len(message.dtypes) > 8
        or len(message.endpoints) > MAX_ENDPOINTS
        or message.usable_memory_bytes > message.memory_bytes * MAX_OVERRIDE_FACTOR
    ):
        raise ProtocolError("a device sent facts about itself that make no sense")
    facts = DeviceFacts(
        node_id=NodeId(message.node_id),
        name=message.name,
        backend=message.backend,
        device=message.device,
        chip=message.chip,
        memory_bytes=message.memory_bytes,
        usable_memory_bytes=message.usable_memory_bytes,
        dtypes=tuple(message.dtypes),
        version=message.version,
    )
    return facts, message.incarnation, from_endpoints(message.endpoints)
