"""Who gets nothing: strangers, removed devices, and members that speak in another's name."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from exo_train.agent.actions import AgentActions
from exo_train.agent.joining import become_member
from exo_train.agent.protocol import TOKEN_METADATA
from exo_train.cluster.home import Home
from exo_train.errors import ConfigError
from exo_train.identity import (
    Identity,
    found_cluster,
    issue_certificate,
    new_key,
    node_id_of,
    public_key_of,
)
from exo_train.train.snapshots import SnapshotStore
from exo_train.transport.probe import PROBE_METHOD
from exo_train.transport.weight_server import FETCH_METHOD
from exo_train.wire.pb import handshake_pb2
from exo_train.worker import GrpcSurroundings
from tests.agent.members_here import (
    GREET,
    HELLO,
    LOOPBACK,
    Answer,
    Here,
    Members,
    all_methods,
    any_member,
    ask,
    channel_to,
    forged,
    hello_of,
    listening_ports,
    short,
    wait_all_met,
)
from tests.agent.running_agents import RunningAgent, loopback_interface, wait_met, wait_until

pytestmark = pytest.mark.xdist_group("agents-here")
MEMBERS_METHODS = {  # what each port has for those who may call
    "control": {
        "Control/DialBack", "Control/Goodbye", "Control/Hello", "Control/KeepReplica",
        "Control/Profile", "Control/Run", "Control/SyncRoster", "Handshake/Greet", "Probe/Exchange",
    },
    "weights": {"Weights/Fetch"},
    "worker": {"Data/Exchange", "Data/Shadow"},
}  # fmt: skip
# By whom it hears it first: who is refused, or who is told.
REMOVED = re.compile(
    "this device was removed from the cluster|removed this device from the cluster"
)
SOON_S = 10.0


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    with Members(tmp_path) as household:
        yield household


def answered(port: int, call: Callable[[grpc.Channel, str], Answer], tls: object) -> set[str]:
    """Give the methods that a port has for this caller, each tried on a connection of its own."""

    def is_answered(method: str) -> bool:
        with channel_to(port, tls) as channel:  # type: ignore[arg-type]
            answer = call(channel, method)
        is_cut = answer.code is grpc.StatusCode.UNAVAILABLE and "not ready" not in answer.details
        return bool(answer.messages) or not (is_cut or answer.code is grpc.StatusCode.UNIMPLEMENTED)

    with ThreadPoolExecutor(4) as pool:
        methods = all_methods()
        return {
            short(method)
            for method, is_there in zip(methods, pool.map(is_answered, methods), strict=True)
            if is_there
        }


def say_nothing(channel: grpc.Channel, method: str) -> Answer:
    return ask(channel, method, b"")


def strangers(cluster: Identity) -> dict[str, object]:
    """Give what a caller without a member's certificate can show."""
    other = found_cluster()
    own_key, own_authority = new_key(), found_cluster()
    self_signed = issue_certificate(own_authority, public_key_of(own_key))
    return {
        "plain text": None,
        "no certificate": forged(cluster.authority_certificate),
        "another cluster's": forged(
            cluster.authority_certificate, other.key_pem, other.certificate
        ),
        "its own authority's": forged(cluster.authority_certificate, own_key, self_signed),
    }


@pytest.fixture(scope="module")
def worker_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Identity, int]]:
    """Open the port that a worker opens, as the worker does it."""
    home = Home(tmp_path_factory.mktemp("worker"))
    identity = home.found()
    surroundings = GrpcSurroundings(home, listen_hosts=[LOOPBACK], hosts=[LOOPBACK], model=None)
    yield identity, surroundings.open_data(SnapshotStore())[0].port
    surroundings.close()


def test_the_list_of_methods_is_all_of_them() -> None:
    listed = {short(method) for method in all_methods()}
    assert {"Data/Exchange", "Weights/Fetch", "Probe/Exchange", "Pairing/Pair"} <= listed
    assert len({name for name in listed if name.startswith("Control/")}) >= 5
    assert len({name for name in listed if name.startswith("Local/")}) >= 7


def test_no_port_of_an_agent_answers_a_stranger(members: Members) -> None:
    """Every port that is open, whatever it is for, and every method, wherever it belongs."""
    before = listening_ports()
    here = members.join("first")
    pairing = here.agent.invite().addresses[0].port
    endpoint = here.home.agent()
    assert endpoint is not None
    local = endpoint.local_port
    opened = listening_ports() - before
    assert opened == {here.port, here.weights_port, local, pairing}
    for what, tls in strangers(here.identity).items():
        assert answered(here.port, say_nothing, tls) == set(), f"control port, {what}"
        assert answered(here.weights_port, say_nothing, tls) == set(), f"weights port, {what}"
        expected = {"Handshake/Greet", "Pairing/Pair"} if tls is None else set()
        assert answered(pairing, say_nothing, tls) == expected, f"pairing port, {what}"
        if tls is not None:
            assert answered(local, say_nothing, tls) == set(), f"local port, {what}"
    assert here.states() == {"first": "alive"}


