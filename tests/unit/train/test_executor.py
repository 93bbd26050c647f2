"""What a rank reports of its step: computing is not waiting, and the pace of its backwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from exo_train.backends.base import MicrobatchInput
from exo_train.backends.preference import PairSums
from exo_train.train.executor import StageExecutor, StepOutcome
from exo_train.transport.base import LinkIdentity, Tag
from exo_train.wire.tensor import HostTensor

HIDDEN = HostTensor.from_numpy(np.zeros((2, 8, 4), np.float32))
GRADIENT = HostTensor.from_numpy(np.zeros((2, 8, 4), np.float16))  # half the bytes
FORWARD_S, BACKWARD_S, SEND_S, EVALUATE_S = 1.0, 2.0, 0.5, 0.25


@dataclass
class Clock:
    """Time goes on only when someone spends it; `events` say in which order it was spent."""

    now_s: float = 0.0
    events: list[str] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now_s

    def spend(self, what: str, seconds: float) -> None:
        self.events.append(what)
        self.now_s += seconds


@dataclass
class SleepingStage:
    """Takes its time; everything else about it is empty."""

    clock: Clock
    has_above: bool
    has_below: bool

    def begin_step(self, *, step: int, loss_scale: float) -> None: ...

    def refer(self, microbatch: MicrobatchInput) -> HostTensor | None:
        self.clock.spend(f"R{microbatch.index}", EVALUATE_S)
        return HIDDEN if self.has_above else None

    def forward(self, microbatch: MicrobatchInput) -> HostTensor | None:
        self.clock.spend(f"F{microbatch.index}", FORWARD_S)
        return HIDDEN if self.has_above else None

    def backward(self, index: int, grad_BTD: HostTensor | None) -> HostTensor | None:
        self.clock.spend(f"B{index}", BACKWARD_S)
        return GRADIENT if self.has_below else None

    def evaluate(self, microbatch: MicrobatchInput) -> HostTensor | float:
        self.clock.spend(f"E{microbatch.index}", EVALUATE_S)
        return HIDDEN if self.has_above else 1.5

    def loss_sum(self) -> float:
        return 0.0

    def grad_square_sum(self) -> float:
        return 0.0

    def take_pair_sums(self) -> PairSums:
        return PairSums()

    def find_bad_gradient(self) -> str:
        return ""


@dataclass
class SlowLink:
    """A tensor arrives at its time in `arrivals_s`; each sending waits longer for room."""

    clock: Clock
    up: bool
    arrivals_s: Sequence[float]
    sent_bytes: int = 1000  # of earlier steps
    tags: list[Tag] = field(default_factory=list)  # sent and received

    @property
    def identity(self) -> LinkIdentity:
        other = {"peer_rank": 2 if self.up else 0, "peer_name": "above" if self.up else "below"}
        return LinkIdentity(
            cluster="c", run="r", generation=1, rank=1, name="self", token="t", **other
        )

    def send(self, tag: Tag, tensor: HostTensor) -> None:
        self.tags.append(tag)
        index = tag.microbatch & 0xFF
        self.clock.spend(f"{'up' if self.up else 'down'}{index}", (index + 1) * SEND_S)
        self.sent_bytes += tensor.num_bytes

    def wait_recv(self, tag: Tag, *, timeout_s: float) -> HostTensor:
        self.tags.append(tag)
        self.clock.now_s = max(self.clock.now_s, self.arrivals_s[tag.microbatch & 0xFF])
        return GRADIENT if self.up else HIDDEN


def executor_of(
    rank: int,
    num_ranks: int,
    *,
    activations_s: Sequence[float] = (),
    gradients_s: Sequence[float] = (),
    has_reference: bool = False,
) -> tuple[StageExecutor, Clock]:
    clock = Clock()
    above = SlowLink(clock, True, gradients_s) if rank + 1 < num_ranks else None
    below = SlowLink(clock, False, activations_s) if rank else None
    stage: Any = SleepingStage(clock, has_above=above is not None, has_below=below is not None)
    links: Any = {"above": above, "below": below}
    executor = StageExecutor(
        stage=stage,
        rank=rank,
        num_ranks=num_ranks,
        schedule_name="1f1b",
        timeout_s=1.0,
        has_reference=has_reference,
        clock_s=clock,
        **links,
    )
    return executor, clock


def step_of(executor: StageExecutor, num_microbatches: int) -> StepOutcome:
    inputs = [MicrobatchInput(index=index) for index in range(num_microbatches)]
    return executor.run_step(1, inputs, loss_scale=1.0)


def test_the_first_rank_waits_for_gradients() -> None:
    executor, clock = executor_of(0, 2, gradients_s=(5.0, 6.0, 20.0))
    outcome = step_of(executor, 3)
    assert clock.events == ["F0", "up0", "F1", "up1", "B0", "F2", "up2", "B1", "B2"]
    # F0 0-1, sent 1.5, F1 -2.5, sent 3.5, waits until 5, B0 -7, F2 -8, sent 9.5, B1 -11.5,
    # waits until 20, B2 -22.
    assert outcome.period_s == pytest.approx((22.0 - 7.0) / 2)
    assert outcome.busy_s == pytest.approx(3 * FORWARD_S + 3 * BACKWARD_S)
    assert outcome.step_s == pytest.approx(22.0)
    assert outcome.sent_bytes == 3 * HIDDEN.num_bytes


def test_waiting_to_send_a_gradient_is_neither_computing_nor_part_of_its_backward() -> None:
    executor, clock = executor_of(1, 3, activations_s=(0.0,) * 2, gradients_s=(4.0, 4.0))
    outcome = step_of(executor, 2)
    assert clock.events == ["F0", "up0", "F1", "up1", "B0", "down0", "B1", "down1"]
    # F0 0-1, sent 1.5, F1 -2.5, sent 3.5, waits until 4, B0 -6, sent 6.5, B1 -8.5, sent 9.5.
    assert outcome.period_s == pytest.approx(8.5 - 6.0)
    assert outcome.busy_s == pytest.approx(2 * FORWARD_S + 2 * BACKWARD_S)
    assert outcome.step_s == pytest.approx(9.5)
    assert outcome.sent_bytes == 2 * HIDDEN.num_bytes + 2 * GRADIENT.num_bytes


@pytest.mark.parametrize(("num_microbatches", "period_s"), [(1, 0.0), (4, 3.0)])
def test_one_device_paces_itself(num_microbatches: int, period_s: float) -> None:
    outcome = step_of(executor_of(0, 1)[0], num_microbatches)
    assert outcome.period_s == pytest.approx(period_s)
    assert outcome.busy_s == outcome.step_s == pytest.approx(3.0 * num_microbatches)
    assert outcome.sent_bytes == 0


def test_an_evaluation_counts_its_forwards_only() -> None:
    executor, _ = executor_of(1, 3, activations_s=(2.0, 7.0))
    inputs = [MicrobatchInput(index=index) for index in range(2)]
    outcome = executor.run_evaluation(1, inputs)
    assert outcome.busy_s == pytest.approx(2 * EVALUATE_S)
    assert outcome.step_s == pytest.approx(7.0 + EVALUATE_S + 2 * SEND_S)
    assert outcome.period_s == 0.0
    assert outcome.sent_bytes == 2 * HIDDEN.num_bytes


def test_the_base_goes_before_each_microbatch_with_tags_of_its_own() -> None:
    executor, clock = executor_of(
        1, 3, activations_s=(0.0,) * 2, gradients_s=(4.0, 4.0), has_reference=True
    )
    outcome = step_of(executor, 2)
    up = ["R0", "up0", "F0", "up0", "R1", "up1", "F1", "up1"]
    assert clock.events == [*up, "B0", "down0", "B1", "down1"]
    assert outcome.busy_s == pytest.approx(2 * (EVALUATE_S + FORWARD_S + BACKWARD_S))
    assert outcome.sent_bytes == 4 * HIDDEN.num_bytes + 2 * GRADIENT.num_bytes
    executor.run_evaluation(1, [MicrobatchInput(index=index) for index in range(2)])
    assert clock.events[-8:] == [word.replace("F", "E") for word in up]
    above: Any = executor.above
    # Four each of step and evaluation; gradients come back with the step's own.
    assert len(above.tags) == 8 + 2
    assert len(set(above.tags)) == 8
    below: Any = executor.below
    assert set(below.tags) == set(above.tags)


def test_without_a_reference_the_base_is_not_asked() -> None:
    executor, clock = executor_of(0, 1)
    step_of(executor, 2)
    assert "R0" not in clock.events
