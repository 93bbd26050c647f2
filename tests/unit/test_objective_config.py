"""What a run learns: what it does not go with, and what it asks of everything else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from exo_train.config import TrainConfig
from exo_train.errors import ConfigError


def _from(**values: Any) -> TrainConfig:
    return TrainConfig.from_mapping(values, source="ours.yaml")


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"objective": "dpo", "packing": True}, "'packing' does not go with 'objective' dpo"),
        ({"objective": "orpo", "packing": True}, "'packing' does not go with 'objective' orpo"),
        ({"objective": "orpo", "label_smoothing": 0.1}, "no meaning with 'objective' orpo"),
        ({"objective": "dpo", "label_smoothing": 0.5}, "must be below 0.5, got 0.5"),
        (
            {"objective": "dpo", "init_adapter": "a"},
            "'init_adapter' does not go with 'objective' dpo: the reference is the base",
        ),
        ({"objective": "ipo"}, "'objective' must be one of sft, dpo, orpo, got 'ipo'"),
        ({"beta": 0}, "'beta' must be a number above 0"),
    ],
    ids=str,
)
def test_what_an_objective_does_not_go_with(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        _from(**values)
    assert problem in str(refused.value)


def test_the_objective_s_options_reach_it() -> None:
    learnt = _from(objective="dpo", beta=0.25, label_smoothing=0.125).learnt
    assert dataclasses.astuple(learnt) == ("dpo", 0.25, 0.125)
    assert (learnt.answers_per_row, learnt.num_forwards, learnt.time_factor) == (2, 2, 1.5)
    assert _from(objective="orpo").learnt.num_forwards == 1
    assert not _from().learnt.has_pairs
