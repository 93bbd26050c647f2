"""Who gets nothing: strangers, removed devices, and members that speak in another's name."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from exo_train.agent.actions import AgentActions
from exo_train.agent.admissions import Admissions
from exo_train.agent.dialling import Dialling, NotTheDeviceError, RemovedHereError
from exo_train.agent.joining import become_member
from exo_train.agent.protocol import TOKEN_METADATA, greeting
from exo_train.agent.services import _host, may_dial_back
from exo_train.cluster.home import Home
from exo_train.errors import ConfigError
from exo_train.identity import (
    ANY_MEMBER_TLS_NAME,
    NEVER_EXPIRES,
    Identity,
    found_cluster,
    issue_certificate,
    new_key,
    node_id_of,
    public_key_of,
    tls_name,
)
from exo_train.peer import Address
from exo_train.transport.base import LinkIdentity, LinkLimits
from exo_train.transport.channel import bind, new_server
from exo_train.transport.data_server import DataServer
from exo_train.transport.dial import dial
from exo_train.transport.grpc_link import EXCHANGE_METHOD
from exo_train.transport.hello import encode_hello
from exo_train.transport.probe import PROBE_METHOD
from exo_train.transport.weight_server import FETCH_METHOD
from exo_train.wire.pb import control_pb2 as pb
from exo_train.wire.pb import handshake_pb2, pairing_pb2
from exo_train.worker import GrpcSurroundings
from tests.agent.members_here import (
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
    member_tls,
    short,
    wait_all_met,
)
from tests.agent.running_agents import RunningAgent, loopback_interface, wait_met, wait_until

pytestmark = pytest.mark.xdist_group("agents-here")
HELLO = "/exo_train.wire.Control/Hello"
GOODBYE = "/exo_train.wire.Control/Goodbye"
DIAL_BACK = "/exo_train.wire.Control/DialBack"
RUN = "/exo_train.wire.Control/Run"
GREET = "/exo_train.wire.Handshake/Greet"
MEMBERS_METHODS = {  # what each port has for those who may call
    "control": {
        "Control/DialBack", "Control/Goodbye", "Control/Hello", "Control/Run",
        "Control/SyncRoster", "Handshake/Greet", "Probe/Exchange",
    },
    "weights": {"Weights/Fetch"},
    "worker": {"Data/Exchange"},
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
    yield identity, surroundings.open_data()[0].port
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


def test_a_member_that_speaks_in_anothers_name_is_refused_counted_and_told_once(
    members: Members, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = members.join_all("first", "second")
    guest = members.guest(first, "guest")
    cluster, view = first.identity.cluster, first.agent.status()["view_hash"]
    goodbye = pb.GoodbyeRequest(cluster=cluster, node_id=second.id, incarnation=2**63)
    with (
        caplog.at_level(logging.WARNING, "exo_train.transport.tls"),
        channel_to(first.port, any_member(guest)) as channel,
    ):
        lies = [
            ask(channel, HELLO, hello_of(second.id, cluster)),
            ask(channel, HELLO, hello_of(first.id, cluster)),
            ask(channel, HELLO, hello_of("", cluster)),
            ask(channel, GOODBYE, goodbye.SerializeToString()),
        ]
        for answer in lies:
            assert answer.code is grpc.StatusCode.UNAUTHENTICATED
            assert answer.messages == ()
        assert first.agent.status()["view_hash"] == view
        assert first.states() == {"first": "alive", "second": "alive"}
        assert first.counts() == {"another's name": len(lies)}
        assert len(caplog.records) == 1
        assert guest.node_id in caplog.text
        assert ask(channel, HELLO, hello_of(guest.node_id, cluster)).code is grpc.StatusCode.OK
    assert first.states() == {"first": "alive", "second": "alive", "guest": "alive"}


def prepare(node_id: str, cluster: str, run_id: str = "a1") -> bytes:
    body = pb.Prepare(backend="torch", device="cpu", node_id=node_id, cluster=cluster)
    return pb.RunMessage(run_id=run_id, prepare=body).SerializeToString()


def test_a_run_meant_for_another_device_starts_nothing(members: Members) -> None:
    first, second = members.join_all("first", "second")
    with channel_to(first.port, any_member(second.identity)) as channel:
        for wrong in (
            prepare(second.id, first.identity.cluster),
            prepare(first.id, "0" * 16),
            prepare("", ""),
        ):
            answer = ask(channel, RUN, wrong)
            assert answer.code is grpc.StatusCode.FAILED_PRECONDITION
            assert answer.messages == ()
    assert first.agent.status()["run"] is None
    assert first.counts() == {"a run that does not fit": 3}


def test_a_member_that_is_not_the_neighbour_gets_no_tensors(tmp_path: Path) -> None:
    founder = found_cluster()
    upper, lower, third = (_member_of(founder) for _ in range(3))
    below = LinkIdentity(
        cluster=founder.cluster, run="run", generation=1, rank=1, name="upper",
        peer_rank=0, peer_name="lower", token="secret", peer_id=lower.node_id,
    )  # fmt: skip
    above = dataclasses.replace(
        below, rank=0, name="lower", peer_rank=1, peer_name="upper", peer_id=upper.node_id
    )
    stolen = encode_hello(above, LinkLimits(), with_token=True)
    with DataServer([LOOPBACK], credentials=member_tls(upper).server()) as server:
        links: list[object] = []
        waiting = threading.Thread(
            target=lambda: links.append(server.wait_link(below, timeout_s=SOON_S))
        )
        waiting.start()
        with channel_to(server.port, any_member(third)) as channel:
            wait_until(
                lambda: "not ready" not in ask(channel, EXCHANGE_METHOD, b"x").details,
                SOON_S,
                lambda: "",
            )
            answer = ask(channel, EXCHANGE_METHOD, stolen)
            assert answer.code is grpc.StatusCode.FAILED_PRECONDITION
            assert "not the ring neighbour's" in answer.details
            assert answer.messages == ()
        tls = any_member(lower)
        link = dial(
            [Address(LOOPBACK, server.port)], above, timeout_s=SOON_S,
            credentials=tls.credentials, tls_name=tls.name,
        )  # fmt: skip
        waiting.join()
        assert len(links) == 1
        link.close()


def _member_of(founder: Identity) -> Identity:
    key_pem = new_key()
    public_key = public_key_of(key_pem)
    certificate = issue_certificate(founder, public_key)
    return dataclasses.replace(
        founder, node_id=node_id_of(public_key), key_pem=key_pem, certificate=certificate
    )


class Impostor:
    """A server on loopback that shows a certificate and greets as it likes."""

    def __init__(
        self,
        shown: Identity,
        *,
        greets_as: Identity,
        refusal: grpc.StatusCode | None = None,
        reason: str = "device was removed from this cluster",
    ) -> None:
        self.num_greeted = 0

        def greet(request: bytes, context: grpc.ServicerContext) -> bytes:
            self.num_greeted += 1
            if refusal is not None:
                context.abort(refusal, reason)
            return greeting(
                node_id=greets_as.node_id, certificate=greets_as.certificate
            ).SerializeToString()

        handler = grpc.unary_unary_rpc_method_handler(greet)
        service, method = GREET.strip("/").split("/")
        self._server = new_server(
            max_workers=2,
            handlers=[grpc.method_handlers_generic_handler(service, {method: handler})],
        )
        port = bind(self._server, LOOPBACK, credentials=member_tls(shown).server())
        self.address = Address(LOOPBACK, port)
        self._server.start()

    def __enter__(self) -> Impostor:
        return self

    def __exit__(self, *error: object) -> None:
        self._server.stop(0).wait()


def certificate_in_the_name_of(victim: Identity, thief: Identity) -> bytes:
    """Make what only the authority can make, for another's name and the thief's key."""
    authority = serialization.load_der_private_key(thief.authority_key, password=None)
    real = x509.load_der_x509_certificate(victim.certificate)
    own = x509.load_der_x509_certificate(thief.certificate)
    builder = (
        x509.CertificateBuilder()
        .subject_name(real.subject)
        .issuer_name(real.issuer)
        .public_key(own.public_key())
        .serial_number(real.serial_number)
        .not_valid_before(real.not_valid_before_utc)
        .not_valid_after(NEVER_EXPIRES)
        .add_extension(
            x509.SubjectAlternativeName(
                [x509.DNSName(n) for n in (tls_name(victim.node_id), ANY_MEMBER_TLS_NAME)]
            ),
            critical=False,
        )
    )
    return builder.sign(authority, hashes.SHA256()).public_bytes(  # type: ignore[arg-type]
        serialization.Encoding.DER
    )


@pytest.fixture
def household(tmp_path: Path) -> tuple[Dialling, Admissions, Identity, Identity]:
    """Give a member's dialling, and two others of its cluster: a victim and a thief."""
    home = Home(tmp_path / "own")
    founder = home.found()
    admissions = Admissions(home, founder, on_removed=lambda node_id: None)
    victim, thief = _member_of(founder), _member_of(founder)
    for other in (victim, thief):
        admissions.admit(other.certificate)
    return Dialling(admissions, instance="0" * 16), admissions, victim, thief


