"""How a connection to an address fails: a closed port, silence and no route are three things."""

from __future__ import annotations

import socket
import sys
import time

import pytest

from exo_train.peer import Address
from exo_train.transport import reach as module
from exo_train.transport.reach import MAX_ADDRESSES, Reach, reach, reach_all

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as reserved:
        return int(reserved.getsockname()[1])


def test_a_port_that_is_open_and_one_that_is_not() -> None:
    with socket.create_server((LOOPBACK, 0)) as listening:
        assert reach(Address(LOOPBACK, listening.getsockname()[1])) is Reach.CONNECTED
    assert reach(Address(LOOPBACK, free_port())) is Reach.REFUSED


@pytest.mark.skipif(sys.platform != "linux", reason="fills the queue as Linux counts it")
def test_silence_is_given_up_in_time() -> None:
    with socket.create_server((LOOPBACK, 0), backlog=0) as full:
        address = Address(LOOPBACK, full.getsockname()[1])
        held = [socket.socket() for _ in range(4)]
        for one in held:
            one.setblocking(False)
            one.connect_ex((address.host, address.port))
        started_s = time.monotonic()
        assert reach(address, timeout_s=0.3) is Reach.TIMED_OUT
        assert time.monotonic() - started_s < 1.0
        for one in held:
            one.close()


@pytest.mark.parametrize("host", ["255.255.255.255", "fe80::1%nolan0"])
def test_an_address_that_leads_nowhere_has_no_route(host: str) -> None:
    assert reach(Address(host, 9), timeout_s=0.5) is Reach.NO_ROUTE


def test_many_are_tried_at_once_and_answered_in_their_order() -> None:
    with socket.create_server((LOOPBACK, 0)) as listening:
        is_open, closed = Address(LOOPBACK, listening.getsockname()[1]), Address(LOOPBACK, 1)
        asked = [is_open, closed, closed, is_open]
        assert reach_all(asked) == [
            Reach.CONNECTED, Reach.REFUSED, Reach.REFUSED, Reach.CONNECTED,
        ]  # fmt: skip
        assert len(reach_all([is_open] * (MAX_ADDRESSES + 5))) == MAX_ADDRESSES
    assert reach_all([]) == []
    assert module.TIMEOUT_S <= 2.0, "a member that dials back must answer within its call's time"
