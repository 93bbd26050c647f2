"""A thread of this process inside a host's network: sockets, TAPs, a door for gRPC. For tests only.

Owns the crossing into a namespace and back. Must not make or remove namespaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import selectors
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

NETNS = Path("/run/netns")
CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA  # linux/if_tun.h
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
MAX_DOOR_CONNECTIONS = 16
CHUNK_BYTES = 65536
DOOR_CHECK_S = 0.2

_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Put this thread into the namespace; sockets made there stay there when it is back."""
    with (NETNS / namespace).open("rb") as there, open("/proc/thread-self/ns/net", "rb") as here:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(here.fileno())


def open_tap(namespace: str, interface: str) -> int:
    """Make a TAP with that name there and give its descriptor; it is gone when that is closed."""
    with inside(namespace):
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        request = struct.pack("16sH22x", interface.encode(), IFF_TAP | IFF_NO_PI)
        try:
            fcntl.ioctl(descriptor, TUNSETIFF, request)
        except OSError:
            os.close(descriptor)
            raise
    return descriptor


@contextlib.contextmanager
def door(namespace: str, host: str, port: int) -> Iterator[int]:
    """Give a port of this machine's loopback that leads to host:port as seen in the namespace.

    gRPC opens its sockets in threads of its own, which no `inside` reaches.
    """
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DOOR_CHECK_S)
        way = (listener, namespace, (host, port), ended)
        thread = threading.Thread(target=_let_through, args=way, name="door", daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            ended.set()
            thread.join()


def _enter(descriptor: int) -> None:
    if _libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns failed")


def _let_through(
    listener: socket.socket, namespace: str, target: tuple[str, int], ended: threading.Event
) -> None:
    """Carry bytes both ways until `ended`; either side's end closes both."""
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ, None)
        while not ended.is_set():
            for key, _ in selector.select(DOOR_CHECK_S / 4):
                if key.data is not None:
                    _carry(selector, key.fileobj, key.data)
                elif len(selector.get_map()) <= 2 * MAX_DOOR_CONNECTIONS:
                    _open_both(selector, stack, listener, namespace, target)


def _open_both(
    selector: selectors.BaseSelector,
    stack: contextlib.ExitStack,
    listener: socket.socket,
    namespace: str,
    target: tuple[str, int],
) -> None:
    caller = stack.enter_context(listener.accept()[0])
    with inside(namespace):
        called = stack.enter_context(socket.socket())
    called.settimeout(5.0)
    try:
        called.connect(target)
    except OSError:
        caller.close()
        return
    selector.register(caller, selectors.EVENT_READ, called)
    selector.register(called, selectors.EVENT_READ, caller)


def _carry(selector: selectors.BaseSelector, source: object, sink: socket.socket) -> None:
    assert isinstance(source, socket.socket)
    if source.fileno() < 0:  # its other side ended in the same round
        return
    content = b""
    with contextlib.suppress(OSError):
        content = source.recv(CHUNK_BYTES)
        sink.sendall(content)
    if not content:
        for end in (source, sink):
            with contextlib.suppress(KeyError, ValueError):
                selector.unregister(end)
            end.close()
