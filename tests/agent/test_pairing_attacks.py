"""Pairing under attack, over real gRPC: listeners, middlemen, impostors, floods and nonsense."""

from __future__ import annotations

import contextlib
import gc
import queue
import socket
import threading
import time
from collections.abc import Iterator

import grpc
import psutil
import pytest
from pairing_parties import (
    CODE,
    LOOPBACK,
    PAIR,
    ByHand,
    Cluster,
    Wire,
    impostor,
    middleman,
    try_to_pair,
)

import exo_train
from exo_train.agent import pairing_desk
from exo_train.agent.pairing import Paired, pair
from exo_train.agent.protocol import PROTOCOL_VERSION
from exo_train.cluster.pairing import Code, InviterExchange, JoinerExchange
from exo_train.identity import public_key_of
from exo_train.transport.channel import open_channel
from exo_train.wire.pb import control_pb2, data_pb2, handshake_pb2
from exo_train.wire.pb import pairing_pb2 as pb

SOON_S = 5.0
RST_STREAM = b"\x00\x00\x04\x03\x00\x00\x00\x00\x01"  # of stream 1; RFC 9113, 6.4


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.desk.close()


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as opened:
        yield opened


def test_a_recorded_pairing_gets_nothing(cluster: Cluster) -> None:
    server, address, heard = middleman(cluster.invite(), lambda side, content: content)
    assert isinstance(try_to_pair([address]), Paired)
    server.stop(None).wait()
    joined = cluster.joined
    said = [heard[0], heard[2]]  # what the joiner said
    with ByHand(cluster.invite()) as replay:
        first, last = (replay.say(message) for message in said)
    assert first is not None
    assert first.spake
    assert first.SerializeToString() != heard[1]
    assert last is not None
    assert last.refusal == "wrong code"
    assert cluster.joined == joined


def test_a_listener_hears_no_secret(cluster: Cluster, stack: contextlib.ExitStack) -> None:
    wire = Wire(cluster.invite())
    stack.callback(wire.close)
    paired = pair([wire.address], CODE)
    heard, identity = bytes(wire.heard), paired.identity
    assert exo_train.__version__.encode() in heard, "the greeting is in plain text"
    key = identity.authority_key
    for secret in (
        key,
        key[36:68],  # the private number itself
        identity.authority_certificate,
        identity.certificate,
        cluster.identity.certificate,
        public_key_of(identity.key_pem),
        identity.node_id.encode(),
        cluster.identity.node_id.encode(),
        identity.cluster.encode(),
        b"maple",
        b"10.0.0.5",
    ):
        assert secret not in heard


def test_who_only_passes_messages_on_changes_nothing_and_learns_nothing(
    cluster: Cluster, stack: contextlib.ExitStack
) -> None:
    server, address, heard = middleman(cluster.invite(), lambda side, content: content)
    stack.callback(lambda: server.stop(None).wait())
    paired = pair([address], CODE)
    assert cluster.joined == (paired.identity.node_id,)
    assert len(heard) == 4
    assert not any(paired.identity.authority_key[36:68] in message for message in heard)


OWN_HALF = Code(number=7, words=("zebra", "zebra"))


@pytest.mark.parametrize(
    ("changed", "noticed"),
    [
        ("joiner spake", "wrong code"),
        ("inviter spake", "wrong code"),
        ("joiner sealed", "wrong code"),
        ("inviter sealed", "was not sealed with the code"),
    ],
)
@pytest.mark.parametrize("how", ["a bit", "its own"])
def test_who_changes_a_message_gets_nothing_and_is_noticed(
    cluster: Cluster, stack: contextlib.ExitStack, changed: str, noticed: str, how: str
) -> None:
    own = {
        "joiner spake": JoinerExchange(OWN_HALF, protocol=PROTOCOL_VERSION).first,
        "inviter spake": InviterExchange(OWN_HALF, protocol=PROTOCOL_VERSION)._answer,
        "joiner sealed": bytes(120),
        "inviter sealed": bytes(2000),
    }

    def change(side: str, content: bytes) -> bytes:
        if side != changed:
            return content
        if how == "its own":
            return own[side]
        return content[:-1] + bytes([content[-1] ^ 1])

    server, address, _ = middleman(cluster.invite(), change)
    stack.callback(lambda: server.stop(None).wait())
    told = try_to_pair([address])
    assert isinstance(told, str), "the joiner must not believe it"
    if how == "its own" or changed.endswith("sealed"):
        assert noticed in told
    if changed != "inviter sealed":
        assert cluster.joined == ()


