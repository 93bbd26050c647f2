"""Copies over real gRPC: taken from whom they are expected, whole, and of this generation only."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import grpc
import pytest
from link_ends import UPPER, Household, connect

from exo_train.errors import PeerLostError, ProtocolError
from exo_train.peer import NodeId
from exo_train.transport.base import NO_ONE, PeerIdentity, Tag
from exo_train.transport.channel import open_channel
from exo_train.transport.data_server import MAX_OPEN_COPIES, MAX_OPEN_STREAMS, DataServer
from exo_train.transport.hello import encode_copy_hello
from exo_train.transport.shadow import SHADOW_METHOD, ShadowSource, send_shadow
from exo_train.transport.stopping import Stopper
from exo_train.transport.tls import MemberTls
from exo_train.wire.tensor import DType, HostTensor

SOON_S = 20.0
REASON = PeerLostError("the ring is formed anew as generation 2")
# Rank 3 sends to rank 1, which is no neighbour of its.
SENDER = PeerIdentity(
    cluster="home", run="run-1", generation=1, rank=3, name="den", peer_rank=1, peer_name="pc",
    token="secret",
)  # fmt: skip
PARTS = [b"first", b"second", b"last"]
NUM_BYTES = sum(map(len, PARTS))


@dataclass
class Shelf:
    """What was stored; a copy is whole when `last` has come."""

    stored: list[list[bytes]] = field(default_factory=list)
    arriving: queue.Queue[bytes] = field(default_factory=queue.Queue)

    def take(self, messages: Iterator[bytes]) -> Callable[[], None]:
        parts = []
        for message in messages:
            self.arriving.put(message)
            parts.append(message)
        if parts[-1:] != PARTS[-1:]:
            raise ProtocolError("a copy of state was cut short")
        return lambda: self.stored.append(parts)

    def source(self, generation: int = 1, peer_id: NodeId = NO_ONE) -> ShadowSource:
        holder = replace(
            SENDER, generation=generation, rank=1, name="pc", peer_rank=3, peer_name="den",
            peer_id=peer_id,
        )  # fmt: skip
        return ShadowSource(identity=holder, num_bytes=NUM_BYTES, take=self.take)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def server(shelf: Shelf) -> Iterator[DataServer]:
    with DataServer(["127.0.0.1"]) as server:
        server.shadows.expect([shelf.source()])
        yield server


def copy(
    server: DataServer,
    identity: PeerIdentity = SENDER,
    messages: Iterator[bytes] | None = None,
    *,
    num_bytes: int = NUM_BYTES,
    stopper: Stopper | None = None,
    tls: MemberTls | None = None,
) -> None:
    peer = tls.to(identity.peer_id) if tls else None
    send_shadow(
        server.addresses,
        identity,
        lambda: messages if messages is not None else iter(PARTS),
        num_bytes=num_bytes,
        stopper=stopper or Stopper(),
        credentials=peer.credentials if peer else None,
        tls_name=peer.name if peer else "",
    )


def test_a_copy_is_stored_when_the_sender_is_told(server: DataServer, shelf: Shelf) -> None:
    copy(server)
    assert shelf.stored == [PARTS]
    copy(server)
    assert shelf.stored == [PARTS] * 2


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"token": "guess"}, "the token is not this run's"),
        ({"cluster": "next door"}, "the cluster is 'next door', expected 'home'"),
        ({"run": "run-0"}, "the run is 'run-0', expected 'run-1'"),
        ({"generation": 0}, "the generation is 0, expected 1"),
        ({"generation": 2}, "the generation is 2, expected 1"),
        ({"rank": 2}, "no copies of this rank are taken here"),
    ],
)
def test_who_is_not_expected_is_refused(
    server: DataServer, shelf: Shelf, change: dict[str, object], sentence: str
) -> None:
    with pytest.raises(PeerLostError, match=f"pc .rank 1. did not take a copy.*{sentence}"):
        copy(server, replace(SENDER, **change))  # type: ignore[arg-type]
    assert shelf.stored == []
    assert shelf.arriving.empty(), "not even looked at"


@pytest.mark.parametrize("num_bytes", [0, NUM_BYTES - 1, NUM_BYTES + 1, 1 << 62])
def test_another_size_is_refused_before_a_byte_is_taken(
    server: DataServer, shelf: Shelf, num_bytes: int
) -> None:
    expected = f"size of the copy in bytes is {num_bytes}, expected {NUM_BYTES}"
    with pytest.raises(PeerLostError, match=expected):
        copy(server, num_bytes=num_bytes)
    assert shelf.arriving.empty()


def test_nothing_is_taken_before_the_plan_is_there() -> None:
    with (
        DataServer(["127.0.0.1"]) as server,
        pytest.raises(PeerLostError, match="no copies are taken here now"),
    ):
        copy(server)


def test_a_copy_that_was_cut_short_is_not_stored(server: DataServer, shelf: Shelf) -> None:
    with pytest.raises(PeerLostError, match="cut short"):
        copy(server, messages=iter(PARTS[:-1]))
    assert shelf.stored == []


@pytest.mark.parametrize("first", [b"", b"\xff" * 64, b"x" * 100_000])
def test_what_is_no_hello_is_refused(server: DataServer, shelf: Shelf, first: bytes) -> None:
    with open_channel(server.addresses[0]) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.stream_unary(SHADOW_METHOD)(iter([first, *PARTS]))
    assert caught.value.code() in (  # type: ignore[attr-defined]
        grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.CANCELLED,
    )  # fmt: skip
    assert shelf.stored == []
    copy(server)
    assert shelf.stored == [PARTS]


class Slow:
    """A copy that stops in its middle until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        yield PARTS[0]
        self.go.wait(SOON_S)
        yield from PARTS[1:]


