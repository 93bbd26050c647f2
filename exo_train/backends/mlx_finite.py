"""Where in an MLX stage a value is not finite. Must not change one, or keep one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import mlx.core as mx


def all_finite(value: mx.array) -> bool:
    # Zero times what is not finite is NaN, which a sum keeps; nothing here can overflow.
    return not bool(mx.isnan((value.astype(mx.float32) * 0.0).sum()))


def first_bad_gradient(gradients: Mapping[str, mx.array]) -> str:
    """Name the last array that is not finite, where backward came first; empty: none."""
    if not gradients:  # of layers without an adapter
        return ""
    # One number an array is quick to look at. The sum of large ones may be infinite: so look again.
    if bool(mx.isfinite(mx.stack([gradient.sum() for gradient in gradients.values()])).all()):
        return ""
    backwards = reversed(list(gradients))
    return next((name for name in backwards if not all_finite(gradients[name])), "")


def first_bad_value(named: Iterable[tuple[str, mx.array]]) -> str:
    """Name the first that is not finite, looking at no later one; empty: none."""
    return next((name for name, value in named if not all_finite(value)), "")
