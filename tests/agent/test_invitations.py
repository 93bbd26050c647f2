"""Codes of a running agent: each with its own port, and what commands make of a refusal."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from pairing_parties import LOOPBACK, Cluster, is_open, try_to_pair

from exo_train import errors
from exo_train.agent.announcing import NOTHING_HEARD, Announcer
from exo_train.agent.dialling import VersionError
from exo_train.agent.invitations import Invitations
from exo_train.agent.local_client import ERROR_METADATA
from exo_train.agent.pairing import Paired
from exo_train.agent.protocol import TOKEN_METADATA
from exo_train.cluster.discovery import Heard
from exo_train.cluster.interfaces import LocalAddress
from exo_train.cluster.pairing import Code
from exo_train.errors import ConfigError, DoesNotFitError, ExoTrainError, PeerError
from exo_train.peer import Address
from exo_train.transport.channel import open_channel
from exo_train.wire.pb import control_pb2
from exo_train.wire.pb.control_pb2_grpc import LocalStub
from tests.agent.conftest import Command, Join

NUM_AT_ONCE = 6


class Record:
    """What is announced now; stands for mDNS."""

    def __init__(self) -> None:
        self.port: int | None = None

    def heard(self) -> Heard:
        return NOTHING_HEARD

    def ask_again(self) -> None:
        pass

    def announce_pairing(self, pairing_id: str, port: int) -> None:
        self.port = port

    def withdraw_pairing(self) -> None:
        self.port = None

    def close(self) -> None:
        pass


def test_codes_asked_for_at_once_have_ports_of_their_own_and_the_last_is_announced() -> None:
    cluster, record = Cluster(), Record()
    announcer = Announcer(lambda addresses: record)
    lan = LocalAddress(interface="lan0", host="10.0.0.1")
    announcer.follow([lan], is_alone=False, now_s=0.0)
    invitations = Invitations(
        lambda: (LOOPBACK,),
        admit=cluster.admit,
        addresses=lambda port: (Address(LOOPBACK, port),),
        announcer=announcer,
        say=lambda text: None,
    )
    together = threading.Barrier(NUM_AT_ONCE)

    def invite(number: int) -> tuple[str, Address]:
        together.wait()
        code, _, (address,) = invitations.invite()
        return code, address

    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        made = dict(pool.map(invite, range(NUM_AT_ONCE)))
    assert len(set(made.values())) == len(made)
    ((code, address),) = [(code, address) for code, address in made.items() if is_open(address)]
    assert record.port == address.port
    assert isinstance(try_to_pair([address], Code.parse(code)), Paired)
    invitations.close()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("it is asked wrongly"), 2),
        (PeerError("the network has gone"), 3),
        (VersionError("they are of two versions"), 3),
        (DoesNotFitError("there is no room"), 4),
    ],
)
def test_a_refusal_keeps_its_kind_on_the_way_to_the_command(
    join: Join, command: Command, error: ExoTrainError, code: int
) -> None:
    here = join("here")

    def refuse() -> tuple[str, ...]:
        raise error

    here.agent.invitations._desk._hosts = refuse
    done = command(here.home, "invite")
    assert (done.code, done.err) == (code, f"exo-train: {error}\n")
    metadata = ((TOKEN_METADATA, here.endpoint().token),)
    address = Address(LOOPBACK, here.endpoint().local_port)
    with contextlib.closing(open_channel(address)) as channel, pytest.raises(grpc.RpcError) as told:
        LocalStub(channel).Invite(control_pb2.InviteRequest(), metadata=metadata)
    (kind,) = [m.value for m in told.value.trailing_metadata() if m.key == ERROR_METADATA]
    assert hasattr(errors, kind), "a command can know no other"


def test_an_address_that_is_no_more_is_an_error_of_the_network(
    join: Join, command: Command
) -> None:
    here = join("here")
    here.agent.invitations._desk._hosts = lambda: ("192.0.2.1",)
    done = command(here.home, "invite")
    assert done.code == 3
    assert "Cannot listen on 192.0.2.1" in done.err
