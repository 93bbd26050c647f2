"""Memory runs out inside a stage: it is said where, and the stage is as it was before the step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from exo_train.backends.base import Stage
from exo_train.errors import DoesNotFitError
from exo_train.wire.tensor import HostTensor
from tests.backends.hand_ring import (
    OPTIONS,
    assert_same_run,
    load_ring,
    microbatches,
    one_stage_run,
    relative_error,
    rows,
    tiny,
    train,
)

BACKENDS = ("mlx", "torch")
each_backend = pytest.mark.parametrize("backend", BACKENDS)
SPLIT = (0, 2, 4)
ADVICE = "use a smaller --microbatch-size or --max-seq-length, "


def run_out() -> None:
    """Fail as an allocator does, in the first framework in earnest."""
    torch.empty(1 << 50, dtype=torch.uint8)


class Exhausted:
    """Stands for anything that cannot be read or used without memory."""

    def __getattr__(self, name: str) -> Any:
        raise MemoryError

    def __iter__(self) -> Any:
        raise MemoryError


def fail_in_layer(stage: Any, place: int, passes: list[str]) -> None:
    """Let a layer fail at its next passes: "ok", "forward", or "backward" of what it gives."""
    blocks = stage._model.model.layers
    block = blocks[place]

    def harmed(output: Any) -> Any:
        kind = passes.pop(0) if passes else "ok"
        if kind == "forward":
            run_out()
        if kind == "backward":
            output.register_hook(lambda gradient: run_out())
        return output

    if hasattr(block, "register_forward_hook"):
        block.register_forward_hook(lambda module, arguments, output: harmed(output))
    else:
        blocks[place] = lambda *arguments: harmed(block(*arguments))


def state(stage: Stage) -> dict[str, np.ndarray]:
    return stage.adapter() | stage.optimizer_state()


@each_backend
@pytest.mark.parametrize("rank", [0, 1])
def test_in_the_forward(backend: str, rank: int) -> None:
    stages: list[Any] = load_ring("llama", [backend], SPLIT)
    batches = list(microbatches(rows(), 2))
    inputs = [batches, [replace(b, hidden_BTD=stages[0].forward(b)) for b in batches]][rank]
    stage = stages[rank]
    stages[0].begin_step(step=0, loss_scale=0.1)
    before = state(stage)
    stage.forward(inputs[0])
    graph = weakref.ref(stage._stash[0].output_BTD) if backend == "torch" else None
    fail_in_layer(stage, 1, ["forward"])
    layers = (0, 1) if rank == 0 else (2, 3)
    with pytest.raises(DoesNotFitError) as told:
        stage.forward(inputs[1])
    message = str(told.value)
    assert message.startswith(
        f"layers {layers[0]}..{layers[1]} ran out of memory on cpu while doing the forward of "
        "microbatch 1 (2 x 24 positions) ("
    )
    assert message.endswith(ADVICE + "--checkpoint-activations, or one more device")
    assert "1125899906842624 bytes" in message
    assert not stage._stash
    gc.collect()
    assert graph is None or graph() is None, "the graph of the other microbatch is kept"
    assert relative_error(state(stage), before) == 0
    assert_same_run(train(stages), one_stage_run("llama", backend))


@each_backend
def test_in_the_backward(backend: str) -> None:
    stages: list[Any] = load_ring("llama", [backend], SPLIT)
    stage = stages[0]
    # MLX runs an inner stage's layers again in the backward.
    fail_in_layer(stage, 0, ["ok", "backward"] if backend == "torch" else ["ok", "ok", "forward"])
    stage.begin_step(step=0, loss_scale=0.1)
    before = state(stage)
    for batch in microbatches(rows(), 2):
        stage.forward(batch)
    kept = weakref.ref(stage._stash[0].output_BTD) if backend == "torch" else None
    gradient = HostTensor.from_numpy(np.ones((2, 24, 64), np.float32))
    with pytest.raises(DoesNotFitError, match=r"doing the backward of microbatch 1 \(2 x 24 pos"):
        stage.backward(1, gradient)
    assert not stage._stash
    gc.collect()
    assert kept is None or kept() is None
    assert relative_error(state(stage), before) == 0
    assert_same_run(train(stages), one_stage_run("llama", backend))


@each_backend
def test_the_failed_pass_is_let_go_while_its_error_lives(backend: str) -> None:
    """A worker keeps the error until it has told it; a device that is full needs the room."""
    (stage,) = load_ring("llama", [backend])
    held: list[Any] = []

    class Large:
        """Stands for a layer's temporary."""

    def layer(*arguments: object, **settings: object) -> None:
        temporary = Large()
        held.append(weakref.ref(temporary))
        run_out()

    model: Any = stage
    blocks = model._model.model.layers
    if backend == "torch":
        blocks[2].forward = layer
    else:
        blocks[2] = layer
    (batch,) = microbatches(rows(), 4)
    with pytest.raises(DoesNotFitError) as told:
        stage.forward(batch)
    gc.collect()
    assert held[0]() is None
    assert told.value.__cause__ is not None