def begun(server: DataServer, shelf: Shelf, slow: Slow, **options: object) -> list[str]:
    """Start a slow copy in a thread, and wait until its first part is there; gives its error."""
    errors: list[str] = []

    def send() -> None:
        try:
            copy(server, messages=iter(slow), **options)  # type: ignore[arg-type]
        except PeerLostError as error:
            errors.append(str(error))
        else:
            errors.append("")

    threading.Thread(target=send, daemon=True).start()
    assert shelf.arriving.get(timeout=SOON_S) == PARTS[0]
    return errors


def wait_for(errors: list[str]) -> str:
    for _ in range(int(SOON_S / 0.05)):
        if errors:
            return errors[0]
        threading.Event().wait(0.05)
    raise AssertionError("the copy did not end")


def test_a_generations_end_cuts_a_copy_that_is_under_way(server: DataServer, shelf: Shelf) -> None:
    slow = Slow()
    errors = begun(server, shelf, slow)
    server.end_before(2, REASON)
    slow.go.set()
    assert "did not take a copy" in wait_for(errors)
    assert shelf.stored == []
    with pytest.raises(PeerLostError, match="no copies are taken here now"):
        copy(server)
    server.shadows.expect([shelf.source()])  # of generation 1, by one who has not heard
    with pytest.raises(PeerLostError, match="no copies are taken here now"):
        copy(server)
    server.shadows.expect([shelf.source(2)])
    copy(server, replace(SENDER, generation=2))
    assert shelf.stored == [PARTS]


@pytest.mark.parametrize("newer", [False, True], ids=["generation's end", "newer copy"])
def test_a_whole_copy_that_comes_too_late_is_not_stored(
    server: DataServer, shelf: Shelf, newer: bool
) -> None:
    """All of it has been read when the generation ends, or when the same rank begins anew."""
    late: list[list[bytes]] = []

    def take(messages: Iterator[bytes]) -> Callable[[], None]:
        parts = list(messages)
        if not late and newer:
            late.append(parts)
            copy(server)
        elif not newer:
            late.append(parts)
            server.end_before(2, REASON)
        return lambda: shelf.stored.append(parts)

    server.shadows.expect([replace(shelf.source(), take=take)])
    with pytest.raises(PeerLostError, match="did not take a copy"):
        copy(server)
    assert late == [PARTS]
    server.close()  # all calls have ended then
    assert shelf.stored == ([PARTS] if newer else [])


