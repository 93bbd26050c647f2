"""Pairing over real gRPC on loopback: who gets in, who does not, and what the others learn."""

from __future__ import annotations

import contextlib
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from pairing_parties import (
    CODE,
    LOOPBACK,
    WRONG,
    ByHand,
    Cluster,
    Wire,
    impostor,
    is_open,
    serve,
    some_key,
    try_to_pair,
)

import exo_train
from exo_train.agent import pairing
from exo_train.agent.pairing import Paired, pair
from exo_train.agent.protocol import PROTOCOL_VERSION, greeting
from exo_train.cluster.pairing import Closed, Code, InviterExchange
from exo_train.cluster.roster import Roster
from exo_train.errors import ConfigError, InterruptedRunError, PeerError, ProtocolError
from exo_train.identity import check_identity, to_pem
from exo_train.peer import Address
from exo_train.transport.channel import bind, new_server
from exo_train.wire.pb import handshake_pb2
from exo_train.wire.pb import pairing_pb2 as pb

SOON_S = 5.0


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.desk.close()


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as opened:
        yield opened


def test_the_right_code_makes_a_member(cluster: Cluster) -> None:
    started_s = time.monotonic()
    paired = pair([cluster.invite()], CODE)
    assert time.monotonic() - started_s < SOON_S
    check_identity(paired.identity)
    assert paired.identity.cluster == cluster.identity.cluster
    assert paired.endpoints == (Address("10.0.0.5", 52415),)
    assert cluster.joined == (paired.identity.node_id,)
    assert Roster.of(paired.identity, paired.roster).digest() == cluster.roster.digest()
    assert cluster.why_closed() is Closed.PAIRED


def test_the_port_is_closed_afterwards(cluster: Cluster) -> None:
    address = cluster.invite()
    assert is_open(address)
    assert cluster.desk.port == address.port
    pair([address], CODE)
    cluster.why_closed()
    assert not is_open(address)
    assert cluster.desk.addresses == ()
    assert cluster.desk.port is None


def test_a_code_is_good_for_one_device(cluster: Cluster) -> None:
    address = cluster.invite()
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: try_to_pair([address]), range(4)))
    won = [result for result in results if isinstance(result, Paired)]
    assert [cluster.joined] == [tuple(p.identity.node_id for p in won)]
    later = try_to_pair([address])
    assert isinstance(later, str)
    assert f"nothing answers at {address}" in later


def test_three_wrong_tries_close_it_and_the_right_code_comes_too_late(cluster: Cluster) -> None:
    address = cluster.invite()
    for _ in range(3):
        refused = try_to_pair([address], WRONG)
        assert isinstance(refused, str)
        assert refused.startswith(f"wrong code: {address}")
    assert cluster.why_closed() is Closed.WRONG_TRIES
    assert isinstance(try_to_pair([address]), str)
    assert cluster.joined == ()


def test_two_wrong_tries_are_forgiven(cluster: Cluster) -> None:
    address = cluster.invite()
    for _ in range(2):
        try_to_pair([address], WRONG)
    assert isinstance(try_to_pair([address]), Paired)


def test_tries_that_were_begun_before_the_third_count_too(cluster: Cluster) -> None:
    """Guesses in parallel must not be more than guesses in a row."""
    address = cluster.invite()
    with contextlib.ExitStack() as opened:
        hands = [opened.enter_context(ByHand(address)) for _ in range(4)]
        begun = [hand.begin(code) for hand, code in zip(hands, [WRONG] * 3 + [CODE], strict=True)]
        replies = [hand.prove(one, some_key()) for hand, one in zip(hands, begun, strict=True)]
    said = [reply.refusal if reply else None for reply in replies]
    assert said[:2] == ["wrong code"] * 2
    assert said[3] in ("closed", None)
    assert cluster.joined == ()


def test_one_device_at_two_addresses_costs_one_try(stack: contextlib.ExitStack) -> None:
    cluster = Cluster(hosts=(LOOPBACK, "::1"))
    stack.callback(cluster.desk.close)
    cluster.invite()
    addresses = cluster.desk.addresses
    assert len(addresses) == 2
    for _ in range(2):
        assert "wrong code" in str(try_to_pair(addresses, WRONG))
    assert isinstance(try_to_pair(addresses), Paired)


@pytest.mark.skipif(sys.platform != "linux", reason="only there 127.0.0.2 is this machine, too")
def test_one_device_at_eight_addresses_does_not_cut_itself_off(
    stack: contextlib.ExitStack,
) -> None:
    cluster = Cluster(hosts=tuple(f"127.0.0.{number}" for number in range(1, 9)))
    stack.callback(cluster.desk.close)
    for _ in range(5):
        cluster.invite()
        assert len(cluster.desk.addresses) == pairing.MAX_AT_ONCE
        assert isinstance(try_to_pair(cluster.desk.addresses), Paired)


def test_another_number_costs_no_try(cluster: Cluster) -> None:
    address = cluster.invite()
    for number in range(10, 15):
        told = try_to_pair([address], Code(number=number, words=CODE.words))
        assert f"the number {number}: {address} invites with another number" in str(told)
    assert isinstance(try_to_pair([address]), Paired)


