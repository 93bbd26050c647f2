"""What arrives as a copy of state is exactly that state, or nothing is stored."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from exo_train.agent.planning import make_plan
from exo_train.backends.registry import available_backends
from exo_train.errors import PeerLostError, ProtocolError
from exo_train.models.manifest import ModelManifest
from exo_train.models.open import open_model
from exo_train.optimizer_config import OPTIMIZERS
from exo_train.plan.history import StepId
from exo_train.plan.plan import Plan
from exo_train.train.messages import STATE_PIECE_BYTES
from exo_train.train.snapshots import Snapshot, SnapshotStore
from exo_train.train.stage_loading import load_planned_stage
from exo_train.train.state_copies import (
    copy_identity,
    from_copy_messages,
    layout_bytes,
    shadow_sources,
    state_layout,
    to_copy_messages,
)
from exo_train.transport.channel import open_channel
from exo_train.transport.data_server import DataServer
from exo_train.transport.hello import encode_copy_hello
from exo_train.transport.shadow import SHADOW_METHOD, send_shadow
from exo_train.transport.stopping import Stopper
from exo_train.wire.pb import control_pb2 as pb
from exo_train.wire.pb import data_pb2
from tests.ring.rings import CONFIG, candidates, manifest_of
from tests.tiny_models import make_tiny_model

AT = StepId(generation=1, step=5)
TOKEN = "secret"
HOLDER, SENDER = 1, 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("copies") / "m", num_layers=3)


@pytest.fixture(scope="module")
def manifest(model: Path) -> ModelManifest:
    return manifest_of(model)


@pytest.fixture(scope="module")
def plan(manifest: ModelManifest) -> Plan:
    return make_plan(candidates(["torch", "torch"]), CONFIG, manifest, cluster="test")


@pytest.fixture(scope="module")
def snapshot(plan: Plan, manifest: ModelManifest) -> Snapshot:
    """State as it might be: rank 0's layers with numbers that are all different."""
    stage = plan.ranks[SENDER].stage
    layout = state_layout(manifest.spec, plan.lora, plan.optimizer, stage)
    rng = np.random.default_rng(3)
    arrays = {
        name: np.array(5) if name == "step" else rng.standard_normal(shape, np.float32)
        for name, (_, shape) in layout.items()
    }
    return Snapshot(at=AT, start=stage.start, end=stage.end, arrays=arrays)


@pytest.fixture
def store() -> SnapshotStore:
    return SnapshotStore()


@pytest.fixture
def server(plan: Plan, manifest: ModelManifest, store: SnapshotStore) -> Iterator[DataServer]:
    with DataServer(["127.0.0.1"]) as server:
        server.shadows.expect(shadow_sources(plan, HOLDER, manifest.spec, TOKEN, store))
        yield server


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert array.dtype == other[name].dtype, name
        assert np.array_equal(array, other[name]), name


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "muon"])
@pytest.mark.parametrize("backend", available_backends())
def test_the_layout_is_what_a_real_stage_gives(
    model: Path, manifest: ModelManifest, backend: str, optimizer: str
) -> None:
    """Else no copy would ever be taken."""
    config = replace(CONFIG, optimizer=optimizer)
    plan = make_plan(candidates([backend, backend]), config, manifest, cluster="test")
    _, source = open_model(model)
    for rank in (0, 1):
        stage = load_planned_stage(plan, rank, manifest, source)
        state = stage.adapter() | stage.optimizer_state()
        layout = state_layout(manifest.spec, plan.lora, plan.optimizer, plan.ranks[rank].stage)
        assert {n: (a.dtype.str, a.shape) for n, a in state.items()} == layout
        assert sum(array.nbytes for array in state.values()) == layout_bytes(layout)


@pytest.mark.parametrize("backend", available_backends())
def test_a_stages_state_is_a_copy_that_steps_do_not_change(
    model: Path, manifest: ModelManifest, backend: str
) -> None:
    plan = make_plan(candidates([backend]), CONFIG, manifest, cluster="test")
    _, source = open_model(model)
    stage = load_planned_stage(plan, 0, manifest, source)
    adapter, optimizer = stage.adapter(), stage.optimizer_state()
    before = {name: array.copy() for name, array in (adapter | optimizer).items()}
    stage.load_adapter({name: np.ones_like(array) for name, array in adapter.items()})
    stage.load_optimizer_state({name: np.ones_like(array) for name, array in optimizer.items()})
    assert_same(adapter | optimizer, before)


def test_a_copy_over_the_network_is_the_state_bit_for_bit(
    plan: Plan, snapshot: Snapshot, server: DataServer, store: SnapshotStore
) -> None:
    send_shadow(
        server.addresses,
        copy_identity(plan, SENDER, HOLDER, TOKEN),
        lambda: to_copy_messages(snapshot),
        num_bytes=snapshot.num_bytes,
        stopper=Stopper(),
    )
    (held,) = store.holdings()
    assert (held.at, held.start, held.end) == (AT, snapshot.start, snapshot.end)
    assert_same(store.arrays(AT), snapshot.arrays)


