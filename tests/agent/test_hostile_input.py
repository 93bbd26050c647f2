"""Nonsense, floods and malice: counted, told once, closed; nothing runs, nobody is disturbed."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from exo_train.agent.examining import examine
from exo_train.agent.local_client import LocalClient
from exo_train.agent.protocol import PROTOCOL_VERSION, greeting
from exo_train.errors import ConfigError
from exo_train.identity import Identity
from exo_train.transport.channel import MAX_MESSAGE_BYTES
from exo_train.transport.probe import PROBE_METHOD
from exo_train.transport.weight_server import FETCH_METHOD
from exo_train.wire.pb import control_pb2 as pb
from exo_train.wire.pb import data_pb2, pairing_pb2
from tests.agent.hostile_bytes import filled, lying_member, messages_of, pickles
from tests.agent.members_here import (
    CONTROL,
    DIAL_BACK,
    GREET,
    HELLO,
    RUN,
    SYNC_ROSTER,
    Here,
    Members,
    all_methods,
    any_member,
    ask,
    channel_to,
    hello_of,
    short,
)
from tests.agent.running_agents import wait_until

pytestmark = pytest.mark.xdist_group("agents-here")
SOON_S = 15.0


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    with Members(tmp_path) as household:
        yield household


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give the file that code from outside would make; the test fails when it is there."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    yield tmp_path / "work" / "marker"
    assert list((tmp_path / "work").iterdir()) == []


def silent_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """Fail when a server met an error that it did not expect."""
    assert [r.getMessage() for r in caplog.records if r.name.startswith("grpc")] == []


def test_a_pickle_does_run_where_it_is_unpickled(tmp_path: Path) -> None:
    """Else the next tests would show nothing."""
    import pickle

    for raw in (pickles(tmp_path / "a")[0], pickles(tmp_path / "b")[1].encode()):
        os.close(pickle.loads(raw))
    assert (tmp_path / "a").exists()
    assert (tmp_path / "b").exists()


def test_pickles_in_every_field_of_every_request_run_nothing(
    members: Members, marker: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = members.join("first")
    guest = members.guest(here, "guest")
    own = any_member(guest)
    raw, text = pickles(marker)
    pairing = here.agent.invite().addresses[0].port
    ports = {here.port: own, here.weights_port: own, pairing: None}

    def with_raw(request: pb.HelloRequest) -> None:
        request.roster_digest = raw

    codes: dict[str, grpc.StatusCode] = {}
    for port, tls_of_port in ports.items():
        with channel_to(port, tls_of_port) as channel:
            for method in all_methods():
                contents = [raw, text.encode()]
                with contextlib.suppress(KeyError):
                    contents.append(filled(messages_of(method)[0](), raw, text).SerializeToString())
                if method == HELLO:  # one that makes sense, so that all of it is looked at
                    contents.append(hello_of(guest.node_id, guest.cluster, change=with_raw))
                contents += [
                    filled(kind(), raw, text).SerializeToString()
                    for kind in (data_pb2.FetchRequest, data_pb2.Hello, pairing_pb2.JoinerMessage)
                ]
                for content in contents:
                    code = ask(channel, method, content).code
                    if code is not grpc.StatusCode.UNIMPLEMENTED:
                        codes[short(method)] = code
    assert codes.keys() >= {"Control/Hello", "Control/Run", "Pairing/Pair", "Weights/Fetch"}
    assert grpc.StatusCode.UNKNOWN not in codes.values()
    assert here.states() == {"first": "alive", "guest": "alive"}
    silent_traceback(caplog)


@pytest.mark.parametrize("is_sensible", [False, True], ids=["nonsense", "else sensible"])
def test_pickles_in_every_field_of_every_reply_run_nothing(
    members: Members, marker: Path, is_sensible: bool
) -> None:
    here = members.join("first")
    guest = members.guest(here, "guest")
    here.agent.admissions.admit(guest.certificate)
    raw, text = pickles(marker)
    own = greeting(node_id=guest.node_id, certificate=raw).SerializeToString()
    answers = {
        method: filled(messages_of(method)[1](), raw, text).SerializeToString()
        for method in all_methods()
        if method.startswith(CONTROL)
    }
    if is_sensible:
        reply = sensible_reply(here, guest)
        reply.roster_digest = raw
        answers[HELLO] = reply.SerializeToString()
        answers[SYNC_ROSTER] = pairing_pb2.RosterState(certificates=[raw]).SerializeToString()
    answers[GREET] = own
    lies = {method: lambda _, answer=answer: answer for method, answer in answers.items()}
    with lying_member(guest, lies) as (address, asked):
        here.agent.meeting.suggest(address, guest.node_id)
        wanted = DIAL_BACK if is_sensible else HELLO
        wait_until(lambda: wanted in asked, SOON_S, lambda: str(asked))
        assert (SYNC_ROSTER in asked) or not is_sensible
        time.sleep(0.5)  # for what it would do with the reply
        others = {"guest": "alive"} if is_sensible else {}
        assert here.states() == {"first": "alive", **others}
    assert not here.agent.ended.is_set()


def sensible_reply(here: Here, guest: Identity) -> pb.HelloReply:
    """Give what the guest could honestly answer to a hello of this agent's."""
    reply = pb.HelloReply(
        protocol=PROTOCOL_VERSION,
        cluster=guest.cluster,
        roster_digest=here.agent.admissions.digest(),
        clock_s=time.time(),
    )
    reply.self.CopyFrom(pb.HelloRequest.FromString(hello_of(guest.node_id, guest.cluster)).sender)
    return reply


