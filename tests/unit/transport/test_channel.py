"""The one table of options, and ports that cannot be had."""

from __future__ import annotations

import socket
import subprocess
import sys

import grpc
import pytest

from exo_train.errors import PeerError
from exo_train.peer import Address
from exo_train.transport.channel import (
    GRPC_OPTIONS,
    KEEPALIVE_TIME_MS,
    MAX_BACKOFF_MS,
    MAX_MESSAGE_BYTES,
    MIN_PING_INTERVAL_MS,
    _target,
    bind,
    bind_each,
    new_server,
    open_channel,
)


def echo_server() -> grpc.Server:
    echo = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    return new_server(
        max_workers=1, handlers=[grpc.method_handlers_generic_handler("t.Echo", {"Say": echo})]
    )


def say(address: Address, message: bytes) -> bytes:
    with open_channel(address) as channel:
        return channel.unary_unary("/t.Echo/Say")(message, timeout=5)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_call_reaches_a_numeric_address(host: str) -> None:
    server = echo_server()
    try:
        port = bind(server, host)
    except PeerError:
        pytest.skip(f"this machine has no {host}")
    server.start()
    assert say(Address(host, port), b"x" * 5_000_000) == b"x" * 5_000_000
    server.stop(0).wait()


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
def test_a_proxy_for_the_web_is_ignored(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = echo_server()
    port = bind(server, "127.0.0.1")
    server.start()
    assert say(Address("127.0.0.1", port), b"hello") == b"hello"
    server.stop(0).wait()


def test_a_second_server_on_a_port_is_refused_and_does_not_blame_itself() -> None:
    first, second = echo_server(), echo_server()
    port = bind(first, "127.0.0.1")
    first.start()
    with pytest.raises(PeerError, match=rf"127\.0\.0\.1:{port}: port {port} is taken") as caught:
        bind(second, "127.0.0.1", port)
    assert str(port) in str(caught.value).split("look for the holder with")[1]
    first.stop(0).wait()


HOLDER = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as holder:
    print(holder.getsockname()[1], flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="others may not tell whose a port is")
def test_the_process_that_holds_a_port_is_named() -> None:
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        port = int(holder.stdout.readline())
        with pytest.raises(PeerError, match=f"process {holder.pid} holds port {port}"):
            bind(echo_server(), "127.0.0.1", port)


def test_hosts_that_cannot_be_bound_are_told_and_the_others_serve() -> None:
    server = echo_server()
    port, bound = bind_each(server, ["192.0.2.77", "127.0.0.1"])
    assert (port > 0, bound) == (True, ("127.0.0.1",))
    with pytest.raises(PeerError, match=r"Cannot listen on 192\.0\.2\.77"):
        bind_each(echo_server(), ["192.0.2.77"])


def test_a_port_held_by_another_program_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(PeerError, match=f"Cannot listen on 127.0.0.1:{port}"):
            bind(echo_server(), "127.0.0.1", port)


def test_an_address_of_another_device_cannot_be_listened_on() -> None:
    with pytest.raises(PeerError, match=r"Cannot listen on 192\.0\.2\.1: this device has no such"):
        bind(echo_server(), "192.0.2.1")


def test_names_are_never_dialled() -> None:
    with pytest.raises(PeerError, match=r"'pc\.local' is a name"):
        open_channel(Address("pc.local", 5000))


def test_targets_need_no_resolver() -> None:
    assert _target(Address("10.0.0.7", 5)) == "ipv4:10.0.0.7:5"
    assert _target(Address("fe80::1%en0", 5)) == "ipv6:[fe80::1%25en0]:5"


def test_the_table_keeps_its_promises() -> None:
    table = dict(GRPC_OPTIONS)
    assert table["grpc.http2.min_ping_interval_without_data_ms"] == MIN_PING_INTERVAL_MS
    assert MIN_PING_INTERVAL_MS < KEEPALIVE_TIME_MS
    assert table["grpc.max_reconnect_backoff_ms"] == MAX_BACKOFF_MS <= 5000
    assert table["grpc.max_receive_message_length"] == MAX_MESSAGE_BYTES
