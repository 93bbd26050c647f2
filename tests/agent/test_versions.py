"""Different versions meet: each is told both sides' versions, and what is new is passed over."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

import exo_train
from exo_train.agent.protocol import PROTOCOL_VERSION, greeting
from exo_train.identity import Identity
from exo_train.wire.pb import control_pb2 as pb
from exo_train.wire.pb import handshake_pb2
from tests.agent.hostile_bytes import lying_member
from tests.agent.members_here import (
    DIAL_BACK,
    GREET,
    HELLO,
    SYNC_ROSTER,
    Here,
    Members,
    all_methods,
    any_member,
    ask,
    channel_to,
    hello_of,
    short,
    wait_said,
)
from tests.agent.running_agents import wait_until

pytestmark = pytest.mark.xdist_group("agents-here")
NEWER = 77
SOON_S = 15.0
UNKNOWN_FIELDS = b"\xc2\xbb\x02\x05later" + b"\xc8\xbb\x02\x2a"  # fields 5000 (text), 5001 (number)


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    with Members(tmp_path) as household:
        yield household


def known_guest(members: Members, here: Here) -> Identity:
    guest = members.guest(here, "guest")
    here.agent.admissions.admit(guest.certificate)
    return guest


def greeting_of(guest: Identity, **other: object) -> bytes:
    own = greeting(node_id=guest.node_id, certificate=guest.certificate)
    own.MergeFrom(handshake_pb2.Greeting(**other))  # type: ignore[arg-type]
    return own.SerializeToString()


@pytest.mark.parametrize("is_known", [True, False], ids=["a known member", "an address"])
def test_who_calls_a_newer_version_reads_both_versions_once(
    members: Members, is_known: bool
) -> None:
    here = members.join("first")
    guest = known_guest(members, here)
    answer = greeting_of(guest, protocol=NEWER, build="9.8.7")
    with lying_member(guest, {GREET: lambda _: answer}) as (address, asked):
        here.agent.meeting.suggest(address, guest.node_id if is_known else None)
        sentence = wait_said(here, "protocol")
        wait_until(lambda: len(asked) > 1, 2 * SOON_S, lambda: str(asked))
    for part in (str(address), "9.8.7", f"protocol {NEWER}", exo_train.__version__,
                 f"with {PROTOCOL_VERSION}", "install the same version on both"):  # fmt: skip
        assert part in sentence, part
    assert asked == [GREET] * len(asked), "nothing is said to it but the greeting"
    assert here.said == [sentence]
    assert here.states() == {"first": "alive"}


def test_a_newer_version_that_calls_is_told_ours_and_nothing_else(members: Members) -> None:
    here = members.join("first")
    guest = members.guest(here, "guest")
    with channel_to(here.port, any_member(guest)) as channel:
        newer = greeting_of(guest, protocol=NEWER, build="9.8.7") + UNKNOWN_FIELDS
        (raw,) = ask(channel, GREET, newer).messages
        ours = handshake_pb2.Greeting.FromString(raw)
        assert (ours.protocol, ours.build) == (PROTOCOL_VERSION, exo_train.__version__)
        change = lambda request: setattr(request, "protocol", NEWER)  # noqa: E731
        answer = ask(channel, HELLO, hello_of(guest.node_id, guest.cluster, change=change))
    reply = pb.HelloReply.FromString(answer.messages[0])
    assert reply.refusal
    assert {field.name for field, _ in reply.ListFields()} == {"protocol", "refusal"}
    assert here.states() == {"first": "alive"}


def test_a_build_that_is_no_text_for_people_does_not_reach_the_screen_as_it_is(
    members: Members,
) -> None:
    here = members.join("first")
    guest = known_guest(members, here)
    answer = greeting_of(guest, protocol=NEWER, build="\x1b[2J" + "x" * 10_000)
    with lying_member(guest, {GREET: lambda _: answer}) as (address, _):
        here.agent.meeting.suggest(address, guest.node_id)
        sentence = wait_said(here, "protocol")
    assert "\x1b" not in sentence
    assert len(sentence) < 400


def meets(members: Members, change: Callable[[pb.HelloReply], bytes], dial_back: bytes) -> Here:
    """Let an agent meet a member whose replies are a later version's, and give the agent."""
    here = members.join("first")
    guest = known_guest(members, here)
    sender = pb.HelloRequest.FromString(hello_of(guest.node_id, guest.cluster)).sender
    reply = pb.HelloReply(
        protocol=PROTOCOL_VERSION, cluster=guest.cluster, self=sender, clock_s=time.time(),
        roster_digest=here.agent.admissions.digest(),
    )  # fmt: skip
    answers = {
        GREET: lambda _: greeting_of(guest, features=["later"]) + UNKNOWN_FIELDS,
        HELLO: lambda _: change(reply),
        DIAL_BACK: lambda _: dial_back,
    }
    with lying_member(guest, answers) as (address, asked):
        here.agent.meeting.suggest(address, guest.node_id)
        wait_until(lambda: DIAL_BACK in asked, SOON_S, lambda: str((asked, here.said)))
        time.sleep(0.5)
        assert here.states() == {"first": "alive", "guest": "alive"}, here.said
        assert not here.agent.introduce().unreachable
    return here


