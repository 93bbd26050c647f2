"""Invariant 6: what leaves a stage is evaluated and copied out, so a thread may send it later."""

from __future__ import annotations

import numpy as np
import pytest

from exo_train.backends.base import MicrobatchInput, Stage
from exo_train.wire.tensor import HostTensor
from tests.architecture.source_tree import PACKAGE, imported_names, package_files, place
from tests.backends.hand_ring import load_ring

TRAFFIC = ("grpc", "socket", "threading", "exo_train.transport", "exo_train.wire.pb")
EARLIER = 3


def microbatch(index: int) -> MicrobatchInput:
    rng = np.random.default_rng(index)
    return MicrobatchInput(
        index=index,
        tokens_BT=rng.integers(0, 300, (2, 8), dtype=np.int32),
        row_keys=(2 * index, 2 * index + 1),
    )


def sent(stage: Stage, index: int) -> HostTensor:
    output = stage.forward(microbatch(index))
    assert output is not None
    return output


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_a_tensor_on_its_way_does_not_change(backend: str) -> None:
    """The sender's thread reads it while the stage computes on, updates, and frees."""
    lower, _upper = load_ring("llama", [backend], (0, 2, 4))
    lower.begin_step(step=1, loss_scale=0.1)
    tensors = [sent(lower, index) for index in range(EARLIER)]
    copies = [bytes(tensor.data) for tensor in tensors]
    for tensor in tensors:
        assert isinstance(tensor, HostTensor)
        assert isinstance(tensor.data, (bytes, bytearray, memoryview))
    for index in range(EARLIER):
        lower.backward(index, HostTensor.from_numpy(np.ones((2, 8, 64), np.float32)))
    lower.apply(learning_rate=1.0, grad_scale=1.0)
    lower.begin_step(step=2, loss_scale=0.1)
    later = [sent(lower, index) for index in range(EARLIER)]
    assert [bytes(tensor.data) for tensor in tensors] == copies
    assert bytes(later[0].data) != copies[0], "the update must have changed what is computed"


def test_backends_know_no_traffic() -> None:
    files = [file for file in package_files() if place(file).startswith("exo_train/backends/")]
    assert files, PACKAGE
    for file in files:
        found = [name for name in imported_names(file) if name.startswith(TRAFFIC)]
        assert not found, f"{place(file)} imports {found}"
