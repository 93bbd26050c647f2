"""A PyTorch stage's own weights as what it trains: float32, whatever its modules compute in.

Must not decide which weights these are (`full` does).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch

from exo_train.backends.torch_model import model_name
from exo_train.models.spec import ModelSpec
from exo_train.plan.stages import StageSpec

Trained = dict[str, torch.nn.Parameter]


def train_weights(
    model: Any,
    spec: ModelSpec,
    stage: StageSpec,
    names: Collection[str],
    exact: dict[str, torch.Tensor],
) -> tuple[Trained, Callable[[], None]]:
    """Have autograd find the gradients of `names`; give their float32 values, and a refresh.

    A weight that computes in 16 bits is a copy of its value in `exact`, which is trained: backward
    adds the copy's gradient to the value's, and `refresh` copies what an update has made of it.
    """
    locals_by_name = {model_name(n, spec, stage): p for n, p in model.named_parameters()}
    trained: Trained = {}
    copies: list[tuple[torch.nn.Parameter, torch.nn.Parameter]] = []
    for name in names:
        computing = locals_by_name[name].requires_grad_()
        trained[name] = computing
        if computing.dtype != torch.float32:
            trained[name] = torch.nn.Parameter(exact.pop(name))
            copies.append((computing, trained[name]))
            computing.register_post_accumulate_grad_hook(
                functools.partial(_hand_over, trained[name])
            )

    def refresh() -> None:
        with torch.no_grad():
            for computing, value in copies:
                computing.copy_(value)

    return trained, refresh


def _hand_over(value: torch.nn.Parameter, computing: torch.nn.Parameter) -> None:
    """Add a microbatch's gradient in float32, so that no sum is rounded to 16 bits."""
    assert value.grad is not None, "a step was begun"
    assert computing.grad is not None
    value.grad += computing.grad
    computing.grad = None
