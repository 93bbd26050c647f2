"""Which number was not finite first: on one rank, and among the ranks of a ring.

Owns the words for it. What is looked at in every step are the tensors that leave a rank and the
loss (rank 0 sends no gradient, so its adapter's are looked at); only when one of them is bad is
the place looked for. Must not change a number, and must not decide what becomes of the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from exo_train.backends.base import MicrobatchInput, Stage
from exo_train.backends.full import layer_of
from exo_train.wire.tensor import DType, HostTensor

MAX_TROUBLE_LETTERS = 300  # it comes from another device
# A float is NaN or infinite when all bits of its exponent are set, so when its bits, read as an
# integer without the sign, are at least these.
_NON_FINITE_BITS = {DType.FP32: 0x7F80_0000, DType.FP16: 0x7C00, DType.BF16: 0x7F80}
_RECEIVED = "received from"


def is_finite(tensor: HostTensor) -> bool:
    """Tell whether no float of `tensor` is NaN or infinite; copies nothing."""
    non_finite = _NON_FINITE_BITS[tensor.dtype]
    num_bytes = tensor.dtype.num_bytes
    bits = np.frombuffer(tensor.data, f"<i{num_bytes}")
    if not bits.size:
        return True
    # Negative floats are negative integers, and above all others without a sign.
    negative = (1 << (8 * num_bytes - 1)) + non_finite
    return bool(bits.max() < non_finite and bits.view(f"<u{num_bytes}").max() < negative)


@dataclass(slots=True, kw_only=True)
class Watch:
    """Looks at one rank's numbers; `trouble` is the first place of the pass where one is bad.

    `below` and `above` are the neighbours as messages call them, empty where there is none.
    """

    stage: Stage
    below: str
    above: str
    trouble: str = ""
    # The last rank looks at these again: values that no loss depends on can spoil a gradient.
    _inputs: dict[int, MicrobatchInput] = field(default_factory=dict)

    def begin(self) -> None:
        self.trouble = ""
        self._inputs.clear()

    def after_forward(self, microbatch: MicrobatchInput, output: HostTensor | None) -> None:
        if output is None:
            self._inputs[microbatch.index] = microbatch
        self._look(microbatch, self.stage.loss_sum() if output is None else output)

    def after_evaluation(self, microbatch: MicrobatchInput, output: HostTensor | float) -> None:
        self._look(microbatch, output, evaluation=True)

    def after_backward(
        self, index: int, received_BTD: HostTensor | None, sent_BTD: HostTensor | None
    ) -> None:
        microbatch = self._inputs.pop(index, None)
        if self.trouble:
            return
        bad_name = "" if sent_BTD is not None else self.stage.find_bad_gradient()
        if bad_name or (sent_BTD is not None and not is_finite(sent_BTD)):
            place = self._bad_backward(microbatch, received_BTD, sent_BTD)
            self.trouble = f"{place}, microbatch {index}"

    def after_step(self, grad_square_sum: float) -> None:
        """Look once more at what no tensor that was sent has shown."""
        if self.trouble or math.isfinite(grad_square_sum):
            return
        name = self.stage.find_bad_gradient()
        self.trouble = (
            _gradient_at(name) if name else f"squared gradients add up to {grad_square_sum}"
        )

    def _look(
        self, microbatch: MicrobatchInput, output: HostTensor | float, *, evaluation: bool = False
    ) -> None:
        if self.trouble:
            return
        if math.isfinite(output) if isinstance(output, float) else is_finite(output):
            return
        hidden_BTD = microbatch.hidden_BTD
        if hidden_BTD is not None and not is_finite(hidden_BTD):
            place = f"activation {_RECEIVED} {self.below}"
        elif bad := self.stage.find_bad_activation(microbatch, evaluation=evaluation):
            place = f"activation after {bad}"
        elif isinstance(output, float):
            self.trouble = f"loss of microbatch {microbatch.index}"
            return
        else:
            dtype = output.dtype.name.lower()
            place = f"activation too large for {dtype} on its way to {self.above}"
        self.trouble = f"{place}, microbatch {microbatch.index}"

    def _bad_backward(
        self,
        microbatch: MicrobatchInput | None,
        received_BTD: HostTensor | None,
        sent_BTD: HostTensor | None,
    ) -> str:
        if received_BTD is not None and not is_finite(received_BTD):
            return f"gradient {_RECEIVED} {self.above}"
        if microbatch is not None:
            hidden_BTD = microbatch.hidden_BTD
            if hidden_BTD is not None and not is_finite(hidden_BTD):
                return f"activation {_RECEIVED} {self.below}"
            if bad := self.stage.find_bad_activation(microbatch):
                return f"activation after {bad}"
        if name := self.stage.find_bad_gradient():
            return _gradient_at(name)
        assert sent_BTD is not None
        return f"gradient not finite as {sent_BTD.dtype.name.lower()} on its way to {self.below}"


def name_trouble(
    names: Sequence[str],
    troubles: Sequence[str],
    *,
    loss_sums: Sequence[float],
    grad_square_sums: Sequence[float],
) -> str:
    """Say where a step first went wrong, from what each rank says, by rank; empty: nowhere.

    What a rank received was bad somewhere else before. Activations go up and gradients down, and
    forward comes before backward.
    """

    def order(rank: int) -> tuple[bool, bool, int]:
        backward = troubles[rank].startswith("gradient")
        return _RECEIVED in troubles[rank], backward, -rank if backward else rank

    bad = [rank for rank, trouble in enumerate(troubles) if trouble]
    if bad:
        rank = min(bad, key=order)
        said = "".join(c for c in troubles[rank][:MAX_TROUBLE_LETTERS] if c.isprintable())
        return f"{names[rank]} (rank {rank}): {said}"
    pairs = zip(loss_sums, grad_square_sums, strict=True)
    silent = [rank for rank, pair in enumerate(pairs) if not all(map(math.isfinite, pair))]
    if silent:
        where = ", ".join(f"{names[rank]} (rank {rank})" for rank in silent)
        return f"{where}: the loss or the gradients, the place is not known"
    sums = (sum(loss_sums), sum(grad_square_sums))
    return "" if all(map(math.isfinite, sums)) else "the sum over all devices is too large"


def _gradient_at(name: str) -> str:
    if name.endswith((".weight", ".bias")):
        return f"gradient of {name}"
    return f"gradient at layer {layer_of(name)}'s adapter ({name})"
