"""Agents in this process, met by address alone: who is let in, who is refused, what is said."""

from __future__ import annotations

import json
import queue
import shutil
import socket
import sys
import time
from pathlib import Path

import grpc
import psutil
import pytest

from exo_train.agent.agent import Agent, JoinOptions
from exo_train.agent.local_client import LocalClient
from exo_train.agent.protocol import HEARTBEAT_S, PROTOCOL_VERSION, TOKEN_METADATA
from exo_train.backends.registry import available_backends
from exo_train.cluster.home import AgentEndpoint, Home
from exo_train.errors import ConfigError, PeerError
from exo_train.peer import Address
from exo_train.transport.channel import open_channel
from exo_train.wire.pb import control_pb2 as pb
from exo_train.wire.pb.control_pb2_grpc import ControlServicer, LocalStub
from tests.agent.agents_here import LOOPBACK, ByHand, Here, wait_all_alive, wait_states
from tests.agent.conftest import Join
from tests.agent.running_agents import loopback_interface, wait_until
from tests.paired_homes import ensure_member

pytestmark = pytest.mark.xdist_group("agents-here")


def listening_ports() -> set[int]:
    connections = psutil.Process().net_connections("tcp")
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}


def test_one_typed_address_is_enough_for_three(join: Join) -> None:
    first = join("first")
    second = join("second", first)
    third = join("third", first)
    wait_all_alive(first, second, third)
    assert len({here.agent.status()["view_hash"] for here in (first, second, third)}) == 1
    wait_until(lambda: len(second.home.remembered_peers()) == 2, 10.0, lambda: "not remembered")


def test_a_restart_meets_again_through_remembered_addresses(join: Join) -> None:
    first = join("first")
    second = join("second", first)
    wait_states(second, {"first": "alive", "second": "alive"})
    second.agent.__exit__(None, None, None)
    wait_states(first, {"first": "alive", "second": "left"})
    again = join("second")
    assert again.id == second.id
    wait_states(again, {"first": "alive", "second": "alive"})
    wait_states(first, {"first": "alive", "second": "alive"})


def test_another_cluster_is_refused_and_the_user_hears_why(join: Join) -> None:
    first = join("first")
    other = join("other", first, cluster="next-door")
    said = other.wait_says("another device or cluster")
    assert said.startswith(f"--peer {LOOPBACK}:{first.port} answers with a certificate")
    assert other.states() == {"other": "alive"}
    assert first.states() == {"first": "alive"}


def test_a_refusal_reveals_nothing(join: Join, tmp_path: Path) -> None:
    here = join("first")
    stranger = ByHand.invited_by(here, tmp_path / "stranger")
    with stranger.control_of(here) as stub:
        newer = stub.Hello(stranger.hello(protocol=77), timeout=5)
        foreign = stub.Hello(stranger.hello(cluster="next-door"), timeout=5)
        mistaken = stub.Hello(stranger.hello(expected="9" * 32), timeout=5)
    assert newer.refusal == foreign.refusal == "another cluster"
    assert mistaken.refusal == "another device answers here"
    for reply in (newer, foreign, mistaken):
        assert reply.protocol == PROTOCOL_VERSION
        assert not reply.HasField("self")
        assert not reply.known
        assert not reply.cluster
        assert not reply.roster_digest
    assert here.states() == {"first": "alive"}, "nobody refused becomes a member"


