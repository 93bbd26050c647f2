"""What the pairing tests are played with: a cluster that admits, a wire that can be heard, a man
in the middle, and a device that speaks the protocol by hand.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc

from exo_train.agent.pairing import Paired, pair
from exo_train.agent.pairing_desk import PairingDesk
from exo_train.agent.protocol import PROTOCOL_VERSION, greeting
from exo_train.cluster.pairing import (
    REFUSED_NUMBER,
    Closed,
    Code,
    InviterExchange,
    JoinerExchange,
)
from exo_train.cluster.roster import Roster
from exo_train.cluster.steady_clock import steady_s
from exo_train.errors import ExoTrainError, PeerError
from exo_train.identity import found_cluster, issue_certificate, new_key, public_key_of
from exo_train.peer import Address, NodeId
from exo_train.transport.channel import bind, open_channel
from exo_train.wire.pb import handshake_pb2
from exo_train.wire.pb import pairing_pb2 as pb

LOOPBACK = "127.0.0.1"
CODE = Code(number=7, words=("maple", "tiger"))
WRONG = Code(number=7, words=("maple", "zebra"))
PAIR = "/exo_train.wire.Pairing/Pair"
WAIT_S = 10.0


class Cluster:
    """One member that invites, and everybody whom it has let in."""

    def __init__(
        self,
        *,
        lifetime_s: float = 600.0,
        hosts: tuple[str, ...] = (LOOPBACK,),
        error: ExoTrainError | None = None,
        clock: Callable[[], float] = steady_s,
    ) -> None:
        self.identity = found_cluster()
        self.roster = Roster.of(self.identity)
        self.closed: queue.Queue[Closed] = queue.Queue()
        self.error = error
        self.hosts = hosts
        self.desk = PairingDesk(
            lambda: self.hosts,
            admit=self.admit,
            on_closed=self.closed.put,
            lifetime_s=lifetime_s,
            choose=lambda: CODE,
            clock=clock,
        )

    @property
    def joined(self) -> tuple[NodeId, ...]:
        return tuple(n for n in self.roster.members() if n != self.identity.node_id)

    def admit(self, public_key: bytes) -> pb.Admission:
        if self.error is not None:
            raise self.error
        certificate = issue_certificate(self.identity, public_key)
        self.roster.admit(certificate)
        return pb.Admission(
            cluster=self.identity.cluster,
            authority_certificate=self.identity.authority_certificate,
            authority_key=self.identity.authority_key,
            certificate=certificate,
            roster=self.roster.state().to_message(),
            endpoints=[pb.Endpoint(host="10.0.0.5", port=52415)],
        )

    def invite(self) -> Address:
        self.desk.invite()
        return self.desk.addresses[0]

    def why_closed(self) -> Closed:
        return self.closed.get(timeout=WAIT_S)


def try_to_pair(candidates: Iterable[Address], code: Code = CODE) -> Paired | str:
    """Give the result, or the sentence that the user would read."""
    try:
        return pair(candidates, code)
    except PeerError as error:
        return str(error)


def is_open(address: Address) -> bool:
    with suppress(OSError), socket.create_connection((address.host, address.port), 2):
        return True
    return False


def some_key() -> bytes:
    return public_key_of(new_key())


def impostor(proofs: list[bytes], number: int = CODE.number) -> tuple[grpc.Server, Address]:
    """Start a pairing port that pretends to have the code, and keeps what it gets.

    Other numbers it leaves alone: tests beside this one may hear of it.
    """

    def pretend(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        first = pb.JoinerMessage.FromString(next(requests))
        if first.number != number:
            yield pb.InviterMessage(refusal=REFUSED_NUMBER).SerializeToString()
            return
        guess = Code(number=number, words=WRONG.words)
        exchange = InviterExchange(guess, protocol=PROTOCOL_VERSION)
        yield pb.InviterMessage(spake=exchange.answer(first.spake)).SerializeToString()
        proofs.append(next(requests))
        yield pb.InviterMessage(sealed=b"x" * 900).SerializeToString()

    return serve(pretend)


class ByHand:
    """A stream to a pairing port, message by message, as bytes."""

    def __init__(self, address: Address) -> None:
        self._channel = open_channel(address)
        self._said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        stream = self._channel.stream_stream(PAIR)
        self._replies = stream(iter(self._said.get, None), timeout=WAIT_S)

    def __enter__(self) -> ByHand:
        return self

    def __exit__(self, *error: object) -> None:
        self._said.put(None)
        self._replies.cancel()
        self._channel.close()

    def say(self, message: pb.JoinerMessage | bytes) -> pb.InviterMessage | None:
        """Give the reply; None when the other side has ended the stream."""
        self.tell(message)
        return self.hear()

    def tell(self, message: pb.JoinerMessage | bytes) -> None:
        self._said.put(message if isinstance(message, bytes) else message.SerializeToString())

    def hear(self) -> pb.InviterMessage | None:
        try:
            return pb.InviterMessage.FromString(next(self._replies))
        except (grpc.RpcError, StopIteration):
            return None

    def begin(self, code: Code) -> JoinerExchange:
        """Exchange the first messages."""
        exchange = JoinerExchange(code, protocol=PROTOCOL_VERSION)
        reply = self.say(pb.JoinerMessage(spake=exchange.first, number=code.number))
        assert reply is not None
        self.spake = reply.spake
        return exchange

    def prove(self, exchange: JoinerExchange, public_key: bytes) -> pb.InviterMessage | None:
        request = pb.JoinRequest(public_key=public_key).SerializeToString()
        return self.say(pb.JoinerMessage(sealed=exchange.prove(self.spake, request)))


def serve(
    pair: Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]],
    *,
    hello: handshake_pb2.Greeting | None = None,
) -> tuple[grpc.Server, Address]:
    """Start what looks like a pairing port, with a conversation of the test's own."""
    said = (hello or greeting()).SerializeToString()
    server = grpc.server(ThreadPoolExecutor(8))
    services = {
        "exo_train.wire.Pairing": {"Pair": grpc.stream_stream_rpc_method_handler(pair)},
        "exo_train.wire.Handshake": {
            "Greet": grpc.unary_unary_rpc_method_handler(lambda request, context: said)
        },
    }
    for name, methods in services.items():
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, methods)])
    address = Address(LOOPBACK, bind(server, LOOPBACK))
    server.start()
    return server, address