def test_the_sender_is_woken_by_its_own_stopper(server: DataServer, shelf: Shelf) -> None:
    slow, stopper = Slow(), Stopper()
    errors = begun(server, shelf, slow, stopper=stopper)
    stopper.stop(REASON)
    assert wait_for(errors) == str(REASON)
    slow.go.set()
    assert shelf.stored == []


def test_a_newer_copy_ends_an_older_one(server: DataServer, shelf: Shelf) -> None:
    slow = Slow()
    errors = begun(server, shelf, slow)
    copy(server)
    assert "did not take a copy" in wait_for(errors)
    slow.go.set()
    assert shelf.stored == [PARTS]


def test_a_silent_sender_is_cut(
    server: DataServer, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exo_train.transport.shadow.STALL_TIMEOUT_S", 0.3)
    slow = Slow()
    hello = encode_copy_hello(SENDER, NUM_BYTES, with_token=True)

    def messages() -> Iterator[bytes]:
        yield hello
        yield from slow

    with open_channel(server.addresses[0]) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.stream_unary(SHADOW_METHOD)(messages())
    assert caught.value.code() is grpc.StatusCode.CANCELLED  # type: ignore[attr-defined]
    slow.go.set()
    assert shelf.stored == []


def test_a_holder_that_takes_nothing_is_given_up(
    server: DataServer, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("exo_train.transport.shadow.STALL_TIMEOUT_S", 0.5)
        slow = Slow()
        assert "did not take a copy" in wait_for(begun(server, shelf, slow))
        slow.go.set()
    assert shelf.stored == []


def test_activations_do_not_wait_for_a_copy(server: DataServer, shelf: Shelf) -> None:
    slow = Slow()
    errors = begun(server, shelf, slow)
    lower, upper = connect(server)
    lower.send(Tag(1, 0), HostTensor(DType.FP16, (2, 2), bytes(8)))
    assert upper.wait_recv(Tag(1, 0), timeout_s=SOON_S).num_bytes == 8
    slow.go.set()
    assert wait_for(errors) == ""
    assert shelf.stored == [PARTS]
    assert upper.identity == UPPER


def test_callers_that_say_nothing_leave_room_for_the_neighbour(server: DataServer) -> None:
    never = threading.Event()

    def nothing() -> Iterator[bytes]:
        never.wait(SOON_S)
        yield from ()

    with open_channel(server.addresses[0]) as channel:
        method = channel.stream_unary(SHADOW_METHOD)
        calls = [method.future(nothing()) for _ in range(MAX_OPEN_COPIES + MAX_OPEN_STREAMS)]
        lower, _ = connect(server)
        never.set()
        assert lower.identity.peer_rank == 1
        assert all(call.code() is not grpc.StatusCode.OK for call in calls)


def test_under_tls_only_that_ranks_own_certificate_counts(shelf: Shelf) -> None:
    household = Household.make()
    to_pc = replace(SENDER, peer_id=household.pc.identity.node_id)
    with DataServer(["127.0.0.1"], credentials=household.pc.server()) as server:
        server.shadows.expect([shelf.source(peer_id=household.mac.identity.node_id)])
        with pytest.raises(PeerLostError, match="certificate is not that rank's"):
            copy(server, to_pc, tls=household.laptop)
        assert shelf.arriving.empty()
        copy(server, to_pc, tls=household.mac)
        assert shelf.stored == [PARTS]


def test_the_holder_must_be_the_one_that_is_meant(server: DataServer, shelf: Shelf) -> None:
    """Behind an old address another rank of the run may listen: that is no shadow."""
    to_another = replace(SENDER, peer_rank=2)
    with pytest.raises(PeerLostError, match="the rank is 1, expected 2"):
        copy(server, to_another)