RUN_IDS = {
    "path": "../../x",
    "slash": "a/b",
    "backslash": "a\\b",
    "shell": ";touch marker",
    "substitution": "$(touch marker)",
    "zero": "a\x00b",
    "option": "--home",
    "newline": "a\nb",
    "empty": "",
    "long": "a" * 65,
    "longest letters": "\U0001d49c" * 64,  # four bytes each: too long for a file's name
}


@pytest.mark.parametrize("run_id", RUN_IDS.values(), ids=RUN_IDS)
def test_a_run_id_is_letters_and_digits_or_nothing_starts(
    members: Members, marker: Path, caplog: pytest.LogCaptureFixture, run_id: str
) -> None:
    here = members.join("first")
    guest = members.guest(here, "guest")
    body = pb.Prepare(
        backend=here.agent.introduce().facts.backend,
        device="cpu",
        node_id=here.id,
        cluster=guest.cluster,
    )
    message = pb.RunMessage(run_id=run_id, prepare=body).SerializeToString()
    with channel_to(here.port, any_member(guest)) as channel:
        answer = ask(channel, RUN, message)
    assert answer.code is grpc.StatusCode.FAILED_PRECONDITION, answer
    assert answer.messages == ()
    assert not here.home.logs.exists() or not list(here.home.logs.glob("worker*"))
    assert here.counts() == {"a run that does not fit": 1}
    silent_traceback(caplog)


@pytest.mark.parametrize("backend", ["torch; touch marker", "../torch", "$(touch marker)", ""])
def test_a_backend_is_one_of_ours_or_nothing_starts(
    members: Members, marker: Path, backend: str
) -> None:
    here = members.join("first")
    guest = members.guest(here, "guest")
    body = pb.Prepare(backend=backend, node_id=here.id, cluster=guest.cluster)
    message = pb.RunMessage(run_id="a1", prepare=body).SerializeToString()
    with channel_to(here.port, any_member(guest)) as channel:
        assert ask(channel, RUN, message).code is grpc.StatusCode.FAILED_PRECONDITION
    assert here.agent.status()["run"] is None


NASTY = ["../../../../etc/passwd", "; touch marker", "$(touch marker)", "|touch marker", "\x00", ""]


@pytest.mark.parametrize("text", NASTY)
def test_tokens_tensor_names_and_model_paths_are_only_compared(
    members: Members, marker: Path, tmp_path: Path, text: str
) -> None:
    class Source:
        infos: dict[str, object] = {}  # noqa: RUF012

        def read(self, name: str) -> bytes:
            raise AssertionError(name)

    here = members.join("first")
    here.agent._weights.register("secret", Source())  # type: ignore[arg-type]
    with channel_to(here.weights_port, any_member(members.guest(here, "guest"))) as channel:
        wrong = data_pb2.FetchRequest(token=text, names=["a"]).SerializeToString()
        assert ask(channel, FETCH_METHOD, wrong).code is grpc.StatusCode.UNAUTHENTICATED
        named = data_pb2.FetchRequest(token="secret", names=[text]).SerializeToString()
        assert ask(channel, FETCH_METHOD, named).code is grpc.StatusCode.INVALID_ARGUMENT
    endpoint = here.home.agent()
    assert endpoint is not None
    with LocalClient(endpoint) as client, pytest.raises(ConfigError):
        client.serve_model(run_id="a1", token="t", path=text)