@pytest.mark.parametrize(
    "change",
    [
        {"name": "a\x1b[2J"},
        {"chip": "c" * 1000},
        {"instance": "\u202e"},
        {"usable_memory_bytes": 10**15},
        {"dtypes": ("fp32",) * 50},
        {"endpoints": (pb.HelloRequest().sender.endpoints.add(host="10.0.0.1", port=7),) * 33},
        {"links": (pb.LinkFacts(),) * 65},
        {"run": pb.RunFacts(run_id="r", phase="p\x00")},
        {"run": pb.RunFacts(run_id="r", phase_age_s=float("nan"))},
        {"run": pb.RunFacts(run_id="r", phase_limit_s=-1)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_facts_that_make_no_sense_are_refused(
    join: Join, tmp_path: Path, change: dict[str, object]
) -> None:
    here = join("first")
    stranger = ByHand.invited_by(here, tmp_path / "stranger")
    request = stranger.hello()
    for key, value in change.items():
        if isinstance(value, tuple):
            getattr(request.sender, key).extend(value)
        elif isinstance(value, pb.RunFacts):
            request.sender.run.CopyFrom(value)
        else:
            setattr(request.sender, key, value)
    with stranger.control_of(here) as stub, pytest.raises(grpc.RpcError) as caught:
        stub.Hello(request, timeout=5)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    assert here.states() == {"first": "alive"}
    assert here.agent.gate.counts() == {"malformed": 1}


def test_a_late_hello_does_not_undo_a_goodbye(join: Join, tmp_path: Path) -> None:
    here = join("first")
    stranger = ByHand.invited_by(here, tmp_path / "stranger")
    with stranger.control_of(here) as stub:
        stub.Hello(stranger.hello(incarnation=4), timeout=5)
        assert here.states() == {"first": "alive", "stranger": "alive"}
        stub.Goodbye(stranger.goodbye(cluster="next-door", incarnation=4), timeout=5)
        assert here.states()["stranger"] == "alive", "a goodbye from another cluster is not ours"
        stub.Goodbye(stranger.goodbye(incarnation=3), timeout=5)
        assert here.states()["stranger"] == "alive", "a goodbye of the start before is late"
        stub.Goodbye(stranger.goodbye(incarnation=4), timeout=5)
        stub.Hello(stranger.hello(incarnation=4), timeout=5)
        assert here.states()["stranger"] == "left"
        stub.Hello(stranger.hello(incarnation=5), timeout=5)
        assert here.states()["stranger"] == "alive"


@pytest.mark.skipif(sys.platform == "darwin", reason="loopback has one address there")
def test_heartbeats_do_not_queue_behind_addresses_that_swallow_them(tmp_path: Path) -> None:
    """36 such addresses cost 6 s a round; a member must be asked every 2 s all the same."""
    hellos: queue.SimpleQueue[float] = queue.SimpleQueue()
    home, other = Home(tmp_path / "own"), Home(tmp_path / "member")
    for one in (home, other):
        ensure_member(one, root=tmp_path, cluster="tests")
    by_hand = ByHand.of(other)

    class Member(ControlServicer):
        def Hello(self, request: pb.HelloRequest, context: object) -> pb.HelloReply:  # noqa: N802
            hellos.put(time.monotonic())
            return pb.HelloReply(
                protocol=PROTOCOL_VERSION,
                cluster=request.cluster,
                self=by_hand.says(),
                roster_digest=request.roster_digest,
            )

    with (
        by_hand.serve(Member()) as member_port,
        socket.create_server(("0.0.0.0", 0), backlog=512) as silent,
    ):
        port = silent.getsockname()[1]
        swallow = tuple(Address(f"127.0.1.{i}", port) for i in range(36))
        options = JoinOptions(
            peers=(Address(LOOPBACK, member_port), *swallow),
            interface=loopback_interface(),
            backend=available_backends()[0],
            discover=False,
        )
        with Agent(home, options, say=lambda text: None):
            hellos.get(timeout=10 * HEARTBEAT_S)  # it may come last in the first round
            for _ in range(3):
                hellos.get(timeout=2 * HEARTBEAT_S)


def copied_laptop(join: Join, tmp_path: Path) -> tuple[Here, Here, Here]:
    """Give a member, another one, and one that runs with a copy of the latter's home."""
    studio = join("studio")
    first = join("laptop", studio)
    wait_states(first, {"studio": "alive", "laptop": "alive"})
    first.agent.__exit__(None, None, None)
    shutil.copytree(first.home.path, tmp_path / "copy")
    laptop = join("laptop", studio)
    wait_states(laptop, {"studio": "alive", "laptop": "alive"})
    copy = join("laptop", studio, laptop, folder="copy")
    assert copy.id == laptop.id
    return studio, laptop, copy


def test_a_copied_home_is_recognised_by_others_and_by_the_copy(join: Join, tmp_path: Path) -> None:
    studio, laptop, copy = copied_laptop(join, tmp_path)
    said = studio.wait_says("a home folder was copied")
    assert said.startswith(f"two devices run with the identity {laptop.id[:8]} (")
    assert "on the copy, end `exo-train join`, run `exo-train leave --forget`" in said
    said = copy.wait_says("its home folder was copied")
    assert said.startswith(
        f"another device runs with this one's identity ({LOOPBACK}:{laptop.port})"
    )
    assert len([s for s in studio.said if "copied" in s]) == 1, "it is said once"
    assert laptop.states() == {"studio": "alive", "laptop": "alive"}


def test_the_original_hears_of_its_copy(join: Join, tmp_path: Path) -> None:
    _, laptop, _ = copied_laptop(join, tmp_path)
    said = laptop.wait_says("its home folder was copied", 5.0)
    assert said.startswith("another device runs with this one's identity (")


@pytest.mark.parametrize(("ahead_s", "way"), [(3600, "ahead of"), (-7200, "behind")])
def test_a_wrong_clock_is_said_with_the_number_and_decides_nothing(
    join: Join, ahead_s: float, way: str
) -> None:
    late, here = join("late"), join("here")
    answer = late.agent.meeting.hello

    def with_its_clock(request: pb.HelloRequest) -> pb.HelloReply:
        reply = answer(request)
        reply.clock_s += ahead_s
        return reply

    late.agent.meeting.hello = with_its_clock  # type: ignore[method-assign]
    here.agent.meeting.suggest(Address(LOOPBACK, late.port), None)
    said = here.wait_says("the clock of")
    assert said.startswith(f"the clock of late is {abs(ahead_s)} s {way} this device's")
    wait_all_alive(late, here)
    assert here.row("late")["clock_skew_s"] == pytest.approx(ahead_s, abs=2)
    assert abs(late.row("here")["clock_skew_s"] or 0.0) < 2
    assert not any("clock" in sentence for sentence in late.said)


def test_a_clock_within_five_seconds_is_not_worth_a_word(join: Join) -> None:
    late, here = join("late"), join("here")
    answer = late.agent.meeting.hello

    def with_its_clock(request: pb.HelloRequest) -> pb.HelloReply:
        reply = answer(request)
        reply.clock_s += 4.5
        return reply

    late.agent.meeting.hello = with_its_clock  # type: ignore[method-assign]
    here.agent.meeting.suggest(Address(LOOPBACK, late.port), None)
    wait_all_alive(late, here)
    assert here.row("late")["clock_skew_s"] == pytest.approx(4.5, abs=0.4)
    assert not any("clock" in sentence for sentence in here.said)


def test_the_local_service_refuses_a_wrong_token(join: Join) -> None:
    here = join("first")
    right = here.endpoint()
    with LocalClient(right) as client:
        assert client.status()["self"] == here.id
    wrong = AgentEndpoint(right.pid, right.started_s, right.local_port, right.control_port, "no")
    with LocalClient(wrong) as client, pytest.raises(PeerError, match="UNAUTHENTICATED"):
        client.status()
    channel = open_channel(Address(LOOPBACK, right.local_port))
    stub = LocalStub(channel)
    methods = pb.DESCRIPTOR.services_by_name["Local"].methods
    assert {"Status", "Invite", "Remove", "Leave"} <= {method.name for method in methods}
    for method in methods:
        request = getattr(pb, method.input_type.name)()
        for metadata in ((), ((TOKEN_METADATA, ""),), ((TOKEN_METADATA, right.token[:-1]),)):
            with pytest.raises(grpc.RpcError) as caught:
                getattr(stub, method.name)(request, timeout=5, metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, method.name  # type: ignore[attr-defined]
    channel.close()
    assert not here.agent.ended.is_set()


def test_local_calls_do_not_answer_on_the_control_port(join: Join, tmp_path: Path) -> None:
    here = join("first")
    stranger = ByHand.invited_by(here, tmp_path / "stranger")
    metadata = ((TOKEN_METADATA, here.endpoint().token),)
    with stranger.channel_to(here) as channel, pytest.raises(grpc.RpcError) as caught:
        LocalStub(channel).Status(pb.StatusRequest(), timeout=5, metadata=metadata)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]


def test_a_start_that_fails_leaves_nothing_behind(join: Join, tmp_path: Path) -> None:
    first = join("first")
    late = Here(Home(tmp_path / "late"), "late", port=first.port)
    before = listening_ports()
    with pytest.raises(PeerError, match=f"port {first.port}"):
        late.agent.__enter__()
    assert late.home.agent() is None
    assert listening_ports() == before
    free = Here(Home(tmp_path / "late"), "late")
    with free.agent:
        assert json.loads(json.dumps(free.agent.status()))["self"] == late.id


def test_an_interface_that_is_not_there_is_refused(tmp_path: Path) -> None:
    options = JoinOptions(interface="eth99", backend=available_backends()[0])
    with pytest.raises(ConfigError, match="no interface 'eth99'"):
        Agent(Home(tmp_path), options).__enter__()
