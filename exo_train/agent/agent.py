"""The agent: makes this device a member and keeps it one.

Owns the composition of discovery, meeting, services and servers, and their end. It holds no
tensor framework: workers do, so that their crash is an event and not the end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

import exo_train
from exo_train.agent.announcing import Announcer
from exo_train.agent.meeting import Meeting
from exo_train.agent.protocol import PROTOCOL_VERSION
from exo_train.agent.run_session import WorkerSettings
from exo_train.agent.services import ControlService, LocalService
from exo_train.backends.registry import available_backends
from exo_train.cluster.discovery import Discovery
from exo_train.cluster.hardware import Hardware, detect
from exo_train.cluster.home import Home, clean_name, default_device_name
from exo_train.cluster.interfaces import LocalAddress, usable_addresses
from exo_train.cluster.membership import MemberState, view_hash
from exo_train.errors import ConfigError, PeerError
from exo_train.peer import Address, DeviceFacts
from exo_train.transport.channel import bind, new_server
from exo_train.transport.weight_server import WeightServer
from exo_train.wire.pb.control_pb2_grpc import (
    add_ControlServicer_to_server,
    add_LocalServicer_to_server,
)

CONTROL_THREADS = 48  # a Run stream keeps one for the run; the rest answer hellos at once
LOCAL_THREADS = 4
STATUS_SCHEMA = 1
LOOPBACK = "127.0.0.1"
ALL_HOSTS = "0.0.0.0"
UPKEEP_S = 2.0
UPKEEP_END_S = 3.0  # mDNS may be starting just then
SERVER_STOP_S = 1.0

log = logging.getLogger(__name__)


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


class Agent:
    """Context manager; entering makes the device a member, leaving says goodbye."""

    def __init__(
        self, home: Home, options: JoinOptions, *, say: Callable[[str], None] = log.info
    ) -> None:
        self._home = home
        self._options = options
        self._say = say
        self._name = clean_name(options.name) if options.name else default_device_name()
        self._node_id = home.node_id()
        self._started_s = time.monotonic()
        self._hardware()  # a wrong backend or device is said before anything listens
        self._port = 0
        self._ended = threading.Event()

    def __enter__(self) -> Agent:
        with contextlib.ExitStack() as stack:  # closes what is open already when a step fails
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._stack.close()

    def _open(self, stack: contextlib.ExitStack) -> None:
        """Start all parts; they end in the reverse order, the home's claim last."""
        self._home.check_free()
        stack.callback(self._home.release)
        self._weights = stack.enter_context(WeightServer(self._listen_hosts()))
        self._meeting = Meeting(
            cluster=self._home.cluster,
            incarnation=self._home.next_incarnation(),
            facts=self._facts,
            addresses=self._addresses,
            lasting=self._options.peers,
            say=self._say,
        )
        self._control = ControlService(self._meeting, self._worker_settings)
        control_server = new_server(max_workers=CONTROL_THREADS, name="control")
        stack.callback(lambda: control_server.stop(SERVER_STOP_S).wait())
        add_ControlServicer_to_server(self._control, control_server)
        self._port = self._bind_all(control_server)
        token = secrets.token_hex(16)
        self._local = LocalService(
            token=token,
            status=lambda: json.dumps(self.status()),
            weights=self._weights,
            weights_addresses=self._weights_addresses,
        )
        local_server = new_server(max_workers=LOCAL_THREADS, name="local")
        stack.callback(lambda: local_server.stop(SERVER_STOP_S).wait())
        add_LocalServicer_to_server(self._local, local_server)
        local_port = bind(local_server, LOOPBACK)
        self._home.claim(local_port=local_port, control_port=self._port, token=token)
        control_server.start()
        local_server.start()
        for remembered in self._home.remembered_peers():
            with contextlib.suppress(ConfigError):
                self._meeting.suggest(Address.parse(remembered))
        self._meeting.start()
        stack.callback(self._meeting.close)
        stack.callback(self._control.close)
        upkeep = threading.Thread(target=self._upkeep, name="upkeep", daemon=True)
        upkeep.start()
        stack.callback(upkeep.join, UPKEEP_END_S)
        stack.callback(self._ended.set)

    @property
    def port(self) -> int:
        return self._port

    def status(self) -> dict[str, Any]:
        """Give the contract's `status --json`; members are in id order, this device included."""
        now_s = time.monotonic()
        own = self._facts()
        members = [_member(own, "alive", self._addresses(), now_s - self._started_s)]
        for member in self._meeting.members():
            age_s = now_s - member.since_s
            members.append(_member(member.facts, member.state.value, member.addresses, age_s))
        live = [(self._node_id, self._meeting.incarnation)]
        live += [
            (m.facts.node_id, m.incarnation)
            for m in self._meeting.members()
            if m.state in (MemberState.ALIVE, MemberState.SUSPECT)
        ]
        return {
            "schema": STATUS_SCHEMA,
            "cluster": self._home.cluster,
            "self": self._node_id,
            "members": sorted(members, key=lambda m: str(m["id"])),
            "links": [],
            "view_hash": view_hash(live),
            "other_clusters": len(self._meeting.other_clusters),
            "run": self._control.run_status(),
        }

    def _upkeep(self) -> None:
        """Follow the network, and remember whom this device met, until the agent ends."""
        announcer = Announcer(self._discover, say=self._say)
        is_ending = False
        while not is_ending:
            if self._options.discover:
                is_alone = not self._meeting.members()
                announcer.follow(self._usable(), is_alone=is_alone, now_s=time.monotonic())
            is_ending = self._ended.wait(UPKEEP_S)
            proven = [str(m.proven[0]) for m in self._meeting.live() if m.proven]
            try:
                self._home.remember_peers(proven)
            except ConfigError as error:  # a full disk must not end this thread
                log.warning("%s", error)
        announcer.close()

    def _discover(self, addresses: list[LocalAddress]) -> Discovery:
        return Discovery(
            self._node_id,
            cluster=self._home.cluster,
            protocol=PROTOCOL_VERSION,
            port=self._port,
            addresses=addresses,
            on_seen=self._meeting.seen,
        )

    def _usable(self) -> list[LocalAddress]:
        """Give the addresses to advertise; none while the named interface is away.

        IPv4 alone: the servers listen on nothing else.
        """
        try:
            return [a for a in usable_addresses(self._options.interface) if a.is_ipv4]
        except ConfigError:
            return []

    def _listen_hosts(self) -> tuple[str, ...]:
        """Give the hosts to bind: only the interface's when one is named, else all."""
        if self._options.interface is None:
            return (ALL_HOSTS,)
        hosts = tuple(a.host for a in usable_addresses(self._options.interface) if a.is_ipv4)
        if not hosts:
            raise ConfigError(
                f"interface '{self._options.interface}' has no IPv4 address, and IPv6 alone is not "
                f"supported yet; choose another one"
            )
        return hosts

    def _bind_all(self, server: grpc.Server) -> int:
        hosts = self._listen_hosts()
        port = bind(server, hosts[0], self._options.port)
        for host in (*hosts[1:], LOOPBACK):
            if host not in hosts[:1] and hosts[0] != ALL_HOSTS:
                try:
                    bind(server, host, port)
                except PeerError as error:
                    log.warning("not listening on %s: %s", host, error)
        return port

    def _addresses(self) -> tuple[Address, ...]:
        hosts = [a.host for a in self._usable()]
        return tuple(Address(host, self._port) for host in hosts[:8] or [LOOPBACK])

    def _weights_addresses(self) -> tuple[Address, ...]:
        served = self._weights.addresses
        if served[0].host != ALL_HOSTS:
            return served
        return tuple(Address(a.host, served[0].port) for a in self._addresses())

    def _hardware(self) -> Hardware:
        options = self._options
        return detect(
            backend=options.backend, device=options.device, memory_bytes=options.memory_bytes
        )

    def _facts(self) -> DeviceFacts:
        hardware = self._hardware()
        return DeviceFacts(
            node_id=self._node_id,
            name=self._name,
            backend=hardware.backend,
            device=hardware.device,
            chip=hardware.chip,
            memory_bytes=hardware.memory_bytes,
            usable_memory_bytes=hardware.usable_memory_bytes,
            dtypes=hardware.dtypes,
            version=exo_train.__version__,
        )

    def _worker_settings(self) -> WorkerSettings:
        return WorkerSettings(
            node_id=self._node_id,
            name=self._name,
            cluster=self._home.cluster,
            hosts=tuple(a.host for a in self._addresses()),
            cache=self._home.cache,
            logs=self._home.logs,
            backends=available_backends(),
            own_models=self._local.own_models(),
        )


def _member(
    facts: DeviceFacts, state: str, addresses: tuple[Address, ...], age_s: float
) -> dict[str, Any]:
    return {
        "id": facts.node_id,
        "name": facts.name,
        "state": state,
        "since_s": round(age_s, 1),
        "backend": facts.backend,
        "device": facts.device,
        "chip": facts.chip,
        "memory_bytes": facts.memory_bytes,
        "usable_memory_bytes": facts.usable_memory_bytes,
        "dtypes": list(facts.dtypes),
        "version": facts.version,
        "addresses": [str(address) for address in addresses],
    }
