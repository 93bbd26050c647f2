"""Channels to members: whose certificate answers, which version, and what is said when not."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

import exo_train
from exo_train.agent.dialling import Dialling, NotTheDeviceError, VersionError
from exo_train.agent.protocol import PROTOCOL_VERSION
from exo_train.cluster.home import Home
from exo_train.errors import PeerError, ProtocolError
from exo_train.peer import Address, NodeId
from exo_train.wire.pb.control_pb2_grpc import ControlServicer, ControlStub
from tests.agent.agents_here import LOOPBACK, ByHand, Here
from tests.agent.conftest import Join
from tests.paired_homes import admit

pytestmark = pytest.mark.xdist_group("agents-here")


def address_of(here: Here) -> Address:
    return Address(LOOPBACK, here.port)


@pytest.fixture
def here(join: Join) -> Here:
    return join("here")


@pytest.fixture
def dialling(here: Here) -> Dialling:
    """As `here` calls others."""
    return Dialling(here.agent.admissions, instance="02" * 8)


@pytest.fixture
def other(here: Here, tmp_path: Path) -> ByHand:
    return ByHand.invited_by(here, tmp_path / "other")


@pytest.fixture
def other_port(other: ByHand) -> Iterator[int]:
    with other.serve(ControlServicer()) as port:
        yield port


def test_whoever_is_there_is_asked_for_its_certificate_once(
    here: Here, dialling: Dialling, other: ByHand, other_port: int
) -> None:
    address = Address(LOOPBACK, other_port)
    assert other.identity.node_id not in here.agent.admissions.members()
    proven = dialling.to(address, None)
    assert (proven.node_id, proven.instance) == (other.identity.node_id, "01" * 8)
    assert other.identity.node_id in here.agent.admissions.members(), "its inviter is a member"
    assert dialling.to(address, None) is proven
    assert dialling.to(address, other.identity.node_id) is proven
    dialling.drop(address)
    assert dialling.to(address, other.identity.node_id) is not proven
    dialling.close()


def test_an_unknown_id_is_looked_up_where_it_is_said_to_be(
    dialling: Dialling, other: ByHand, other_port: int
) -> None:
    proven = dialling.to(Address(LOOPBACK, other_port), other.identity.node_id)
    assert proven.node_id == other.identity.node_id
    dialling.close()


def test_another_member_at_the_address_is_not_the_one_that_was_meant(
    join: Join, here: Here, dialling: Dialling, other_port: int
) -> None:
    third = join("third")
    dialling.to(address_of(third), None)
    known = Address(LOOPBACK, other_port)
    with pytest.raises(NotTheDeviceError, match=f"{known} answers with a certificate of another"):
        dialling.to(known, third.id)
    unknown = NodeId("9" * 32)
    with pytest.raises(NotTheDeviceError, match=f"{known} is device .{{8}}, not 99999999"):
        dialling.to(known, unknown)
    dialling.close()


def test_another_cluster_is_not_called(join: Join, dialling: Dialling) -> None:
    stranger = join("stranger", cluster="next-door")
    for node_id in (None, stranger.id):
        with pytest.raises(NotTheDeviceError, match="another device or cluster"):
            dialling.to(address_of(stranger), node_id)
    dialling.close()


def test_a_member_whose_inviter_is_unknown_here_is_not_taken_at_its_word(
    here: Here, dialling: Dialling, tmp_path: Path
) -> None:
    unknown = Home(tmp_path / "unknown")
    admit(unknown, here.home)
    guest = Home(tmp_path / "guest")
    admit(guest, unknown)
    with (
        ByHand.of(guest).serve(ControlServicer()) as port,
        pytest.raises(NotTheDeviceError, match="which is no member here"),
    ):
        dialling.to(Address(LOOPBACK, port), None)
    assert here.agent.is_alone
    dialling.close()


def test_a_certificate_of_another_in_the_greeting_is_no_proof(
    here: Here, dialling: Dialling, other: ByHand, tmp_path: Path
) -> None:
    """Who answers with another's certificate is dialled again, pinned to that other."""
    liar = ByHand.invited_by(here, tmp_path / "liar")
    with (
        liar.serve(ControlServicer(), certificate=other.identity.certificate) as port,
        pytest.raises(NotTheDeviceError, match="a certificate of another device"),
    ):
        dialling.to(Address(LOOPBACK, port), None)
    with (
        liar.serve(ControlServicer(), node_id=other.identity.node_id) as port,
        pytest.raises(NotTheDeviceError, match="claims to be another than it proves to be"),
    ):
        dialling.to(Address(LOOPBACK, port), liar.identity.node_id)
    dialling.close()


def test_another_version_is_told_with_both_and_nothing_that_moves_the_cursor(
    dialling: Dialling, other: ByHand
) -> None:
    with (
        other.serve(ControlServicer(), protocol=77, build="9.8\x1b[2J") as port,
        pytest.raises(VersionError) as caught,
    ):
        dialling.to(Address(LOOPBACK, port), None)
    said = str(caught.value)
    assert said.startswith(f"{LOOPBACK}:{port} runs exo-train '9.8\\x1b[2J' with protocol 77, ")
    assert f"this device {exo_train.__version__} with {PROTOCOL_VERSION}" in said
    assert "install the same version on both" in said
    dialling.close()


def test_nobody_and_silence_are_no_refusal(dialling: Dialling) -> None:
    with socket.create_server((LOOPBACK, 0)) as silent:
        addresses = [Address(LOOPBACK, 1), Address(LOOPBACK, silent.getsockname()[1])]
        for address in addresses:
            with pytest.raises(PeerError, match=str(address)) as caught:
                dialling.to(address, None)
            assert not isinstance(caught.value, ProtocolError)
    dialling.close()


def test_channels_to_a_removed_device_are_closed(
    dialling: Dialling, other: ByHand, other_port: int
) -> None:
    proven = dialling.to(Address(LOOPBACK, other_port), None)
    dialling.drop_all_of(NodeId("9" * 32))
    stub = ControlStub(proven.channel)
    with pytest.raises(grpc.RpcError) as caught:
        stub.Hello(other.hello(), timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED, "it is still open"  # type: ignore[attr-defined]
    dialling.drop_all_of(other.identity.node_id)
    with pytest.raises(ValueError, match="closed channel"):
        stub.Hello(other.hello(), timeout=5)
    dialling.close()
