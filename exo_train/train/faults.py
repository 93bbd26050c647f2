"""A test hook: a stage that computes wrongly on purpose.

Owns the meaning of EXO_TRAIN_TEST_FAULT in a worker's environment. It exists so that `verify`,
and the tests of the ring, can be seen to fail; nothing else may set it.

`forward:1.01` scales what the stage sends up, `backward:1.01` what it sends down,
`adapter:1.01` its own adapter gradients, `die:3` ends the process at step 3, `nan:3` makes the
gradients of step 3 non-finite, `nans:3` those of all steps from 3 on. Two make a slow device, for
benchmarks of exact ratios: `slow:2` lets every forward and backward take twice its time, and
`sleep_ms:5` adds 5 ms for each decoder layer of the stage to every forward and every backward.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from exo_train.backends.base import Arrays, MicrobatchInput, Stage
from exo_train.errors import ConfigError
from exo_train.wire.tensor import DType, HostTensor

VARIABLE = "EXO_TRAIN_TEST_FAULT"
KINDS = ("forward", "backward", "adapter", "die", "nan", "nans", "slow", "sleep_ms")

_T = TypeVar("_T")


def with_fault(stage: Stage, setting: str) -> Stage:
    """Wrap `stage` as `setting` says; an empty setting gives the stage itself."""
    if not setting:
        return stage
    kind, _, value = setting.partition(":")
    if kind not in KINDS:
        raise ConfigError(f"{VARIABLE} must be one of {', '.join(KINDS)} and a number")
    return FaultyStage(stage, kind=kind, value=float(value))


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


def _num_layers(stage: Stage) -> int:
    """Count decoder layers by their adapters' names, `model.layers.<index>.…`."""
    return len({name.split(".")[2] for name in stage.adapter()})
