"""Members that speak in another's name, pass for another, or have others look around for them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from exo_train.agent.admissions import Admissions
from exo_train.agent.dialling import Dialling, NotTheDeviceError, RemovedHereError
from exo_train.agent.protocol import greeting
from exo_train.agent.services import may_dial_back
from exo_train.cluster.home import Home
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
from exo_train.transport.tls import host_of
from exo_train.wire.pb import control_pb2 as pb
from exo_train.wire.pb import pairing_pb2
from tests.agent.members_here import (
    DIAL_BACK,
    GOODBYE,
    GREET,
    HELLO,
    LOOPBACK,
    RUN,
    Members,
    any_member,
    ask,
    channel_to,
    hello_of,
    member_tls,
)
from tests.agent.running_agents import wait_until

pytestmark = pytest.mark.xdist_group("agents-here")
SOON_S = 10.0


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    with Members(tmp_path) as household:
        yield household


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
        ("ipv6:%5B::ffff:192.168.1.7%5D:5000", "192.168.1.7"),
        ("unix:", ""),
    ],
)
def test_a_callers_host_is_read_from_what_grpc_says(peer: str, host: str) -> None:
    assert host_of(peer) == host