def test_unknown_fields_and_enum_values_are_passed_over(members: Members) -> None:
    later = pb.DialBackReply(outcomes=[99] * 8).SerializeToString() + UNKNOWN_FIELDS
    meets(members, lambda reply: reply.SerializeToString() + UNKNOWN_FIELDS, later)


def test_unknown_fields_of_a_caller_are_passed_over(members: Members) -> None:
    here = members.join("first")
    guest = members.guest(here, "guest")
    with channel_to(here.port, any_member(guest)) as channel:
        hello = hello_of(guest.node_id, guest.cluster) + UNKNOWN_FIELDS
        assert ask(channel, HELLO, hello).code is grpc.StatusCode.OK
        assert ask(channel, SYNC_ROSTER, UNKNOWN_FIELDS).code is grpc.StatusCode.OK
    assert here.states() == {"first": "alive", "guest": "alive"}
    assert here.counts() == {}


def test_a_method_that_the_other_does_not_have_harms_nothing(members: Members) -> None:
    """The other has neither DialBack nor Probe, and calls what this version does not have."""
    here = members.join("first")
    guest = known_guest(members, here)
    sender = pb.HelloRequest.FromString(hello_of(guest.node_id, guest.cluster)).sender
    reply = pb.HelloReply(
        protocol=PROTOCOL_VERSION, cluster=guest.cluster, self=sender, clock_s=time.time(),
        roster_digest=here.agent.admissions.digest(),
    ).SerializeToString()  # fmt: skip
    answers = {GREET: lambda _: greeting_of(guest), HELLO: lambda _: reply}
    with lying_member(guest, answers) as (address, asked):
        here.agent.meeting.suggest(address, guest.node_id)
        wait_until(lambda: asked.count(HELLO) > 2, SOON_S, lambda: str((asked, here.said)))
        with channel_to(here.port, any_member(guest)) as channel:
            answer = ask(channel, "/exo_train.wire.Control/Later", b"\x01")
            assert answer.code is grpc.StatusCode.UNIMPLEMENTED
        assert here.states() == {"first": "alive", "guest": "alive"}
        assert not here.agent.introduce().unreachable


def test_random_bytes_to_every_method_are_an_answer_never_an_accident(
    members: Members, caplog: pytest.LogCaptureFixture
) -> None:
    here = members.join("first")
    guest = members.guest(here, "guest")
    for port in (here.port, here.weights_port):
        with channel_to(port, any_member(guest)) as channel:
            for method in all_methods():
                for size in (1, 10, 100, 5000):
                    code = ask(channel, method, os.urandom(size)).code
                    assert code is not grpc.StatusCode.UNKNOWN, short(method)
    assert here.states() == {"first": "alive"}
    assert [r.getMessage() for r in caplog.records if r.name.startswith("grpc")] == []


def test_random_bytes_as_a_reply_are_a_device_that_is_not_met(members: Members) -> None:
    here = members.join("first")
    guest = known_guest(members, here)
    for answers in (
        {GREET: lambda _: b"\xff" * 50},
        {GREET: lambda _: greeting_of(guest), HELLO: lambda _: b"\xff" * 50},
    ):
        with lying_member(guest, answers) as (address, asked):
            here.agent.meeting.suggest(address, guest.node_id)
            wait_until(lambda: bool(asked), SOON_S, lambda: str(here.said))
            wait_until(
                lambda: any(m.address == address for m in here.agent.meeting.noticed.not_met()),
                SOON_S,
                lambda: str(here.agent.meeting.noticed.not_met()),
            )
    assert here.states() == {"first": "alive"}