Change = Callable[[str, bytes], bytes]  # who speaks and what its message holds → what arrives


def middleman(target: Address, change: Change) -> tuple[grpc.Server, Address, list[bytes]]:
    """Stand between a joiner and an inviter; gives all that was said, too."""
    heard: list[bytes] = []

    def altered(side: str, message: pb.JoinerMessage | pb.InviterMessage) -> bytes:
        kind = message.WhichOneof("body") or ""
        heard.append(message.SerializeToString())
        if kind in ("spake", "sealed"):
            setattr(message, kind, change(f"{side} {kind}", getattr(message, kind)))
        return message.SerializeToString()

    def pair(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        with ByHand(target) as real:
            for raw in requests:
                reply = real.say(altered("joiner", pb.JoinerMessage.FromString(raw)))
                if reply is None:
                    return
                yield altered("inviter", reply)

    server, address = serve(pair)
    return server, address, heard


class Wire:
    """A TCP relay that writes down every byte of both directions, and may take its time."""

    def __init__(self, target: Address, *, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s
        self.heard = bytearray()
        self._target = target
        self._listener = socket.create_server((LOOPBACK, 0))
        self.address = Address(LOOPBACK, self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for one in [self._listener, *self._sockets]:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                time.sleep(self._delay_s)
                far = socket.create_connection((self._target.host, self._target.port))
                self._sockets += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self.heard += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
