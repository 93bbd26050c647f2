"""Measure a gRPC link against raw TCP on loopback, in the same run: `python bench/wire.py`.

Prints GB/s of payload per tensor size for both, and the ratio. Sender and receiver are two
processes. The link's number includes framing, both checksums and the receiver's copy.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from exo_train.identity import (
    Identity,
    MemberCertificate,
    found_cluster,
    issue_certificate,
    new_key,
    node_id_of,
    public_key_of,
    read_certificate,
)
from exo_train.peer import Address, NodeId
from exo_train.transport.base import NO_ONE, LinkIdentity, Tag
from exo_train.transport.data_server import DataServer
from exo_train.transport.dial import dial
from exo_train.transport.tls import MemberTls
from exo_train.wire.tensor import DType, HostTensor

SIZES_BYTES = (256 << 10, 1 << 20, 4 << 20, 16 << 20)
DURATION_S = 1.0
WARM_UP_TENSORS = 8
TIMEOUT_S = 30.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=DURATION_S, help="per size and way")
    seconds = parser.parse_args().seconds
    pair = member_pair()
    receiver = functools.partial(link_receiver, pair=pair)
    sender = functools.partial(link_sender, pair=pair)
    print("   tensor  TCP GB/s  plain  TLS GB/s  TLS/TCP  TLS/plain")
    for num_bytes in SIZES_BYTES:
        tcp = measure(tcp_receiver, tcp_sender, num_bytes, seconds)
        plain = measure(link_receiver, link_sender, num_bytes, seconds)
        tls = measure(receiver, sender, num_bytes, seconds)
        print(
            f"{num_bytes >> 10:>6} KB {tcp:>9.2f} {plain:>6.2f} {tls:>9.2f} {tls / tcp:>8.2f} "
            f"{tls / plain:>10.2f}",
            flush=True,
        )


def member_pair() -> tuple[Identity, Identity]:
    """Make a cluster of two, as pairing would."""
    founder, key_pem = found_cluster(), new_key()
    public_key = public_key_of(key_pem)
    member = Identity(
        node_id=node_id_of(public_key),
        cluster=founder.cluster,
        key_pem=key_pem,
        certificate=issue_certificate(founder, public_key),
        authority_certificate=founder.authority_certificate,
        authority_key=founder.authority_key,
    )
    return founder, member


def measure(
    receiver: Callable[[Connection, int], None],
    sender: Callable[[int, int, float], tuple[int, float]],
    num_bytes: int,
    seconds: float,
) -> float:
    """Give GB/s from the first measured byte sent to the last one acknowledged."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receiver, args=(theirs, num_bytes))
    process.start()
    port = ours.recv()
    num_tensors, start_s = sender(port, num_bytes, seconds)
    elapsed_s = time.perf_counter() - start_s
    process.join()
    return num_tensors * num_bytes / elapsed_s / 1e9


def tcp_sender(port: int, num_bytes: int, seconds: float) -> tuple[int, float]:
    data = bytes(num_bytes)
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(WARM_UP_TENSORS):
            peer.sendall(data)
        start_s, num_tensors = time.perf_counter(), 0
        while time.perf_counter() - start_s < seconds:
            peer.sendall(data)
            num_tensors += 1
        peer.shutdown(socket.SHUT_WR)
        peer.recv(1)
    return num_tensors, start_s


def tcp_receiver(pipe: Connection, num_bytes: int) -> None:
    buffer = bytearray(num_bytes)
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        peer, _ = server.accept()
        with peer:
            while peer.recv_into(buffer):
                pass


def identity(rank: int, peer_id: NodeId = NO_ONE) -> LinkIdentity:
    return LinkIdentity(
        peer_id=peer_id,
        cluster="bench",
        run="bench",
        generation=0,
        rank=rank,
        name=f"rank {rank}",
        peer_rank=1 - rank,
        peer_name=f"rank {1 - rank}",
        token="bench",
    )


def link_sender(
    port: int, num_bytes: int, seconds: float, *, pair: tuple[Identity, Identity] | None = None
) -> tuple[int, float]:
    tensor = HostTensor(DType.BF16, (num_bytes // 2,), bytes(num_bytes))
    address = Address("127.0.0.1", port)
    if pair is None:
        link = dial([address], identity(0), timeout_s=TIMEOUT_S)
    else:
        server, own = pair
        tls = MemberTls(own, lambda node_id: read(server)).to(server.node_id)
        link = dial(
            [address],
            identity(0, server.node_id),
            timeout_s=TIMEOUT_S,
            credentials=tls.credentials,
            tls_name=tls.name,
        )
    for i in range(WARM_UP_TENSORS):
        link.send(Tag(0, i), tensor)
    start_s, num_tensors = time.perf_counter(), 0
    while time.perf_counter() - start_s < seconds:
        link.send(Tag(0, WARM_UP_TENSORS + num_tensors), tensor)
        num_tensors += 1
    # An empty tensor marks the end; the answer comes when all before it were taken.
    link.send(Tag(0, WARM_UP_TENSORS + num_tensors), HostTensor(DType.BF16, (0,), b""))
    link.wait_recv(Tag(0, 0), timeout_s=TIMEOUT_S)
    link.close()
    return num_tensors, start_s


def read(member: Identity) -> MemberCertificate:
    return read_certificate(member.certificate, authority_certificate=member.authority_certificate)


def link_receiver(
    pipe: Connection, num_bytes: int, *, pair: tuple[Identity, Identity] | None = None
) -> None:
    credentials = MemberTls(pair[0], lambda node_id: None).server() if pair else None
    peer_id = pair[1].node_id if pair else NO_ONE
    with DataServer(["127.0.0.1"], credentials=credentials) as server:
        pipe.send(server.port)
        link = server.wait_link(identity(1, peer_id), timeout_s=TIMEOUT_S)
        i = 0
        while link.wait_recv(Tag(0, i), timeout_s=TIMEOUT_S).num_bytes:
            i += 1
        link.send(Tag(0, 0), HostTensor(DType.BF16, (0,), b""))


if __name__ == "__main__":
    main()
