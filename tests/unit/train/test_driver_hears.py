"""What the driver believes of what ranks say: state, holdings, progress, failures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from told_ranks import Body, ToldRank, to_id

from exo_train.agent.planning import make_plan
from exo_train.backends.base import Arrays
from exo_train.backends.lora import is_adapter
from exo_train.errors import ConfigError, ProtocolError
from exo_train.models.manifest import ModelManifest
from exo_train.plan.history import Holding, StepId
from exo_train.plan.plan import Plan
from exo_train.train import conversation
from exo_train.train.conversation import LostRankError
from exo_train.train.messages import to_state_arrays
from exo_train.train.ring import MAX_HOLDINGS, Ring
from exo_train.train.state_copies import state_layout
from exo_train.wire.pb import control_pb2 as pb
from tests.ring.rings import CONFIG, candidates, manifest_of
from tests.tiny_models import make_tiny_model

AT = StepId(generation=1, step=5)
NAME = "model.layers.1.self_attn.q_proj.lora_a"


@dataclass(eq=False)
class Two:
    """A ring of two ranks whose state is what `state` has."""

    ring: Ring
    plan: Plan
    ranks: list[ToldRank]
    state: list[Arrays]

    def give(self, number: int, message: pb.RunMessage) -> list[Body]:
        kind = message.state_request.kind
        arrays = {
            name: array
            for name, array in self.state[number].items()
            if kind == pb.HELD or is_adapter(name) == (kind == pb.ADAPTER)
        }
        return [{"state_array": piece} for piece in to_state_arrays(kind, arrays)]

    def hold(self, number: int, *holdings: pb.Holding) -> None:
        self.ranks[number].answers["rewind"] = lambda message: [
            {"rewound": pb.Rewound(holdings=holdings)}
        ]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> ModelManifest:
    model: Path = make_tiny_model(tmp_path_factory.mktemp("hears") / "m", num_layers=2)
    return manifest_of(model)


@pytest.fixture
def two(manifest: ModelManifest) -> Iterator[Two]:
    plan = make_plan(candidates(["torch", "torch"]), CONFIG, manifest, cluster="test")
    ranks = [ToldRank(plan, n) for n in (0, 1)]
    state: list[Arrays] = []
    for rank in plan.ranks:
        layout = state_layout(manifest.spec, plan.lora, plan.optimizer, rank.stage)
        state.append({n: np.ones(shape, dtype) for n, (dtype, shape) in layout.items()})
    with Ring(plan, ranks, spec=manifest.spec) as ring:
        ring.prepare()
        two = Two(ring, plan, ranks, state)
        for n, rank in enumerate(ranks):
            rank.answers["state_request"] = lambda message, n=n: two.give(n, message)
            own = plan.ranks[n].stage
            two.hold(n, pb.Holding(at=to_id(AT), start=own.start, end=own.end))
        yield two


def test_the_state_of_all_layers_is_fetched(two: Two) -> None:
    whole = {**two.state[0], **two.state[1]}
    assert two.ring.collect_state().keys() == whole.keys()
    two.ring.rewind(2)
    held = two.ring.collect_held(AT)
    assert held.keys() == whole.keys()
    assert all(np.array_equal(held[name], whole[name]) for name in whole)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        (NAME, None),
        ("step", None),
        (NAME, np.ones((2, 2), np.float32)),
        (NAME, np.ones(3, np.int64)),
        ("model.layers.0.self_attn.q_proj.lora_a", np.ones((2, 2), np.float32)),
        ("lm_head.weight", np.ones(3, np.float32)),
    ],
)
def test_state_that_is_not_what_the_layers_have_names_the_rank(
    two: Two, name: str, array: np.ndarray | None
) -> None:
    if array is None:
        del two.state[1][name]
    else:
        two.state[1][name] = array
    with pytest.raises(ProtocolError, match=r"device1 \(rank 1\) gave wrong state.*array"):
        two.ring.collect_state()
    assert [rank.name for rank in two.ring.blamed()] == ["device1"]


def test_what_was_held_must_be_given_and_who_does_not_is_out(two: Two) -> None:
    two.ring.rewind(2)
    two.state[1] = {}
    with pytest.raises(ProtocolError, match=r"device1 \(rank 1\) gave wrong state"):
        two.ring.collect_held(AT)
    two.ring.rewind(3)
    assert [rank.name for rank, _ in two.ring.losses()] == ["device1"]
    assert two.ranks[1].is_closed


def test_a_rank_cannot_have_more_memory_taken_than_its_layers_have(two: Two) -> None:
    """Pieces of an array without an end: the first is refused, not the one that fills memory."""

    def endless(message: pb.RunMessage) -> Iterator[Body]:
        for _ in range(8):
            piece = pb.StateArray(kind=pb.HELD, name="a", dtype="<f4", shape=(1 << 40,))
            piece.data = bytes(4096)
            yield {"state_array": piece}

    two.ring.rewind(2)
    two.ranks[1].answers["state_request"] = endless
    with pytest.raises(ProtocolError, match="array 'a' is not of the state that is wanted"):
        two.ring.collect_held(AT)


def test_no_more_holdings_are_read_than_a_rank_can_have(two: Two) -> None:
    lies = [pb.Holding(at=pb.StepId(generation=1, step=n), start=0, end=2) for n in range(1000)]
    two.hold(1, *lies)
    holdings = two.ring.rewind(2)
    assert len(holdings) == 1 + MAX_HOLDINGS
    own = two.plan.ranks[0].stage
    assert Holding(at=AT, start=own.start, end=own.end) in holdings


def test_while_the_driver_is_away_only_the_last_progress_counts(two: Two) -> None:
    """A paused run: a worker that stood still for a while, long ago, is a good one."""
    for silent_s in (30.0, *[0.0] * 500):
        two.ranks[1].say(progress=pb.Progress(phase="waiting", silent_s=silent_s))
    assert two.ring._talk._events.empty(), "beats take memory while nobody reads them"
    assert two.ring.collect_state()


@pytest.mark.parametrize(
    ("phase", "good_s", "bad_s"),
    [("step 3: computing", 8.0, 8.1), ("loading tensors", 20.0, 20.1)],
)
def test_a_worker_that_stands_still_now_is_lost(
    two: Two, phase: str, good_s: float, bad_s: float
) -> None:
    """Sooner in a step than while a framework is imported, which holds up all threads."""
    two.ranks[1].say(progress=pb.Progress(phase=phase, silent_s=good_s))
    assert two.ring.collect_state()
    two.ranks[1].say(progress=pb.Progress(phase=phase, silent_s=bad_s))
    with pytest.raises(LostRankError, match=r"device1 .* has stood still for \d+ s"):
        two.ring.collect_state()


def test_what_was_said_before_the_driver_was_away_is_not_held_against_a_worker(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.ranks[1].say(progress=pb.Progress(phase="computing", silent_s=30.0))
    monkeypatch.setattr(conversation, "OWN_PAUSE_S", -1.0)
    assert two.ring.collect_state()


def test_an_idle_driver_reads_what_is_said_and_ends_who_is_gone(two: Two) -> None:
    two.ring.rewind(2)
    for _ in range(50):
        two.ranks[0].say(committed=pb.Committed(step=1))
    two.ranks[1].event(LostRankError("device1: the connection to it broke"))
    two.ring.idle()
    assert two.ring._talk._events.empty()
    assert len(two.ring) == 1
    assert two.ring.rewind(3), "with who is left it goes on"


def test_a_rewind_begins_with_what_was_said_before_it(two: Two) -> None:
    for _ in range(50):
        two.ranks[0].say(committed=pb.Committed(step=1))
    two.ranks[1].event(LostRankError("device1: the connection to it broke"))
    asked: list[int] = []

    def rewind(message: pb.RunMessage) -> list[Body]:
        asked.append(message.generation)
        return []

    two.ranks[1].answers["rewind"] = rewind
    two.ring.rewind(2)
    assert not asked, "nothing is sent to one that is gone"
    assert [(rank.name, gone) for rank, gone in two.ring.losses()] == [("device1", True)]


def test_the_rank_that_failed_is_blamed_and_not_who_complains_of_it(two: Two) -> None:
    two.ranks[0].answers["state_request"] = lambda message: [
        {"failure": pb.Failure(kind="PeerLostError", message="the link broke")}
    ]
    two.ranks[1].answers["state_request"] = lambda message: [
        {"failure": pb.Failure(kind="ConfigError", message="no space left on the cache's disk")}
    ]
    with pytest.raises(ConfigError, match="device1: no space left"):
        two.ring.collect_state()
    assert [rank.name for rank in two.ring.blamed()] == ["device1"]
    two.ring.rewind(2)
    assert two.ring.blamed() == []
