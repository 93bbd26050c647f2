"""This device as it tells others of itself: name, hardware, and where it can be reached.

Owns the options of `join` that describe the device. Must not talk to anybody.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import exo_train
from exo_train.cluster.hardware import Hardware, detect
from exo_train.cluster.home import Home
from exo_train.cluster.interface_kinds import WI_FI
from exo_train.cluster.interfaces import (
    LocalAddress,
    interface_towards,
    listen_hosts,
    usable_addresses,
)
from exo_train.errors import ConfigError
from exo_train.peer import Address, DeviceFacts, NodeId

LOOPBACK = "127.0.0.1"
MAX_ADDRESSES = 8  # that others are told


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """The options of `exo-train join`; None and "auto" mean: find out."""

    name: str | None = None
    peers: tuple[Address, ...] = ()
    interface: str | None = None
    port: int = 0
    memory_bytes: int | None = None
    backend: str = "auto"
    device: str = "auto"
    discover: bool = True


class OwnDevice:
    """Asks anew each time: free memory and addresses change. `port` is set once it is known.

    Raises ConfigError at once when a name, backend, device or interface is wrong.
    """

    def __init__(self, home: Home, options: JoinOptions) -> None:
        self.port = 0
        self._options = options
        self.name = home.device_name(options.name)
        self._detect()
        _ = self.listen_hosts

    def facts(self, node_id: NodeId) -> DeviceFacts:
        return facts_of(self._detect(), node_id=node_id, name=self.name)

    def offered(self) -> dict[str, bool]:
        """Give the devices that a run may use, and whether the user said how much of each."""
        return offered(self._detect(), is_told=self._options.memory_bytes is not None)

    @property
    def listen_hosts(self) -> tuple[str, ...]:
        """Give the hosts to bind; raises ConfigError while a named interface is away."""
        return listen_hosts(self._options.interface)

    def usable(self) -> list[LocalAddress]:
        """Give the addresses to tell, best first; none while the named interface is away."""
        with contextlib.suppress(ConfigError, OSError):
            return usable_addresses(self._options.interface)
        return []

    def may_dial(self, address: Address) -> bool:
        """Tell whether the way there leaves by the interface that `--interface` names, if any."""
        named = self._options.interface
        if named is None:
            return True
        own = interface_towards(address.host)
        return own is not None and own.is_called(named)

    def hosts(self) -> tuple[str, ...]:
        """Give where others reach this device; its loopback while it has no network."""
        return tuple(a.host for a in self.usable()[:MAX_ADDRESSES]) or (LOOPBACK,)

    def wifi_hosts(self) -> tuple[str, ...]:
        """Give those of `hosts` that are on Wi-Fi: all of it is one medium."""
        return tuple(a.host for a in self.usable()[:MAX_ADDRESSES] if a.kind == WI_FI)

    def addresses(self, port: int | None = None) -> tuple[Address, ...]:
        """Give `hosts` with the control port, or another one."""
        return tuple(Address(host, port or self.port) for host in self.hosts())

    def _detect(self) -> Hardware:
        options = self._options
        return detect(
            backend=options.backend, device=options.device, memory_bytes=options.memory_bytes
        )


def facts_of(hardware: Hardware, *, node_id: NodeId, name: str) -> DeviceFacts:
    return DeviceFacts(
        node_id=node_id,
        name=name,
        backend=hardware.backend,
        device=hardware.device,
        chip=hardware.chip,
        memory_bytes=hardware.memory_bytes,
        free_memory_bytes=hardware.free_memory_bytes,
        usable_memory_bytes=hardware.usable_memory_bytes,
        dtypes=hardware.dtypes,
        version=exo_train.__version__,
        more_devices=hardware.more_devices,
    )


def offered(hardware: Hardware, *, is_told: bool) -> dict[str, bool]:
    """Give each device, and whether the user's word says how much memory it gives.

    For several devices a number is the word for the first and a bound for the others: see
    `hardware.offer`.
    """
    return {hardware.device: is_told} | {d.device: False for d in hardware.more_devices}
