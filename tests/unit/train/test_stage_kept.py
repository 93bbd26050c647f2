"""A rank that stays keeps its stage through a rewind, if the next plan has a use for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rewound_rank import NAME, Conversation, failure_of, point

from exo_train.errors import PeerLostError
from exo_train.objective_config import ObjectiveConfig
from exo_train.wire.pb import control_pb2 as pb


def test_a_stage_serves_the_next_plan_with_the_state_that_is_sent(talk: Conversation) -> None:
    """Whoever stays has its layers already: only their state goes back."""
    talk.load()
    talk.train(1)
    talk.step(2)
    stage = talk.stage
    talk.rewind(2)
    assert stage.begun == 0, "what a step has left in it is dropped at once"
    talk.load(point(1))
    assert talk.stage is stage
    assert talk.around.loaded_ranks == [0]
    assert "has not come yet" in failure_of(talk.mark(point(1))[0])
    stage.adapter_value[:] = 7.0
    talk.rewind(3)
    talk.load(point(1))
    for kind in (pb.ADAPTER, pb.OPTIMIZER):
        talk.give(kind, talk.held(point(1)))
    talk.train(2)
    assert talk.rewind(4) == [point(1), point(2, 3)]
    talk.load(point(2, 3))
    for kind in (pb.ADAPTER, pb.OPTIMIZER):
        talk.give(kind, talk.held(point(2, 3)))
    assert talk.rewind(5) == [point(2, 3)], "older points go without a mark, too"
    assert float(talk.held(point(2, 3))[NAME][0]) == 1 + 2


def test_a_stage_survives_a_load_that_failed_at_its_links(
    talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk.load()
    talk.train(1)
    talk.rewind(2)
    with monkeypatch.context() as context:
        context.setattr(talk.around, "connect", _unreachable)
        assert "nobody is there" in failure_of(talk.load(point(1)))
    talk.rewind(3)
    assert talk.load(point(1)).WhichOneof("body") == "loaded"
    assert talk.around.loaded_ranks == [0]


def _unreachable(*args: object) -> None:
    raise PeerLostError("nobody is there")


@pytest.mark.parametrize(
    "changed",
    [
        {"seed": 8},
        {"checkpoint_activations": True},
        {"objective": ObjectiveConfig(label_smoothing=0.1)},
    ],
)
def test_a_stage_that_does_not_serve_is_gone_before_the_next_one_is_loaded(
    talk: Conversation, changed: dict[str, Any]
) -> None:
    talk.load()
    talk.train(1)
    talk.rewind(2)
    talk.plan = replace(talk.plan, **changed)
    talk.load(point(1))
    assert talk.around.stages_alive == [False, False]


def test_the_runs_start_has_a_stage_of_its_own(talk: Conversation) -> None:
    """No state is sent for it, so a stage that has trained cannot serve."""
    talk.load()
    talk.train(1)
    talk.rewind(2)
    talk.load()
    talk.rewind(3)
    talk.load()
    assert talk.around.stages_alive == [False, False, False]
    talk.train(1)
    talk.rewind(4)
    assert float(talk.held(point(1, 3))[NAME][0]) == 1
