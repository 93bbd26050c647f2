"""The probe on loopback: its numbers, its bounds, and peers that answer badly or not at all."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import grpc
import pytest

from exo_train.errors import PeerError, ProtocolError
from exo_train.identity import found_cluster, tls_name, to_pem
from exo_train.peer import Address
from exo_train.transport import probe
from exo_train.transport.channel import bind, new_server, open_channel
from exo_train.transport.probe import (
    ARRIVED,
    DATA,
    ECHO,
    MAX_CALL_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_PROBES,
    MAX_WISHED_MESSAGES,
    PROBE_METHOD,
    SEND,
    measure,
    probe_handler,
)

BUDGET_S = 2.0
SLACK_S = 0.3
HOST = "127.0.0.1"

Answer = Callable[[bytes], Iterator[bytes]]


@contextlib.contextmanager
def serving(
    *handlers: grpc.GenericRpcHandler[bytes, bytes],
    credentials: grpc.ServerCredentials | None = None,
) -> Iterator[Address]:
    server = new_server(max_workers=8, handlers=handlers)
    address = Address(HOST, bind(server, HOST, credentials=credentials))
    server.start()
    try:
        yield address
    finally:
        server.stop(0).wait()


@contextlib.contextmanager
def answering(answer: Answer) -> Iterator[Address]:
    """Serve a probe of another make; `answer` gives the replies to one message."""

    def exchange(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in requests:
            yield from answer(message)

    service, method = PROBE_METHOD.strip("/").split("/")
    handler = grpc.stream_stream_rpc_method_handler(exchange)
    with serving(grpc.method_handlers_generic_handler(service, {method: handler})) as address:
        yield address


def wish(message: bytes) -> tuple[int, int]:
    """Read a SEND as the protocol's document has it."""
    return int.from_bytes(message[1:5], "little"), int.from_bytes(message[5:9], "little")


def well(message: bytes) -> Iterator[bytes]:
    """Answer as the document has it."""
    if message[:1] == ECHO:
        yield message
    elif message[:1] == DATA:
        yield ARRIVED
    else:
        count, size = wish(message)
        yield from itertools.repeat(DATA.ljust(size, b"x"), count)


def talk(channel: grpc.Channel, messages: Iterator[bytes]) -> grpc.CallIterator[bytes]:
    return channel.stream_stream(PROBE_METHOD)(messages, timeout=5)


def test_loopback_is_quick_and_fast_within_the_budget() -> None:
    with serving(probe_handler()) as address:
        start_s = time.monotonic()
        result = measure(address)
    assert time.monotonic() - start_s < BUDGET_S
    assert 0 < result.rtt_s < 0.05
    assert result.jitter_s < 0.1
    assert result.to_peer_bytes_per_s > 10e6
    assert result.from_peer_bytes_per_s > 10e6
    assert result.trouble == ""


def test_round_trip_and_jitter_are_the_peers_delays() -> None:
    delays_s = itertools.cycle([0.01] * 9 + [0.1])

    def slowly(message: bytes) -> Iterator[bytes]:
        if message[:1] == ECHO:
            time.sleep(next(delays_s))
        yield from well(message)

    with answering(slowly) as address:
        result = measure(address)
    assert result.rtt_s == pytest.approx(0.01, abs=0.006), "the median, not the mean"
    assert result.jitter_s == pytest.approx(0.09, abs=0.02)


def test_each_direction_has_its_own_speed() -> None:
    def slow_to_take(message: bytes) -> Iterator[bytes]:
        if message[:1] == DATA:
            time.sleep(len(message) / 2e6)
        yield from well(message)

    def slow_to_give(message: bytes) -> Iterator[bytes]:
        for reply in well(message):
            time.sleep(len(reply) / 2e6 if message[:1] == SEND else 0)
            yield reply

    with answering(slow_to_take) as address:
        result = measure(address)
    assert result.to_peer_bytes_per_s == pytest.approx(2e6, rel=0.4)
    assert result.from_peer_bytes_per_s > 10e6
    with answering(slow_to_give) as address:
        result = measure(address)
    assert result.to_peer_bytes_per_s > 10e6
    assert result.from_peer_bytes_per_s == pytest.approx(2e6, rel=0.4)


def test_a_peer_on_a_very_slow_link_is_measured_within_the_budget() -> None:
    def crawl(message: bytes) -> Iterator[bytes]:
        for reply in well(message):
            time.sleep(max(len(message), len(reply)) / 30e3)
            yield reply

    with answering(crawl) as address:
        start_s = time.monotonic()
        result = measure(address, budget_s=BUDGET_S)
    assert time.monotonic() - start_s < BUDGET_S + SLACK_S
    assert result.to_peer_bytes_per_s == pytest.approx(30e3, rel=0.35)
    assert result.from_peer_bytes_per_s == pytest.approx(30e3, rel=0.35)
    assert result.trouble == ""


