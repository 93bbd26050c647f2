"""Who a device is and what it can do, as frozen values. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

NodeId = NewType("NodeId", str)


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """A numeric host (IPv6 link-local with its zone) and a TCP port; names are never dialled."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What a device says of itself; memory in bytes, `usable` after its reserve."""

    node_id: NodeId
    name: str
    backend: str  # "mlx" or "torch"
    device: str  # "cpu", "cuda:0", "gpu"
    chip: str
    memory_bytes: int
    usable_memory_bytes: int
    dtypes: tuple[str, ...]  # natively supported compute dtypes, best first
    version: str
