"""Nonsense, floods and malice: counted, told once, closed; nothing runs, nobody is disturbed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from exo_train.agent.agent import CONTROL_THREADS
from exo_train.agent.examining import examine
from exo_train.agent.local_client import LocalClient
from exo_train.agent.protocol import HEARTBEAT_S, PROTOCOL_VERSION, greeting
from exo_train.errors import ConfigError
from exo_train.transport import tls
from exo_train.transport.channel import HANDSHAKE_TIMEOUT_MS, MAX_MESSAGE_BYTES
from exo_train.transport.probe import PROBE_METHOD
from exo_train.transport.weight_server import FETCH_METHOD
from exo_train.wire.pb import control_pb2 as pb
from exo_train.wire.pb import data_pb2, pairing_pb2
from tests.agent.hostile_bytes import RawHttp2, filled, lying_member, messages_of, pickles
from tests.agent.members_here import (
    LOOPBACK,
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
CONTROL = "/exo_train.wire.Control/"
HELLO, RUN, SYNC_ROSTER = CONTROL + "Hello", CONTROL + "Run", CONTROL + "SyncRoster"
GREET = "/exo_train.wire.Handshake/Greet"
SOON_S = 15.0
STRANGER = "127.0.0.9"  # no member's; a machine may have all of 127.0.0.0/8
needs_loopback_net = pytest.mark.skipif(
    os.uname().sysname != "Linux" if hasattr(os, "uname") else True,
    reason="loopback has one address there",
)


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


class Undisturbed:
    """Two members that must hear each other all the time, whatever happens meanwhile."""

    def __init__(self, members: Members) -> None:
        self.first, self.second = members.join_all("first", "second")
        self.view = self.first.agent.status()["view_hash"]
        self._ages_s: list[float] = []
        self._states: list[dict[str, str]] = []
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Undisturbed:
        self._watch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._watch.join()
        if error[0] is None:
            for states in self._states:
                assert states["first"] == states["second"] == "alive", states
            assert max(self._ages_s) < 3 * HEARTBEAT_S, "a heartbeat was lost"

    def _look(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._ended.wait(0.2)
            for here, other in ((self.first, self.second), (self.second, self.first)):
                self._states.append(here.states())
                heard_s = [
                    m.last_heard_s
                    for m in here.agent.meeting.members()
                    if m.facts.node_id == other.id
                ]
                self._ages_s.append(time.monotonic() - heard_s[0])


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
    guest = any_member(members.guest(here, "guest"))
    raw, text = pickles(marker)
    pairing = here.agent.invite().addresses[0].port
    ports = {here.port: guest, here.weights_port: guest, pairing: None}
    codes: dict[str, grpc.StatusCode] = {}
    for port, tls_of_port in ports.items():
        with channel_to(port, tls_of_port) as channel:
            for method in all_methods():
                contents = [raw, text.encode()]
                with contextlib.suppress(KeyError):
                    contents.append(filled(messages_of(method)[0](), raw, text).SerializeToString())
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
    assert here.states() == {"first": "alive"}
    silent_traceback(caplog)


def test_pickles_in_every_field_of_every_reply_run_nothing(members: Members, marker: Path) -> None:
    here = members.join("first")
    guest = members.guest(here, "guest")
    here.agent.admissions.admit(guest.certificate)
    raw, text = pickles(marker)
    own = greeting(node_id=guest.node_id, certificate=guest.certificate).SerializeToString()
    answers = {
        method: lambda _, method=method: filled(
            messages_of(method)[1](), raw, text
        ).SerializeToString()
        for method in all_methods()
        if method.startswith(CONTROL)
    }
    with lying_member(guest, {**answers, GREET: lambda _: own}) as (address, asked):
        here.agent.meeting.suggest(address, guest.node_id)
        wait_until(lambda: HELLO in asked, SOON_S, lambda: str(asked))
        time.sleep(0.5)  # for what it would do with the reply
    assert here.states() == {"first": "alive"}
    assert not here.agent.ended.is_set()


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
    read = ("Hello", "Goodbye", "SyncRoster", "DialBack", "Run")
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
    reply = pb.HelloReply(
        protocol=PROTOCOL_VERSION,
        cluster=guest.cluster,
        roster_digest=here.agent.admissions.digest(),
        clock_s=time.time(),
    )
    reply.self.CopyFrom(pb.HelloRequest.FromString(hello_of(guest.node_id, guest.cluster)).sender)
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


def test_ten_thousand_silent_calls_of_a_member_disturb_nobody(
    members: Members,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tls, "FIRST_MESSAGE_S", 2.0)
    process = psutil.Process()
    with Undisturbed(members) as both:
        guest = members.guest(both.first, "guest")
        num_fds, num_threads = process.num_fds(), threading.active_count()
        with contextlib.ExitStack() as stack:
            for number in range(160):
                raw = RawHttp2(both.first.port, guest, tmp_path)
                stack.callback(raw.close)
                raw.begin((HELLO, RUN, PROBE_METHOD, SYNC_ROSTER)[number % 4], 64)
            with channel_to(both.first.port, any_member(both.second.identity)) as channel:
                assert ask(channel, GREET, b"", timeout_s=2.0).code is grpc.StatusCode.OK
            wait_until(  # gRPC refuses some itself, when too many wait
                lambda: sum(both.first.counts().values()) > 5_000,
                2 * SOON_S,
                lambda: str(both.first.counts()),
            )
            limit = num_threads + CONTROL_THREADS + 2 * tls.MAX_CALLS_OF_ONE
            assert threading.active_count() <= limit
        counts = both.first.counts()
        assert counts.keys() == {"too many calls", "silent"}
        assert counts["silent"] >= tls.MAX_CALLS_OF_ONE
        assert len(caplog.records) == 2, "one line for each kind"
        with channel_to(both.first.port, any_member(guest)) as channel:
            wait_until(
                lambda: ask(channel, GREET, b"").code is grpc.StatusCode.OK,
                SOON_S,
                lambda: "its places are never free again",
            )
        wait_until(
            lambda: process.num_fds() <= num_fds + 4,
            SOON_S,
            lambda: f"{num_fds} → {process.num_fds()} open files",
        )


def test_silent_calls_of_a_removed_device_end_at_once(members: Members, tmp_path: Path) -> None:
    with Undisturbed(members) as both:
        guest = members.guest(both.first, "guest")
        both.first.agent.admissions.admit(guest.certificate)
        both.first.agent.admissions.remove(guest.node_id)
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                raw = RawHttp2(both.first.port, guest, tmp_path)
                stack.callback(raw.close)
                raw.begin(HELLO, 64)
            wait_until(
                lambda: both.first.counts().get("removed") == 256,
                SOON_S,
                lambda: str(both.first.counts()),
            )


def scanner(port: int, said: bytes) -> socket.socket:
    """Connect as a host that is no member."""
    opened = socket.create_connection((LOOPBACK, port), timeout=10, source_address=(STRANGER, 0))
    with contextlib.suppress(OSError):
        opened.sendall(said)
    return opened


SCANS = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00" + bytes(100),  # the beginning of TLS, and no more
    b"\x00" * 9000,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    os.urandom(3000),
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"\x03\x00\x00\x13\x0e\xe0\x00\x00",
]


@needs_loopback_net
def test_scanners_and_500_silent_connections_get_nothing_and_are_closed(
    members: Members, caplog: pytest.LogCaptureFixture
) -> None:
    process = psutil.Process()
    with Undisturbed(members) as both, contextlib.ExitStack() as stack:
        num_fds = process.num_fds()
        opened = [scanner(both.first.port, b"") for _ in range(500)]
        opened += [scanner(both.first.port, said) for said in SCANS for _ in range(5)]
        slow = scanner(both.first.port, b"\x16")  # a byte a second, for ever
        for one in (*opened, slow):
            stack.callback(one.close)
        deadline_s = time.monotonic() + HANDSHAKE_TIMEOUT_MS / 1000 + 5
        said = [_until_closed(one, deadline_s, slow) for one in opened]
        assert all(text is not None for text in said), f"{said.count(None)} are still open"
        names = (b"first", both.first.id.encode(), both.first.identity.cluster.encode())
        assert not any(name in (text or b"") for text in said for name in names)
        assert _until_closed(slow, deadline_s, slow) is not None
        for one in opened:
            one.close()
        wait_until(
            lambda: process.num_fds() <= num_fds + 4,
            SOON_S,
            lambda: f"{num_fds} → {process.num_fds()} open files",
        )
        wait_until(
            lambda: both.first.agent.strangers.counts().get(STRANGER, 0) >= 400,
            SOON_S,
            lambda: str(both.first.agent.strangers.counts()),
        )
        assert examine(both.first.agent)["refused_calls"][f"connections from {STRANGER}"] >= 400
        lines = [r for r in caplog.records if STRANGER in r.getMessage()]
        assert len(lines) == 1
        assert lines[0].levelno == logging.WARNING
        assert both.first.agent.status()["view_hash"] == both.view


def _until_closed(one: socket.socket, deadline_s: float, slow: socket.socket) -> bytes | None:
    """Give what was said until the other side closed; None when it did not in time."""
    heard = bytearray()
    while (left_s := deadline_s - time.monotonic()) > 0:
        one.settimeout(min(left_s, 0.5))
        try:
            with contextlib.suppress(OSError):
                slow.send(b"\x03")
            data = one.recv(65536)
            if not data:
                return bytes(heard)
            heard += data
        except TimeoutError:
            continue
        except OSError:
            return bytes(heard)
    return None
