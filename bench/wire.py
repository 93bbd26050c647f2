"""Measure a gRPC link against raw TCP on loopback, in the same run: `python bench/wire.py`.

Prints GB/s of payload per tensor size for both, and the ratio. Sender and receiver are two
processes. The link's number includes framing, both checksums and the receiver's copy.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from exo_train.peer import Address
from exo_train.transport.base import LinkIdentity, Tag
from exo_train.transport.data_server import DataServer
from exo_train.transport.dial import dial
from exo_train.wire.tensor import DType, HostTensor

SIZES_BYTES = (256 << 10, 1 << 20, 4 << 20, 16 << 20)
DURATION_S = 1.0
WARM_UP_TENSORS = 8
TIMEOUT_S = 30.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=DURATION_S, help="per size and way")
    seconds = parser.parse_args().seconds
    print(f"{'tensor':>9} {'TCP GB/s':>9} {'link GB/s':>10} {'ratio':>6}")
    for num_bytes in SIZES_BYTES:
        tcp = measure(tcp_receiver, tcp_sender, num_bytes, seconds)
        link = measure(link_receiver, link_sender, num_bytes, seconds)
        print(f"{num_bytes >> 10:>6} KB {tcp:>9.2f} {link:>10.2f} {link / tcp:>6.2f}", flush=True)


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


def identity(rank: int) -> LinkIdentity:
    return LinkIdentity(
        cluster="bench",
        run="bench",
        generation=0,
        rank=rank,
        name=f"rank {rank}",
        peer_rank=1 - rank,
        peer_name=f"rank {1 - rank}",
        token="bench",
    )


def link_sender(port: int, num_bytes: int, seconds: float) -> tuple[int, float]:
    tensor = HostTensor(DType.BF16, (num_bytes // 2,), bytes(num_bytes))
    link = dial([Address("127.0.0.1", port)], identity(0), timeout_s=TIMEOUT_S)
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


def link_receiver(pipe: Connection, num_bytes: int) -> None:
    with DataServer(["127.0.0.1"]) as server:
        pipe.send(server.addresses[0].port)
        link = server.wait_link(identity(1), timeout_s=TIMEOUT_S)
        i = 0
        while link.wait_recv(Tag(0, i), timeout_s=TIMEOUT_S).num_bytes:
            i += 1
        link.send(Tag(0, 0), HostTensor(DType.BF16, (0,), b""))


if __name__ == "__main__":
    main()
