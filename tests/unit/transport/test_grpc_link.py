"""The gRPC link where it differs from the in-process one: big tensors, dead and hostile peers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import grpc
import psutil
import pytest
from link_ends import LOWER, UPPER, connect

from exo_train.errors import PeerLostError, ProtocolError
from exo_train.peer import Address
from exo_train.transport.base import MAILBOX_TENSORS, LinkLimits, Tag
from exo_train.transport.channel import bind, new_server, open_channel
from exo_train.transport.data_server import HELLO_TIMEOUT_S, MAX_OPEN_STREAMS, DataServer
from exo_train.transport.dial import dial
from exo_train.transport.grpc_link import EXCHANGE_METHOD
from exo_train.transport.hello import PROTOCOL_VERSION, encode_hello
from exo_train.wire.codec import encode_tensor
from exo_train.wire.pb import data_pb2
from exo_train.wire.tensor import DType, HostTensor

SMALL = HostTensor(DType.FP16, (2, 2), bytes(range(8)))
CHILD = """
import sys, time
from exo_train.transport.base import LinkIdentity, Tag
from exo_train.transport.data_server import DataServer
from exo_train.wire.tensor import DType, HostTensor
server = DataServer(["127.0.0.1"])
print(server.addresses[0].port, flush=True)
link = server.wait_link(LinkIdentity(cluster="home", run="run-1", generation=1, rank=1, name="pc",
                                     peer_rank=0, peer_name="mac", token="secret"), timeout_s=20)
for i in range(10**6):
    link.send(Tag(1, i), HostTensor(DType.FP32, (1 << 20,), bytes(4 << 20)))
