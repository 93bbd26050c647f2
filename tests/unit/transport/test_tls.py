"""Links and weights under mutual TLS, and the gate that asks who calls before it reads."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from link_ends import Household, member_of, secure

from exo_train.cluster.roster import Roster
from exo_train.errors import PeerError, PeerLostError, ProtocolError
from exo_train.identity import found_cluster, node_id_of, public_key_of, read_certificate
from exo_train.models.tensors import TensorInfo
from exo_train.peer import Address, NodeId
from exo_train.transport.base import Link, LinkIdentity, Tag
from exo_train.transport.channel import bind, new_server, open_channel
from exo_train.transport.data_server import DataServer
from exo_train.transport.dial import dial
from exo_train.transport.tls import Gate, MemberTls, RemovedError, caller_id
from exo_train.transport.weight_cache import WeightCache
from exo_train.transport.weight_server import WeightServer
from exo_train.transport.weights import RemoteSource
from exo_train.wire.tensor import DType, HostTensor

LOOPBACK = "127.0.0.1"
SMALL = HostTensor(DType.FP16, (2, 2), bytes(range(8)))
BIG = HostTensor(DType.FP32, (1 << 20,), bytes(4 << 20))
WEIGHTS = {"layer.0": b"w" * 70_000}


@pytest.fixture(scope="module")
def household() -> Household:
    return Household.make()


@pytest.fixture
def server(household: Household) -> Iterator[DataServer]:
    """The PC waits for its neighbour, the Mac."""
    with DataServer([LOOPBACK], credentials=household.pc.server()) as server:
        yield server


def call(tls: MemberTls, server: DataServer, household: Household, identity: LinkIdentity) -> Link:
    """Dial the PC's port as this member, with this claim."""
    to = tls.to(household.pc.identity.node_id)
    return dial(
        server.addresses,
        identity,
        timeout_s=2,
        credentials=to.credentials,
        tls_name=to.name,
    )


def test_two_neighbours_exchange_tensors(household: Household, server: DataServer) -> None:
    lower_id, upper_id = secure(household)
    accepted: list[Link] = []
    waiting = threading.Thread(
        target=lambda: accepted.append(server.wait_link(upper_id, timeout_s=10))
    )
    waiting.start()
    lower = call(household.mac, server, household, lower_id)
    waiting.join()
    (upper,) = accepted
    lower.send(Tag(1, 0), BIG)
    upper.send(Tag(1, 0), SMALL)
    assert upper.wait_recv(Tag(1, 0), timeout_s=10).num_bytes == 4 << 20
    assert bytes(lower.wait_recv(Tag(1, 0), timeout_s=10).data) == bytes(range(8))
    lower.close()
    upper.close()


def expect_mac(household: Household, server: DataServer) -> LinkIdentity:
    """Make the server know whom it waits for; gives what the Mac would say of itself."""
    lower_id, upper_id = secure(household)
    with pytest.raises(PeerLostError):
        server.wait_link(upper_id, timeout_s=0)
    return lower_id


def test_another_member_is_not_the_neighbour_though_it_says_all_the_right_things(
    household: Household, server: DataServer
) -> None:
    lower_id = expect_mac(household, server)
    with pytest.raises(ProtocolError, match="certificate is not the ring neighbour's"):
        call(household.laptop, server, household, lower_id)
    _, upper_id = secure(household)
    with pytest.raises(PeerLostError, match="a caller was refused: the caller's certificate is"):
        server.wait_link(upper_id, timeout_s=0)


def test_whoever_is_no_member_does_not_even_get_to_say_hello(
    household: Household, server: DataServer
) -> None:
    lower_id = expect_mac(household, server)
    stranger = found_cluster()
    pinned = household.roster.certificate
    tls = MemberTls(stranger, pinned)
    with pytest.raises(PeerLostError, match=r"pc \(rank 1\) could not be reached"):
        call(tls, server, household, lower_id)
    with pytest.raises(PeerLostError, match="could not be reached"):
        dial(server.addresses, lower_id, timeout_s=1)  # in plain text
    _, upper_id = secure(household)
    with pytest.raises(PeerLostError) as caught:
        server.wait_link(upper_id, timeout_s=0)
    assert "refused" not in str(caught.value), "the server has not heard a word"


def test_a_device_with_the_authoritys_key_is_not_taken_for_the_neighbour(
    household: Household,
) -> None:
    """Every member could certify a server for any name; the dialler pins the one certificate."""
    lower_id, upper_id = secure(household)
    founder = household.mac.identity
    impostor = member_of(founder, Roster.of(founder))
    tls = MemberTls(impostor, household.roster.certificate)
    with DataServer([LOOPBACK], credentials=tls.server()) as server:
        with pytest.raises(PeerLostError):  # it would let the Mac in
            server.wait_link(upper_id, timeout_s=0)
        with pytest.raises(PeerLostError, match="could not be reached"):
            call(household.mac, server, household, lower_id)


def test_who_is_no_member_cannot_be_dialled(household: Household) -> None:
    with pytest.raises(PeerError, match=r"device 99999999 is not a member.*exo-train invite"):
        household.mac.to(NodeId("9" * 32))


def test_secrets_are_in_no_repr(household: Household) -> None:
    shown = repr(household.mac) + repr(household.mac.to(household.pc.identity.node_id))
    for secret in (household.mac.identity.key_pem, household.mac.identity.authority_key):
        assert repr(secret)[2:30] not in shown
    assert "PRIVATE" not in shown