def test_no_port_of_a_worker_answers_a_stranger(worker_port: tuple[Identity, int]) -> None:
    identity, port = worker_port
    for what, tls in strangers(identity).items():
        assert answered(port, say_nothing, tls) == set(), what


def test_members_are_answered_on_the_same_ports(
    members: Members, worker_port: tuple[Identity, int]
) -> None:
    """Else the tests above would show nothing."""
    here = members.join("first")
    guest = any_member(members.guest(here, "guest"))
    assert answered(here.port, say_nothing, guest) == MEMBERS_METHODS["control"]
    assert answered(here.weights_port, say_nothing, guest) == MEMBERS_METHODS["weights"]
    identity, port = worker_port
    assert answered(port, say_nothing, any_member(identity)) == MEMBERS_METHODS["worker"]


@pytest.mark.parametrize("token", [None, "", "0" * 32])
def test_the_local_port_answers_nothing_without_the_token(
    members: Members, token: str | None
) -> None:
    here = members.join("first")
    endpoint = here.home.agent()
    assert endpoint is not None
    metadata = () if token is None else ((TOKEN_METADATA, token),)
    with channel_to(endpoint.local_port, None) as channel:
        codes = {
            short(method): ask(channel, method, b"", metadata=metadata).code
            for method in all_methods()
        }
        right = ((TOKEN_METADATA, endpoint.token),)
        told = ask(channel, "/exo_train.wire.Local/Status", b"", metadata=right)
    assert told.code is grpc.StatusCode.OK
    local = {name for name, code in codes.items() if code is not grpc.StatusCode.UNIMPLEMENTED}
    assert {codes[name] for name in local} == {grpc.StatusCode.UNAUTHENTICATED}
    assert local == {name for name in codes if name.startswith("Local/")}


def refusals(port: int, tls: object, channel: grpc.Channel | None = None) -> dict[str, Answer]:
    """Call every method of this port's with a message that a member could send."""
    with contextlib.ExitStack() as stack:
        if channel is None:
            channel = stack.enter_context(channel_to(port, tls))  # type: ignore[arg-type]
        answers = {short(method): ask(channel, method, b"") for method in all_methods()}
    return {
        name: answer
        for name, answer in answers.items()
        if answer.code is not grpc.StatusCode.UNIMPLEMENTED
    }


def assert_removed_from(here: Here, tls: object, channel: grpc.Channel | None = None) -> None:
    for what, port in (("control", here.port), ("weights", here.weights_port)):
        with contextlib.ExitStack() as stack:
            if channel is None or what == "weights":
                used = stack.enter_context(channel_to(port, tls))  # type: ignore[arg-type]
            else:
                used = channel
            answers = refusals(port, tls, used)
        assert answers.keys() == MEMBERS_METHODS[what]
        for name, answer in answers.items():
            assert answer.code is grpc.StatusCode.PERMISSION_DENIED, (name, answer)
            assert answer.messages == (), name
            assert "was removed from this cluster" in answer.details


def test_a_removed_certificate_is_refused_on_every_method_by_all(members: Members) -> None:
    first, second = members.join_all("first", "second")
    guest = members.guest(first, "guest")
    tls = any_member(guest)
    cluster = first.identity.cluster
    with channel_to(first.port, tls) as open_before, channel_to(second.port, tls) as too:
        for channel in (open_before, too):
            code = ask(channel, HELLO, hello_of(guest.node_id, cluster)).code
            assert code is grpc.StatusCode.OK
        wait_until(lambda: "guest" in first.states(), SOON_S, lambda: str(first.states()))
        reply = AgentActions(first.agent).remove("guest")
        assert reply.node_id == guest.node_id
        assert_removed_from(first, tls, open_before)
        assert_removed_from(second, tls, too)
        assert_removed_from(first, tls)
    late = members.join("late", second.port)  # learns it by gossip, having known the guest
    wait_all_met([first, second, late])
    assert late.agent.admissions.is_removed(guest.node_id)
    assert_removed_from(late, tls)
    for here in (first, second, late):
        assert sorted(here.states()) == ["first", "late", "second"]
        assert here.counts()["removed"] >= len(MEMBERS_METHODS["control"])