def test_a_member_cannot_pass_for_another_though_it_has_the_authoritys_key(
    household: tuple[Dialling, Admissions, Identity, Identity],
) -> None:
    dialling, _, victim, thief = household
    forgery = dataclasses.replace(thief, certificate=certificate_in_the_name_of(victim, thief))
    with contextlib.closing(dialling):
        for shown in (thief, forgery):
            with Impostor(shown, greets_as=victim) as impostor:
                for wanted in (victim.node_id, None):
                    with pytest.raises(NotTheDeviceError):
                        dialling.to(impostor.address, wanted)
            with Impostor(shown, greets_as=victim) as impostor:
                with pytest.raises(NotTheDeviceError):
                    dialling.to(impostor.address, victim.node_id)
                assert impostor.num_greeted == 0, "who is known is asked nothing before the proof"
        with Impostor(victim, greets_as=victim) as real:
            assert dialling.to(real.address, victim.node_id).node_id == victim.node_id
            assert dialling.to(real.address, None).node_id == victim.node_id


def test_only_a_member_whose_certificate_is_known_can_say_that_we_are_removed(
    household: tuple[Dialling, Admissions, Identity, Identity],
) -> None:
    """A former member answers where nobody is known yet; what it says must not end us."""
    dialling, admissions, victim, thief = household
    admissions.remove(thief.node_id)
    removed = grpc.StatusCode.PERMISSION_DENIED
    with contextlib.closing(dialling):
        with Impostor(thief, greets_as=thief, refusal=removed) as impostor:
            for wanted in (None, thief.node_id, "7" * 32):
                with pytest.raises(NotTheDeviceError) as caught:
                    dialling.to(impostor.address, wanted)  # type: ignore[arg-type]
                assert not isinstance(caught.value, RemovedHereError), wanted
        with (
            Impostor(victim, greets_as=victim, refusal=removed) as member,
            pytest.raises(RemovedHereError),
        ):
            dialling.to(member.address, victim.node_id)