def test_large_arrays_come_in_pieces(manifest: ModelManifest, plan: Plan) -> None:
    stage = plan.ranks[SENDER].stage
    values = np.arange(STATE_PIECE_BYTES // 4 + 7, dtype=np.float32)
    layout = {"step": ("<i8", ()), "large": ("<f4", values.shape)}
    arrays = {"step": np.array(1), "large": values}
    large = Snapshot(at=AT, start=stage.start, end=stage.end, arrays=arrays)
    messages = list(to_copy_messages(large))
    assert len(messages) == 1 + 3
    got = from_copy_messages(iter(messages), stage, layout, generation=1)
    assert_same(got.arrays, arrays)


Hostile = Callable[[list[bytes]], list[bytes]]


def piece(raw: bytes, **changes: object) -> bytes:
    message = pb.StateArray.FromString(raw)
    for name, value in changes.items():
        if name == "shape":
            del message.shape[:]
            message.shape.extend(value)  # type: ignore[arg-type]
        else:
            setattr(message, name, value)
    return message.SerializeToString()


def head(messages: list[bytes], **changes: int) -> list[bytes]:
    changed = data_pb2.ShadowHead.FromString(messages[0])
    for name, value in changes.items():
        setattr(changed, name, value)
    return [changed.SerializeToString(), *messages[1:]]


HOSTILE: dict[str, tuple[Hostile, str]] = {
    "nothing after the hello": (lambda m: [], "a copy of layers"),
    "a pickle for the head": (lambda m: [pickle.dumps(print), *m[1:]], "no ShadowHead"),
    "a pickle for an array": (
        lambda m: [m[0], pickle.dumps({"step": print}), *m[2:]],
        "no StateArray|not of the state",
    ),
    "random bytes": (lambda m: [m[0], os.urandom(4096)], "no StateArray|not of the state"),
    "other layers": (lambda m: head(m, start=1, end=2), "a copy of layers 1..1 came, expected"),
    "a later generation": (lambda m: head(m, generation=2), "a copy of generation 2 came in 1"),
    "cut short": (lambda m: m[:-1], "cut short"),
    "an array that is missing": (
        lambda m: [m[0], *m[2:]],
        "a copy of state has no",
    ),
    "no mark on the last": (lambda m: [*m[:-1], piece(m[-1], last=False)], "cut short"),
    "more after the last": (lambda m: [*m, m[1]], "goes on after its end"),
    "an array twice": (lambda m: [*m[:2], *m[1:]], "came twice"),
    "a name of no array": (
        lambda m: [m[0], piece(m[1], name="../../etc/passwd"), *m[2:]],
        "'../../etc/passwd' is not of the state",
    ),
    "no name": (lambda m: [m[0], piece(m[1], name=""), *m[2:]], "'' is not of the state"),
    "an oversized shape": (
        lambda m: [m[0], piece(m[1], shape=[1 << 40]), *m[2:]],
        "is not of the state",
    ),
    "another dtype": (lambda m: [m[0], piece(m[1], dtype="|O"), *m[2:]], "is not of the state"),
    "another kind": (lambda m: [m[0], piece(m[1], kind=pb.ADAPTER), *m[2:]], "not of the state"),
    "more data than the shape": (
        lambda m: [m[0], piece(m[1], data=bytes(1 << 20)), *m[2:]],
        "has 1048576 bytes",
    ),
    "endless empty pieces": (lambda m: [m[0], piece(m[1], data=b"")] * 2, "has 0 bytes"),
    "half an array, then the next": (
        lambda m: [m[0], piece(m[1], data=pb.StateArray.FromString(m[1]).data[:4]), *m[2:]],
        "has the wrong shape",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_no_copy_is_refused_and_nothing_is_stored(
    what: str, plan: Plan, snapshot: Snapshot, server: DataServer, store: SnapshotStore
) -> None:
    change, sentence = HOSTILE[what]
    identity = copy_identity(plan, SENDER, HOLDER, TOKEN)
    with pytest.raises(PeerLostError, match=sentence):
        send_shadow(
            server.addresses,
            identity,
            lambda: iter(change(list(to_copy_messages(snapshot)))),
            num_bytes=snapshot.num_bytes,
            stopper=Stopper(),
        )
    assert store.holdings() == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [({"token": "guess"}, "token"), ({"generation": 2}, "generation"), ({"rank": 1}, "this rank")],
)
def test_a_whole_copy_of_the_wrong_sender_is_refused(
    plan: Plan,
    snapshot: Snapshot,
    server: DataServer,
    store: SnapshotStore,
    change: dict[str, object],
    sentence: str,
) -> None:
    identity = replace(copy_identity(plan, SENDER, HOLDER, TOKEN), **change)  # type: ignore[arg-type]
    hello = encode_copy_hello(identity, snapshot.num_bytes, with_token=True)
    with open_channel(server.addresses[0]) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.stream_unary(SHADOW_METHOD)(iter([hello, *to_copy_messages(snapshot)]))
    assert sentence in caught.value.details()  # type: ignore[attr-defined]
    assert store.holdings() == []


def test_a_rank_takes_the_copies_that_the_plan_gives_it(
    plan: Plan, manifest: ModelManifest, store: SnapshotStore
) -> None:
    """Ranks 0 and 1 are two GPUs of one computer: both copies go to rank 2."""
    three = make_plan(candidates(["torch"] * 3), CONFIG, manifest, cluster="test")
    ranks = list(three.ranks)
    ranks[1] = replace(ranks[1], node_id=ranks[0].node_id)
    three = replace(three, ranks=tuple(ranks))
    senders = [
        [s.identity.peer_rank for s in shadow_sources(three, rank, manifest.spec, TOKEN, store)]
        for rank in range(3)
    ]
    assert senders == [[2], [], [0, 1]]


def test_a_copy_of_an_earlier_generation_is_a_point_of_this_one(
    plan: Plan, manifest: ModelManifest, snapshot: Snapshot
) -> None:
    """After a rewind to a point, the ring marks that very point before it commits a step."""
    stage = plan.ranks[SENDER].stage
    layout = state_layout(manifest.spec, plan.lora, plan.optimizer, stage)
    got = from_copy_messages(to_copy_messages(snapshot), stage, layout, generation=7)
    assert got.at == AT
    with pytest.raises(ProtocolError):
        from_copy_messages(to_copy_messages(snapshot), stage, layout, generation=0)