class Heard:
    """A service behind a gate: `callers` reached it, with what they said."""

    def __init__(self, household: Household) -> None:
        self.household = household
        self.callers: list[tuple[NodeId, str]] = []
        self.decoded: list[bytes] = []
        self.gate = Gate(self.admit)
        handler = grpc.unary_unary_rpc_method_handler(
            self._say, request_deserializer=self._decode, response_serializer=bytes
        )
        self.server = new_server(
            max_workers=2,
            handlers=[grpc.method_handlers_generic_handler("t.Echo", {"Say": handler})],
            interceptors=[self.gate],
        )
        port = bind(self.server, LOOPBACK, credentials=household.pc.server())
        self.address = Address(LOOPBACK, port)
        self.server.start()

    def admit(self, der: bytes) -> NodeId:
        authority = self.household.pc.identity.authority_certificate
        node_id = read_certificate(der, authority_certificate=authority).node_id
        if node_id == self.household.laptop.identity.node_id:
            raise RemovedError(f"device {node_id} was removed from this cluster")
        self.household.roster.admit(der)
        return node_id

    def say(self, tls: MemberTls, text: bytes, *, method: str = "/t.Echo/Say") -> bytes:
        to = tls.to(self.household.pc.identity.node_id)
        channel = open_channel(self.address, credentials=to.credentials, tls_name=to.name)
        with channel:
            answer: bytes = channel.unary_unary(method)(text, timeout=5)
        return answer

    def _decode(self, raw: bytes) -> str:
        self.decoded.append(raw)
        return raw.decode("ascii")

    def _say(self, text: str, context: grpc.ServicerContext) -> bytes:
        self.callers.append((caller_id(context), text))
        return text.encode()


@pytest.fixture
def heard() -> Iterator[Heard]:
    service = Heard(Household.make())
    yield service
    service.server.stop(0).wait()


def code_of(error: pytest.ExceptionInfo[grpc.RpcError]) -> grpc.StatusCode:
    code: grpc.StatusCode = error.value.code()  # type: ignore[attr-defined]
    return code


def test_the_gate_lets_members_in_and_knows_them_by_their_keys(heard: Heard) -> None:
    assert heard.say(heard.household.mac, b"hello") == b"hello"
    key = public_key_of(heard.household.mac.identity.key_pem)
    assert heard.callers == [(node_id_of(key), "hello")]
    assert heard.gate.counts() == {}


def test_the_gate_turns_others_away_before_their_message_is_read(
    heard: Heard, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        with pytest.raises(grpc.RpcError) as removed:
            heard.say(heard.household.laptop, b"hello")
        assert code_of(removed) is grpc.StatusCode.PERMISSION_DENIED
    founder = heard.household.mac.identity
    elsewhere = Roster.of(founder)
    inviter = member_of(founder, elsewhere)
    guest = MemberTls(member_of(inviter, elsewhere), heard.household.roster.certificate)
    with pytest.raises(grpc.RpcError) as unknown:
        heard.say(guest, b"hello")
    assert code_of(unknown) is grpc.StatusCode.UNAUTHENTICATED
    assert "which is no member here" in unknown.value.details()  # type: ignore[attr-defined]
    assert heard.decoded == heard.callers == []
    assert heard.gate.counts() == {"removed": 3, "not a member": 1}
    said = [record.message for record in caplog.records if "was refused" in record.message]
    assert len(said) == 2, "each kind and caller once"


def test_a_message_that_cannot_be_read_is_counted_and_its_sender_told(heard: Heard) -> None:
    with pytest.raises(grpc.RpcError) as malformed:
        heard.say(heard.household.mac, b"\xff\xfe")
    assert code_of(malformed) is grpc.StatusCode.INVALID_ARGUMENT
    assert "a message of 2 bytes is not what this call takes" in str(malformed.value)
    assert heard.gate.counts() == {"malformed": 1}
    assert heard.say(heard.household.mac, b"again") == b"again"


def test_a_method_that_does_not_exist_is_unimplemented(heard: Heard) -> None:
    with pytest.raises(grpc.RpcError) as missing:
        heard.say(heard.household.mac, b"x", method="/t.Echo/Shout")
    assert code_of(missing) is grpc.StatusCode.UNIMPLEMENTED


class Model:
    """A model of one tensor."""

    infos = {  # noqa: RUF012
        name: TensorInfo(name=name, encoding="BF16", shape=(), num_bytes=len(data))
        for name, data in WEIGHTS.items()
    }

    def read(self, name: str) -> bytes:
        return WEIGHTS[name]


def test_weights_go_to_members_alone(household: Household, tmp_path: Path) -> None:
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in WEIGHTS.items()}
    gate = Gate(household.roster.admit)
    credentials = household.pc.server()
    with WeightServer([LOOPBACK], credentials=credentials, gate=gate) as server:
        server.register("secret", Model())

        def fetch(tls: MemberTls, folder: str) -> bytes:
            to = tls.to(household.pc.identity.node_id)
            source = RemoteSource(
                server.addresses,
                peer="pc",
                token="secret",
                infos=Model.infos,
                digests=digests,
                cache=WeightCache(tmp_path / folder),
                credentials=to.credentials,
                tls_name=to.name,
            )
            return source.read("layer.0")

        assert fetch(household.mac, "mac") == WEIGHTS["layer.0"]
        founder = household.mac.identity
        elsewhere = Roster.of(founder)
        guest = member_of(member_of(founder, elsewhere), elsewhere)
        with pytest.raises(ProtocolError, match=r"pc refused to give weights \(unauthenticated"):
            fetch(MemberTls(guest, household.roster.certificate), "guest")
        assert gate.counts() == {"not a member": 1}
        stranger = MemberTls(found_cluster(), household.roster.certificate)
        with pytest.raises(PeerLostError, match=r"Cannot fetch tensor 'layer\.0' from pc"):
            fetch(stranger, "stranger")
    for nobody in ("guest", "stranger"):
        assert not list((tmp_path / nobody).glob("*/*"))