def nested_groups(depth: int) -> bytes:
    """Give groups in groups: the oldest way to exhaust a reader's stack."""
    return b"\x0b" * depth + b"\x0c" * depth


MALFORMED = {
    "no protobuf": b"\xff" * 40,
    "cut short": b"\x0a\xff\xff\xff\x7f",
    "deep": nested_groups(100_000),
}


@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED)
def test_malformed_messages_of_a_member_are_refused_counted_and_told_once(
    members: Members, caplog: pytest.LogCaptureFixture, raw: bytes
) -> None:
    here = members.join("first")
    guest = members.guest(here, "guest")
    read = ("Hello", "Goodbye", "SyncRoster", "DialBack", "Profile", "Run")
    with channel_to(here.port, any_member(guest)) as channel:
        for name in read:
            answer = ask(channel, CONTROL + name, raw)
            assert answer.code in (
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.UNAUTHENTICATED,
                grpc.StatusCode.FAILED_PRECONDITION,
            ), (name, answer)
        hello = hello_of(guest.node_id, guest.cluster)
        assert ask(channel, HELLO, hello).code is grpc.StatusCode.OK
    assert sum(here.counts().values()) == len(read)
    lines = [r for r in caplog.records if r.name == "exo_train.transport.tls"]
    assert 1 <= len(lines) == len(here.counts()), "one line for each kind"
    silent_traceback(caplog)


def test_text_that_is_no_text_is_malformed(members: Members) -> None:
    here = members.join("first")
    with channel_to(here.port, any_member(members.guest(here, "guest"))) as channel:
        answer = ask(channel, HELLO, b"\x12\x02\xff\xfe")  # the cluster, as no UTF-8
    assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
    assert here.counts() == {"malformed": 1}


def test_a_message_above_the_limit_is_not_taken_in(members: Members) -> None:
    here = members.join("first")
    with channel_to(here.port, any_member(members.guest(here, "guest"))) as channel:
        for name in ("Hello", "SyncRoster", "Run"):
            answer = ask(channel, CONTROL + name, bytes(MAX_MESSAGE_BYTES + 1))
            assert answer.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        answer = ask(channel, PROBE_METHOD, b"\x02" + bytes(300_000))
        assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
    assert here.states() == {"first": "alive"}