def test_a_reason_that_would_move_the_cursor_is_not_shown(
    household: tuple[Dialling, Admissions, Identity, Identity],
) -> None:
    dialling, _, victim, thief = household
    code = grpc.StatusCode.UNAUTHENTICATED
    with contextlib.closing(dialling):
        for who, reason, shown in (
            (victim, "\x1b[2Jhello", "it gives no reason that can be shown"),
            (thief, "not today", "not today"),
        ):
            with (
                Impostor(who, greets_as=who, refusal=code, reason=reason) as liar,
                pytest.raises(NotTheDeviceError) as caught,
            ):
                dialling.to(liar.address, who.node_id)
            assert str(caught.value) == f"{liar.address}: {shown}"


def test_a_former_member_cannot_talk_an_agent_out_of_its_cluster(members: Members) -> None:
    first = members.join("first")
    former = members.guest(first, "former")
    first.agent.admissions.admit(former.certificate)
    first.agent.admissions.remove(former.node_id)
    denied = grpc.StatusCode.PERMISSION_DENIED
    with Impostor(former, greets_as=former, refusal=denied) as impostor:
        first.agent.meeting.suggest(impostor.address, "7" * 32)  # type: ignore[arg-type]
        wait_until(lambda: impostor.num_greeted > 0, SOON_S, lambda: "it was never asked")
        wait_until(
            lambda: bool(first.agent.meeting.noticed.not_met()), SOON_S, lambda: "nothing came"
        )
    assert not first.agent.ended.is_set()
    assert not first.agent.admissions.is_removed(first.id)


