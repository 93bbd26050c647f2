"""The learning rate over a run: where it starts, peaks and ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exo_train.errors import ConfigError
from exo_train.train.learning_rate import learning_rate_at


def curve(total_updates: int, *, schedule: str = "cosine", **options: float) -> list[float]:
    warmup_steps = int(options.pop("warmup_steps", 0))
    return [
        learning_rate_at(
            update,
            total_updates=total_updates,
            peak=options.get("peak", 1.0),
            schedule=schedule,
            warmup_steps=warmup_steps,
            min_ratio=options.get("min_ratio", 0.0),
        )
        for update in range(total_updates)
    ]


def test_golden_curve() -> None:
    rates = curve(7, warmup_steps=3, min_ratio=0.1, peak=2.0)
    assert rates == pytest.approx(
        [2 / 3, 4 / 3, 2.0, 0.2 + 1.8 * 0.8535533906, 1.1, 0.2 + 1.8 * 0.1464466094, 0.2]
    )


@given(
    total=st.integers(2, 60),
    warmup=st.integers(0, 59),
    peak=st.floats(1e-6, 1.0),
    min_ratio=st.floats(0.0, 0.9),
)
def test_cosine_rises_to_one_peak_and_ends_at_its_minimum(
    total: int, warmup: int, peak: float, min_ratio: float
) -> None:
    warmup = min(warmup, total - 1)
    rates = curve(total, warmup_steps=warmup, peak=peak, min_ratio=min_ratio)
    top = max(warmup - 1, 0)
    assert rates[0] > 0
    assert [update for update, rate in enumerate(rates) if rate == peak] == [top]
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[-1] == pytest.approx(peak * min_ratio, abs=1e-15)
    assert all(0 <= rate <= peak for rate in rates)


def test_constant_stays_at_the_peak_after_warm_up() -> None:
    assert curve(5, schedule="constant", warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0]
    assert curve(3, schedule="constant") == [1.0, 1.0, 1.0]


def test_a_single_update_uses_the_peak() -> None:
    assert curve(1) == [1.0]
    assert curve(1, warmup_steps=1) == [1.0]


def test_warm_up_longer_than_the_run_is_refused() -> None:
    assert curve(3, warmup_steps=3) == pytest.approx([1 / 3, 2 / 3, 1.0])
    with pytest.raises(ConfigError, match=r"'warmup_steps' 4 is more than the run's 3 updates"):
        curve(3, warmup_steps=4)


def test_unknown_schedule_is_refused() -> None:
    with pytest.raises(ConfigError, match="'linear'"):
        curve(3, schedule="linear")
