"""A rank goes back to a committed point and on in a new generation, and copies its state."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from rewound_rank import NAME, WAIT_S, Conversation, failure_of, point

from exo_train.agent.planning import make_plan
from exo_train.errors import PeerLostError
from exo_train.models.manifest import ModelManifest
from exo_train.plan.history import StepId
from exo_train.wire.pb import control_pb2 as pb
from tests.ring.rings import CONFIG, candidates

START = point(0, 0)
Talk = Conversation


def test_a_rewind_gives_the_last_committed_state(talk: Talk) -> None:
    talk.load()
    talk.train(1, 2)
    assert talk.rewind(2) == [point(2)]
    assert talk.around.interrupted == [2], "the links of generation 1 are cut"
    held = talk.held(point(2))
    assert held.keys() == {NAME, "step"}
    assert (float(held[NAME][0]), int(held["step"])) == (1 + 2, 2)
    assert talk.held(point(1)) == {}
    assert "before the plan was loaded" in failure_of(talk.step(3))


def test_a_pending_step_is_dropped_and_done_anew(talk: Talk) -> None:
    talk.load()
    talk.train(1)
    talk.step(2)
    assert talk.rewind(2) == [point(1)]
    talk.load(point(1))
    for kind in (pb.ADAPTER, pb.OPTIMIZER):
        talk.give(kind, talk.held(point(1)))
    talk.train(2)
    assert talk.rewind(3) == [point(1), point(2, 2)]
    assert float(talk.held(point(2, 2))[NAME][0]) == 1 + 2


def test_a_dropped_step_is_a_point_too(talk: Talk) -> None:
    """All ranks count it, so that they agree on where they are."""
    talk.load()
    talk.step(1)
    talk.commit(1, apply=False)
    assert talk.rewind(2) == [point(1)]
    assert float(talk.held(point(1))[NAME][0]) == 0


def test_the_pieces_of_a_step_that_was_cut_do_not_reach_the_next(talk: Talk) -> None:
    talk.load()
    data = pb.MicrobatchData(num_sequences=1, num_positions=4, row_keys=[0])
    assert talk.say(step_input=pb.StepInput(step=1, microbatches=[data], more=True)) == []
    array = pb.StateArray(kind=pb.ADAPTER, name=NAME, dtype="<f4", shape=[1], data=b"12")
    assert talk.say(state_array=array) == []
    talk.rewind(2)
    talk.load()
    assert talk.step(1).step_report.step == 1
    talk.commit(1)
    assert talk.give(pb.ADAPTER, {NAME: np.ones(1, np.float32)})[0].state_stored.kind == pb.ADAPTER


def test_nothing_is_held_before_there_is_a_state(talk: Talk) -> None:
    assert talk.rewind(2) == []
    assert talk.rewind(2) == [], "asked again, it says it again"
    talk.load(point(7))
    assert talk.rewind(3) == [], "the state of step 7 has not come"
    talk.load(point(7))
    talk.give(pb.ADAPTER, {NAME: np.ones(1, np.float32)})
    assert talk.rewind(4) == [], "the optimizer's has not come"
    talk.load(point(7))
    talk.give(pb.ADAPTER, {NAME: np.ones(1, np.float32)})
    talk.give(pb.OPTIMIZER, {"step": np.array(7)})
    assert talk.rewind(5) == [point(7)]
    assert int(talk.held(point(7))["step"]) == 7


def test_a_state_that_cannot_be_loaded_is_the_state_of_no_point(talk: Talk) -> None:
    talk.load()
    talk.give(pb.OPTIMIZER, {"step": np.array(0)})
    talk.stage.fails_in = "load_adapter"
    (answer,) = talk.give(pb.ADAPTER, {NAME: np.ones(1, np.float32)})
    assert "load_adapter failed" in failure_of(answer)
    assert talk.rewind(2) == []


def test_before_the_first_step_the_state_is_that_of_step_0(talk: Talk) -> None:
    talk.load()
    assert talk.rewind(2) == [START]


def test_a_rank_that_failed_in_a_step_has_its_committed_state(talk: Talk) -> None:
    talk.load()
    talk.train(1)
    talk.stage.fails_in = "forward"
    assert "forward failed on purpose" in failure_of(talk.step(2))
    assert talk.rewind(2) == [point(1)]
    assert float(talk.held(point(1))[NAME][0]) == 1


def test_a_rank_that_failed_in_a_commit_has_only_what_it_kept_before(talk: Talk) -> None:
    talk.load()
    talk.train(1)
    talk.mark(point(1))
    talk.train(2)
    talk.step(3)
    talk.stage.fails_in = "apply"
    assert "apply failed on purpose" in failure_of(talk.commit(3))
    assert talk.rewind(2) == [point(1)], "step 2 and half of step 3 is the state of no point"
    assert float(talk.held(point(1))[NAME][0]) == 1


def test_a_rank_that_failed_waits_for_a_rewind(talk: Talk) -> None:
    talk.load()
    talk.stage.fails_in = "forward"
    talk.step(1)
    data = pb.MicrobatchData(num_sequences=1, num_positions=4, row_keys=[0])
    assert talk.say(step_input=pb.StepInput(step=1, microbatches=[data])) == []
    assert talk.say(commit=pb.Commit(step=1)) == []
    assert talk.say(load=pb.Load()) == []
    assert talk.say(state_request=pb.StateRequest(kind=pb.ADAPTER)) == []
    assert talk.rewind(2) == [START]
    assert talk.load().WhichOneof("body") == "loaded"
    talk.train(1)


@pytest.mark.parametrize("body", [{"finish": pb.Finish()}, {"failure": pb.Failure()}])
def test_the_end_comes_through_to_a_rank_that_failed(talk: Talk, body: dict[str, object]) -> None:
    talk.load()
    talk.stage.fails_in = "forward"
    talk.step(1)
    assert not talk.runner.handle(talk.message(**body))


def test_what_is_of_an_earlier_generation_is_dropped_in_silence(talk: Talk) -> None:
    talk.load()
    talk.train(1)
    talk.rewind(3)
    talk.generation = 2
    for body in (
        {"commit": pb.Commit(step=1)},
        {"load": pb.Load()},
        {"rewind": pb.Rewind()},
        {"finish": pb.Finish()},
        {"failure": pb.Failure()},
    ):
        assert talk.say(**body) == []
    talk.generation = 3
    assert talk.load().WhichOneof("body") == "loaded"


@pytest.mark.parametrize(
    "change",
    [
        lambda talk: setattr(talk, "generation", 5),
        lambda talk: setattr(talk, "rank", 1),
        lambda talk: setattr(talk, "plan", replace(talk.plan, run_id="other")),
    ],
    ids=["a later generation", "another rank", "another run"],
)
def test_a_step_of_another_ring_is_refused(talk: Talk, change: Callable[[Talk], None]) -> None:
    talk.load()
    change(talk)
    assert "message for run, generation, rank" in failure_of(talk.step(1))


def test_a_rewind_of_another_run_is_refused(talk: Talk) -> None:
    talk.load()
    talk.plan = replace(talk.plan, run_id="other")
    assert "message for run" in failure_of(talk.ask(rewind=pb.Rewind()))
    assert talk.around.interrupted == []


def test_a_rewind_to_the_generation_that_goes_on_is_refused(talk: Talk) -> None:
    talk.load()
    assert "generation 1, which goes on here" in failure_of(talk.ask(rewind=pb.Rewind()))


def test_a_load_brings_the_new_rank_and_drops_what_came_after_its_point(talk: Talk) -> None:
    talk.load()
    talk.train(1)
    talk.mark(point(1))
    talk.train(2)
    assert talk.rewind(2) == [point(1), point(2)]
    talk.rank = 1
    assert talk.load(point(1)).WhichOneof("body") == "loaded"
    assert talk.around.loaded_ranks == [0, 1]
    assert talk.held(point(2)) == {}, "the ring went back before it: it is another history"
    assert float(talk.held(point(1))[NAME][0]) == 1


def test_a_load_without_a_rewind_is_refused(talk: Talk) -> None:
    talk.load()
    assert "without a rewind" in failure_of(talk.load())


def test_a_load_that_failed_can_be_done_anew(talk: Talk) -> None:
    talk.load()
    talk.train(1)
    talk.mark(point(1))
    talk.rewind(2)
    assert talk.ask(load=pb.Load(plan_json="{")).WhichOneof("body") == "failure"
    assert talk.rewind(3) == [point(1)]
    assert talk.load(point(1)).WhichOneof("body") == "loaded"


def test_a_marks_snapshot_is_not_changed_by_later_steps(talk: Talk) -> None:
    talk.load()
    talk.train(1)
    talk.mark(point(1))
    talk.train(2, 3)
    held = talk.held(point(1))
    assert (float(held[NAME][0]), int(held["step"])) == (1, 1)


def test_a_mark_forgets_what_is_older_than_the_safe_point(talk: Talk) -> None:
    talk.load()
    talk.mark(START)
    talk.train(1)
    talk.mark(point(1), safe=START)
    talk.train(2)
    talk.mark(point(2), safe=point(1))
    assert talk.rewind(2) == [point(1), point(2)]


@pytest.mark.parametrize("at", [point(2), point(1, 2), START])
def test_a_mark_of_another_point_than_the_last_is_refused(talk: Talk, at: StepId) -> None:
    talk.load()
    talk.train(1)
    (answer,) = talk.mark(at)
    assert "but the last point here is" in failure_of(answer)
    assert talk.rewind(2) == [point(1)]


def test_a_mark_before_the_state_has_come_is_refused(talk: Talk) -> None:
    talk.load(point(4))
    (answer,) = talk.mark(point(4))
    assert "has not come yet" in failure_of(answer)


def test_a_copy_is_told_when_it_is_there(talk: Talk) -> None:
    talk.load()
    talk.train(1)
    assert talk.mark(point(1), copy=True) == []
    told = talk.shadowed.get(timeout=WAIT_S)
    assert (told.run_id, told.generation, told.rank) == (talk.plan.run_id, 1, 0)
    assert (told.shadowed.at.generation, told.shadowed.at.step) == (1, 1)
    assert not told.shadowed.HasField("failure")
    (copy,) = talk.around.copies
    own = talk.plan.ranks[0].stage
    assert (copy.at, copy.start, copy.end) == (point(1), own.start, own.end)


def test_no_copy_is_sent_when_none_is_wanted_or_nobody_holds_it(
    talk: Talk, manifest: ModelManifest
) -> None:
    alone = make_plan(candidates(["torch"]), CONFIG, manifest, cluster="test")
    for talking, copy in ((talk, False), (Conversation(alone, manifest), True)):
        talking.load()
        talking.train(1)
        talking.mark(point(1), copy=copy)
        assert not talking.around.copying.acquire(timeout=0.2)
        assert talking.shadowed.empty()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PeerLostError("the neighbour does not listen"), "the neighbour does not listen"),
        (OSError("no route"), "OSError: no route"),
    ],
)
def test_a_copy_that_fails_is_told_and_the_next_mark_tries_again(
    talk: Talk, error: Exception, said: str
) -> None:
    """It is no failure of the rank, but the driver would wait for it."""
    talk.load()
    talk.train(1)
    talk.around.copy_fails = error
    talk.mark(point(1), copy=True)
    told = talk.shadowed.get(timeout=WAIT_S).shadowed
    assert (told.at.step, told.failure.message) == (1, said)
    talk.train(2)
    talk.around.copy_fails = None
    talk.mark(point(2), copy=True)
    assert talk.shadowed.get(timeout=WAIT_S).shadowed.at.step == 2
    assert [copy.at for copy in talk.around.copies] == [point(2)]


def test_one_copy_at_a_time_and_the_newest_of_those_that_wait(talk: Talk) -> None:
    talk.around.hold_copies = threading.Event()
    talk.load()
    for step in (1, 2, 3, 4):
        talk.train(step)
        talk.mark(point(step), safe=START, copy=True)
        if step == 1:
            assert talk.around.copying.acquire(timeout=WAIT_S)
    assert not talk.around.copying.acquire(timeout=0.1), "one at a time"
    talk.around.hold_copies.set()
    steps = [talk.shadowed.get(timeout=WAIT_S).shadowed.at.step for _ in range(2)]
    assert steps == [1, 4]
    assert talk.shadowed.empty()


def test_a_rewind_ends_the_copying(talk: Talk) -> None:
    talk.around.hold_copies = threading.Event()
    talk.load()
    for step in (1, 2):
        talk.train(step)
        talk.mark(point(step), safe=START, copy=True)
    assert talk.around.copying.acquire(timeout=WAIT_S)
    talk.rewind(2)
    talk.around.hold_copies = None
    talk.load()
    talk.train(1)
    talk.mark(point(1, 2), copy=True)
    told = talk.shadowed.get(timeout=WAIT_S)
    assert (told.generation, told.shadowed.at.generation, told.shadowed.at.step) == (2, 2, 1)
    assert [copy.at for copy in talk.around.copies] == [point(1, 2)]
