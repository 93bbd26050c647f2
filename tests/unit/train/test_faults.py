"""Devices made slow on purpose: by a factor, or by milliseconds a layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from exo_train.backends.base import MicrobatchInput
from exo_train.errors import ConfigError
from exo_train.train.faults import FaultyStage, with_fault

LAYERS = (3, 4, 5, 12)


class Clock:
    """Seconds that pass only when somebody computes or sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept_s: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


class FakeStage:
    """Takes 2 s for a forward and 3 s for a backward."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def forward(self, microbatch: MicrobatchInput) -> None:
        self._clock.now_s += 2.0

    def backward(self, index: int, grad_BTD: object) -> None:
        self._clock.now_s += 3.0

    def adapter(self) -> dict[str, np.ndarray]:
        names = ("self_attn.q_proj.lora_a", "mlp.up_proj.lora_b")
        return {f"model.layers.{i}.{name}": np.zeros(1) for i in LAYERS for name in names}


def times(kind: str, value: float) -> tuple[float, float]:
    """Give the seconds of a forward and of a backward."""
    clock = Clock()
    inner: Any = FakeStage(clock)
    stage = FaultyStage(inner, kind=kind, value=value, clock=clock, sleep=clock.sleep)
    stage.forward(MicrobatchInput(index=0))
    forward_s = clock.now_s
    stage.backward(0, None)
    return forward_s, clock.now_s - forward_s


@pytest.mark.parametrize(
    ("kind", "value", "forward_s", "backward_s"),
    [
        ("slow", 4.0, 8.0, 12.0),
        ("slow", 1.0, 2.0, 3.0),
        ("slow", 0.5, 2.0, 3.0),  # nobody becomes faster
        ("sleep_ms", 250.0, 2.0 + len(LAYERS) * 0.25, 3.0 + len(LAYERS) * 0.25),
        ("forward", 4.0, 2.0, 3.0),
    ],
)
def test_a_stage_takes_as_long_as_it_is_told(
    kind: str, value: float, forward_s: float, backward_s: float
) -> None:
    assert times(kind, value) == pytest.approx((forward_s, backward_s))


def test_an_unknown_fault_is_refused_and_none_changes_nothing() -> None:
    inner: Any = FakeStage(Clock())
    assert with_fault(inner, "") is inner
    assert isinstance(with_fault(inner, "sleep_ms:3"), FaultyStage)
    with pytest.raises(ConfigError, match="slow, sleep_ms"):
        with_fault(inner, "slower:3")