"""


@pytest.fixture
def server():
    with DataServer(["127.0.0.1"]) as server:
        yield server


def expect(server: DataServer) -> None:
    """Make the server know whom it waits for, without a neighbour."""
    with pytest.raises(PeerLostError):
        server.wait_link(UPPER, timeout_s=0)


def raw_call(server: DataServer, messages: list[bytes]):
    channel = open_channel(server.addresses[0])
    exchange = channel.stream_stream(EXCHANGE_METHOD)
    return channel, exchange(iter(messages))


def test_600_mb_travel_with_default_settings(server: DataServer) -> None:
    lower, upper = connect(server)
    num_bytes = 600_000_000
    lower.send(Tag(1, 0), HostTensor(DType.FP32, (num_bytes // 4,), bytes(num_bytes)))
    arrived = upper.wait_recv(Tag(1, 0), timeout_s=60)
    assert arrived.num_bytes == num_bytes
    assert upper.received_bytes == num_bytes
    assert arrived.data.count(0) == num_bytes
    lower.close()


def test_a_killed_peer_is_noticed_within_a_second_by_all_who_wait() -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    try:
        port = int(child.stdout.readline())
        link = dial([Address("127.0.0.1", port)], LOWER, timeout_s=10)
        assert link.wait_recv(Tag(1, 0), timeout_s=10).num_bytes == 4 << 20
        held_tensors = 1 + MAILBOX_TENSORS + 1  # taken, shelved, and one that finds no place
        while link.received_bytes < held_tensors * (4 << 20):
            time.sleep(0.01)
        threading.Timer(0.2, child.kill).start()
        last = r"pc \(rank 1\) broke.*gradient.*step 1, microbatch 999999\)"
        with pytest.raises(PeerLostError, match=last):  # nobody reads the stream now
            link.wait_recv(Tag(1, 999_999), timeout_s=10)
        child.wait()
        start_s = time.monotonic()
        with pytest.raises(PeerLostError, match="broke"):
            link.wait_recv(Tag(1, 1), timeout_s=10)
        with pytest.raises(PeerLostError, match="sending the activation of step 1"):
            link.send(Tag(1, 1), SMALL)
        assert time.monotonic() - start_s < 1
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_a_peer_that_dies_while_we_wait_wakes_us_at_once(server: DataServer) -> None:
    lower, upper = connect(server)
    died_s = []

    def die() -> None:
        died_s.append(time.monotonic())
        server._server.stop(0)

    threading.Timer(0.2, die).start()
    with pytest.raises(PeerLostError, match=r"connection to pc \(rank 1\) broke"):
        lower.wait_recv(Tag(1, 0), timeout_s=30)
    with pytest.raises(PeerLostError, match=r"connection to mac \(rank 0\) broke"):
        upper.wait_recv(Tag(1, 0), timeout_s=30)
    assert time.monotonic() - died_s[0] < 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"token": "guess"}, "the token is not this run's"),
        ({"cluster": "next door"}, "the cluster is 'next door', expected 'home'"),
        ({"run": "run-0"}, "the run is 'run-0', expected 'run-1'"),
        ({"generation": 0}, "the generation is 0, expected 1"),
        ({"rank": 2}, "the rank is 2, expected 0"),
    ],
)
def test_whoever_is_not_the_neighbour_is_refused(server, change, sentence) -> None:
    expect(server)
    with pytest.raises(ProtocolError, match=rf"pc \(rank 1\) refused the link.*{sentence}"):
        dial(server.addresses, replace(LOWER, **change), timeout_s=5)
    with pytest.raises(PeerLostError, match=f"a caller was refused: {sentence}"):
        server.wait_link(UPPER, timeout_s=0)


def test_the_dialler_refuses_a_server_that_is_not_the_neighbour() -> None:
    other = encode_hello(replace(UPPER, rank=1, run="run-9"), LinkLimits(), with_token=False)
    handler = grpc.stream_stream_rpc_method_handler(lambda requests, context: iter([other]))
    service, method = EXCHANGE_METHOD.strip("/").split("/")
    handlers = [grpc.method_handlers_generic_handler(service, {method: handler})]
    impostor = new_server(max_workers=2, handlers=handlers)
    port = bind(impostor, "127.0.0.1")
    impostor.start()
    with pytest.raises(ProtocolError, match="the run is 'run-9', expected 'run-1'"):
        dial([Address("127.0.0.1", port)], LOWER, timeout_s=5)
    impostor.stop(0).wait()


def test_different_tensor_limits_are_found_before_the_first_step(server: DataServer) -> None:
    expect(server)
    with pytest.raises(ProtocolError, match="largest tensor in bytes is 5, expected 4294967296"):
        dial(server.addresses, LOWER, timeout_s=5, limits=LinkLimits(max_tensor_bytes=5))


def test_another_protocol_version_is_refused_with_both_numbers(server: DataServer) -> None:
    expect(server)
    hello = data_pb2.Hello(protocol=PROTOCOL_VERSION + 8)
    channel, call = raw_call(server, [hello.SerializeToString()])
    with channel, pytest.raises(grpc.RpcError) as caught:
        next(call)
    assert f"protocol {PROTOCOL_VERSION + 8} meets {PROTOCOL_VERSION};" in caught.value.details()


def test_only_one_neighbour_is_let_in(server: DataServer) -> None:
    lower, upper = connect(server)
    with pytest.raises(PeerLostError, match="already exists: this neighbour is connected"):
        dial(server.addresses, LOWER, timeout_s=0.5)
    lower.send(Tag(1, 0), SMALL)
    assert bytes(upper.wait_recv(Tag(1, 0), timeout_s=5).data) == bytes(range(8))


def test_garbage_after_the_hello_is_answered_and_breaks_the_link(server: DataServer) -> None:
    expect(server)
    hello = encode_hello(LOWER, LinkLimits(), with_token=True)
    [frame] = encode_tensor(replace(LOWER, run="old").outgoing, Tag(1, 0), SMALL)
    accepted, refused = threading.Event(), threading.Event()

    def messages():
        yield hello
        accepted.wait(10)
        yield frame
        refused.wait(10)

    channel, call = raw_call(server, messages())
    with channel:
        next(call)
        link = server.wait_link(UPPER, timeout_s=5)
        accepted.set()
        with pytest.raises(
            ProtocolError, match=r"run 'old', generation 1; expected .* run 'run-1'"
        ):
            link.wait_recv(Tag(1, 0), timeout_s=5)
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        refused.set()


def test_garbage_on_the_port_harms_nobody(server: DataServer) -> None:
    expect(server)
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(4096),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ):
        with socket.create_connection((server.addresses[0].host, server.addresses[0].port)) as raw:
            raw.sendall(garbage)
    channel, call = raw_call(server, [os.urandom(64)])
    with channel, pytest.raises(grpc.RpcError, match=r"is no Hello|protocol"):
        next(call)
    lower, upper = connect(server)
    lower.send(Tag(1, 0), SMALL)
    assert upper.wait_recv(Tag(1, 0), timeout_s=5).shape == (2, 2)


def test_silent_callers_are_cut_and_the_neighbour_still_gets_in(server: DataServer) -> None:
    expect(server)
    address = (server.addresses[0].host, server.addresses[0].port)
    silent = socket.create_connection(address)
    silent.settimeout(3 * HELLO_TIMEOUT_S)
    never = threading.Event()

    def say_nothing():
        never.wait(3 * HELLO_TIMEOUT_S)
        yield from ()

    with open_channel(server.addresses[0]) as channel:
        exchange = channel.stream_stream(EXCHANGE_METHOD)
        calls = [exchange(say_nothing()) for _ in range(MAX_OPEN_STREAMS + 2)]
        start_s = time.monotonic()
        connect(server)
        assert time.monotonic() - start_s < 2 * HELLO_TIMEOUT_S
        for call in calls:
            assert call.code() is not grpc.StatusCode.OK
        never.set()
    while silent.recv(4096):  # its settings, then the end
        pass
    assert time.monotonic() - start_s < 2 * HELLO_TIMEOUT_S
    silent.close()


def test_dial_goes_on_to_the_address_that_works_and_waits_for_a_late_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        dead = Address("127.0.0.1", reserved.getsockname()[1])
    with DataServer(["127.0.0.1"]) as server:
        threading.Timer(0.5, lambda: server.wait_link(UPPER, timeout_s=5)).start()
        link = dial([dead, *server.addresses], LOWER, timeout_s=5)
        link.close()


def test_refused_and_silent_addresses_are_two_sentences() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        closed = Address("127.0.0.1", free_port())
        silent = Address("127.0.0.1", mute.getsockname()[1])
        with pytest.raises(PeerLostError) as caught:
            dial([closed, silent], LOWER, timeout_s=1)
    message = str(caught.value)
    assert "pc (rank 1) could not be reached within 1.0 s" in message
    assert f"{closed} refused the connection: nothing listens there" in message
    assert f"{silent} gave no answer in" in message


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        return int(reserved.getsockname()[1])


@pytest.mark.skipif(sys.platform == "win32", reason="counts POSIX file descriptors")
def test_failed_dials_leave_no_sockets_or_threads_behind() -> None:
    process = psutil.Process()
    closed = Address("127.0.0.1", free_port())

    def try_dial() -> None:
        with pytest.raises(PeerLostError):
            dial([closed], LOWER, timeout_s=0.05)

    try_dial()
    before = process.num_fds(), threading.active_count()
    for _ in range(10):
        try_dial()
    time.sleep(0.5)
    assert process.num_fds() <= before[0] + 2
    assert threading.active_count() <= before[1] + 1