@contextlib.contextmanager
def listener() -> Iterator[tuple[socket.socket, Address]]:
    with socket.create_server((LOOPBACK, 0)) as opened:
        opened.settimeout(0.2)
        yield opened, Address(LOOPBACK, opened.getsockname()[1])


def has_caller(opened: socket.socket) -> bool:
    try:
        opened.accept()[0].close()
    except TimeoutError:
        return False
    return True


def test_dial_back_tries_only_what_the_caller_told_of_itself(members: Members) -> None:
    first, second = members.join_all("first", "second")
    guest = members.guest(first, "guest")
    cluster = first.identity.cluster
    with listener() as (own, told), listener() as (others, secret):
        with channel_to(first.port, any_member(guest)) as channel:
            hello = hello_of(guest.node_id, cluster, addresses=(told,))
            assert ask(channel, HELLO, hello).code is grpc.StatusCode.OK
            wanted = [told, secret, Address(LOOPBACK, second.port), told]
            request = pb.DialBackRequest(
                endpoints=[pairing_pb2.Endpoint(host=a.host, port=a.port) for a in wanted]
            )
            answer = ask(channel, DIAL_BACK, request.SerializeToString())
            outcomes = pb.DialBackReply.FromString(answer.messages[0]).outcomes
            nothing = pb.DIAL_OUTCOME_UNSPECIFIED
            assert list(outcomes) == [pb.CONNECTED, nothing, nothing, pb.CONNECTED]
            many = pb.DialBackRequest(endpoints=[pairing_pb2.Endpoint(host="1.2.3.4", port=1)] * 99)
            answer = ask(channel, DIAL_BACK, many.SerializeToString())
            assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
        assert has_caller(own)
        assert not has_caller(others)


@pytest.mark.parametrize(
    ("host", "caller", "may"),
    [
        ("192.168.1.7", "192.168.1.7", True),
        ("10.0.0.7", "192.168.1.7", True),  # its other interface
        ("fe80::7", "fe80::7%eth0", True),
        ("127.0.0.1", "127.0.0.1", True),  # another agent of this machine
        ("127.0.0.1", "192.168.1.1", True),  # the same, by this machine's own address
        ("127.0.0.1", "192.168.1.7", False),
        ("127.8.8.8", "192.168.1.7", False),
        ("::1", "192.168.1.7", False),
        ("::ffff:127.0.0.1", "192.168.1.7", False),
        ("0.0.0.0", "192.168.1.7", False),
        ("::", "192.168.1.7", False),
        ("192.168.1.1", "192.168.1.7", False),  # this machine's own, seen from within
        ("fe80::1", "fe80::7%eth0", False),
        ("224.0.0.251", "192.168.1.7", False),
        ("router.local", "192.168.1.7", False),
        ("", "192.168.1.7", False),
        ("127.0.0.1", "nonsense", False),
    ],
)
def test_dial_back_does_not_look_at_this_device_for_others(
    host: str, caller: str, may: bool
) -> None:
    assert may_dial_back(host, caller, {"192.168.1.1", "fe80::1%eth0"}) is may


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:192.168.1.7:5000", "192.168.1.7"),
        ("ipv6:[fe80::7%25eth0]:5000", "fe80::7%eth0"),
        ("ipv6:%5B::1%5D:5000", "::1"),
        ("unix:", ""),
    ],
)
def test_a_callers_host_is_read_from_what_grpc_says(peer: str, host: str) -> None:
    assert _host(peer) == host


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
