"""Runs one rank's schedule: waits for tensors, computes, sends tensors on.

Owns the order of traffic and arithmetic on a rank. Must not know a framework or a transport: it
sees a Stage and two Links. Every wait has a deadline; the link's error names the neighbour.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from exo_train.backends.base import MicrobatchInput, Stage
from exo_train.backends.preference import PairSums
from exo_train.plan.schedule import build_schedule
from exo_train.train.blame import Watch
from exo_train.train.tied import TiedMatrix, share_gradient
from exo_train.transport.base import Link, Tag
from exo_train.wire.tensor import HostTensor

# Evaluations after step k share k's number; their microbatches count from here, so that a tag
# never means two tensors.
EVALUATION_MICROBATCH_BASE = 1 << 20
# What goes up for the reference, before a microbatch's own activation, counts from here on top.
REFERENCE_MICROBATCH_BASE = 1 << 21

Result = TypeVar("Result")


class OnPhase(Protocol):
    def __call__(self, phase: str, limit_s: float = 0.0) -> None:
        """Take in what a rank does now, and how long that may last (0: no limit of its own)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What a rank knows after its part of a step; times in seconds.

    `busy_s` is computing only: neither waiting for a tensor nor for room to send one. `period_s`
    is the mean time between the ends of backwards (0: fewer than two). `sent_bytes` are those of
    the tensors, as the wire dtype stores them. `trouble` is the first place on this rank where a
    number is not finite, in words: "activation after layer 12, microbatch 3".
    """

    loss_sum: float
    grad_square_sum: float
    busy_s: float
    step_s: float
    sent_bytes: int
    period_s: float = 0.0
    trouble: str = ""
    pair_sums: PairSums = PairSums()  # noqa: RUF009 - frozen


@dataclass(slots=True, kw_only=True)
class StageExecutor:
    """One rank's stage between its neighbours: `below` is rank - 1, `above` is rank + 1."""

    stage: Stage
    rank: int
    num_ranks: int
    schedule_name: str
    timeout_s: float
    below: Link | None
    above: Link | None
    tied: TiedMatrix | None = None  # that the first and the last rank train, both
    has_reference: bool = False  # each microbatch goes up for the base alone first
    capture: bool = False
    on_phase: OnPhase = lambda phase, limit_s=0.0: None
    check: Callable[[], None] = lambda: None  # between microbatches: raises when all should stop
    clock_s: Callable[[], float] = time.perf_counter
    boundaries: dict[str, HostTensor] = field(default_factory=dict)
    _busy_s: float = 0.0
    _watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        below, above = (
            "" if link is None else link.identity.peer for link in (self.below, self.above)
        )
        self._watch = Watch(stage=self.stage, below=below, above=above)

    def run_step(
        self, step: int, inputs: Sequence[MicrobatchInput], *, loss_scale: float
    ) -> StepOutcome:
        """Forward and backward of all microbatches in the schedule's order; applies nothing."""
        schedule = build_schedule(
            self.schedule_name, num_ranks=self.num_ranks, num_microbatches=len(inputs)
        )
        started_s, sent_before = self.clock_s(), self._sent_bytes()
        self._busy_s = 0.0
        self.boundaries.clear()
        self._watch.begin()
        self.stage.begin_step(step=step, loss_scale=loss_scale)
        backwards_ended_s = []
        for action in schedule[self.rank]:
            self.check()
            if action.kind == "F":
                self._forward(step, inputs[action.microbatch])
            else:
                backwards_ended_s.append(self._backward(step, action.microbatch))
        if self.tied is not None:
            self.on_phase(f"step {step}: adding up the tied matrix's gradients", self.timeout_s)
            share_gradient(
                self.tied,
                self.stage,
                step,
                below=self.below,
                above=self.above,
                timeout_s=self.timeout_s,
            )
        grad_square_sum = self.stage.grad_square_sum()
        self._watch.after_step(grad_square_sum)
        return StepOutcome(
            loss_sum=self.stage.loss_sum(),
            grad_square_sum=grad_square_sum,
            busy_s=self._busy_s,
            step_s=self.clock_s() - started_s,
            sent_bytes=self._sent_bytes() - sent_before,
            period_s=_mean_interval_s(backwards_ended_s),
            trouble=self._watch.trouble,
            pair_sums=self.stage.take_pair_sums(),
        )

    def run_evaluation(self, step: int, inputs: Sequence[MicrobatchInput]) -> StepOutcome:
        """Forward of all microbatches without dropout; the loss is on the last rank."""
        started_s, sent_before = self.clock_s(), self._sent_bytes()
        self._busy_s = 0.0
        loss_sum = 0.0
        self._watch.begin()
        for microbatch in inputs:
            self.check()
            tag = Tag(step, EVALUATION_MICROBATCH_BASE + microbatch.index)
            self._refer(microbatch, tag)
            given = self._with_hidden(microbatch, tag)
            output = self._timed(self.stage.evaluate, given)
            self._timed(self._watch.after_evaluation, given, output)
            if self.above is not None:
                assert isinstance(output, HostTensor)
                self.above.send(tag, output)
            else:
                assert isinstance(output, float)
                loss_sum += output
        return StepOutcome(
            loss_sum=loss_sum,
            grad_square_sum=0.0,
            busy_s=self._busy_s,
            step_s=self.clock_s() - started_s,
            sent_bytes=self._sent_bytes() - sent_before,
            trouble=self._watch.trouble,
            pair_sums=self.stage.take_pair_sums(),
        )

    def _refer(self, microbatch: MicrobatchInput, own: Tag) -> None:
        """Send a microbatch, whose own tag is `own`, through the base alone where that is asked."""
        if not self.has_reference:
            return
        tag = Tag(own.step, REFERENCE_MICROBATCH_BASE + own.microbatch)
        given = self._with_hidden(microbatch, tag)
        output = self._timed(self.stage.refer, given)
        if self.above is not None:
            assert output is not None
            self._timed(self._watch.after_evaluation, given, output)
            self.above.send(tag, output)

    def _forward(self, step: int, microbatch: MicrobatchInput) -> None:
        tag = Tag(step, microbatch.index)
        self._refer(microbatch, tag)
        given = self._with_hidden(microbatch, tag)
        output = self._timed(self.stage.forward, given)
        self._timed(self._watch.after_forward, given, output)
        if self.above is not None:
            assert output is not None
            self._send(self.above, tag, output, "activation")

    def _backward(self, step: int, index: int) -> float:
        """Give when the computing ended: sending what came out may wait for room."""
        tag = Tag(step, index)
        gradient = None
        if self.above is not None:
            source = f"gradient {index} from {self.above.identity.peer_name}"
            self.on_phase(f"step {step}: waiting for {source}", self.timeout_s)
            gradient = self.above.wait_recv(tag, timeout_s=self.timeout_s)
            self.on_phase(f"step {step}: computing")
        result = self._timed(self.stage.backward, index, gradient)
        self._timed(self._watch.after_backward, index, gradient, result)
        ended_s = self.clock_s()
        if self.below is not None:
            assert result is not None
            self._send(self.below, tag, result, "gradient")
        return ended_s

    def _with_hidden(self, microbatch: MicrobatchInput, tag: Tag) -> MicrobatchInput:
        if self.below is None:
            return microbatch
        source = f"activation {microbatch.index} from {self.below.identity.peer_name}"
        self.on_phase(f"step {tag.step}: waiting for {source}", self.timeout_s)
        hidden_BTD = self.below.wait_recv(tag, timeout_s=self.timeout_s)
        self.on_phase(f"step {tag.step}: computing")
        return replace(microbatch, hidden_BTD=hidden_BTD)

    def _send(self, link: Link, tag: Tag, tensor: HostTensor, kind: str) -> None:
        if self.capture:
            self.boundaries[f"{kind}.{tag.microbatch}"] = tensor
        link.send(tag, tensor)

    def _timed(self, function: Callable[..., Result], *arguments: object) -> Result:
        started_s = self.clock_s()
        result = function(*arguments)
        self._busy_s += self.clock_s() - started_s
        return result

    def _sent_bytes(self) -> int:
        return sum(link.sent_bytes for link in (self.below, self.above) if link is not None)


def _mean_interval_s(ends_s: Sequence[float]) -> float:
    return (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1) if len(ends_s) > 1 else 0.0
