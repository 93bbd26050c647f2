"""Numbers both ends of the control plane agree on, and facts to and from protobuf."""

from __future__ import annotations

import math
from dataclasses import dataclass

import exo_train
from exo_train.cluster.hardware import MAX_OVERRIDE_FACTOR
from exo_train.errors import ProtocolError
from exo_train.identity import is_node_id
from exo_train.peer import Address, ComputeDevice, DeviceFacts, NodeId, has_control_characters
from exo_train.train.messages import from_endpoints, to_endpoints
from exo_train.wire.pb import control_pb2 as pb
from exo_train.wire.pb import handshake_pb2

PROTOCOL_VERSION = 6
FEATURES: tuple[str, ...] = ()
TOKEN_METADATA = "exo-train-token"
HEARTBEAT_S = 2.0
HELLO_TIMEOUT_S = 2.0
MAX_TEXT_CHARS = 200
MAX_ENDPOINTS = 32
MAX_DTYPES = 8
MAX_LINKS = 64
MAX_ENDED = 16
MAX_MORE_DEVICES = 16
MAX_FACTS_BYTES = 64 << 10  # they are told on to all others


def greeting(
    *, node_id: str = "", instance: str = "", certificate: bytes = b""
) -> handshake_pb2.Greeting:
    """Make this version's part of the frozen handshake; before pairing the rest stays empty."""
    return handshake_pb2.Greeting(
        protocol=PROTOCOL_VERSION,
        build=exo_train.__version__,
        features=FEATURES,
        node_id=node_id,
        instance=instance,
        certificate=certificate,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """All that a device says of itself in a hello; `run` and `links` are as they came."""

    facts: DeviceFacts
    incarnation: int
    instance: str
    addresses: tuple[Address, ...]
    run: pb.RunFacts | None = None
    unreachable: bool = False
    links: tuple[pb.LinkFacts, ...] = ()
    wifi_hosts: tuple[str, ...] = ()
    ended_runs: tuple[pb.EndedRun, ...] = ()


def to_node_facts(own: Introduction) -> pb.NodeFacts:
    facts = own.facts
    return pb.NodeFacts(
        node_id=facts.node_id,
        name=facts.name,
        backend=facts.backend,
        device=facts.device,
        chip=facts.chip,
        memory_bytes=facts.memory_bytes,
        free_memory_bytes=facts.free_memory_bytes,
        usable_memory_bytes=facts.usable_memory_bytes,
        dtypes=facts.dtypes,
        version=facts.version,
        incarnation=own.incarnation,
        instance=own.instance,
        endpoints=to_endpoints(own.addresses),
        run=own.run,
        unreachable=own.unreachable,
        links=own.links,
        wifi_hosts=own.wifi_hosts,
        ended_runs=own.ended_runs,
        more_devices=[_to_compute_device(device) for device in facts.more_devices],
    )


def from_node_facts(message: pb.NodeFacts) -> Introduction:
    """Read what a device says of itself; raises ProtocolError when it makes no sense."""
    texts = (message.name, message.backend, message.version, message.instance)
    devices: list[pb.NodeFacts | pb.ComputeDevice] = [message, *message.more_devices]
    if (
        message.ByteSize() > MAX_FACTS_BYTES
        or not is_node_id(message.node_id)
        or any(not _is_shown(text) for text in texts)
        or len(message.endpoints) > MAX_ENDPOINTS
        or len(message.links) > MAX_LINKS
        or len(message.wifi_hosts) > MAX_ENDPOINTS
        or not all(map(_is_shown, message.wifi_hosts))
        or len(message.more_devices) > MAX_MORE_DEVICES
        or not all(_is_possible(device) for device in devices)
        or len({device.device for device in devices}) < len(devices)
        or not _makes_sense(message.run)
    ):
        raise ProtocolError("a device sent facts about itself that make no sense")
    facts = DeviceFacts(
        node_id=NodeId(message.node_id),
        name=message.name,
        backend=message.backend,
        device=message.device,
        chip=message.chip,
        memory_bytes=message.memory_bytes,
        free_memory_bytes=message.free_memory_bytes,
        usable_memory_bytes=message.usable_memory_bytes,
        dtypes=tuple(message.dtypes),
        version=message.version,
        more_devices=tuple(_from_compute_device(device) for device in message.more_devices),
    )
    return Introduction(
        facts=facts,
        incarnation=message.incarnation,
        instance=message.instance,
        addresses=from_endpoints(message.endpoints),
        run=message.run if message.HasField("run") else None,
        unreachable=message.unreachable,
        links=tuple(message.links),
        wifi_hosts=tuple(message.wifi_hosts),
        ended_runs=tuple(message.ended_runs[:MAX_ENDED]),
    )


def _to_compute_device(device: ComputeDevice) -> pb.ComputeDevice:
    return pb.ComputeDevice(
        device=device.device,
        chip=device.chip,
        memory_bytes=device.memory_bytes,
        free_memory_bytes=device.free_memory_bytes,
        usable_memory_bytes=device.usable_memory_bytes,
        dtypes=device.dtypes,
    )


def _from_compute_device(message: pb.ComputeDevice) -> ComputeDevice:
    return ComputeDevice(
        device=message.device,
        chip=message.chip,
        memory_bytes=message.memory_bytes,
        free_memory_bytes=message.free_memory_bytes,
        usable_memory_bytes=message.usable_memory_bytes,
        dtypes=tuple(message.dtypes),
    )


def _is_possible(device: pb.NodeFacts | pb.ComputeDevice) -> bool:
    return (
        all(_is_shown(text) for text in (device.device, device.chip, *device.dtypes))
        and len(device.dtypes) <= MAX_DTYPES
        and device.usable_memory_bytes <= device.memory_bytes * MAX_OVERRIDE_FACTOR
    )


def _is_shown(text: str) -> bool:
    return len(text) <= MAX_TEXT_CHARS and not has_control_characters(text)


def _makes_sense(run: pb.RunFacts) -> bool:
    seconds = (run.phase_age_s, run.phase_limit_s)
    return (
        _is_shown(run.run_id)
        and _is_shown(run.phase)
        and _is_shown(run.coordinator_id)
        and all(math.isfinite(value) and value >= 0 for value in seconds)
    )