def test_an_impostor_sees_the_code_used_once_and_learns_nothing(
    stack: contextlib.ExitStack,
) -> None:
    """It may test one guess on what it gets; with many addresses it must not get more."""
    proofs: list[bytes] = []
    addresses = []
    for _ in range(3):
        server, address = impostor(proofs)
        stack.callback(lambda server=server: server.stop(None).wait())
        addresses.append(address)
    assert "pretend to be that device" in str(try_to_pair(addresses))
    assert len(proofs) == 1


def test_the_greeting_says_the_version_and_nothing_else(cluster: Cluster) -> None:
    with contextlib.closing(open_channel(cluster.invite())) as channel:
        greet = channel.unary_unary("/exo_train.wire.Handshake/Greet")
        said = handshake_pb2.Greeting.FromString(greet(b"anything \xff", timeout=5))
    assert [field.name for field, _ in said.ListFields() if field.name != "features"] == [
        "protocol",
        "build",
    ]
    assert (said.protocol, said.build) == (PROTOCOL_VERSION, exo_train.__version__)


def test_nothing_but_handshake_and_pairing_is_there(cluster: Cluster) -> None:
    address = cluster.invite()
    services = [
        service
        for module in (control_pb2, data_pb2, handshake_pb2, pb)
        for service in module.DESCRIPTOR.services_by_name.values()
    ]
    methods = [f"/{s.full_name}/{m.name}" for s in services for m in s.methods]
    assert len(methods) > 10
    answered = set()
    with contextlib.closing(open_channel(address)) as channel:
        for method in methods:
            try:
                list(channel.stream_stream(method)(iter([b""]), timeout=5))
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    continue
            answered.add(method.rpartition(".")[2])
    assert answered == {"Handshake/Greet", "Pairing/Pair"}


NONSENSE = {
    "no protobuf": b"\xff" * 40,
    "nothing": b"",
    "too large": bytes(pairing_desk.MAX_REQUEST_MESSAGE_BYTES + 1),
    "much too large": bytes(4 << 20),
    "a proof first": pb.JoinerMessage(sealed=bytes(80)).SerializeToString(),
    "no half": pb.JoinerMessage(spake=b"A" * 33, number=7).SerializeToString(),
}


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_nonsense_is_cut_off_costs_no_try_and_disturbs_nobody(
    cluster: Cluster, nonsense: str, caplog: pytest.LogCaptureFixture
) -> None:
    address = cluster.invite()
    for _ in range(5):
        with ByHand(address) as hand:
            assert hand.say(NONSENSE[nonsense]) is None
    assert len(caplog.records) <= 1, "one line, not one for each"
    assert isinstance(try_to_pair([address]), Paired)


def test_an_oversized_message_is_refused_before_it_is_read(cluster: Cluster) -> None:
    with contextlib.closing(open_channel(cluster.invite())) as channel:
        replies = channel.stream_stream(PAIR)(iter([NONSENSE["too large"]]), timeout=5)
        with pytest.raises(grpc.RpcError) as caught:
            next(replies)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_proof_that_is_too_large_is_cut_off(cluster: Cluster) -> None:
    with ByHand(cluster.invite()) as hand:
        hand.begin(CODE)
        assert hand.say(pb.JoinerMessage(sealed=bytes(2000))) is None
    assert cluster.joined == ()


