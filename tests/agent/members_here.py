"""Agents in this process as members of one cluster, and callers that show what they like.

Owns the household of the security tests: who is in it, whose certificate a call carries, and the
list of every method there is. All traffic stays on loopback.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil

import exo_train
import exo_train.wire.pb
from exo_train.agent.agent import Agent, JoinOptions
from exo_train.agent.protocol import PROTOCOL_VERSION, Introduction, to_node_facts
from exo_train.backends.registry import available_backends
from exo_train.cluster.home import Home
from exo_train.identity import Identity, to_pem
from exo_train.peer import Address, DeviceFacts, NodeId
from exo_train.transport.channel import open_channel
from exo_train.transport.tls import MemberTls, PeerTls
from exo_train.wire.pb import control_pb2 as pb
from tests.agent.running_agents import loopback_interface, wait_until
from tests.paired_homes import admit, ensure_member

LOOPBACK = "127.0.0.1"
CONTROL = "/exo_train.wire.Control/"
HELLO, GOODBYE, SYNC_ROSTER, DIAL_BACK, RUN = (
    CONTROL + name for name in ("Hello", "Goodbye", "SyncRoster", "DialBack", "Run")
)
GREET = "/exo_train.wire.Handshake/Greet"
CALL_TIMEOUT_S = 10.0
MEET_TIMEOUT_S = 15.0


class Here:
    """One agent in this process and what it said."""

    def __init__(self, home: Home, name: str, peers: tuple[int, ...]) -> None:
        self.said: list[str] = []
        self.home = home
        options = JoinOptions(
            name=name,
            peers=tuple(Address(LOOPBACK, peer) for peer in peers),
            interface=loopback_interface(),
            backend=available_backends()[0],
            discover=False,
        )
        self.agent = Agent(home, options, say=self.said.append)

    @property
    def port(self) -> int:
        return self.agent.port

    @property
    def id(self) -> NodeId:
        return self.agent.node_id

    @property
    def identity(self) -> Identity:
        return self.agent.admissions.identity

    @property
    def weights_port(self) -> int:
        return self.agent._weights.addresses[0].port

    def states(self) -> dict[str, str]:
        """Give the state of each member that was met, by name."""
        members = self.agent.status()["members"]
        return {m["name"]: m["state"] for m in members if m["state"] != "away"}

    def counts(self) -> dict[str, int]:
        return self.agent.gate.counts()


class Members:
    """Starts members of one cluster; they leave when this is closed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def home(self, name: str) -> Home:
        """Give a member's home; nothing runs there yet."""
        home = Home(self.root / name)
        ensure_member(home, root=self.root, cluster="tests")
        return home

    def join(self, name: str, *peers: int) -> Here:
        here = Here(self.home(name), name, peers)
        self._stack.enter_context(here.agent)
        return here

    def join_all(self, *names: str) -> list[Here]:
        """Start members that know each other's certificates, and wait until all have met."""
        joined: list[Here] = []
        for name in names:
            joined.append(self.join(name, *(here.port for here in joined)))
        wait_all_met(joined)
        return joined

    def guest(self, of: Here, name: str) -> Identity:
        """Make a member that runs nothing: it is what a test says in its name."""
        return admit(Home(self.root / name), of.home)


def wait_all_met(joined: list[Here]) -> None:
    wait_until(
        lambda: all(list(here.states().values()) == ["alive"] * len(joined) for here in joined),
        MEET_TIMEOUT_S,
        lambda: str([(here.states(), here.said) for here in joined]),
    )


def wait_said(here: Here, words: str, timeout_s: float = MEET_TIMEOUT_S) -> str:
    wait_until(lambda: words in str(here.said), timeout_s, lambda: str(here.said))
    return next(text for text in here.said if words in text)


def member_tls(identity: Identity) -> MemberTls:
    """Dial as this member, knowing nobody."""
    return MemberTls(identity, lambda node_id: None)


def any_member(identity: Identity) -> PeerTls:
    return member_tls(identity).to_any()


def forged(
    authority_certificate: bytes, key_pem: bytes | None = None, certificate: bytes = b""
) -> PeerTls:
    """Dial a cluster whose authority is known, with a certificate of one's own or without one.

    The client trusts the server, so that a refusal is the server's.
    """
    return PeerTls(
        grpc.ssl_channel_credentials(
            root_certificates=to_pem(authority_certificate),
            private_key=key_pem,
            certificate_chain=to_pem(certificate) if key_pem else None,
        ),
        "member.exo-train",
    )


@contextlib.contextmanager
def channel_to(port: int, tls: PeerTls | None) -> Iterator[grpc.Channel]:
    address = Address(LOOPBACK, port)
    if tls is None:
        channel = open_channel(address)
    else:
        channel = open_channel(address, credentials=tls.credentials, tls_name=tls.name)
    with contextlib.closing(channel):
        yield channel


@dataclass(frozen=True, slots=True)
class Answer:
    code: grpc.StatusCode
    details: str
    messages: tuple[bytes, ...]


def ask(
    channel: grpc.Channel,
    method: str,
    *messages: bytes,
    metadata: tuple[tuple[str, str], ...] = (),
    timeout_s: float = CALL_TIMEOUT_S,
) -> Answer:
    """Call any method with any bytes; unary ones look the same on the wire."""
    heard: list[bytes] = []
    call = channel.stream_stream(method)(iter(messages), timeout=timeout_s, metadata=metadata)
    with contextlib.suppress(grpc.RpcError):
        heard.extend(call)
    return Answer(call.code(), call.details() or "", tuple(heard))


def all_methods() -> list[str]:
    """Give every method of the generated services and every raw one that the package names."""
    found = set()
    for module in pkgutil.iter_modules(exo_train.wire.pb.__path__, "exo_train.wire.pb."):
        if module.name.endswith("_pb2"):
            for service in importlib.import_module(
                module.name
            ).DESCRIPTOR.services_by_name.values():
                found |= {f"/{service.full_name}/{method.name}" for method in service.methods}
    for path in Path(exo_train.__file__).parent.rglob("*.py"):
        found |= set(re.findall(r'"(/exo_train\.wire\.\w+/\w+)"', path.read_text("utf-8")))
    return sorted(found)


def short(method: str) -> str:
    return method.rpartition(".")[2]


def listening_ports() -> set[int]:
    connections = psutil.Process().net_connections("tcp")
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}


def hello_of(
    node_id: str,
    cluster: str,
    *,
    addresses: tuple[Address, ...] = (),
    change: Callable[[pb.HelloRequest], object] = lambda request: None,
) -> bytes:
    """Give a hello that makes sense, except for what `change` does to it."""
    facts = DeviceFacts(
        node_id=NodeId(node_id),
        name="guest",
        backend="torch",
        device="cpu",
        chip="chip",
        memory_bytes=8 * 10**9,
        usable_memory_bytes=6 * 10**9,
        dtypes=("fp32",),
        version=exo_train.__version__,
    )
    own = Introduction(facts=facts, incarnation=1, instance="0" * 16, addresses=addresses)
    request = pb.HelloRequest(
        protocol=PROTOCOL_VERSION,
        cluster=cluster,
        sender=to_node_facts(own),
    )
    change(request)
    return request.SerializeToString()