def test_a_member_that_was_away_learns_of_a_removal_before_it_believes_the_removed(
    members: Members,
) -> None:
    first = members.join("first")
    guest = members.guest(first, "guest")
    away = members.home("away")
    away_roster = away.roster(away.paired_identity())
    away_roster.admit(guest.certificate)
    away.save_roster(away_roster)
    first.agent.admissions.admit(guest.certificate)
    first.agent.admissions.remove(guest.node_id)
    back = members.join("away", first.port)
    wait_all_met([first, back])
    assert_removed_from(back, any_member(guest))


def test_a_removed_device_cannot_make_itself_a_new_certificate(members: Members) -> None:
    """It keeps the authority's key for ever."""
    first = members.join("first")
    guest = members.guest(first, "guest")
    first.agent.admissions.admit(guest.certificate)
    first.agent.admissions.remove(guest.node_id)
    key_pem = new_key()
    own_id = node_id_of(public_key_of(key_pem))
    claims = {
        "by itself": guest,
        "in a member's name": dataclasses.replace(guest, node_id=first.id),
        "self-invited": dataclasses.replace(guest, node_id=own_id, key_pem=key_pem),
        "by nobody known": dataclasses.replace(guest, node_id="7" * 32),
    }
    for what, inviter in claims.items():
        minted = dataclasses.replace(
            guest,
            node_id=own_id,
            key_pem=key_pem,
            certificate=issue_certificate(inviter, public_key_of(key_pem)),
        )
        answers = refusals(first.port, any_member(minted))
        assert answers.keys() == MEMBERS_METHODS["control"]
        codes = {answer.code for answer in answers.values()}
        assert codes == {grpc.StatusCode.UNAUTHENTICATED}, what
    renewed = dataclasses.replace(
        guest, certificate=issue_certificate(first.identity, public_key_of(guest.key_pem))
    )
    codes = {answer.code for answer in refusals(first.port, any_member(renewed)).values()}
    assert codes == {grpc.StatusCode.PERMISSION_DENIED}, "its key is removed, not its certificate"
    assert first.agent.admissions.members() == (first.id,)
    assert first.states() == {"first": "alive"}


def test_a_removed_device_pairs_again_under_a_new_id(members: Members) -> None:
    first, second = members.join_all("first", "second")
    AgentActions(first.agent).remove("second")
    wait_until(second.agent.ended.is_set, SOON_S, lambda: str(second.said))
    assert second.agent.failure is not None
    assert REMOVED.search(str(second.agent.failure))
    assert "exo-train invite" in str(second.agent.failure)
    second.agent.__exit__(None, None, None)
    old_id = second.id
    with pytest.raises(ConfigError, match="was removed from its cluster; pair it anew"):
        second.agent.__enter__()
    invitation = first.agent.invite()
    become_member(
        second.home,
        invitation.code,
        peers=invitation.addresses,
        interface=loopback_interface(),
        say=second.said.append,
    )
    new_id = second.home.paired_identity().node_id
    assert new_id != old_id
    assert set(first.agent.admissions.members()) == {first.id, new_id}
    again = members.join("second", first.port)
    wait_all_met([first, again])


@pytest.mark.processes
def test_a_removed_agent_ends_with_a_sentence_and_code_3(tmp_path: Path) -> None:
    options = ("--interface", loopback_interface())
    first = RunningAgent("first", tmp_path, "tests", options)
    second = RunningAgent("second", tmp_path, "tests", options)
    with contextlib.ExitStack() as stack:
        first.start()
        stack.callback(first.close)
        second.options = (*options, "--peer", f"{LOOPBACK}:{first.port}")
        second.start()
        stack.callback(second.close)
        wait_met([first, second])
        removed = first.run("remove", "second")
        assert removed.returncode == 0, removed.stderr
        assert second.process is not None
        assert second.process.wait(SOON_S) == 3
        assert REMOVED.search(second.output)
        assert "exo-train join --code CODE" in second.output
        assert "Traceback" not in second.output
        assert first.end(signal.SIGTERM) == 0


def test_a_probe_and_weights_need_a_member_and_weights_a_token_too(members: Members) -> None:
    first = members.join("first")
    guest = any_member(members.guest(first, "guest"))
    with channel_to(first.port, guest) as channel:
        assert ask(channel, PROBE_METHOD, b"\x01ping").messages == (b"\x01ping",)
    with channel_to(first.weights_port, guest) as channel:
        answer = ask(channel, FETCH_METHOD, b"")
    assert answer.code is grpc.StatusCode.UNAUTHENTICATED
    assert "no model is served under this token" in answer.details


def test_the_greeting_on_a_control_port_is_a_members_privilege_too(members: Members) -> None:
    first = members.join("first")
    guest = members.guest(first, "guest")
    with channel_to(first.port, any_member(guest)) as channel:
        (raw,) = ask(channel, GREET, b"").messages
    assert handshake_pb2.Greeting.FromString(raw).certificate == first.identity.certificate
