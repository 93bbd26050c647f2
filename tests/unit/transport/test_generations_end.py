"""A generation's end wakes whoever waits on the network, and the port serves the next one."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from link_ends import LOWER, UPPER

from exo_train.errors import PeerLostError
from exo_train.models.tensors import TensorInfo
from exo_train.peer import Address
from exo_train.transport.base import Link, Tag
from exo_train.transport.channel import bind, new_server
from exo_train.transport.data_server import DataServer
from exo_train.transport.dial import dial
from exo_train.transport.grpc_link import EXCHANGE_METHOD
from exo_train.transport.stopping import Generations, Stopper
from exo_train.transport.weight_cache import WeightCache
from exo_train.transport.weight_server import FETCH_METHOD
from exo_train.transport.weights import RemoteSource
from exo_train.wire.tensor import DType, HostTensor

REASON = PeerLostError("the ring is formed anew as generation 2")
FOREVER_S = 600.0  # whoever is not woken fails by the test's own timeout
SOON_S = 20.0
TENSOR = HostTensor(DType.FP16, (2, 2), bytes(range(8)))
LOWER_2, UPPER_2 = (replace(identity, generation=2) for identity in (LOWER, UPPER))


@pytest.fixture
def server() -> Iterator[DataServer]:
    with DataServer(["127.0.0.1"]) as server:
        yield server


def woken(wait: Callable[[], object], end: Callable[[], object]) -> str:
    """Call `end` while `wait` waits; gives the sentence that the waiting one gets."""
    sentences: list[str] = []

    def waiting() -> None:
        try:
            wait()
        except PeerLostError as error:
            sentences.append(str(error))

    thread = threading.Thread(target=waiting, daemon=True)
    thread.start()
    time.sleep(0.3)  # let it begin to wait; it is right without, too
    assert thread.is_alive(), "it waits"
    end()
    thread.join(SOON_S)
    assert not thread.is_alive(), "it was not woken"
    (sentence,) = sentences
    return sentence


def pair(server: DataServer) -> tuple[Link, Link]:
    """Make the link of generation 2, as if nothing had been before."""
    accepted: list[Link] = []
    thread = threading.Thread(
        target=lambda: accepted.append(server.wait_link(UPPER_2, timeout_s=SOON_S))
    )
    thread.start()
    dialled = dial(server.addresses, LOWER_2, timeout_s=SOON_S)
    thread.join()
    return dialled, accepted[0]


def test_waiting_for_a_neighbours_dial(server: DataServer) -> None:
    sentence = woken(
        lambda: server.wait_link(UPPER, timeout_s=FOREVER_S),
        lambda: server.end_before(2, REASON),
    )
    assert sentence == str(REASON)
    with pytest.raises(PeerLostError, match="generation 2"):  # also when it comes too late
        server.wait_link(UPPER, timeout_s=FOREVER_S)
    lower, upper = pair(server)
    lower.send(Tag(1, 0), TENSOR)
    assert upper.wait_recv(Tag(1, 0), timeout_s=SOON_S).shape == (2, 2)


def test_a_dialler_of_the_old_generation_is_not_let_in(server: DataServer) -> None:
    with pytest.raises(PeerLostError):
        server.wait_link(UPPER, timeout_s=0)
    server.end_before(2, REASON)
    with pytest.raises(PeerLostError, match="not ready here yet"):
        dial(server.addresses, LOWER, timeout_s=0.5)


def test_dialling_a_neighbour_that_does_not_answer() -> None:
    stopper = Stopper()
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = Address("127.0.0.1", mute.getsockname()[1])
        sentence = woken(
            lambda: dial([address], LOWER, timeout_s=FOREVER_S, stopper=stopper),
            lambda: stopper.stop(REASON),
        )
    assert sentence == str(REASON)


def test_dialling_a_neighbour_that_takes_the_call_and_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("exo_train.transport.dial.ATTEMPT_TIMEOUT_S", FOREVER_S)
    stopper = Stopper()
    with silent_server(EXCHANGE_METHOD, grpc.stream_stream_rpc_method_handler) as address:
        sentence = woken(
            lambda: dial([address], LOWER, timeout_s=FOREVER_S, stopper=stopper),
            lambda: stopper.stop(REASON),
        )
    assert sentence == str(REASON)


def test_dialling_a_neighbour_that_is_not_ready(server: DataServer) -> None:
    stopper = Stopper()
    sentence = woken(
        lambda: dial(server.addresses, LOWER, timeout_s=FOREVER_S, stopper=stopper),
        lambda: stopper.stop(REASON),
    )
    assert sentence == str(REASON)


def test_waiting_for_a_neighbours_tensor_on_either_end(server: DataServer) -> None:
    generations = Generations()
    accepted: list[Link] = []
    thread = threading.Thread(
        target=lambda: accepted.append(server.wait_link(UPPER, timeout_s=SOON_S))
    )
    thread.start()
    stopper = generations.stopper(1)
    lower = dial(server.addresses, LOWER, timeout_s=SOON_S, stopper=stopper)
    stopper.on_stop(lower.fail)
    thread.join()
    (upper,) = accepted
    sentence = woken(
        lambda: upper.wait_recv(Tag(1, 0), timeout_s=FOREVER_S),
        lambda: server.end_before(2, REASON),
    )
    assert sentence.startswith(str(REASON))
    generations.end_before(2, REASON)
    with pytest.raises(PeerLostError):  # its peer has broken the link, or its own side has
        lower.wait_recv(Tag(1, 0), timeout_s=SOON_S)
    for link in pair(server):
        assert link.identity.generation == 2


def test_the_end_of_an_earlier_generation_leaves_the_link_that_is(server: DataServer) -> None:
    server.end_before(2, REASON)
    lower, upper = pair(server)
    server.end_before(1, PeerLostError("too late"))
    server.end_before(2, PeerLostError("said twice"))
    lower.send(Tag(1, 0), TENSOR)
    assert upper.wait_recv(Tag(1, 0), timeout_s=SOON_S).shape == (2, 2)


@contextlib.contextmanager
def silent_server(name: str, make_handler: Callable[..., Any]) -> Iterator[Address]:
    """Take calls of this method, and never answer; at the end none must be left."""
    ended = threading.Event()

    def serve(request: object, context: grpc.ServicerContext) -> Iterator[bytes]:
        context.add_callback(ended.set)
        ended.wait(FOREVER_S)
        yield from ()

    service, method = name.strip("/").split("/")
    methods = {method: make_handler(serve)}
    server = new_server(
        max_workers=2, handlers=[grpc.method_handlers_generic_handler(service, methods)]
    )
    port = bind(server, "127.0.0.1")
    server.start()
    yield Address("127.0.0.1", port)
    server.stop(0).wait()
    assert ended.wait(SOON_S), "the call went on"


def test_fetching_tensors(tmp_path: Path) -> None:
    stopper = Stopper()
    infos = {"a": TensorInfo(name="a", encoding="BF16", shape=(), num_bytes=8)}
    with silent_server(FETCH_METHOD, grpc.unary_stream_rpc_method_handler) as address:
        source = RemoteSource(
            [address],
            peer="mac",
            token="secret",
            infos=infos,
            digests={"a": hashlib.sha256(bytes(8)).hexdigest()},
            cache=WeightCache(tmp_path),
            stopper=stopper,
        )
        sentence = woken(lambda: source.prefetch(["a"]), lambda: stopper.stop(REASON))
        assert sentence == str(REASON)
        with pytest.raises(PeerLostError, match="formed anew"):
            source.read("a")
