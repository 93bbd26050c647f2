"""Optimizers, written once for all backends, and what they keep of each trained array.

Owns the rules and the names of their state. Must not import a framework: a backend lends its
module `xp` (torch, mlx.core; NumPy in tests), of which the rules use what all of them call the
same. So a run has the same numbers on any backend, and state that one saved another goes on with.

Arrays are float32 and belong to whichever framework, so they are `Any` here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from exo_train.backends.base import Arrays
from exo_train.backends.lora import select_arrays
from exo_train.optimizer_config import OptimizerConfig

Shape = tuple[int, ...]
Slots = dict[str, Any]
# Norms and biases of a model are not pulled to zero: BERT's rule, and transformers' since.
UNDECAYED = ("norm.weight", ".bias")
ADAFACTOR_EPSILON, ADAFACTOR_DECAY = 1e-30, -0.8
NEWTON_SCHULZ, NEWTON_SCHULZ_STEPS, NEWTON_SCHULZ_EPSILON = (3.4445, -4.7750, 2.0315), 5, 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """One array's turn in an update; `count` is the number of this update, from 1."""

    value: Any
    gradient: Any
    slots: Slots
    rate: float
    count: int
    decays: bool


# (options, xp, turn) -> the new value and slots
Rule = Callable[[OptimizerConfig, Any, _Turn], tuple[Any, Slots]]


def state_shapes(config: OptimizerConfig, adapter: Mapping[str, Shape]) -> dict[str, Shape]:
    """Give every array of the state but `step` by its name, `<adapter array>.<slot>`."""
    return {
        f"{name}.{slot}": slot_shape
        for name, shape in adapter.items()
        for slot, slot_shape in config.slots(name, shape).items()
    }


class Optimizer:
    """Moves a stage's adapter; begins with zeros and no update taken.

    What is `shared` with another rank is moved in NumPy: frameworks and devices round differently,
    and both ranks are to have the same bits.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        shapes: Mapping[str, Shape],
        *,
        xp: Any,
        from_numpy: Callable[[np.ndarray], Any],
        to_numpy: Callable[[Any], np.ndarray] = np.array,
        shared: Collection[str] = (),
    ) -> None:
        self._config, self._shapes, self._xp = config, dict(shapes), xp
        self._from_numpy, self._to_numpy = from_numpy, to_numpy
        self._shared = frozenset(shared)
        self.num_updates = 0
        self.arrays = self._placed(
            {n: np.zeros(shape, np.float32) for n, shape in state_shapes(config, shapes).items()}
        )

    def updated(
        self, adapter: Mapping[str, Any], gradients: Mapping[str, Any], *, learning_rate: float
    ) -> Iterator[tuple[str, Any]]:
        """Take one update; yields each array's name and new value, and must be read to its end."""
        self.num_updates += 1
        for name, value in adapter.items():
            # LoRA+ (Hayou et al. 2024, arXiv:2402.12354): B learns faster than A.
            faster = self._config.lora_plus_ratio if name.endswith(".lora_b") else 1.0
            shape = self._shapes[name]
            turn = _Turn(
                value=value,
                gradient=gradients[name],
                slots={
                    slot: self.arrays[f"{name}.{slot}"] for slot in self._config.slots(name, shape)
                },
                rate=learning_rate * faster,
                count=self.num_updates,
                decays=not name.endswith(UNDECAYED),
            )
            rule = RULES[self._config.rule_of(name, shape)]
            if name in self._shared:
                value, gradient = self._to_numpy(turn.value), self._to_numpy(turn.gradient)
                here = replace(turn, value=value, gradient=gradient)
                new, slots = rule(self._config, np, here)
                new = self._from_numpy(new)
            else:
                new, slots = rule(self._config, self._xp, turn)
            self.arrays.update({f"{name}.{slot}": array for slot, array in slots.items()})
            yield name, new

    def state(self) -> Arrays:
        """Copy the state out, with the number of updates as `step`, int64 of shape ()."""
        arrays: Arrays = {"step": np.array(self.num_updates, np.int64)}
        for name, array in self.arrays.items():
            is_here = isinstance(array, np.ndarray)
            arrays[name] = array.copy() if is_here else self._to_numpy(array)
        return arrays

    def load(self, given: Mapping[str, np.ndarray], *, layers: range) -> None:
        """Take this stage's part out of `given`; raises ConfigError where it does not fit."""
        expected = state_shapes(self._config, self._shapes)
        chosen = select_arrays(given, expected, layers=layers)
        self.arrays = self._placed(chosen)
        self.num_updates = int(given["step"])

    def _placed(self, arrays: Arrays) -> dict[str, Any]:
        """Give the state as it is kept: that of shared arrays stays NumPy's."""
        kept = {
            f"{name}.{slot}"
            for name in self._shared
            for slot in self._config.slots(name, self._shapes[name])
        }
        return {n: array if n in kept else self._from_numpy(array) for n, array in arrays.items()}