def test_streams_that_say_nothing_do_not_keep_a_device_out(cluster: Cluster) -> None:
    address = cluster.invite()
    with contextlib.ExitStack() as opened:
        for _ in range(2 * pairing_desk.MAX_CALLS):
            opened.enter_context(ByHand(address))
        half = opened.enter_context(ByHand(address))
        half.begin(CODE)  # and then nothing
        started_s = time.monotonic()
        assert isinstance(try_to_pair([address]), Paired)
        assert time.monotonic() - started_s < SOON_S


def test_greetings_that_say_nothing_do_not_keep_a_device_out(cluster: Cluster) -> None:
    address = cluster.invite()
    silence: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    with contextlib.ExitStack() as opened:
        for _ in range(2 * pairing_desk.MAX_CALLS):
            channel = opened.enter_context(contextlib.closing(open_channel(address)))
            greet = channel.stream_unary("/exo_train.wire.Handshake/Greet")
            opened.callback(greet.future(iter(silence.get, None)).cancel)
            opened.callback(silence.put, None)
        time.sleep(0.5)
        assert isinstance(try_to_pair([address]), Paired)


def test_greetings_that_nobody_hears_do_not_heap_up(cluster: Cluster) -> None:
    """HTTP/2 that allows its server to send nothing: the answers stay where they are."""
    address = cluster.invite()
    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": b"/exo_train.wire.Handshake/Greet",
        b":authority": b"desk",
        b"content-type": b"application/grpc",
        b"te": b"trailers",
    }
    # RFC 7541, 6.2.2: literal fields, not indexed. RFC 9113: window 0 is setting 4.
    block = b"".join(
        b"\x00" + b"".join(bytes([len(part)]) + part for part in pair) for pair in fields.items()
    )
    said = (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + b"\x00\x00\x06\x04\x00\x00\x00\x00\x00"
        + b"\x00\x04\x00\x00\x00\x00"
        + len(block).to_bytes(3, "big")
        + b"\x01\x04\x00\x00\x00\x01"
        + block
        + b"\x00\x00\x05\x00\x01\x00\x00\x00\x01"
        + bytes(5)  # an empty message, the last
    )
    first: socket.socket | None = None
    with contextlib.ExitStack() as opened:
        for _ in range(2 * pairing_desk.MAX_CALLS):
            one = opened.enter_context(socket.create_connection((LOOPBACK, address.port), 5))
            one.sendall(said)
            first = one if first is None else first
        assert first is not None
        heard = b""
        while RST_STREAM not in heard:  # it was cut off to make room for the others
            heard += first.recv(4096)
        assert isinstance(try_to_pair([address]), Paired)


def test_a_stream_has_a_limit(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing_desk, "STREAM_S", 0.2)
    with ByHand(cluster.invite()) as hand:
        hand.begin(CODE)
        started_s = time.monotonic()
        assert hand.hear() is None
        assert time.monotonic() - started_s < SOON_S


def test_strangers_on_the_port_do_not_keep_a_device_out(cluster: Cluster) -> None:
    address = cluster.invite()
    with contextlib.ExitStack() as opened:
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + bytes(200), bytes(9000)):
            for _ in range(10):
                one = opened.enter_context(socket.create_connection((LOOPBACK, address.port)))
                with contextlib.suppress(OSError):
                    one.sendall(said)
        assert isinstance(try_to_pair([address]), Paired)


def test_invitations_leave_nothing_open(cluster: Cluster, stack: contextlib.ExitStack) -> None:
    process = psutil.Process()
    counts = []
    stack.callback(gc.enable)
    gc.disable()  # it would hide threads that nobody has ended
    for _ in range(3):
        for _ in range(5):
            pair([cluster.invite()], CODE)
            cluster.why_closed()
        cluster.desk.close()
        deadline_s = time.monotonic() + SOON_S
        while threading.active_count() > 20 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        counts.append((process.num_fds(), threading.active_count()))
    assert counts[2][0] <= counts[0][0] + 5
    assert counts[2][1] <= counts[0][1] + 3
