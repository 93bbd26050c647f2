"""The learning rate over a run: where it starts, peaks and ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exo_train.config import TrainConfig
from exo_train.errors import ConfigError
from exo_train.train.learning_rate import Schedule


def curve(total_updates: int, **options: float | str) -> list[float]:
    config = TrainConfig(**{"learning_rate": 1.0, **options})  # type: ignore[arg-type]
    schedule = Schedule.of(config, total_updates)
    return [schedule.rate(update) for update in range(total_updates)]


def test_golden_curves() -> None:
    shared = {"warmup_steps": 3, "min_lr_ratio": 0.1, "learning_rate": 2.0}
    rise = [2 / 3, 4 / 3, 2.0]
    assert curve(7, lr_schedule="cosine", **shared) == pytest.approx(
        [*rise, 0.2 + 1.8 * 0.8535533906, 1.1, 0.2 + 1.8 * 0.1464466094, 0.2]
    )
    assert curve(7, lr_schedule="linear", **shared) == pytest.approx([*rise, 1.55, 1.1, 0.65, 0.2])


@given(
    kind=st.sampled_from(["cosine", "linear"]),
    total=st.integers(2, 60),
    warmup=st.integers(0, 59),
    peak=st.floats(1e-6, 1.0),
    min_ratio=st.floats(0.0, 0.9),
)
def test_it_rises_to_one_peak_and_ends_at_its_minimum_at_the_last_update(
    kind: str, total: int, warmup: int, peak: float, min_ratio: float
) -> None:
    warmup = min(warmup, total - 1)
    rates = curve(
        total, lr_schedule=kind, warmup_steps=warmup, learning_rate=peak, min_lr_ratio=min_ratio
    )
    top = max(warmup - 1, 0)
    assert rates[0] > 0
    assert [update for update, rate in enumerate(rates) if rate == peak] == [top]
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[-1] == peak * min_ratio
    assert all(0 <= rate <= peak for rate in rates)


@given(total=st.integers(1, 400), percent=st.integers(0, 100))
def test_a_ratio_is_that_share_of_the_updates(total: int, percent: int) -> None:
    warmup = Schedule.of(TrainConfig(warmup_ratio=percent / 100), total).warmup_updates
    assert warmup == -(-percent * total // 100), "rounded up"
    assert curve(total, warmup_ratio=percent / 100) == curve(total, warmup_steps=warmup)


def test_a_ratio_is_of_the_run_and_gives_way_to_steps() -> None:
    assert curve(10, warmup_ratio=0.25, lr_schedule="constant")[:4] == pytest.approx(
        [1 / 3, 2 / 3, 1, 1]
    )
    assert curve(10, warmup_ratio=0.5, warmup_steps=2) == curve(10, warmup_steps=2)


def test_constant_stays_at_the_peak_after_warm_up() -> None:
    assert curve(5, lr_schedule="constant", warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0]
    assert curve(3, lr_schedule="constant") == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_a_single_update_uses_the_peak(kind: str) -> None:
    assert curve(1, lr_schedule=kind) == [1.0]
    assert curve(1, lr_schedule=kind, warmup_steps=1) == [1.0]
    assert curve(1, lr_schedule=kind, warmup_ratio=0.1) == [1.0]


def test_warm_up_longer_than_the_run_is_refused() -> None:
    assert curve(3, warmup_steps=3) == pytest.approx([1 / 3, 2 / 3, 1.0])
    with pytest.raises(ConfigError, match=r"'warmup_steps' 4 is more than the run's 3 updates"):
        curve(3, warmup_steps=4)
