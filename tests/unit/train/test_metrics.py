"""Names and values of a step's line, and a throughput that stalls do not spoil."""

from __future__ import annotations

import json
import math

import pytest

from exo_train.train.metrics import WINDOW_STEPS, RankMetrics, StepMetrics, Throughput


def make_step(step: int = 1, **changes) -> StepMetrics:
    values = {
        "step": step,
        "epoch": 0.5,
        "loss": 2.5,
        "lr": 1e-4,
        "grad_norm": 0.7,
        "tokens": 100,
        "supervised_tokens": 40,
        "positions": 128,
        "tokens_per_s": 50.0,
        "step_s": 2.0,
        "period_s": 0.4,
        "generation": 0,
        "ranks": (
            RankMetrics(
                rank=0,
                name="küche\u2028mac",
                busy_s=1.5,
                bubble_fraction=0.25,
                sent_bytes=4096,
                peak_memory_bytes=10**9,
            ),
        ),
    }
    return StepMetrics(**(values | changes))


def test_keys_are_the_published_ones():
    plain = make_step().to_dict()
    assert set(plain) == {
        "step", "epoch", "loss", "lr", "grad_norm", "tokens", "supervised_tokens",
        "positions", "tokens_per_s", "step_s", "period_s", "generation", "ranks",
    }  # fmt: skip
    assert set(plain["ranks"][0]) == {
        "rank", "name", "busy_s", "bubble_fraction", "sent_bytes", "peak_memory_bytes",
    }  # fmt: skip
    assert plain["ranks"][0]["bubble_fraction"] == 0.25


def test_numbers_that_json_cannot_hold_are_null():
    plain = make_step(loss=math.nan, grad_norm=math.inf).to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False))["loss"] is None
    assert plain["grad_norm"] is None


def test_slow_first_step_is_forgotten():
    throughput = Throughput().after_step(tokens=100, step_s=50.0)
    assert throughput.tokens_per_s == pytest.approx(2.0)
    for _ in range(3):
        throughput = throughput.after_step(tokens=100, step_s=1.0)
    assert throughput.tokens_per_s == pytest.approx(100.0)
    assert throughput.remaining_s(num_steps_left=7) == pytest.approx(7.0)


def test_one_stall_does_not_move_the_estimate():
    throughput = Throughput()
    for step_s in [1.0] * 5 + [60.0] + [1.0] * 5:
        throughput = throughput.after_step(tokens=10, step_s=step_s)
    assert throughput.remaining_s(num_steps_left=100) == pytest.approx(100.0)


def test_window_follows_a_new_speed():
    throughput = Throughput()
    for step_s in [4.0] * 50 + [1.0] * WINDOW_STEPS:
        throughput = throughput.after_step(tokens=10, step_s=step_s)
    assert throughput.tokens_per_s == pytest.approx(10.0)


def test_nothing_is_known_before_the_first_step():
    assert Throughput().remaining_s(num_steps_left=10) is None
    assert Throughput().tokens_per_s == 0.0