@each_backend
def test_in_an_evaluation(backend: str) -> None:
    options = replace(OPTIONS, checkpoint_activations=True)
    (stage,) = load_ring("llama", [backend], options=options)
    fail_in_layer(stage, 3, ["forward"])
    (batch,) = microbatches(rows(), 4)
    with pytest.raises(DoesNotFitError, match=r"evaluating microbatch 0 \(4 x 24 pos") as told:
        stage.evaluate(batch)
    assert str(told.value).endswith(ADVICE + "or one more device")
    assert isinstance(stage.evaluate(batch), float)


def apply(stage: Stage) -> None:
    stage.apply(learning_rate=1e-3, grad_scale=1.0)


@each_backend
@pytest.mark.parametrize(
    ("attributes", "use", "doing"),
    [
        (["_optimizer"], apply, "updating its adapter"),
        (["_adapter"], lambda s: s.adapter(), "giving its adapter"),
        (["_optimizer"], lambda s: s.optimizer_state(), "giving its optimizer's state"),
        (["_adapter"], lambda s: s.begin_step(step=1, loss_scale=1.0), "beginning a step"),
        (["_adapter", "_gradients"], lambda s: s.gradients(), "giving its gradients"),
        (["_adapter", "_gradients"], lambda s: s.grad_square_sum(), "adding up its gradients"),
        (["_adapter", "_gradients"], lambda s: s.find_bad_gradient(), "looking at its gradients"),
    ],
)
def test_between_the_passes(
    backend: str,
    attributes: list[str],
    use: Callable[[Stage], object],
    doing: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (stage,) = load_ring("llama", [backend])
    for name in attributes:
        if name != "_gradients" or backend == "mlx":
            monkeypatch.setattr(stage, name, Exhausted())
    with pytest.raises(DoesNotFitError, match=f"3 ran out of memory on cpu while {doing}"):
        use(stage)


@each_backend
@pytest.mark.parametrize("kind", ["adapter", "optimizer_state"])
def test_when_state_is_taken(backend: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (stage,) = load_ring("llama", [backend])
    arrays = getattr(stage, kind)()
    target = "mlx_stage.mx.array" if backend == "mlx" else "torch_stage.torch.from_numpy"
    monkeypatch.setattr(f"exo_train.backends.{target}", lambda *arguments: run_out())
    with pytest.raises(DoesNotFitError, match="taking an "):
        getattr(stage, f"load_{kind}")(arrays)


@each_backend
@pytest.mark.parametrize("function", ["load_base_model", "initial_adapter"])
def test_while_loading(backend: str, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny("llama")

    def fail(*arguments: object, **settings: object) -> None:
        run_out()

    monkeypatch.setattr(f"exo_train.backends.{backend}_backend.{function}", fail)
    with pytest.raises(DoesNotFitError, match=r"layers 0\.\.3 ran out .* while loading"):
        load_ring("llama", [backend])