def test_an_expired_code_gets_nothing(stack: contextlib.ExitStack) -> None:
    cluster = Cluster(lifetime_s=0.2)
    stack.callback(cluster.desk.close)
    address = cluster.invite()
    with ByHand(address) as hand:
        exchange = hand.begin(CODE)
        assert cluster.why_closed() is Closed.EXPIRED
        assert hand.prove(exchange, some_key()) is None, "what was begun in time is cut off"
    assert not is_open(address)
    assert "nothing answers" in str(try_to_pair([address]))
    assert cluster.joined == ()


def test_a_code_ages_while_the_machine_sleeps(stack: contextlib.ExitStack) -> None:
    """All waits stand still then: only the clock has gone on afterwards."""
    now_s = 0.0
    cluster = Cluster(clock=lambda: now_s)
    stack.callback(cluster.desk.close)
    address = cluster.invite()
    now_s = 599.0
    assert cluster.desk.addresses == (address,)
    now_s = 601.0
    assert cluster.desk.addresses == ()
    assert cluster.closed.get(timeout=3.0) is Closed.EXPIRED
    assert not is_open(address)


def test_a_proof_that_wakes_a_machine_up_comes_too_late(stack: contextlib.ExitStack) -> None:
    now_s = 0.0
    cluster = Cluster(clock=lambda: now_s)
    stack.callback(cluster.desk.close)
    with ByHand(cluster.invite()) as hand:
        exchange = hand.begin(CODE)
        now_s = 601.0
        reply = hand.prove(exchange, some_key())
    assert reply is None or reply.refusal == "closed"
    assert cluster.joined == ()


def test_each_code_is_for_the_addresses_of_its_moment(cluster: Cluster) -> None:
    assert cluster.invite().host == LOOPBACK
    cluster.hosts = ("::1",)
    after = cluster.invite()
    assert after.host == "::1"
    assert isinstance(try_to_pair([after]), Paired)


def test_a_new_code_voids_the_one_before(cluster: Cluster) -> None:
    before = cluster.invite()
    after = cluster.invite()
    assert cluster.why_closed() is Closed.REPLACED
    assert not is_open(before)
    assert isinstance(try_to_pair([before, after]), Paired)


def test_a_closed_desk_may_invite_again_from_its_callback(cluster: Cluster) -> None:
    again: list[str] = []
    done = threading.Event()

    def invite(why: Closed) -> None:
        if not again:
            again.append(str(cluster.desk.invite().code))
            done.set()

    cluster.desk._on_closed = invite
    pair([cluster.invite()], CODE)
    assert done.wait(SOON_S)
    assert isinstance(try_to_pair(cluster.desk.addresses), Paired)


def test_a_device_that_cannot_be_admitted_is_told(stack: contextlib.ExitStack) -> None:
    cluster = Cluster(error=ProtocolError("this cluster has 64 devices, the limit is 64"))
    stack.callback(cluster.desk.close)
    address = cluster.invite()
    told = str(try_to_pair([address]))
    assert f"the code is right, but {address} could not let this device in" in told
    assert "64" not in told, "the answer is in plain text"
    assert cluster.why_closed() is Closed.NOT_ADMITTED


@pytest.mark.parametrize(
    ("build", "told"), [("9.8.7", "9.8.7"), ("\x1b[2J", "unknown"), ("x" * 999, "x" * 40 + " ")]
)
def test_another_version_is_told_with_both(
    stack: contextlib.ExitStack, build: str, told: str
) -> None:
    hello = handshake_pb2.Greeting(protocol=99, build=build)
    server, address = serve(lambda requests, context: iter(()), hello=hello)
    stack.callback(lambda: server.stop(None).wait())
    sentence = str(try_to_pair([address]))
    assert f"{address} runs exo-train {told}" in sentence
    assert "(protocol 99)" in sentence
    assert f"exo-train {exo_train.__version__} (protocol {PROTOCOL_VERSION})" in sentence


def test_a_control_port_is_no_pairing_port(cluster: Cluster, stack: contextlib.ExitStack) -> None:
    own = (cluster.identity.key_pem, to_pem(cluster.identity.certificate))
    credentials = grpc.ssl_server_credentials([own])
    server = new_server(max_workers=2)
    address = Address(LOOPBACK, bind(server, LOOPBACK, credentials=credentials))
    server.start()
    stack.callback(lambda: server.stop(None).wait())
    assert ssl.get_server_certificate((address.host, address.port), timeout=5)
    assert f"{address} answers, but it is no pairing port" in str(try_to_pair([address]))


def test_a_port_that_says_nothing_is_given_up(
    stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairing, "GREET_TIMEOUT_S", 0.3)
    silent = stack.enter_context(socket.create_server((LOOPBACK, 0)))
    address = Address(LOOPBACK, silent.getsockname()[1])
    assert f"{address} answers, but it is no pairing port" in str(try_to_pair([address]))


