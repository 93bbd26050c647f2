"""Discovery on this machine's loopback: what of it stays announced, and which sockets it keeps."""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
from collections.abc import Iterator

import pytest

from exo_train.cluster.discovery import Discovery
from exo_train.cluster.interfaces import local_addresses
from exo_train.cluster.multicast import MAX_SOCKET_ERRORS, MulticastCounts, MulticastEar
from exo_train.errors import PeerError
from exo_train.peer import NodeId
from tests.agent.running_agents import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs multicast on loopback")

OWN_ID = "ab" * 16


@pytest.fixture
def discovery() -> Iterator[Discovery]:
    opened = Discovery(
        NodeId(OWN_ID),
        cluster="c0ffee",
        protocol=7,
        port=5000,
        addresses=[a for a in local_addresses() if a.host == "127.0.0.1"],
        on_seen=lambda seen: None,
    )
    with contextlib.closing(opened):
        yield opened


def test_an_invitation_that_one_family_cannot_announce_is_announced_in_none(
    discovery: Discovery,
) -> None:
    """The same family twice stands for two: zeroconf refuses the second record of one name."""
    (zeroconf,) = discovery._zeroconfs
    before = [info.name for info in zeroconf.registry.async_get_service_infos()]
    discovery._zeroconfs.append(zeroconf)
    with pytest.raises(PeerError, match="mDNS does not work here"):
        discovery.announce_pairing("cd" * 8, 6000)
    discovery._zeroconfs.pop()

    def announced() -> list[str]:
        return [info.name for info in zeroconf.registry.async_get_service_infos()]

    wait_until(lambda: announced() == before, 5.0, lambda: str(announced()))
    discovery.announce_pairing("cd" * 8, 6000)
    assert len(announced()) == len(before) + 1
    discovery.withdraw_pairing()
    assert announced() == before


@contextlib.contextmanager
def heard_by(ear: MulticastEar) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Give a socket that the ear listens to, and another that it hears; both end with this."""
    heard, other = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    with heard, other:
        for one in (heard, other):
            one.bind(("127.0.0.1", 0))
        heard.setblocking(False)
        ear._counts["lo"] = MulticastCounts()
        ear._selector.register(heard, selectors.EVENT_READ, "lo")
        yield heard, other


def test_a_socket_that_fails_now_and_then_is_listened_to_for_ever() -> None:
    """A datagram to a closed port comes back as an error, as one from an interface that is down."""
    ear = MulticastEar([], own_id=OWN_ID)
    with contextlib.closing(ear), heard_by(ear) as (heard, other):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as closed:
            closed.bind(("127.0.0.1", 0))
            nobody = closed.getsockname()

        for number in range(1, 2 * MAX_SOCKET_ERRORS):
            heard.connect(nobody)
            heard.send(b"x")
            wait_until(lambda: ear._patience[heard].num_errors > 0, 5.0, lambda: "no error came")
            heard.connect(other.getsockname())
            other.sendto(OWN_ID.encode(), heard.getsockname())
            wait_until(
                lambda number=number: ear.counts()["lo"].sent == number,
                5.0,
                lambda number=number: f"after {number} errors nothing is heard",
            )