def _decayed(config: OptimizerConfig, turn: _Turn) -> Any:
    """Decay apart from the gradient, in all rules: Loshchilov & Hutter 2017, arXiv:1711.05101."""
    if not turn.decays:
        return turn.value
    return (1 - turn.rate * config.weight_decay) * turn.value


def _adamw(config: OptimizerConfig, xp: Any, turn: _Turn) -> tuple[Any, Slots]:
    """Loshchilov & Hutter 2017, arXiv:1711.05101, algorithm 2, with bias correction."""
    gradient, slots = turn.gradient, turn.slots
    first = config.beta1 * slots["exp_avg"] + (1 - config.beta1) * gradient
    second = config.beta2 * slots["exp_avg_sq"] + (1 - config.beta2) * gradient * gradient
    spread = xp.sqrt(second) / (1 - config.beta2**turn.count) ** 0.5 + config.epsilon
    change = turn.rate / (1 - config.beta1**turn.count) * first / spread
    return _decayed(config, turn) - change, {"exp_avg": first, "exp_avg_sq": second}


def _sgd(config: OptimizerConfig, xp: Any, turn: _Turn) -> tuple[Any, Slots]:
    """Heavy ball (Polyak 1964) as PyTorch has it: the momentum is of gradients, not of changes."""
    if not config.momentum:
        return _decayed(config, turn) - turn.rate * turn.gradient, {}
    momentum = config.momentum * turn.slots["momentum"] + turn.gradient
    return _decayed(config, turn) - turn.rate * momentum, {"momentum": momentum}


def _adafactor(config: OptimizerConfig, xp: Any, turn: _Turn) -> tuple[Any, Slots]:
    """Shazeer & Stern 2018, arXiv:1804.04235, algorithms 4 and 5, with the rate that is given.

    Without momentum; second moments decay by 1 - count**-0.8, changes are clipped at an RMS of 1.
    """
    keep = 1 - turn.count**ADAFACTOR_DECAY
    square = turn.gradient * turn.gradient + ADAFACTOR_EPSILON
    if len(turn.value.shape) == 2:
        row = keep * turn.slots["exp_avg_sq_row"] + (1 - keep) * xp.mean(square, axis=1)
        col = keep * turn.slots["exp_avg_sq_col"] + (1 - keep) * xp.mean(square, axis=0)
        slots = {"exp_avg_sq_row": row, "exp_avg_sq_col": col}
        # Two roots, not one of the product, which may be too small for float32.
        change = turn.gradient / xp.sqrt(row / xp.mean(row))[:, None] / xp.sqrt(col)
    else:
        second = keep * turn.slots["exp_avg_sq"] + (1 - keep) * square
        slots = {"exp_avg_sq": second}
        change = turn.gradient / xp.sqrt(second)
    rms = xp.sqrt(xp.mean(change * change))
    return _decayed(config, turn) - turn.rate * change / xp.clip(rms, 1.0, None), slots


def _muon(config: OptimizerConfig, xp: Any, turn: _Turn) -> tuple[Any, Slots]:
    """Jordan et al. 2024, kellerjordan.github.io/posts/muon, with Nesterov's momentum.

    `original` is its factor of the rate; `match_rms_adamw` that of Liu et al. 2025,
    arXiv:2502.16982, with which a change is as large as AdamW's usual one.
    """
    keep, (rows, columns) = config.muon_momentum, turn.value.shape
    momentum = keep * turn.slots["momentum"] + (1 - keep) * turn.gradient
    ahead = keep * momentum + (1 - keep) * turn.gradient
    if config.muon_rate == "original":
        factor = max(1, rows / columns) ** 0.5
    else:
        factor = 0.2 * max(rows, columns) ** 0.5
    change = turn.rate * factor * _nearly_orthogonal(ahead, xp)
    return _decayed(config, turn) - change, {"momentum": momentum}


def _nearly_orthogonal(matrix: Any, xp: Any) -> Any:
    """Bring the singular values near 1 by the post's five steps of a Newton-Schulz iteration.

    In float32 like `mlx.optimizers`; PyTorch's and the post's own are in bfloat16, for speed.
    """
    rows, columns = matrix.shape
    x = matrix.T if rows > columns else matrix
    x = x / (xp.sqrt(xp.sum(x * x)) + NEWTON_SCHULZ_EPSILON)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.T if rows > columns else x


RULES: dict[str, Rule] = {"adamw": _adamw, "adafactor": _adafactor, "sgd": _sgd, "muon": _muon}
