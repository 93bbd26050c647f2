"""Bytes that nobody honest sends: HTTP/2 by hand, messages full of pickles, servers that lie."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from exo_train.identity import Identity, to_pem
from exo_train.peer import Address
from exo_train.transport.channel import bind, new_server
from exo_train.wire.pb import control_pb2, handshake_pb2
from tests.agent.members_here import LOOPBACK, member_tls

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, HEADERS, END_HEADERS = 4, 1, 4
MAX_DEPTH = 4


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.open, (str(self._marker), os.O_CREAT)


def pickles(marker: Path) -> tuple[bytes, str]:
    """Give a pickle that makes the file, as bytes, and as text for fields that hold text."""
    return pickle.dumps(Touch(marker)), pickle.dumps(Touch(marker), protocol=0).decode("ascii")


def filled(message: Message, raw: bytes, text: str, depth: int = 0) -> Message:
    """Put `raw` into every bytes field of a message and of those in it, and `text` into strings."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None:
            if depth < MAX_DEPTH:
                inner = filled(GetMessageClass(field.message_type)(), raw, text, depth + 1)
                _put(message, field, inner)
        elif field.type == FieldDescriptor.TYPE_BYTES:
            _put(message, field, raw)
        elif field.type == FieldDescriptor.TYPE_STRING:
            _put(message, field, text)
    return message


def _put(message: Message, field: FieldDescriptor, value: Any) -> None:
    if field.is_repeated:
        getattr(message, field.name).append(value)
    elif isinstance(value, Message):
        getattr(message, field.name).CopyFrom(value)
    else:
        setattr(message, field.name, value)


def messages_of(method: str) -> tuple[type[Message], type[Message]]:
    """Give request and reply of a generated method."""
    service, _, name = method.strip("/").partition("/")
    for module in (control_pb2, handshake_pb2):
        found = module.DESCRIPTOR.services_by_name.get(service.rpartition(".")[2])
        if found is not None:
            one = found.methods_by_name[name]
            return GetMessageClass(one.input_type), GetMessageClass(one.output_type)
    raise KeyError(method)


@contextlib.contextmanager
def lying_member(
    identity: Identity, answers: dict[str, Callable[[bytes], bytes]]
) -> Iterator[tuple[Address, list[str]]]:
    """Run a server with a member's certificate and any answers; gives what it was asked, too."""
    asked: list[str] = []
    server = new_server(max_workers=4)
    for method, answer in answers.items():

        def reply(raw: bytes, context: object, method: str = method, answer: Any = answer) -> bytes:
            asked.append(method)
            return bytes(answer(raw))

        service, _, name = method.strip("/").partition("/")
        handler = grpc.unary_unary_rpc_method_handler(reply)
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(service, {name: handler})]
        )
    port = bind(server, LOOPBACK, credentials=member_tls(identity).server())
    server.start()
    try:
        yield Address(LOOPBACK, port), asked
    finally:
        server.stop(0).wait()


class RawHttp2:
    """An HTTP/2 connection with a member's certificate, that begins calls and ends none."""

    def __init__(self, port: int, identity: Identity, folder: Path) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        own = folder / f"{identity.node_id}.pem"
        if not own.exists():
            own.write_bytes(identity.key_pem + to_pem(identity.certificate))
        context.load_cert_chain(own)
        self._socket = context.wrap_socket(socket.create_connection((LOOPBACK, port), timeout=10))
        self._socket.sendall(PREFACE + _frame(SETTINGS, 0, 0, b""))
        self._next_stream = 1

    def begin(self, method: str, count: int) -> None:
        """Send the headers of calls, and no message."""
        frames = bytearray()
        for _ in range(count):
            frames += _frame(HEADERS, END_HEADERS, self._next_stream, _headers(method))
            self._next_stream += 2
        self._socket.sendall(frames)

    def close(self) -> None:
        self._socket.close()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Lay out a frame: RFC 9113, 4.1."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _headers(method: str) -> bytes:
    """Write the headers of a gRPC call as literals that no table remembers: RFC 7541, 6.2.2."""
    fields = {
        ":method": "POST",
        ":scheme": "https",
        ":path": method,
        ":authority": "x",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    block = bytearray()
    for name, value in fields.items():
        block += b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return bytes(block)
