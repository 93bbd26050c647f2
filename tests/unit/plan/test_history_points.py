"""Which point all layers can be brought back to, whatever ranks claim to hold."""

from __future__ import annotations

import pytest

from exo_train.plan.history import Holding, StepId, newest_whole

NUM_LAYERS = 4


def holding(step: int, start: int, end: int) -> Holding:
    return Holding(at=StepId(generation=1, step=step), start=start, end=end)


def newest_step(*holdings: Holding) -> int | None:
    up_to = StepId(generation=1, step=9)
    at = newest_whole(holdings, num_layers=NUM_LAYERS, up_to=up_to)
    return None if at is None else at.step


def test_the_newest_point_of_which_all_layers_are_held() -> None:
    assert newest_step(holding(3, 0, 2), holding(3, 2, 4), holding(4, 0, 2)) == 3
    assert newest_step(holding(3, 0, 2), holding(4, 2, 4)) is None


@pytest.mark.parametrize(
    ("start", "end"), [(0, NUM_LAYERS + 1), (0, 2**32 - 1), (3, 1), (2**32 - 2, 2**32 - 1)]
)
def test_layers_that_the_model_does_not_have_count_for_nothing(start: int, end: int) -> None:
    """The numbers come from the network: a range of four thousand million is no memory taken."""
    assert newest_step(holding(3, 0, 4), holding(5, start, end)) == 3
    assert newest_step(holding(5, start, end)) is None
