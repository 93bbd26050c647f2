"""Agents in this process, met by address alone: who is let in, who is refused, what is said."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from exo_train.agent.agent import Agent, JoinOptions
from exo_train.agent.local_client import LocalClient
from exo_train.agent.protocol import (
    HEARTBEAT_S,
    PROTOCOL_VERSION,
    TOKEN_METADATA,
    to_node_facts,
)
from exo_train.backends.registry import available_backends
from exo_train.cluster.home import AgentEndpoint, Home
from exo_train.errors import ConfigError, PeerError
from exo_train.peer import Address, DeviceFacts, NodeId
from exo_train.transport.channel import bind, new_server, open_channel
from exo_train.wire.pb import control_pb2 as pb
from exo_train.wire.pb.control_pb2_grpc import (
    ControlServicer,
    ControlStub,
    LocalStub,
    add_ControlServicer_to_server,
)
from tests.agent.running_agents import loopback_interface, wait_until

pytestmark = pytest.mark.xdist_group("agents-here")
STRANGER = DeviceFacts(
    node_id=NodeId("5" * 32),
    name="stranger",
    backend="torch",
    device="cpu",
    chip="chip",
    memory_bytes=8 * 10**9,
    usable_memory_bytes=6 * 10**9,
    dtypes=("fp32",),
    version="0.1.0",
)


class Here:
    """One agent in this process and what it said."""

    def __init__(self, root: Path, name: str, peers: tuple[int, ...], port: int) -> None:
        self.said: list[str] = []
        self.home = Home(root / name)
        options = JoinOptions(
            name=name,
            peers=tuple(Address("127.0.0.1", peer) for peer in peers),
            interface=loopback_interface(),
            port=port,
            backend=available_backends()[0],
            discover=False,
        )
        self.agent = Agent(self.home, options, say=self.said.append)

    @property
    def port(self) -> int:
        return self.agent.port

    def states(self) -> dict[str, str]:
        return {m["name"]: m["state"] for m in self.agent.status()["members"]}

    def endpoint(self) -> AgentEndpoint:
        endpoint = self.home.agent()
        assert endpoint is not None
        return endpoint


Join = Callable[..., Here]


@pytest.fixture
def join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Join]:
    """Makes members of the cluster "tests"; they leave after the test."""
    with contextlib.ExitStack() as stack:

        def join(name: str, *peers: int, port: int = 0, cluster: str = "tests") -> Here:
            monkeypatch.setenv("EXO_TRAIN_CLUSTER", cluster)
            here = Here(tmp_path, name, peers, port)
            stack.enter_context(here.agent)
            return here

        yield join


def wait_states(here: Here, wanted: dict[str, str], timeout_s: float = 10.0) -> None:
    wait_until(lambda: here.states() == wanted, timeout_s, lambda: str(here.states()))


@contextlib.contextmanager
def control(port: int) -> Iterator[ControlStub]:
    channel = open_channel(Address("127.0.0.1", port))
    yield ControlStub(channel)
    channel.close()


def listening_ports() -> set[int]:
    connections = psutil.Process().net_connections("tcp")
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}


def hello(
    *,
    protocol: int = PROTOCOL_VERSION,
    cluster: str = "tests",
    expected: str = "",
    facts: DeviceFacts = STRANGER,
    incarnation: int = 1,
) -> pb.HelloRequest:
    return pb.HelloRequest(
        protocol=protocol,
        cluster=cluster,
        expected_node_id=expected,
        sender=to_node_facts(facts, incarnation=incarnation, addresses=()),
    )


def test_one_typed_address_is_enough_for_three(join: Join) -> None:
    first = join("first")
    second = join("second", first.port)
    third = join("third", first.port)
    everyone = {"first": "alive", "second": "alive", "third": "alive"}
    for here in (first, second, third):
        wait_states(here, everyone)
    assert len({here.agent.status()["view_hash"] for here in (first, second, third)}) == 1
    wait_until(lambda: len(second.home.remembered_peers()) == 2, 10.0, lambda: "not remembered")


def test_a_restart_meets_again_through_remembered_addresses(join: Join) -> None:
    first = join("first")
    second = join("second", first.port)
    wait_states(second, {"first": "alive", "second": "alive"})
    second.agent.__exit__(None, None, None)
    wait_states(first, {"first": "alive", "second": "left"})
    again = join("second")
    wait_states(again, {"first": "alive", "second": "alive"})
    wait_states(first, {"first": "alive", "second": "alive"})


def test_another_cluster_is_refused_and_the_user_hears_why(join: Join) -> None:
    first = join("first")
    other = join("other", first.port, cluster="next-door")
    wait_until(lambda: "another cluster than 'next-door'" in str(other.said), 10, lambda: "")
    assert other.states() == {"other": "alive"}
    assert first.states() == {"first": "alive"}


def test_a_refusal_reveals_nothing_and_names_both_protocols(join: Join) -> None:
    here = join("first")
    with control(here.port) as stub:
        newer = stub.Hello(hello(protocol=77), timeout=5)
        foreign = stub.Hello(hello(cluster="next-door"), timeout=5)
        mistaken = stub.Hello(hello(expected="9" * 32), timeout=5)
    assert "77" in newer.refusal
    assert str(PROTOCOL_VERSION) in newer.refusal
    assert "same version" in newer.refusal
    for reply in (newer, foreign, mistaken):
        assert reply.refusal
        assert not reply.HasField("self")
        assert not reply.known
        assert not reply.cluster
    assert here.states() == {"first": "alive"}, "nobody refused becomes a member"


def test_a_peer_with_another_protocol_is_named_with_both_numbers(join: Join) -> None:
    class Newer(ControlServicer):
        def Hello(self, request: pb.HelloRequest, context: object) -> pb.HelloReply:  # noqa: N802
            return pb.HelloReply(protocol=9, refusal="\x1b[31mprotocol 1 is not 9")

    server = new_server(max_workers=2)
    add_ControlServicer_to_server(Newer(), server)
    port = bind(server, "127.0.0.1")
    server.start()
    try:
        here = join("first", port)
        wait_until(lambda: bool(here.said), 10.0, lambda: "nothing was said")
    finally:
        server.stop(0).wait()
    (sentence,) = here.said
    assert sentence.startswith(
        f"127.0.0.1:{port} speaks protocol 9, this device {PROTOCOL_VERSION}"
    )
    assert "\x1b" not in sentence


@pytest.mark.parametrize(
    "change",
    [
        {"node_id": "x"},
        {"name": "a\x1b[2J"},
        {"chip": "c" * 1000},
        {"usable_memory_bytes": 10**15},
        {"dtypes": ("fp32",) * 50},
    ],
    ids=lambda change: next(iter(change)),
)
def test_facts_that_make_no_sense_are_refused(join: Join, change: dict[str, object]) -> None:
    here = join("first")
    request = hello()
    for key, value in change.items():
        if isinstance(value, tuple):
            request.sender.dtypes.extend(value)
        else:
            setattr(request.sender, key, value)
    with control(here.port) as stub, pytest.raises(grpc.RpcError) as caught:
        stub.Hello(request, timeout=5)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    assert here.states() == {"first": "alive"}


def test_a_late_hello_does_not_undo_a_goodbye(join: Join) -> None:
    here = join("first")
    with control(here.port) as stub:
        stub.Hello(hello(incarnation=4), timeout=5)
        assert here.states() == {"first": "alive", "stranger": "alive"}
        stub.Goodbye(pb.GoodbyeRequest(cluster="next-door", node_id="5" * 32), timeout=5)
        assert here.states()["stranger"] == "alive", "a goodbye from another cluster is not ours"
        stub.Goodbye(pb.GoodbyeRequest(cluster="tests", node_id="5" * 32), timeout=5)
        stub.Hello(hello(incarnation=4), timeout=5)
        assert here.states()["stranger"] == "left"
        stub.Hello(hello(incarnation=5), timeout=5)
        assert here.states()["stranger"] == "alive"


@pytest.mark.skipif(sys.platform == "darwin", reason="loopback has one address there")
def test_heartbeats_do_not_queue_behind_addresses_that_swallow_them(tmp_path: Path) -> None:
    """96 such addresses cost 12 s a round; a member must be asked every 2 s all the same."""
    hellos: queue.SimpleQueue[float] = queue.SimpleQueue()

    class Member(ControlServicer):
        def Hello(self, request: pb.HelloRequest, context: object) -> pb.HelloReply:  # noqa: N802
            hellos.put(time.monotonic())
            own = hello(cluster=request.cluster).sender
            return pb.HelloReply(protocol=PROTOCOL_VERSION, cluster=request.cluster, self=own)

    server = new_server(max_workers=2)
    add_ControlServicer_to_server(Member(), server)
    member = Address("127.0.0.1", bind(server, "127.0.0.1"))
    server.start()
    with socket.create_server(("0.0.0.0", 0), backlog=512) as silent:
        port = silent.getsockname()[1]
        swallow = tuple(Address(f"127.0.1.{i}", port) for i in range(96))
        options = JoinOptions(
            peers=(member, *swallow),
            interface=loopback_interface(),
            backend=available_backends()[0],
            discover=False,
        )
        with Agent(Home(tmp_path), options, say=lambda text: None):
            for _ in range(4):
                hellos.get(timeout=2 * HEARTBEAT_S)
    server.stop(0).wait()


def test_the_local_service_refuses_a_wrong_token(join: Join) -> None:
    here = join("first")
    right = here.endpoint()
    with LocalClient(right) as client:
        assert client.status()["self"] == here.home.node_id()
    wrong = AgentEndpoint(right.pid, right.started_s, right.local_port, right.control_port, "no")
    with LocalClient(wrong) as client, pytest.raises(PeerError, match="UNAUTHENTICATED"):
        client.status()
    channel = open_channel(Address("127.0.0.1", right.local_port))
    stub = LocalStub(channel)
    calls = [
        lambda meta: stub.Status(pb.StatusRequest(), timeout=5, metadata=meta),
        lambda meta: stub.ServeModel(pb.ServeModelRequest(path="/"), timeout=5, metadata=meta),
        lambda meta: stub.StopServing(pb.StopServingRequest(), timeout=5, metadata=meta),
    ]
    for call in calls:
        for metadata in ((), ((TOKEN_METADATA, ""),), ((TOKEN_METADATA, right.token[:-1]),)):
            with pytest.raises(grpc.RpcError) as caught:
                call(metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
    channel.close()


def test_control_calls_do_not_answer_on_the_local_port_nor_local_calls_on_the_control_port(
    join: Join,
) -> None:
    here = join("first")
    channel = open_channel(Address("127.0.0.1", here.port))
    metadata = ((TOKEN_METADATA, here.endpoint().token),)
    with pytest.raises(grpc.RpcError) as caught:
        LocalStub(channel).Status(pb.StatusRequest(), timeout=5, metadata=metadata)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]
    channel.close()


def test_a_start_that_fails_leaves_nothing_behind(join: Join, tmp_path: Path) -> None:
    first = join("first")
    late = Here(tmp_path, "late", (), port=first.port)
    before = listening_ports()
    with pytest.raises(PeerError, match=f"port {first.port}"):
        late.agent.__enter__()
    assert late.home.agent() is None
    assert listening_ports() == before
    free = Here(tmp_path, "late", (), port=0)
    with free.agent:
        assert json.loads(json.dumps(free.agent.status()))["self"] == late.home.node_id()


def test_an_interface_that_is_not_there_is_refused(tmp_path: Path) -> None:
    options = JoinOptions(interface="eth99", backend=available_backends()[0])
    with pytest.raises(ConfigError, match="no interface 'eth99'"):
        Agent(Home(tmp_path), options).__enter__()
