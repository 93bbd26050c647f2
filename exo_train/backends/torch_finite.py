"""Where in a PyTorch stage a value is not finite. Must not change one, or keep one."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch


def all_finite(value: torch.Tensor) -> bool:
    return bool(value.isfinite().all())


def first_bad_gradient(gradients: Mapping[str, torch.Tensor]) -> str:
    """Name the last array that is not finite, where backward came first; empty: none."""
    if not gradients:  # of layers without an adapter
        return ""
    # One number an array is quick to look at. The sum of large ones may be infinite: so look again.
    if bool(torch.stack([gradient.sum() for gradient in gradients.values()]).isfinite().all()):
        return ""
    backwards = reversed(list(gradients))
    return next((name for name in backwards if not all_finite(gradients[name])), "")


@contextmanager
def outputs_watched(layers: range, blocks: torch.nn.ModuleList) -> Iterator[list[int]]:
    """Give a list that is filled, while `blocks` run, with the layers whose output is bad."""
    bad_layers: list[int] = []

    def look(layer: int, block: object, arguments: object, output_BTD: torch.Tensor) -> None:
        if not all_finite(output_BTD):
            bad_layers.append(layer)

    hooks = [
        block.register_forward_hook(functools.partial(look, layer))
        for layer, block in zip(layers, blocks, strict=True)
    ]
    try:
        yield bad_layers
    finally:
        for hook in hooks:
            hook.remove()