def test_a_malformed_message_in_the_middle_of_a_run_ends_that_run_alone(
    members: Members, marker: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also JSON as deep as a stack can be, which only the worker reads."""
    here = members.join("first")
    guest = members.guest(here, "guest")
    body = pb.Prepare(
        backend=here.agent.introduce().facts.backend,
        device="cpu",
        node_id=here.id,
        cluster=guest.cluster,
    )
    begin = pb.RunMessage(run_id="a1", prepare=body).SerializeToString()
    deep = pb.RunMessage(
        run_id="a1", load=pb.Load(plan_json="[" * 100_000, manifest_json="{}", token="t")
    ).SerializeToString()
    with channel_to(here.port, any_member(guest)) as channel:
        answer = ask(channel, RUN, begin, b"\xff" * 40, timeout_s=30)
        assert answer.code is grpc.StatusCode.INVALID_ARGUMENT, answer
        answer = ask(channel, RUN, begin, deep, timeout_s=60)
        told = [pb.RunMessage.FromString(raw) for raw in answer.messages]
        assert [m.WhichOneof("body") for m in told if m.HasField("failure")] == ["failure"], answer
    wait_until(lambda: here.agent.status()["run"] is None, SOON_S, lambda: "the run goes on")
    assert here.states() == {"first": "alive"}
    silent_traceback(caplog)


HUGE_FIELD = b"\xba\x3e\x80\x80\x80\x02" + bytes(4 << 20)  # 4 MiB in field 999
MAX_TOLD_BYTES = 64 << 10  # of all that a device says
FACTS: dict[str, Callable[[pb.HelloRequest], object]] = {
    "control characters": lambda r: setattr(r.sender, "name", "a\x1b[2J"),
    "long name": lambda r: setattr(r.sender, "name", "n" * 1000),
    "too much memory": lambda r: setattr(r.sender, "usable_memory_bytes", 2**64 - 1),
    "many dtypes": lambda r: r.sender.dtypes.extend(["fp32"] * 100_000),
    "many endpoints": lambda r: r.sender.endpoints.extend(
        [pairing_pb2.Endpoint(host="1.2.3.4", port=1)] * 100_000
    ),
    "port": lambda r: r.sender.endpoints.add(host="1.2.3.4", port=65536),
    "host name": lambda r: r.sender.endpoints.add(host="evil.invalid", port=1),
    "host to show": lambda r: r.sender.endpoints.add(host="\x1b[2J", port=1),
    "zone to show": lambda r: r.sender.endpoints.add(host="fe80::1%\x1b[2J", port=1),
    "no host": lambda r: r.sender.endpoints.add(host="", port=1),
    "huge host": lambda r: r.sender.endpoints.add(host="h" * (8 << 20), port=1),
    "huge link": lambda r: r.sender.links.add(peer_id="0" * 32, interface="i" * (8 << 20)),
    "many links": lambda r: r.sender.links.extend([pb.LinkFacts()] * 1000),
    "huge unknown field": lambda r: r.sender.run.MergeFromString(HUGE_FIELD),
    "phase": lambda r: setattr(r.sender.run, "phase_age_s", float("nan")),
}  # fmt: skip


@pytest.mark.parametrize("change", FACTS.values(), ids=FACTS)
def test_facts_that_make_no_sense_are_refused_and_not_told_on(
    members: Members, change: Callable[[pb.HelloRequest], object]
) -> None:
    here = members.join("first")
    guest = members.guest(here, "guest")
    message = hello_of(guest.node_id, guest.cluster, change=change)
    with channel_to(here.port, any_member(guest)) as channel:
        answer = ask(channel, HELLO, message)
    assert answer.code is grpc.StatusCode.INVALID_ARGUMENT, answer.code
    assert here.counts() == {"malformed": 1}
    assert here.states() == {"first": "alive"}


def _says_clock(clock_s: float) -> Callable[[pb.HelloReply], object]:
    return lambda reply: setattr(reply, "clock_s", clock_s)


REPLIES: dict[str, Callable[[pb.HelloReply], object]] = {
    "clock no number": _says_clock(float("nan")),
    "clock endless": _says_clock(float("inf")),
    "clock before all": _says_clock(-float("inf")),
    "clock far ahead": _says_clock(1e308),
    "host name": lambda r: r.self.endpoints.add(host="evil.invalid", port=1),
    "another's host name": lambda r: _known(r).endpoints.add(host="evil.invalid", port=1),
    "huge link": lambda r: r.self.links.add(interface="i" * (8 << 20)),
    "huge unknown field": lambda r: r.self.run.MergeFromString(HUGE_FIELD),
    "other id": lambda r: setattr(r.self, "node_id", "7" * 32),
    "many known": lambda r: r.known.extend([r.self] * 5_000),
}


def _known(reply: pb.HelloReply) -> pb.NodeFacts:
    reply.known.append(reply.self)
    reply.known[0].node_id = "7" * 32
    return reply.known[0]


@pytest.mark.parametrize("change", REPLIES.values(), ids=REPLIES)
def test_a_reply_that_makes_no_sense_is_heard_and_told_on_as_nothing(
    members: Members, change: Callable[[pb.HelloReply], object]
) -> None:
    """The agent asks that member again and again, and its own status can be read and told on."""
    here = members.join("first")
    guest = members.guest(here, "guest")
    here.agent.admissions.admit(guest.certificate)
    other = members.guest(here, "other")
    reply = sensible_reply(here, guest)
    change(reply)
    raw = reply.SerializeToString()
    own = greeting(node_id=guest.node_id, certificate=guest.certificate).SerializeToString()
    with lying_member(guest, {HELLO: lambda _: raw, GREET: lambda _: own}) as (address, asked):
        here.agent.meeting.suggest(address, guest.node_id, is_lasting=True)
        wait_until(lambda: asked.count(HELLO) > 1, SOON_S, lambda: str((asked, here.said)))
        json.dumps(examine(here.agent), allow_nan=False)
        json.dumps(here.agent.status(), allow_nan=False)
        with channel_to(here.port, any_member(other)) as channel:
            told = ask(channel, HELLO, hello_of(other.node_id, guest.cluster))
    assert all(len(text) < 300 and "\x1b" not in text for text in here.said)
    assert told.code is grpc.StatusCode.OK
    assert len(told.messages[0]) < MAX_TOLD_BYTES
    assert "7" * 32 not in str(here.states())
