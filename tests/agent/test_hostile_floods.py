"""Calls and connections without number: bounded, counted, told once; members hear each other."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from exo_train.agent.agent import CONTROL_THREADS
from exo_train.agent.examining import examine
from exo_train.agent.protocol import HEARTBEAT_S
from exo_train.transport import tls
from exo_train.transport.probe import PROBE_METHOD
from tests.agent.hostile_bytes import RawHttp2
from tests.agent.members_here import (
    GREET,
    HELLO,
    LOOPBACK,
    RUN,
    SYNC_ROSTER,
    Members,
    any_member,
    ask,
    channel_to,
)
from tests.agent.running_agents import wait_until

pytestmark = pytest.mark.xdist_group("agents-here")
SOON_S = 15.0
SILENCE_S = 12.0  # what a connection that says nothing may last, on a busy machine
STRANGER = "127.0.0.9"  # no member's; a machine may have all of 127.0.0.0/8
needs_loopback_net = pytest.mark.skipif(
    sys.platform != "linux", reason="loopback has one address there"
)


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    with Members(tmp_path) as household:
        yield household


class Undisturbed:
    """Two members that must hear each other all the time, whatever happens meanwhile."""

    def __init__(self, members: Members) -> None:
        self.first, self.second = members.join_all("first", "second")
        self.view = self.first.agent.status()["view_hash"]
        self._ages_s: list[float] = []
        self._states: list[dict[str, str]] = []
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Undisturbed:
        self._watch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._watch.join()
        if error[0] is None:
            for states in self._states:
                assert states["first"] == states["second"] == "alive", states
            assert max(self._ages_s) < 3 * HEARTBEAT_S, "a heartbeat was lost"

    def _look(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._ended.wait(0.2)
            for here, other in ((self.first, self.second), (self.second, self.first)):
                self._states.append(here.states())
                heard_s = [
                    m.last_heard_s
                    for m in here.agent.meeting.members()
                    if m.facts.node_id == other.id
                ]
                self._ages_s.append(time.monotonic() - heard_s[0])


def test_ten_thousand_silent_calls_of_a_member_disturb_nobody(
    members: Members,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tls, "FIRST_MESSAGE_S", 2.0)
    process = psutil.Process()
    with Undisturbed(members) as both:
        guest = members.guest(both.first, "guest")
        num_fds, num_threads = process.num_fds(), threading.active_count()
        with contextlib.ExitStack() as stack:
            for number in range(160):
                raw = RawHttp2(both.first.port, guest, tmp_path)
                stack.callback(raw.close)
                raw.begin((HELLO, RUN, PROBE_METHOD, SYNC_ROSTER)[number % 4], 64)
            with channel_to(both.first.port, any_member(both.second.identity)) as channel:
                assert ask(channel, GREET, b"", timeout_s=2.0).code is grpc.StatusCode.OK
            wait_until(  # gRPC refuses some itself, when too many wait
                lambda: sum(both.first.counts().values()) > 5_000,
                2 * SOON_S,
                lambda: str(both.first.counts()),
            )
            limit = num_threads + CONTROL_THREADS + 2 * tls.MAX_CALLS_OF_ONE
            assert threading.active_count() <= limit
        counts = both.first.counts()
        assert counts.keys() == {"too many calls", "silent"}
        assert counts["silent"] >= tls.MAX_CALLS_OF_ONE
        assert len(caplog.records) == 2, "one line for each kind"
        with channel_to(both.first.port, any_member(guest)) as channel:
            wait_until(
                lambda: ask(channel, GREET, b"").code is grpc.StatusCode.OK,
                SOON_S,
                lambda: "its places are never free again",
            )
        wait_until(
            lambda: process.num_fds() <= num_fds + 4,
            SOON_S,
            lambda: f"{num_fds} → {process.num_fds()} open files",
        )


def test_silent_calls_of_a_removed_device_end_at_once(members: Members, tmp_path: Path) -> None:
    with Undisturbed(members) as both:
        guest = members.guest(both.first, "guest")
        both.first.agent.admissions.admit(guest.certificate)
        both.first.agent.admissions.remove(guest.node_id)
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                raw = RawHttp2(both.first.port, guest, tmp_path)
                stack.callback(raw.close)
                raw.begin(HELLO, 64)
            wait_until(
                lambda: both.first.counts().get("removed") == 256,
                SOON_S,
                lambda: str(both.first.counts()),
            )


def scanner(port: int, said: bytes) -> socket.socket:
    """Connect as a host that is no member."""
    opened = socket.create_connection((LOOPBACK, port), timeout=10, source_address=(STRANGER, 0))
    with contextlib.suppress(OSError):
        opened.sendall(said)
    return opened


SCANS = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00" + bytes(100),  # the beginning of TLS, and no more
    b"\x00" * 9000,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    os.urandom(3000),
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"\x03\x00\x00\x13\x0e\xe0\x00\x00",
]


@needs_loopback_net
def test_scanners_and_500_silent_connections_get_nothing_and_are_closed(
    members: Members, caplog: pytest.LogCaptureFixture
) -> None:
    process = psutil.Process()
    with Undisturbed(members) as both, contextlib.ExitStack() as stack:
        num_fds = process.num_fds()
        opened = [scanner(both.first.port, b"") for _ in range(500)]
        opened += [scanner(both.first.port, said) for said in SCANS for _ in range(5)]
        slow = scanner(both.first.port, b"\x16")  # a byte a second, for ever
        for one in (*opened, slow):
            stack.callback(one.close)
        deadline_s = time.monotonic() + SILENCE_S
        said = [_until_closed(one, deadline_s, slow) for one in opened]
        assert all(text is not None for text in said), f"{said.count(None)} are still open"
        names = (b"first", both.first.id.encode(), both.first.identity.cluster.encode())
        assert not any(name in (text or b"") for text in said for name in names)
        assert _until_closed(slow, deadline_s, slow) is not None
        for one in opened:
            one.close()
        wait_until(
            lambda: process.num_fds() <= num_fds + 4,
            SOON_S,
            lambda: f"{num_fds} → {process.num_fds()} open files",
        )
        wait_until(
            lambda: both.first.agent.strangers.counts().get(STRANGER, 0) >= 400,
            SOON_S,
            lambda: str(both.first.agent.strangers.counts()),
        )
        assert examine(both.first.agent)["refused_calls"][f"connections from {STRANGER}"] >= 400
        lines = [r for r in caplog.records if STRANGER in r.getMessage()]
        assert len(lines) == 1
        assert lines[0].levelno == logging.WARNING
        assert both.first.agent.status()["view_hash"] == both.view


def _until_closed(one: socket.socket, deadline_s: float, slow: socket.socket) -> bytes | None:
    """Give what was said until the other side closed; None when it did not in time."""
    heard = bytearray()
    while (left_s := deadline_s - time.monotonic()) > 0:
        one.settimeout(min(left_s, 0.5))
        try:
            with contextlib.suppress(OSError):
                slow.send(b"\x03")
            data = one.recv(65536)
            if not data:
                return bytes(heard)
            heard += data
        except TimeoutError:
            continue
        except OSError:
            return bytes(heard)
    return None
