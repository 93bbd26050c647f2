"""Agents in this process, each with a home of its own; all on loopback. For tests only.

Owns their start and end, callers that speak to them by hand, and commands typed in their homes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from exo_train.agent.agent import Agent, JoinOptions
from exo_train.agent.local_client import LocalClient
from exo_train.agent.protocol import PROTOCOL_VERSION, Introduction, greeting, to_node_facts
from exo_train.agent.services import HandshakeService
from exo_train.backends.registry import available_backends
from exo_train.cluster.home import AgentEndpoint, Home
from exo_train.identity import Identity
from exo_train.peer import Address, DeviceFacts, NodeId
from exo_train.transport.channel import bind, new_server, open_channel
from exo_train.transport.tls import MemberTls
from exo_train.wire.pb import control_pb2 as pb
from exo_train.wire.pb.control_pb2_grpc import (
    ControlServicer,
    ControlStub,
    add_ControlServicer_to_server,
)
from exo_train.wire.pb.handshake_pb2_grpc import add_HandshakeServicer_to_server
from tests.agent.running_agents import loopback_interface, wait_until
from tests.paired_homes import admit

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Done:
    """What a command left: its exit code and what it printed."""

    code: int
    out: str
    err: str


class Here:
    """One agent in this process and what it said."""

    def __init__(
        self, home: Home, name: str, *peers: int | Address, port: int = 0, discover: bool = False
    ) -> None:
        self.said: list[str] = []
        self.home = home
        self.name = name
        self._thread: threading.Thread | None = None
        options = JoinOptions(
            name=name,
            peers=tuple(p if isinstance(p, Address) else Address(LOOPBACK, p) for p in peers),
            interface=loopback_interface(),
            port=port,
            backend=available_backends()[0],
            discover=discover,
        )
        self.agent = Agent(home, options, say=self.said.append)

    @property
    def port(self) -> int:
        return self.agent.port

    @property
    def id(self) -> NodeId:
        return self.agent.node_id

    def states(self) -> dict[str, str]:
        """Give the state of each member that was met, by name."""
        members = self.agent.status()["members"]
        return {m["name"]: m["state"] for m in members if m["state"] != "away"}

    def row(self, name: str) -> dict[str, Any]:
        """Give what its status says of a member."""
        (row,) = [m for m in self.agent.status()["members"] if m["name"] == name]
        return dict(row)

    def endpoint(self) -> AgentEndpoint:
        endpoint = self.home.agent()
        assert endpoint is not None
        return endpoint

    def client(self) -> LocalClient:
        return LocalClient(self.endpoint())

    def ends_when_asked(self) -> Here:
        """Do what `join` does when the agent's membership ends from within."""

        def wait() -> None:
            self.agent.ended.wait()
            self.agent.__exit__(None, None, None)

        self._thread = threading.Thread(target=wait, daemon=True)
        self._thread.start()
        return self

    def wait_ended(self, timeout_s: float = 5.0) -> None:
        assert self._thread is not None
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"{self.name} has not ended"

    def wait_says(self, text: str, timeout_s: float = 10.0) -> str:
        """Give the first sentence with this text in it."""
        wait_until(
            lambda: any(text in sentence for sentence in self.said),
            timeout_s,
            lambda: f"{self.name} said {self.said}, nothing with '{text}'",
        )
        return next(sentence for sentence in self.said if text in sentence)


def wait_states(here: Here, wanted: dict[str, str], timeout_s: float = 10.0) -> None:
    wait_until(lambda: here.states() == wanted, timeout_s, lambda: str(here.states()))


def wait_all_alive(*agents: Here, timeout_s: float = 10.0) -> None:
    """Wait until each of these sees just these alive."""
    for here in agents:
        wait_states(here, {other.name: "alive" for other in agents}, timeout_s)


@dataclass(frozen=True)
class ByHand:
    """A member that has a certificate and no agent: it says what the test wants."""

    identity: Identity
    tls: MemberTls

    @classmethod
    def of(cls, home: Home) -> ByHand:
        identity = home.paired_identity()
        return cls(identity, MemberTls(identity, home.roster(identity).certificate))

    @classmethod
    def invited_by(cls, here: Here, folder: Path) -> ByHand:
        home = Home(folder)
        admit(home, here.home)
        return cls.of(home)

    @contextlib.contextmanager
    def channel_to(self, here: Here) -> Iterator[grpc.Channel]:
        tls = self.tls.to(here.id)
        channel = open_channel(
            Address(LOOPBACK, here.port), credentials=tls.credentials, tls_name=tls.name
        )
        yield channel
        channel.close()

    @contextlib.contextmanager
    def control_of(self, here: Here) -> Iterator[ControlStub]:
        with self.channel_to(here) as channel:
            yield ControlStub(channel)

    @contextlib.contextmanager
    def serve(self, servicer: ControlServicer, **greeted: Any) -> Iterator[int]:
        """Answer as an agent would, with another greeting where `greeted` says so."""
        own = greeting(
            node_id=self.identity.node_id, instance="01" * 8, certificate=self.identity.certificate
        )
        for key, value in greeted.items():
            setattr(own, key, value)
        server = new_server(max_workers=4)
        add_HandshakeServicer_to_server(HandshakeService(own), server)
        add_ControlServicer_to_server(servicer, server)
        port = bind(server, LOOPBACK, credentials=self.tls.server())
        server.start()
        yield port
        server.stop(0).wait()

    def goodbye(self, *, incarnation: int = 1, cluster: str = "") -> pb.GoodbyeRequest:
        return pb.GoodbyeRequest(
            cluster=cluster or self.identity.cluster,
            node_id=self.identity.node_id,
            incarnation=incarnation,
        )

    def facts(self, name: str) -> DeviceFacts:
        return DeviceFacts(
            node_id=self.identity.node_id,
            name=name,
            backend="torch",
            device="cpu",
            chip="chip",
            memory_bytes=8 * 10**9,
            free_memory_bytes=7 * 10**9,
            usable_memory_bytes=6 * 10**9,
            dtypes=("fp32",),
            version="0.1.0",
        )

    def says(self, *, name: str = "stranger", incarnation: int = 1, **given: Any) -> pb.NodeFacts:
        told = Introduction(
            facts=self.facts(name),
            incarnation=incarnation,
            instance="01" * 8,
            addresses=given.pop("addresses", ()),
            **given,
        )
        return to_node_facts(told)

    def hello(
        self,
        *,
        protocol: int = PROTOCOL_VERSION,
        cluster: str = "",
        expected: str = "",
        incarnation: int = 1,
        **given: Any,
    ) -> pb.HelloRequest:
        return pb.HelloRequest(
            protocol=protocol,
            cluster=cluster or self.identity.cluster,
            expected_node_id=expected,
            sender=self.says(incarnation=incarnation, **given),
        )