def test_the_device_meant_is_found_among_others(
    cluster: Cluster, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another number, another version, a port of something else, and nobody at all."""
    monkeypatch.setattr(pairing, "GREET_TIMEOUT_S", 15.0)
    other = Cluster()
    stack.callback(other.desk.close)
    other.desk._choose = lambda: Code(number=8, words=CODE.words)
    hello = greeting()
    hello.protocol = 99
    server, newer = serve(lambda requests, context: iter(()), hello=hello)
    stack.callback(lambda: server.stop(None).wait())
    silent = stack.enter_context(socket.create_server((LOOPBACK, 0)))
    nothing = Address(LOOPBACK, silent.getsockname()[1])
    candidates = [nothing, Address(LOOPBACK, 1), newer, other.invite(), cluster.invite()]
    started_s = time.monotonic()
    assert pair(candidates, CODE).identity.cluster == cluster.identity.cluster
    assert time.monotonic() - started_s < pairing.GREET_TIMEOUT_S, "nobody is waited for"
    assert other.joined == ()


def test_candidates_may_turn_up_later_or_never(cluster: Cluster) -> None:
    address = cluster.invite()
    forever = threading.Event()

    def heard() -> Iterator[Address]:
        time.sleep(0.1)
        yield address
        forever.wait()

    assert pair(heard(), CODE).identity.cluster == cluster.identity.cluster

    def silence() -> Iterator[Address]:
        forever.wait()
        yield from ()

    with pytest.raises(PeerError, match=r"number 7: no device that invites was heard.*--peer"):
        pair(silence(), CODE, timeout_s=0.2)
    with pytest.raises(PeerError, match="no device that invites was heard"):
        pair([], CODE)
    forever.set()


def test_others_are_asked_only_when_all_who_were_named_have_missed(
    cluster: Cluster, stack: contextlib.ExitStack
) -> None:
    """Whoever else answers may be an impostor, and gets the one guess."""
    proofs: list[bytes] = []
    server, pretender = impostor(proofs)
    stack.callback(lambda: server.stop(None).wait())
    slow = Wire(cluster.invite(), delay_s=1.0)
    stack.callback(slow.close)
    asked: list[bool] = []

    def otherwise(ended: threading.Event) -> Iterator[Address]:
        asked.append(True)
        yield pretender

    named = [Address(LOOPBACK, 1), slow.address]
    assert pair(named, CODE, otherwise=otherwise).identity.cluster == cluster.identity.cluster
    assert (proofs, asked) == ([], [])
    with pytest.raises(PeerError, match="pretend to be that device"):
        pair(named[:1], CODE, otherwise=otherwise)
    assert (len(proofs), asked) == (1, [True])


@pytest.mark.parametrize("at", ["a silent port", "the network", "the proof"])
def test_a_stop_ends_the_search_wherever_it_is(stack: contextlib.ExitStack, at: str) -> None:
    forever, stopped = threading.Event(), threading.Event()
    stack.callback(forever.set)

    def hang(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        first = pb.JoinerMessage.FromString(next(requests))
        answer = InviterExchange(CODE, protocol=PROTOCOL_VERSION).answer(first.spake)
        yield pb.InviterMessage(spake=answer).SerializeToString()
        forever.wait()

    def browse(ended: threading.Event) -> Iterator[Address]:
        ended.wait()
        yield from ()

    silent = stack.enter_context(socket.create_server((LOOPBACK, 0)))
    server, hanging = serve(hang)
    stack.callback(lambda: server.stop(None).wait())
    stack.callback(forever.set)
    named = {
        "a silent port": [Address(LOOPBACK, silent.getsockname()[1])],
        "the network": [],
        "the proof": [hanging],
    }[at]
    threading.Timer(0.4, stopped.set).start()
    started_s = time.monotonic()
    with pytest.raises(InterruptedRunError, match="nothing was changed here") as caught:
        pair(named, CODE, otherwise=browse, stopped=stopped)
    assert time.monotonic() - started_s < 1.4
    assert ("the code may be used up" in str(caught.value)) == (at == "the proof")


def test_an_error_of_the_search_is_passed_on() -> None:
    def broken() -> Iterator[Address]:
        raise ConfigError("no usable network")
        yield

    with pytest.raises(ConfigError, match="no usable network"):
        pair(broken(), CODE)


def test_an_admission_that_does_not_fit_together_is_refused(
    cluster: Cluster, stack: contextlib.ExitStack
) -> None:
    other = Cluster()
    stack.callback(other.desk.close)
    honest = cluster.admit

    def admit(public_key: bytes) -> pb.Admission:
        admission = honest(public_key)
        admission.authority_key = other.identity.authority_key
        return admission

    cluster.desk._admit = admit
    assert "do not match" in str(try_to_pair([cluster.invite()]))

    def forget(public_key: bytes) -> pb.Admission:
        admission = honest(public_key)
        admission.roster.Clear()
        return admission

    cluster.desk._admit = forget
    assert "without knowing who had invited it" in str(try_to_pair([cluster.invite()]))
