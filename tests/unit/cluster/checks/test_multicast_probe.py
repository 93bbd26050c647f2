"""One mDNS question on the loopback interface, and answers as other devices would give them."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from exo_train.cluster.checks import multicast_probe
from exo_train.cluster.checks.multicast_probe import GROUP, probe_multicast, question
from exo_train.cluster.checks.network import MulticastFacts
from exo_train.cluster.checks.reading import read_interfaces

pytestmark = [
    pytest.mark.xdist_group("mdns on loopback"),
    pytest.mark.skipif(
        sys.platform != "linux", reason="answers from 127.0.0.2, which only Linux' loopback has"
    ),
]

LOOPBACK = {"lo": "127.0.0.1"}
MDNS_PORT = 5353
# Agents of other tests may answer, too, from these.
THIS_MACHINE = frozenset(facts.host for facts in read_interfaces())
Answer = Callable[[bytes], list[bytes]]


@contextlib.contextmanager
def answering(answer: Answer, host: str = "127.0.0.2") -> Iterator[None]:
    """Answer each question on loopback's port 5353 from `host`."""
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as heard,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sends,
    ):
        heard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        heard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        heard.bind((GROUP, MDNS_PORT))
        member = socket.inet_aton(GROUP) + socket.inet_aton("127.0.0.1")
        heard.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
        heard.settimeout(0.05)
        sends.bind((host, 0))
        ended = threading.Event()

        def serve() -> None:
            while not ended.is_set():
                with contextlib.suppress(TimeoutError):
                    packet, sender = heard.recvfrom(9000)
                    # What other programs of this machine ask comes from port 5353.
                    for reply in answer(packet) if sender[1] != MDNS_PORT else ():
                        sends.sendto(reply, sender)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def reply_to(packet: bytes, *, answers: int = 1) -> bytes:
    """Answer as RFC 6762, section 6.7, has it: same number, the question repeated."""
    return packet[:2] + struct.pack(">5H", 0x8400, 1, answers, 0, 0) + packet[12:] + b"\0" * 30


def ask(*, own: frozenset[str] = THIS_MACHINE, listen_s: float) -> MulticastFacts:
    return probe_multicast(LOOPBACK, own=own, listen_s=listen_s)["lo"]


def asks_exo_train(packet: bytes) -> bool:
    return b"\x0a_exo-train" in packet


def test_silence_is_counted_as_silence_and_ends_in_time() -> None:
    started_s = time.monotonic()
    facts = ask(listen_s=0.3)
    assert time.monotonic() - started_s < 2.0
    assert (facts.sent, facts.heard, facts.exo_train_heard, facts.error) == (2, 0, 0, "")


def test_a_printer_is_heard_but_is_no_exo_train() -> None:
    with answering(lambda p: [] if asks_exo_train(p) else [reply_to(p)]):
        facts = ask(listen_s=0.4)
    assert (facts.heard, facts.exo_train_heard, facts.malformed) == (1, 0, 0)


def test_an_exo_train_device_is_counted_once_however_often_it_answers() -> None:
    with answering(lambda p: [reply_to(p)] * 3):
        facts = ask(listen_s=0.4)
    assert (facts.heard, facts.exo_train_heard) == (1, 1)


def test_what_this_device_answers_itself_does_not_count() -> None:
    with answering(lambda p: [reply_to(p)]):
        facts = ask(own=THIS_MACHINE | {"127.0.0.2"}, listen_s=0.4)
    assert facts.heard == 0


@pytest.mark.parametrize("packet", [b"", b"x", b"GET / HTTP/1.0", b"\0" * 12, b"\xff\0" * 6])
def test_garbage_is_counted_and_is_nobody(packet: bytes) -> None:
    with answering(lambda p: [packet]):
        facts = ask(listen_s=0.3)
    if packet.startswith(b"\xff"):  # it has the shape of an answer, to another question
        assert (facts.heard, facts.exo_train_heard, facts.malformed) == (1, 0, 0)
    else:
        assert (facts.heard, facts.exo_train_heard, facts.malformed) == (0, 0, 2)


def test_a_reply_without_answers_is_nobody() -> None:
    with answering(lambda p: [reply_to(p, answers=0)]):
        facts = ask(listen_s=0.3)
    assert (facts.heard, facts.malformed) == (0, 2)


def test_a_flood_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multicast_probe, "MAX_PACKETS", 20)
    with answering(lambda p: [b"x"] * 100):
        started_s = time.monotonic()
        facts = ask(listen_s=20.0)
    assert time.monotonic() - started_s < 10.0, "the flood ends the asking"
    assert 0 < facts.malformed <= 20


def test_an_address_that_is_gone_is_an_error_with_its_number_and_the_rest_goes_on() -> None:
    facts = probe_multicast({"eth7": "192.0.2.77", "lo": "127.0.0.1"}, listen_s=0.1)
    assert "error 99" in facts["eth7"].error
    assert not facts["eth7"].is_no_route
    assert facts["lo"].error == ""


def test_the_question_is_a_well_formed_dns_query() -> None:
    packet = question(0x1234, "_exo-train._tcp.local")
    assert packet == (b"\x12\x34\0\0\0\1\0\0\0\0\0\0\x0a_exo-train\x04_tcp\x05local\0\0\x0c\0\1")
