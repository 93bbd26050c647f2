"""Who a device is and what it can do, as frozen values. Pure."""

from __future__ import annotations

import ipaddress
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NewType

from exo_train.errors import ConfigError

NodeId = NewType("NodeId", str)

SHORT_ID_CHARS = 8

# UAX #9, 2.1 to 2.4: they reorder the text around them on the screen.
BIDI_CONTROLS = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


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
class ComputeDevice:
    """A processor with memory of its own; bytes as in DeviceFacts."""

    device: str  # "cuda:1"
    chip: str
    memory_bytes: int
    free_memory_bytes: int
    usable_memory_bytes: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What a device says of itself; memory in bytes, `free` now, `usable` after its reserve.

    `more_devices` are further GPUs of the same computer: each may take a rank of its own.
    """

    node_id: NodeId
    name: str
    backend: str  # "mlx" or "torch"
    device: str  # "cpu", "cuda:0", "gpu"
    chip: str
    memory_bytes: int
    usable_memory_bytes: int
    dtypes: tuple[str, ...]  # natively supported compute dtypes, best first
    version: str
    free_memory_bytes: int = 0
    more_devices: tuple[ComputeDevice, ...] = ()


def short_id(node_id: str) -> str:
    """Give as much of an id as people are shown, and may type."""
    return node_id[:SHORT_ID_CHARS]


def devices_called(text: str, names: Mapping[NodeId, str]) -> list[NodeId]:
    """Give the devices of that name, else those whose id starts so; `names` by id."""
    by_name = [node_id for node_id, name in names.items() if name == text]
    is_id = len(text) >= SHORT_ID_CHARS
    return by_name or [node_id for node_id in names if is_id and node_id.startswith(text)]


def has_control_characters(text: str) -> bool:
    """Tell whether printing it could move the cursor, break the line or turn the text around.

    Not `str.isprintable`: that refuses joined emoji, and what it knows grows with Python's
    version, so that a new emoji in a name would keep an older device from meeting it.
    """
    return any(
        unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")
        or unicodedata.bidirectional(c) in BIDI_CONTROLS
        for c in text
    )
