"""Copies that do not arrive: the driver knows at once, and the user is told once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from told_ranks import Body, ToldRank

from exo_train.agent.planning import make_plan
from exo_train.plan.history import StepId
from exo_train.plan.plan import Plan
from exo_train.train import shadowing
from exo_train.train.ring import START, Ring
from exo_train.train.shadowing import Shadowing
from exo_train.wire.pb import control_pb2 as pb
from tests.ring.rings import CONFIG, candidates, manifest_of
from tests.tiny_models import make_tiny_model

REFUSED = pb.Failure(kind="PeerLostError", message="the neighbour does not listen")


def point(step: int) -> StepId:
    return StepId(generation=1, step=step)


class Copies:
    """A ring of two whose copies do what they are told to, and its shadowing."""

    def __init__(self, plan: Plan, setting: str) -> None:
        self.plan = plan
        self.failing: dict[int, pb.Failure | None] = {}  # by rank; None: nothing is ever heard
        ranks = [ToldRank(plan, n) for n in (0, 1)]
        for number, rank in enumerate(ranks):
            rank.answers["mark"] = lambda message, number=number: self._copied(number, message)
        self.ring = Ring(plan, ranks)
        self.ring.prepare()
        self.notes: list[str] = []
        self.marks: list[int] = []
        self.shadowing = Shadowing(setting, on_note=self.notes.append)
        self.shadowing.begin(self.ring, START, {})

    def train(self, *steps: int) -> None:
        for step in steps:
            self.shadowing.before_commit(self.ring, step_s=100.0)
            self.shadowing.after_commit(self.ring, point(step), step_s=100.0)

    def _copied(self, number: int, message: pb.RunMessage) -> list[Body]:
        if number == 0:
            self.marks.append(message.mark.at.step)
        told = pb.Shadowed(at=message.mark.at)
        if number in self.failing:
            failure = self.failing[number]
            if failure is None:
                return []
            told.failure.CopyFrom(failure)
        return [{"shadowed": told}]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    model: Path = make_tiny_model(tmp_path_factory.mktemp("copies") / "m", num_layers=2)
    return make_plan(candidates(["torch", "torch"]), CONFIG, manifest_of(model), cluster="test")


@pytest.fixture
def copies(plan: Plan, request: pytest.FixtureRequest) -> Iterator[Copies]:
    copies = Copies(plan, getattr(request, "param", "auto"))
    with copies.ring:
        yield copies


def test_a_wait_ends_with_the_first_copy_that_failed(copies: Copies) -> None:
    copies.failing[1] = REFUSED
    copies.ring.mark(point(1), safe=START)
    (late,) = copies.ring.wait_shadowed(point(1), timeout_s=5.0)
    assert (late.rank.name, late.holder.name) == ("device1", "device0")
    assert "the neighbour does not listen" in str(late.error)
    copies.failing.clear()
    copies.ring.mark(point(2), safe=START)
    assert copies.ring.wait_shadowed(point(2), timeout_s=5.0) == [], "that was an earlier one"


def test_the_user_hears_once_whose_copy_does_not_arrive_and_what_it_may_cost(
    copies: Copies,
) -> None:
    copies.train(1, 2)
    copies.failing[0] = REFUSED
    copies.train(*range(3, 40))
    (note,) = copies.notes
    assert "the copy of device0's state does not arrive at device1 (device0: the neigh" in note
    assert "a device that is lost may cost all steps since step 2;" in note
    assert copies.shadowing.safe == point(2)


def test_copies_that_fail_are_tried_less_often_and_come_back(copies: Copies) -> None:
    copies.failing[0] = REFUSED
    copies.train(*range(1, 16))
    assert copies.marks == [1, 3, 7, 15]
    copies.failing.clear()
    copies.train(*range(16, 40))
    assert copies.shadowing.safe.step >= 38
    assert copies.shadowing.every == 1


@pytest.mark.parametrize("copies", ["1"], indirect=True)
def test_a_rhythm_that_was_asked_for_is_kept(copies: Copies) -> None:
    copies.failing[0] = REFUSED
    copies.train(1, 2, 3)
    assert copies.marks == [1, 2, 3]
    assert copies.notes[0].endswith("it is tried again every step")


def test_a_copy_of_which_nothing_is_heard_is_told_too(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadowing, "COPY_TIMEOUT_S", 1.0)
    copies.failing[1] = None
    copies.train(1, 2)
    (note,) = copies.notes
    assert "of device1's state does not arrive at device0 (it was not there after 1 s)" in note


@pytest.mark.parametrize("copies", ["off"], indirect=True)
def test_without_copies_the_driver_holds_a_state_until_it_is_saved(copies: Copies) -> None:
    """Of all weights it is large; else a loss would go back to the checkpoint before it."""
    state = {"model.norm.weight": np.zeros(1, np.float32)}
    copies.shadowing.begin(copies.ring, point(7), state, saved_step=5)
    copies.train(8, 9)
    assert copies.shadowing.held == (point(7), state)
    copies.shadowing.saved(7)
    assert copies.shadowing.held is None
    copies.shadowing.begin(copies.ring, point(10), state, saved_step=10)
    assert copies.shadowing.held is None