def test_what_a_shaper_had_saved_up_does_not_count() -> None:
    """44 KiB pass at once, then 200 kB/s: half of the third round is slow."""
    num_bytes = 0

    def shaped(message: bytes) -> Iterator[bytes]:
        nonlocal num_bytes
        if message[:1] == DATA:
            num_bytes += len(message)
            time.sleep(len(message) / 200e3 if num_bytes > 44 << 10 else 0)
        return well(message)

    with answering(shaped) as address:
        result = measure(address)
    assert result.to_peer_bytes_per_s == pytest.approx(200e3, rel=0.3)
    assert num_bytes <= 200 << 10, "the next round is sized by what was seen"


def test_a_long_round_trip_is_no_slowness_but_ends_the_filling() -> None:
    num_bytes = last_size = 0

    def far(message: bytes) -> Iterator[bytes]:
        nonlocal num_bytes, last_size
        if message[:1] == ECHO or len(message) != last_size:  # what follows travels close behind
            time.sleep(0.15)
        last_size = len(message)
        num_bytes += last_size if message[:1] == DATA else 0
        return well(message)

    with answering(far) as address:
        result = measure(address, budget_s=BUDGET_S)
    assert result.rtt_s == pytest.approx(0.15, rel=0.2)
    assert result.to_peer_bytes_per_s > 150e3, "not 27e3, what 4 KiB in a round trip make"
    assert num_bytes < 400 << 10, "three rounds fit into the time"


@pytest.mark.parametrize(
    ("lost", "way"),
    [({DATA}, "to the peer"), ({SEND}, "from the peer"), ({DATA, SEND}, "either way")],
)
def test_large_messages_that_never_come_are_a_trouble(lost: set[bytes], way: str) -> None:
    def lossy(message: bytes) -> Iterator[bytes]:
        return iter(()) if message[:1] in lost else well(message)

    with answering(lossy) as address:
        start_s = time.monotonic()
        result = measure(address, budget_s=1.2)
    assert time.monotonic() - start_s < 1.2 + SLACK_S
    assert f"messages of 4096 bytes do not pass {way} within" in result.trouble
    assert "same MTU" in result.trouble
    assert (result.to_peer_bytes_per_s == 0) == (DATA in lost)
    assert (result.from_peer_bytes_per_s == 0) == (SEND in lost)


def test_data_that_stops_later_is_another_trouble() -> None:
    taken = itertools.count()

    def stops(message: bytes) -> Iterator[bytes]:
        if message[:1] == DATA and next(taken) >= 10:
            return iter(())
        return well(message)

    with answering(stops) as address:
        result = measure(address, budget_s=1.2)
    # 4 KiB, then 9 of the second round's 16 messages.
    assert "data stopped to the peer for" in result.trouble
    assert "after 13312 bytes" in result.trouble
    assert 0 < result.to_peer_bytes_per_s < 100e3
    assert result.from_peer_bytes_per_s > 10e6


def altered_echo(message: bytes) -> Iterator[bytes]:
    yield message + b"!" if message[:1] == ECHO else b""


def no_arrivals(message: bytes) -> Iterator[bytes]:
    yield message if message[:1] == ECHO else b"thanks"


def short_data(message: bytes) -> Iterator[bytes]:
    yield DATA if message[:1] == SEND else next(well(message))


@pytest.mark.parametrize(
    ("answer", "refusal"),
    [
        (altered_echo, "something else than was sent"),
        (no_arrivals, "something else than an arrival"),
        (short_data, "something else than the 4096 bytes"),
    ],
)
def test_a_peer_that_answers_something_else_is_refused(answer: Answer, refusal: str) -> None:
    with answering(answer) as address, pytest.raises(ProtocolError, match=refusal):
        measure(address)


