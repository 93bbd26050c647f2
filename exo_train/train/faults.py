"""A test hook: a stage that computes wrongly, or comes to harm, on purpose.

Owns the meaning of EXO_TRAIN_TEST_FAULT for a stage. It exists so that `verify`, and the tests of
the ring, can be seen to fail; nothing else may set it. Several faults are separated by `;`.

`forward:1.01` scales what the stage sends up, `backward:1.01` what it sends down,
`adapter:1.01` its own adapter gradients, `die:3` ends the process at step 3, `nan:3` makes the
gradients of step 3 non-finite, `nans:3` those of all steps from 3 on. Two make a slow device, for
benchmarks of exact ratios: `slow:2` lets every forward and backward take twice its time, and
`sleep_ms:5` adds 5 ms for each decoder layer of the stage to every forward and every backward.

`ACTION@key=value,…` is harm at an address, as `fault_points` says; four more actions make numbers
bad inside the framework, each time that a microbatch passes: `nan-activation@layer=2` and
`overflow-activation@layer=2` what a layer gives, `nan-gradient@layer=2` the gradient there,
`nan-loss@` the loss. They also take `rank`, `step`, `microbatch`, and `phase=evaluate` for
evaluations (which otherwise are spared).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from exo_train.backends.base import Arrays, MicrobatchInput, Stage
from exo_train.backends.full import layer_of
from exo_train.backends.memory import memory_errors_named
from exo_train.errors import ConfigError
from exo_train.plan.stages import StageSpec
from exo_train.train.fault_points import (
    LAYER_ACTIONS,
    VARIABLE,
    Fault,
    KilledError,
    Strikes,
    parse_fault,
    point,
    split_setting,
)
from exo_train.wire.tensor import DType, HostTensor

__all__ = ["VARIABLE", "FaultyStage", "KilledError", "StruckStage", "point", "with_fault"]

KINDS = ("forward", "backward", "adapter", "die", "nan", "nans", "slow", "sleep_ms")
TOO_LARGE = 3e38  # times itself it is too large for every dtype

_T = TypeVar("_T")


def with_fault(
    stage: Stage, setting: str, *, rank: int | None = None, in_process: bool = False
) -> Stage:
    """Wrap `stage` as `setting` says; an empty setting gives the stage itself.

    `rank` is the stage's; without one, faults that name a rank do not strike. `in_process`: the
    rank is a thread, so what would hit its process raises KilledError instead.
    """
    addressed = []
    for text in split_setting(setting):
        if "@" in text:
            addressed.append(parse_fault(text))
            continue
        kind, _, value = text.partition(":")
        if kind not in KINDS:
            raise ConfigError(f"{VARIABLE} must be one of {', '.join(KINDS)} and a number")
        stage = FaultyStage(stage, kind=kind, value=float(value))
    if not addressed:
        return stage
    return StruckStage(stage, Strikes(faults=tuple(addressed), rank=rank, in_process=in_process))


class FaultyStage:
    """Everything but the fault is the inner stage's."""

    def __init__(
        self,
        inner: Stage,
        *,
        kind: str,
        value: float,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._inner = inner
        self._kind = kind
        self._value = value
        self._step = 0
        self._clock, self._sleep = clock, sleep
        self._extra_s = value / 1e3 * _num_layers(inner) if kind == "sleep_ms" else 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def begin_step(self, *, step: int, loss_scale: float) -> None:
        self._step = step
        if self._kind == "die" and step >= self._value:
            os._exit(9)
        self._inner.begin_step(step=step, loss_scale=loss_scale)

    def forward(self, microbatch: MicrobatchInput) -> HostTensor | None:
        return self._scaled("forward", self._slowed(lambda: self._inner.forward(microbatch)))

    def backward(self, index: int, grad_BTD: HostTensor | None) -> HostTensor | None:
        return self._scaled("backward", self._slowed(lambda: self._inner.backward(index, grad_BTD)))

    def gradients(self) -> Arrays:
        factor = self._value if self._kind == "adapter" else 1.0
        return {n: (g * factor).astype(np.float32) for n, g in self._inner.gradients().items()}

    def grad_square_sum(self) -> float:
        if self._kind == "nan" and self._step == self._value:
            return float("nan")
        if self._kind == "nans" and self._step >= self._value:
            return float("nan")
        return self._inner.grad_square_sum()

    def _slowed(self, compute: Callable[[], _T]) -> _T:
        started_s = self._clock()
        result = compute()
        own_s = self._clock() - started_s
        factor = self._value if self._kind == "slow" else 1.0
        self._sleep(max(0.0, (factor - 1.0) * own_s) + self._extra_s)
        return result

    def _scaled(self, kind: str, tensor: HostTensor | None) -> HostTensor | None:
        if tensor is None or kind != self._kind or tensor.dtype is DType.BF16:
            return tensor
        array = tensor.to_numpy()
        return HostTensor.from_numpy((array * self._value).astype(array.dtype))


class StruckStage:
    """Passes the points of `fault_points`, and makes bad numbers; the rest is the inner stage's."""

    def __init__(self, inner: Stage, strikes: Strikes) -> None:
        self._inner, self._strikes = inner, strikes
        self._step, self._microbatch, self._evaluating = 0, 0, False
        self._loss = 0.0
        self._layers = _layers(inner)
        for fault in strikes.faults:
            if fault.action in LAYER_ACTIONS:
                self._spoil_layer(fault)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def begin_step(self, *, step: int, loss_scale: float) -> None:
        self._step, self._loss = step, 0.0
        self._inner.begin_step(step=step, loss_scale=loss_scale)

    def forward(self, microbatch: MicrobatchInput) -> HostTensor | None:
        self._enter(microbatch.index)
        if microbatch.index:
            self._reach("between")
        output = self._inner.forward(microbatch)
        self._loss += self._bad_loss()
        self._reach("forward")
        return output

    def backward(self, index: int, grad_BTD: HostTensor | None) -> HostTensor | None:
        self._enter(index)
        result = self._inner.backward(index, grad_BTD)
        self._reach("backward")
        return result

    def evaluate(self, microbatch: MicrobatchInput) -> HostTensor | float:
        self._enter(microbatch.index, evaluating=True)
        output = self._inner.evaluate(microbatch)
        self._reach("evaluate")
        return output + self._bad_loss() if isinstance(output, float) else output

    def loss_sum(self) -> float:
        return self._inner.loss_sum() + self._loss

    def find_bad_activation(self, microbatch: MicrobatchInput, *, evaluation: bool = False) -> str:
        self._enter(microbatch.index, evaluating=evaluation)
        return self._inner.find_bad_activation(microbatch, evaluation=evaluation)

    def apply(self, *, learning_rate: float, grad_scale: float) -> None:
        self._reach("commit", of_microbatch=False)
        self._inner.apply(learning_rate=learning_rate, grad_scale=grad_scale)
        self._reach("committed", of_microbatch=False)

    def adapter(self) -> Arrays:
        self._reach("snapshot", of_microbatch=False)
        return self._inner.adapter()

    def optimizer_state(self) -> Arrays:
        self._reach("snapshot", of_microbatch=False)
        return self._inner.optimizer_state()

    def _enter(self, microbatch: int, *, evaluating: bool = False) -> None:
        self._microbatch, self._evaluating = microbatch, evaluating

    def _reach(self, phase: str, *, of_microbatch: bool = True) -> None:
        start, end = self._layers[0], self._layers[-1] + 1
        stage = StageSpec(start=start, end=end, embedding=False, head=False)
        # As the stage itself would name it, had its framework run out of memory.
        with memory_errors_named(stage, "this device", doing=f"at the point '{phase}'"):
            self._strikes.reach(
                phase,
                step=self._step,
                microbatch=self._microbatch if of_microbatch else None,
            )

    def _spoils(self, fault: Fault) -> bool:
        return (fault.phase == "evaluate") == self._evaluating and fault.is_at(
            rank=self._strikes.rank, step=self._step, microbatch=self._microbatch
        )

    def _bad_loss(self) -> float:
        losses = [fault for fault in self._strikes.faults if fault.action == "nan-loss"]
        return float("nan") if any(map(self._spoils, losses)) else 0.0

    def _spoil_layer(self, fault: Fault) -> None:
        """Put a bad number behind a decoder layer, whichever framework it is written in."""
        if fault.layer not in self._layers:
            return
        blocks = self._inner._model.model.layers  # type: ignore[attr-defined]
        place = self._layers.index(fault.layer)
        block = blocks[place]

        def spoiled(output_BTD: Any) -> Any:
            if not self._spoils(fault):
                return output_BTD
            return _SPOIL[fault.action](output_BTD)

        if hasattr(block, "register_forward_hook"):
            block.register_forward_hook(lambda module, arguments, output: spoiled(output))
        else:
            blocks[place] = lambda *arguments: spoiled(block(*arguments))


# In the arithmetic that arrays of both frameworks share. The slope of a square root is infinite
# at zero, so the last one changes no value and spoils every gradient.
_SPOIL: Mapping[str, Callable[[Any], Any]] = {
    "nan-activation": lambda output: output * float("nan"),
    "overflow-activation": lambda output: output * TOO_LARGE * TOO_LARGE,
    "nan-gradient": lambda output: output + (output * 0.0) ** 0.5,
}


def _num_layers(stage: Stage) -> int:
    return len(_layers(stage))


def _layers(stage: Stage) -> list[int]:
    """Give the decoder layers by the names of what is trained, `model.layers.<index>.…`."""
    layers = {layer_of(name) for name in stage.adapter()}
    return sorted(layer for layer in layers if layer is not None)
