"""Real stages go back and on: in one process and over gRPC with TLS, whatever a rank waits for."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from exo_train.plan.history import StepId
from tests.ring.rank_threads import RankThreads, make_ranks
from tests.tiny_models import make_tiny_model

START = StepId(generation=0, step=0)
LAYERS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("rewound") / "m", num_layers=LAYERS)


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The oracle: the losses of six steps on one device."""
    alone = make_ranks("local", model, tmp_path_factory.mktemp("alone"), [(0, LAYERS)])
    alone.prepare()
    alone.load_all(START)
    losses = alone.train(1, 2, 3, 4, 5, 6)
    alone.finish()
    return losses


@pytest.fixture(params=["local", "grpc"])
def two(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> Iterator[RankThreads]:
    ranks = make_ranks(request.param, model, tmp_path, [(0, 3), (3, LAYERS)])
    ranks.prepare()
    yield ranks
    ranks.finish()


def at(step: int, generation: int = 1) -> StepId:
    return StepId(generation=generation, step=step)


def test_one_device_goes_on_with_the_copy_of_the_other(
    two: RankThreads, undisturbed: list[float]
) -> None:
    two.load_all(START)
    losses = two.train(1, 2)
    two.mark(at(2))
    losses += two.train(3)
    two.begin_step(4, ranks=[0])  # rank 1 never hears of it: it could be off
    two.ranks[0].wait_phase("waiting for gradient")
    both = {(at(2), 0, 3), (at(2), 3, LAYERS)}
    assert two.rewind(2, [0]) == [both | {(at(3), 0, 3)}], "though rank 1 keeps its link open"
    assert two.rewind(2, [1]) == [both | {(at(3), 3, LAYERS)}]
    own, copied = two.held(1, at(2)), two.held(0, at(2))
    assert own.keys() == copied.keys()
    assert all(np.array_equal(own[name], copied[name]) for name in own)
    two.split((0, LAYERS))  # rank 1 is lost
    two.load_all(at(2), copied)
    again = two.train(3, 4, 5, 6)
    assert losses[2] == pytest.approx(again[0], rel=1e-5)
    assert losses[:2] + again == pytest.approx(undisturbed, rel=1e-5)


def test_the_same_split_goes_on_to_the_last_digit(
    two: RankThreads, undisturbed: list[float]
) -> None:
    two.load_all(START)
    before = two.train(1, 2, 3)
    two.begin_step(4)
    two.rewind(2)
    state = two.held(0, at(3)) | two.held(1, at(3))
    two.load_all(at(3), state)
    losses = two.train(4, 5)
    two.mark(at(5, 2))
    assert before + losses == pytest.approx(undisturbed[:5], rel=1e-5)
    two.rewind(3)
    two.load_all(at(3), state)  # back further: the same steps have the same losses
    assert two.train(4, 5) == losses


@pytest.mark.parametrize("rank", [0, 1], ids=["dialling", "waiting for the dial"])
def test_a_load_is_overtaken_by_two_rewinds(
    two: RankThreads, rank: int, undisturbed: list[float]
) -> None:
    if not two.plan.ranks[0].addresses:
        pytest.skip("in one process links are there at once")
    two.load(rank, START)
    two.ranks[rank].wait_phase("connecting")
    two.rewind(2)
    two.load(rank, START)
    two.ranks[rank].wait_phase("connecting")
    assert two.rewind(3) == [set(), set()]
    two.load_all(START)
    assert two.train(1, 2) == pytest.approx(undisturbed[:2], rel=1e-5)
    assert {f.failure.kind for f in two.failures} == {"PeerLostError"}
    assert all("formed anew" in f.failure.message for f in two.failures)


def test_a_rewind_that_comes_before_the_load_it_overtakes_is_handled(two: RankThreads) -> None:
    """The thread that reads sees all three at once; the one that loads, one after another."""
    two.load_all(START)
    two.train(1)
    two.begin_step(2)
    held = two.rewind(2)
    two.load(0, START)
    two.rewind(3)
    assert held[0] == {(at(1), 0, 3)}
    two.load_all(START)
    assert len(two.train(1)) == 1


def test_the_port_stays_over_the_generations_and_is_gone_at_the_end(
    model: Path, tmp_path: Path
) -> None:
    two = make_ranks("grpc", model, tmp_path, [(0, 3), (3, LAYERS)])
    two.prepare()
    ports = [rank.addresses[0].port for rank in two.plan.ranks]
    for generation in (2, 3, 4):
        two.rewind(generation)
        two.load_all(START)
        two.train(1)
    assert [rank.addresses[0].port for rank in two.plan.ranks] == ports
    two.finish()
    for port in ports:
        with pytest.raises(OSError, match="refused"):
            _connect(port)


def _connect(port: int) -> None:
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
