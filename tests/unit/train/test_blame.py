"""What is finite, bit by bit, and which rank of several is the origin of a bad number."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exo_train.backends.base import MicrobatchInput
from exo_train.train.blame import Watch, is_finite, name_trouble
from exo_train.wire.tensor import DType, HostTensor

NAN, INF = float("nan"), float("inf")
NAMES = ["attic", "den-pc", "mac"]
GOOD = HostTensor.from_numpy(np.zeros((1, 2, 3), np.float32))
BAD = HostTensor.from_numpy(np.full((1, 2, 3), NAN, np.float32))
DTYPES = [DType.FP32, DType.FP16, DType.BF16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def tensor_of(bits: list[int], dtype: DType) -> HostTensor:
    data = np.array(bits, f"<u{dtype.num_bytes}")
    return HostTensor(dtype, (len(bits),), data.tobytes())


@each_dtype
@given(data=st.data())
def test_finite_is_what_numpy_says_for_any_bits(dtype: DType, data: st.DataObject) -> None:
    word = st.integers(0, (1 << 8 * dtype.num_bytes) - 1)
    bits = data.draw(st.lists(word, max_size=4))
    tensor = tensor_of(bits, dtype)
    assert is_finite(tensor) == bool(np.isfinite(tensor.to_numpy()).all())


@each_dtype
@pytest.mark.parametrize("negative", [False, True])
def test_the_largest_is_finite_and_the_next_is_not(dtype: DType, negative: bool) -> None:
    exponent = {DType.FP32: 0x7F800000, DType.FP16: 0x7C00, DType.BF16: 0x7F80}[dtype]
    sign = negative << (8 * dtype.num_bytes - 1)
    assert is_finite(tensor_of([0, sign, sign | 1, sign | (exponent - 1)], dtype))
    assert not is_finite(tensor_of([0, sign | exponent, 1], dtype)), "infinity"
    assert not is_finite(tensor_of([0, sign | (exponent + 1), 1], dtype)), "NaN"
    assert is_finite(tensor_of([], dtype))


def origin(
    *troubles: str, losses: tuple[float, ...] = (0.0, 0.0, 1.0), squares: tuple[float, ...] = ()
) -> str:
    return name_trouble(
        NAMES, troubles, loss_sums=losses, grad_square_sums=squares or (1.0, 1.0, 1.0)
    )


@pytest.mark.parametrize(
    ("troubles", "rank"),
    [
        # What was received was bad before: the rank that says something else is the origin.
        (("gradient received from den-pc (rank 1)", "activation after layer 5", ""), 1),
        (("", "activation after layer 5", "activation received from den-pc (rank 1)"), 1),
        (("gradient received from", "gradient received from", "loss of microbatch 1"), 2),
        (("gradient received from", "gradient at layer 4's adapter (x)", ""), 1),
        (("gradient at layer 0's adapter", "activation received from attic (rank 0)", ""), 0),
        # Two say it: activations go up, gradients down, and forward comes first.
        (("activation after layer 0", "activation after layer 5", ""), 0),
        (("gradient at layer 0's adapter", "gradient at layer 4's adapter", ""), 1),
        (("gradient at layer 0's adapter", "", "loss of microbatch 3"), 2),
        (("gradient at layer 0's adapter", "", "activation after layer 9"), 2),
        # None is the origin, for the one that was says nothing.
        (("", "activation received from attic (rank 0)", "activation received from"), 1),
    ],
)
def test_the_origin_among_ranks(troubles: tuple[str, ...], rank: int) -> None:
    assert origin(*troubles) == f"{NAMES[rank]} (rank {rank}): {troubles[rank]}"


def test_without_words_the_sums_tell() -> None:
    assert origin("", "", "") == ""
    assert origin("", "", "", losses=(0.0, 0.0, NAN)) == (
        "mac (rank 2): the loss or the gradients, the place is not known"
    )
    assert origin("", "", "", squares=(INF, 1.0, NAN)).startswith("attic (rank 0), mac (rank 2): ")
    assert origin("", "", "", squares=(1.7e308, 1.7e308, 1.0)) == (
        "the sum over all devices is too large"
    )


def test_words_from_another_device_are_cut_and_cleaned() -> None:
    said = origin("", "activation\x1b[2J\n" + "x" * 10_000, "")
    assert said.startswith("den-pc (rank 1): activation[2Jx")
    assert len(said) < 350


@dataclass
class Scripted:
    """A stage that says what it is told to."""

    bad_activation: str = ""
    bad_gradient: str = ""
    loss: float = 1.0
    asked: list[str] = field(default_factory=list)

    def loss_sum(self) -> float:
        return self.loss

    def find_bad_activation(self, microbatch: MicrobatchInput, *, evaluation: bool = False) -> str:
        self.asked.append(f"activation {microbatch.index}")
        return self.bad_activation

    def find_bad_gradient(self) -> str:
        self.asked.append("gradient")
        return self.bad_gradient


def watch_of(stage: Any, *, below: str = "attic (rank 0)", above: str = "mac (rank 2)") -> Watch:
    return Watch(stage=stage, below=below, above=above)


def test_a_good_step_is_not_searched() -> None:
    stage = Scripted()
    watch = watch_of(stage)
    for index in range(3):
        watch.after_forward(MicrobatchInput(index=index, hidden_BTD=GOOD), GOOD)
        watch.after_backward(index, GOOD, GOOD)
    watch.after_step(4.0)
    assert watch.trouble == ""
    assert stage.asked == []


def test_the_first_place_stays() -> None:
    stage = Scripted(bad_activation="layer 7")
    watch = watch_of(stage)
    watch.after_forward(MicrobatchInput(index=4, hidden_BTD=GOOD), BAD)
    stage.bad_activation = "layer 8"
    watch.after_forward(MicrobatchInput(index=5, hidden_BTD=GOOD), BAD)
    watch.after_backward(4, BAD, BAD)
    watch.after_step(NAN)
    assert watch.trouble == "activation after layer 7, microbatch 4"
    assert stage.asked == ["activation 4"]
    watch.begin()
    assert watch.trouble == ""


def test_a_bad_value_that_no_loss_depends_on() -> None:
    """Where only an unsupervised position is bad, the loss is good and the gradient is not."""
    stage = Scripted(bad_gradient="model.layers.9.mlp.up_proj.lora_a")
    watch = watch_of(stage, above="")
    watch.after_forward(MicrobatchInput(index=0, hidden_BTD=GOOD), None)
    stage.bad_activation = "layer 9"
    watch.after_backward(0, None, BAD)
    assert watch.trouble == "activation after layer 9, microbatch 0"


def test_what_no_tensor_showed_is_found_at_the_end() -> None:
    stage = Scripted(bad_gradient="model.layers.3.self_attn.q_proj.lora_b")
    watch = watch_of(stage)
    watch.after_step(NAN)
    assert watch.trouble == "gradient at layer 3's adapter (model.layers.3.self_attn.q_proj.lora_b)"
    stage.bad_gradient = ""
    watch.begin()
    watch.after_step(INF)
    assert watch.trouble == "squared gradients add up to inf"
