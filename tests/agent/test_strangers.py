"""Connections to the agent's port: members' from wherever they come, and everybody else's."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from exo_train.agent.strangers import Strangers
from exo_train.peer import Address
from exo_train.transport import tls
from exo_train.transport.channel import open_channel
from exo_train.wire.pb.control_pb2_grpc import ControlStub
from tests.agent.agents_here import LOOPBACK, ByHand, Here
from tests.agent.conftest import Join
from tests.agent.running_agents import wait_until

pytestmark = [
    pytest.mark.xdist_group("agents-here"),
    pytest.mark.skipif(sys.platform != "linux", reason="needs all of 127.0.0.0/8"),
]

ELSEWHERE, SCANNER = "127.0.0.9", "127.0.0.10"  # addresses that no member advertises


def carry(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def way_from(host: str, port: int) -> Iterator[int]:
    """Give a port that leads to `port`, where calls seem to come from `host`, as behind NAT."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((LOOPBACK, 0)))

        def let_through() -> None:
            with contextlib.suppress(OSError):
                near, _ = listener.accept()
                stack.callback(near.close)
                far = socket.create_connection((LOOPBACK, port), source_address=(host, 0))
                stack.callback(far.close)
                back = threading.Thread(target=carry, args=(far, near), daemon=True)
                back.start()
                carry(near, far)

        threading.Thread(target=let_through, daemon=True).start()
        yield listener.getsockname()[1]


@contextlib.contextmanager
def member_calls_from(host: str, here: Here, guest: ByHand) -> Iterator[None]:
    """Have a member call through such a way; its connection stays open."""
    with way_from(host, here.port) as port:
        dialled = guest.tls.to(here.id)
        channel = open_channel(
            Address(LOOPBACK, port), credentials=dialled.credentials, tls_name=dialled.name
        )
        with contextlib.closing(channel):
            ControlStub(channel).Hello(guest.hello(name="guest"), timeout=10.0)
            yield


def test_a_member_that_calls_from_an_unknown_address_is_no_stranger(
    join: Join, tmp_path: Path
) -> None:
    here = join("here")
    guest = ByHand.invited_by(here, tmp_path / "guest")
    said: list[str] = []
    strangers = Strangers(here.port, say=said.append)
    with (
        member_calls_from(ELSEWHERE, here, guest),
        socket.create_connection((LOOPBACK, here.port), source_address=(SCANNER, 0)),
    ):
        for _ in range(2):
            strangers.look(here.agent._known_hosts())
        assert strangers.counts() == {SCANNER: 1}
        (sentence,) = said
        assert sentence.startswith(f"{SCANNER}, which is no member, connects to port {here.port}")
        wait_until(  # the agent's own look is the same
            lambda: bool(here.agent.strangers.counts()), 10.0, lambda: "nobody was counted"
        )
        assert here.agent.strangers.counts() == {SCANNER: 1}


def test_hosts_of_members_are_remembered_the_newest_and_only_so_many(
    join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "MAX_HOSTS", 2)
    here = join("here")
    guest = ByHand.invited_by(here, tmp_path / "guest")
    for host in ("127.0.0.11", "127.0.0.12", "127.0.0.11", "127.0.0.13"):
        with member_calls_from(host, here, guest):
            pass
    assert here.agent.gate.hosts() == {"127.0.0.11", "127.0.0.13"}


def test_whoever_is_refused_stays_a_stranger(join: Join, tmp_path: Path) -> None:
    here = join("here")
    guest = ByHand.invited_by(here, tmp_path / "guest")
    here.agent.admissions.remove(guest.identity.node_id)
    with pytest.raises(grpc.RpcError), member_calls_from(ELSEWHERE, here, guest):
        pass
    assert here.agent.gate.counts() == {"removed": 1}
    assert ELSEWHERE not in here.agent.gate.hosts()
