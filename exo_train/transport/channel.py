"""gRPC channels and servers.

Owns the one table of gRPC options, so that both ends of every connection agree, and the opening
of ports. Must not know what is sent over them.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import psutil

from exo_train.errors import PeerError
from exo_train.peer import Address
from exo_train.wire.codec import MAX_CHUNK_BYTES

# A frame's header and prefix come on top of its chunk.
MAX_MESSAGE_BYTES = MAX_CHUNK_BYTES + (1 << 20)
KEEPALIVE_TIME_MS = 20_000
# Also the longest that sent bytes may stay unacknowledged (TCP_USER_TIMEOUT): generous, so that a
# slow link with a full buffer is not taken for a dead one. Heartbeats find the dead sooner.
KEEPALIVE_TIMEOUT_MS = 60_000
# Below half of the keepalive time, so that jitter is no "too many pings".
MIN_PING_INTERVAL_MS = 5_000
# A connection that says nothing, or no HTTP/2, is closed after this.
HANDSHAKE_TIMEOUT_MS = 5_000
INITIAL_BACKOFF_MS = 200
MAX_BACKOFF_MS = 5_000
MAX_STREAMS_PER_CONNECTION = 64
# Sized for frames of 1 MiB; `bench/wire.py` measures what a change does.
HTTP2_FRAME_BYTES = 1 << 20
LOOKAHEAD_BYTES = 8 << 20
WRITE_BUFFER_BYTES = 2 << 20

log = logging.getLogger(__name__)

Options = list[tuple[str, int | str]]

# Channels ignore the server's options and the other way round, so one table serves both.
GRPC_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
    ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
    ("grpc.initial_reconnect_backoff_ms", INITIAL_BACKOFF_MS),
    ("grpc.min_reconnect_backoff_ms", MAX_BACKOFF_MS),
    ("grpc.max_reconnect_backoff_ms", MAX_BACKOFF_MS),
    # A proxy for the web cannot know the devices at home.
    ("grpc.enable_http_proxy", 0),
    # Two servers on one port would each get some of the calls.
    ("grpc.so_reuseport", 0),
    # Control and data to one device must not share a connection: heartbeats would queue.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.max_frame_size", HTTP2_FRAME_BYTES),
    ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
    ("grpc.http2.write_buffer_size", WRITE_BUFFER_BYTES),
)


def open_channel(
    address: Address,
    *,
    credentials: grpc.ChannelCredentials | None = None,
    tls_name: str = "",
) -> grpc.Channel:
    """Open a lazy channel; `tls_name` is the name the peer's certificate must have.

    Raises PeerError when the host is not numeric.
    """
    options: Options = list(GRPC_OPTIONS)
    if tls_name:
        options.append(("grpc.ssl_target_name_override", tls_name))
    if credentials is None:
        return grpc.insecure_channel(_target(address), options=options)
    return grpc.secure_channel(_target(address), credentials, options=options)


def new_server(
    *,
    max_workers: int,
    max_rpcs: int | None = None,
    handlers: Sequence[grpc.GenericRpcHandler[bytes, bytes]] = (),
    interceptors: Sequence[Any] = (),
    name: str = "grpc",
) -> grpc.Server:
    """Make a server with its own thread pool; calls above `max_rpcs` are refused at once."""
    return grpc.server(
        ThreadPoolExecutor(max_workers=max_workers, thread_name_prefix=name),
        handlers=list(handlers),
        interceptors=list(interceptors),
        options=list(GRPC_OPTIONS),
        maximum_concurrent_rpcs=max_rpcs,
    )


def bind(
    server: grpc.Server,
    host: str,
    port: int = 0,
    *,
    credentials: grpc.ServerCredentials | None = None,
) -> int:
    """Bind to a numeric host and give the port; 0 lets the system choose.

    Raises PeerError naming the port and, where it can be known, who holds it.
    """
    address = Address(host, port)
    _check_numeric(address)
    try:
        if credentials is None:
            bound = server.add_insecure_port(str(address))
        else:
            bound = server.add_secure_port(str(address), credentials)
    except RuntimeError:
        bound = 0
    if bound == 0:
        raise PeerError(_bind_sentence(address))
    return bound


def bind_all(
    server: grpc.Server,
    hosts: Sequence[str],
    port: int = 0,
    *,
    credentials: grpc.ServerCredentials | None = None,
) -> int:
    """Bind one port on several hosts and give it; the first must work, others are logged."""
    return bind_each(server, hosts, port, credentials=credentials)[0]


def bind_each(
    server: grpc.Server,
    hosts: Sequence[str],
    port: int = 0,
    *,
    credentials: grpc.ServerCredentials | None = None,
) -> tuple[int, tuple[str, ...]]:
    """Bind one port where it can be; gives it and where. Raises PeerError when it is nowhere.

    An IPv6 address cannot be bound while the system still checks that it is nobody else's.
    """
    bound: list[str] = []
    refusal: PeerError | None = None
    for host in hosts:
        try:
            port = bind(server, host, port, credentials=credentials)
            bound.append(host)
        except PeerError as error:
            refusal = refusal or error
            log.info("not listening on %s: %s", host, error)
    if not bound:
        raise refusal or PeerError("there is no address to listen on")
    return port, tuple(bound)


def _target(address: Address) -> str:
    """Name the address so that gRPC asks no resolver: an IPv6 zone is escaped (RFC 6874)."""
    version = _check_numeric(address)
    return f"ipv{version}:{str(address).replace('%', '%25')}"


def _check_numeric(address: Address) -> int:
    try:
        return ipaddress.ip_address(address.host).version
    except ValueError:
        raise PeerError(
            f"'{address.host}' is a name, not a numeric address, and names are never dialled; "
            f"give an IP address"
        ) from None


def _bind_sentence(address: Address) -> str:
    if address.port == 0:
        return f"Cannot listen on {address.host}: this device has no such address, or no free port"
    if sys.platform == "win32":
        hint = f"netstat -ano | findstr :{address.port}"
    else:
        hint = f"lsof -nP -iTCP:{address.port} -sTCP:LISTEN"
    return (
        f"Cannot listen on {address}: {_port_holder(address.port)}; choose another port, "
        f"or look for the holder with `{hint}`"
    )


def _port_holder(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            here = connection.laddr and connection.laddr.port == port
            is_other = connection.pid not in (None, os.getpid())
            if here and connection.status == psutil.CONN_LISTEN and is_other:
                return f"process {connection.pid} holds port {port}"
    except psutil.Error:  # macOS tells only the administrator
        pass
    return f"port {port} is taken, not allowed, or this device has no such address"
