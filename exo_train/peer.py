"""Who a device is and what it can do, as frozen values. Pure."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import NewType

from exo_train.errors import ConfigError

NodeId = NewType("NodeId", str)


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """A numeric host (IPv6 link-local with its zone) and a TCP port; names are never dialled."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read HOST:PORT or [IPV6]:PORT; raises ConfigError."""
        host, _, port = text.rpartition(":")
        host = host.strip("[]")
        try:
            ipaddress.ip_address(host.partition("%")[0])
            number = int(port)
        except ValueError:
            number = 0
        if not 0 < number < 65536:
            raise ConfigError(
                f"'{text}' is not HOST:PORT with a numeric host, like 192.168.1.20:52415"
            )
        return cls(host, number)

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