def test_a_closed_port_a_silent_one_and_an_older_peer_are_peer_errors() -> None:
    with socket.create_server((HOST, 0)) as silent:
        start_s = time.monotonic()
        with pytest.raises(PeerError, match=rf"{HOST}:\d+ cannot be measured"):
            measure(Address(HOST, silent.getsockname()[1]), budget_s=1.0)
        assert time.monotonic() - start_s < 1.0 + SLACK_S
        port = silent.getsockname()[1]
    with pytest.raises(PeerError, match="cannot be measured"):
        measure(Address(HOST, port))
    with serving() as address, pytest.raises(PeerError, match="unimplemented"):
        measure(address)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (b"", grpc.StatusCode.INVALID_ARGUMENT),
        (b"GET / HTTP/1.1", grpc.StatusCode.INVALID_ARGUMENT),
        (ARRIVED, grpc.StatusCode.INVALID_ARGUMENT),
        (ECHO.ljust(65, b"x"), grpc.StatusCode.INVALID_ARGUMENT),
        (DATA.ljust(MAX_MESSAGE_BYTES + 1, b"x"), grpc.StatusCode.INVALID_ARGUMENT),
        (SEND, grpc.StatusCode.INVALID_ARGUMENT),
        (SEND + bytes(8), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (SEND + b"\xff" * 8, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
    ids=lambda value: value[:9].hex() if isinstance(value, bytes) else value.name,
)
def test_a_message_that_makes_no_sense_ends_the_call(message: bytes, code: grpc.StatusCode) -> None:
    with serving(probe_handler()) as address, open_channel(address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            list(talk(channel, iter([message])))
        assert caught.value.code() is code
        assert list(talk(channel, iter([ECHO]))) == [ECHO], "the next call is served"


def test_bytes_are_capped_each_way() -> None:
    most = DATA.ljust(MAX_MESSAGE_BYTES, b"x")
    count = MAX_CALL_BYTES // MAX_MESSAGE_BYTES
    numbers = [MAX_WISHED_MESSAGES, MAX_MESSAGE_BYTES]
    largest = SEND + b"".join(number.to_bytes(4, "little") for number in numbers)
    assert MAX_WISHED_MESSAGES * MAX_MESSAGE_BYTES == MAX_CALL_BYTES
    with serving(probe_handler()) as address, open_channel(address) as channel:
        for messages, num_answers in ([most] * (count + 1), count), ([largest] * 2, 64):
            replies = talk(channel, iter(messages))
            answers = list(itertools.islice(replies, num_answers))
            assert len(answers) == num_answers
            with pytest.raises(grpc.RpcError) as caught:
                next(replies)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert f"limit {MAX_CALL_BYTES}" in str(caught.value.details())


def test_as_many_probes_as_allowed_run_at_once_and_slots_come_back() -> None:
    still_open = threading.Event()

    def opening() -> Iterator[bytes]:
        yield ECHO
        still_open.wait(10)

    with serving(probe_handler()) as address, open_channel(address) as channel:
        calls = [talk(channel, opening()) for _ in range(MAX_PROBES)]
        assert [next(call) for call in calls] == [ECHO] * MAX_PROBES
        with pytest.raises(PeerError, match=f"limit {MAX_PROBES}"):
            measure(address)
        for call in calls:
            call.cancel()
        still_open.set()
        deadline_s = time.monotonic() + 2
        while True:
            try:
                assert measure(address).rtt_s > 0
                break
            except PeerError:
                assert time.monotonic() < deadline_s, "cancelled calls kept their slots"


def test_a_caller_that_falls_silent_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MAX_CALL_S", 0.3)
    still_open = threading.Event()

    def silent() -> Iterator[bytes]:
        yield ECHO
        still_open.wait(10)

    with serving(probe_handler()) as address, open_channel(address) as channel:
        call = talk(channel, silent())
        assert next(call) == ECHO
        start_s = time.monotonic()
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        still_open.set()
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        assert 0.1 < time.monotonic() - start_s < 2.0


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files in /proc")
def test_many_measurements_leave_no_thread_and_no_socket() -> None:
    def lossy(message: bytes) -> Iterator[bytes]:
        return iter(()) if message[:1] == DATA else well(message)

    with serving(probe_handler()) as address, answering(lossy) as lossy_address:

        def measure_both() -> tuple[int, int]:
            measure(address)
            measure(lossy_address, budget_s=0.4)
            deadline_s = time.monotonic() + 2
            while time.monotonic() < deadline_s and len(os.listdir("/proc/self/fd")) > num_files:
                time.sleep(0.02)
            return threading.active_count(), len(os.listdir("/proc/self/fd"))

        num_files = 10_000
        num_threads, num_files = measure_both()
        for _ in range(5):
            now_threads, now_files = measure_both()
        assert now_files <= num_files + 2
        assert now_threads <= num_threads + 8, "the servers' pools and no more"


def test_it_measures_under_tls_and_only_the_named_peer() -> None:
    identity = found_cluster()
    certificate = to_pem(identity.certificate)
    server = grpc.ssl_server_credentials([(identity.key_pem, certificate)])
    trust = grpc.ssl_channel_credentials(to_pem(identity.authority_certificate))
    with serving(probe_handler(), credentials=server) as address:
        result = measure(address, credentials=trust, tls_name=tls_name(identity.node_id))
        assert min(result.to_peer_bytes_per_s, result.from_peer_bytes_per_s) > 5e6
        with pytest.raises(PeerError, match="cannot be measured"):
            measure(address, credentials=trust, tls_name="other.exo-train")


@pytest.mark.parametrize("round_bytes", [1, 4096, 5000, 100_000, 3 << 20, 8 << 20])
def test_rounds_stay_within_what_the_other_end_takes(round_bytes: int) -> None:
    count, size = probe._messages(round_bytes)
    assert 2 <= count <= MAX_WISHED_MESSAGES
    assert 1024 <= size <= MAX_MESSAGE_BYTES
    assert count * size <= max(round_bytes, 2048)
    if round_bytes >= 1 << 15:
        assert count * size > 0.9 * round_bytes
