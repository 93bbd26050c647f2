"""Loss of the last stage in MLX, a bounded number of tokens at a time.

Nothing comes after the loss, so the gradients at the head's input and of its weight are made chunk
by chunk in the forward, and no logits live until the backward. Must not touch the layers.

Shapes: B sequences, T positions, N = B*T, D hidden size, S supervised tokens, C those of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from exo_train.backends.base import HEAD_CHUNK_TOKENS

Head = Callable[[mx.array], mx.array]


def head_loss(
    head: Head,
    hidden_BTD: mx.array,
    targets_BT: np.ndarray,
    mask_BT: np.ndarray,
    *,
    loss_scale: float = 1.0,
    label_smoothing: float = 0.0,
    weight_VD: mx.array | None = None,
) -> mx.array:
    """Give the cross-entropy (nats) summed over supervised positions, in float32.

    Its gradients are those of loss * `loss_scale`, which are scaled before they are made: a factor
    that comes after is too late in fp16. A head that is trained is its `weight_VD`, and `head` is
    not used. Needs at least one supervised position. Smoothing s makes a target 1 - s of itself and
    s of all V alike (Szegedy et al. 2015, arXiv:1512.00567, section 7).
    """
    hidden_SD, targets_S = _supervised(hidden_BTD, targets_BT, mask_BT)
    trained = [] if weight_VD is None else [weight_VD]

    def logits(hidden_CD: mx.array, *weights: mx.array) -> mx.array:
        return hidden_CD @ weights[0].T if weights else head(hidden_CD)

    loss_and_gradients = _loss_and_gradients(logits, targets_S, loss_scale, label_smoothing)
    return loss_and_gradients(hidden_SD, *trained)[0]


def head_log_probs(
    head: Head, hidden_BTD: mx.array, targets_BT: np.ndarray, mask_BT: np.ndarray
) -> np.ndarray:
    """Give the log-probability (nats) of each supervised position (S), a chunk after the other."""
    hidden_SD, targets_S = _supervised(hidden_BTD, targets_BT, mask_BT)
    return np.concatenate(
        [
            np.array(_log_probs(head, hidden_SD[part], targets_S[part]))
            for part in _parts(hidden_SD.shape[0])
        ]
    )


def differentiable_log_probs(
    head: Head, hidden_BTD: mx.array, targets_BT: np.ndarray, mask_BT: np.ndarray
) -> mx.array:
    """Give the same, with a gradient of their own: no chunk's logits are kept for it."""
    hidden_SD, targets_S = _supervised(hidden_BTD, targets_BT, mask_BT)

    def chunk(hidden_CD: mx.array, targets_C: mx.array) -> tuple[mx.array, mx.array]:
        log_probs_C = _log_probs(head, hidden_CD, targets_C)
        return log_probs_C.sum(), log_probs_C

    @mx.custom_function
    def log_probs(hidden_SD: mx.array) -> tuple[mx.array, ...]:
        parts, grads = [], []
        for part in _parts(hidden_SD.shape[0]):
            (_, log_probs_C), grad_CD = mx.value_and_grad(chunk)(hidden_SD[part], targets_S[part])
            parts.append(log_probs_C)
            grads.append(grad_CD)
        return mx.concatenate(parts), mx.concatenate(grads)

    @log_probs.vjp
    def _(
        primals: mx.array, cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, ...]
    ) -> mx.array:
        grad_SD = cotangents[0][:, None] * outputs[1].astype(mx.float32)
        return grad_SD.astype(outputs[1].dtype)

    return cast(Callable[[mx.array], tuple[mx.array, ...]], log_probs)(hidden_SD)[0]


def _log_probs(head: Head, hidden_CD: mx.array, targets_C: mx.array) -> mx.array:
    losses_C: mx.array = nn.losses.cross_entropy(head(hidden_CD).astype(mx.float32), targets_C)
    return -losses_C


def _supervised(
    hidden_BTD: mx.array, targets_BT: np.ndarray, mask_BT: np.ndarray
) -> tuple[mx.array, mx.array]:
    rows_S = np.flatnonzero(mask_BT)
    targets_S = mx.array(targets_BT.reshape(-1)[rows_S])
    return hidden_BTD.flatten(0, 1)[mx.array(rows_S)], targets_S


def _parts(num_tokens: int) -> Iterator[slice]:
    for start in range(0, num_tokens, HEAD_CHUNK_TOKENS):
        yield slice(start, start + HEAD_CHUNK_TOKENS)


def _loss_and_gradients(
    logits: Callable[..., mx.array],
    targets_S: mx.array,
    loss_scale: float,
    label_smoothing: float,
) -> Callable[..., tuple[mx.array, ...]]:
    """Give a function to the loss and, beside it, its own gradients at the inputs and weights."""

    def scaled_and_loss(
        targets_C: mx.array, hidden_CD: mx.array, *weights: mx.array
    ) -> tuple[mx.array, mx.array]:
        logits_CV = logits(hidden_CD, *weights).astype(mx.float32)
        loss: mx.array = nn.losses.cross_entropy(
            logits_CV, targets_C, label_smoothing=label_smoothing, reduction="sum"
        )
        return loss * loss_scale, loss  # the first is differentiated

    @mx.custom_function
    def loss_and_gradients(hidden_SD: mx.array, *weights: mx.array) -> tuple[mx.array, ...]:
        loss_sum = mx.array(0.0)
        grads: list[mx.array] = []
        of_weights = [mx.zeros(weight.shape, mx.float32) for weight in weights]
        # Of a single one MLX gives no tuple.
        wanted = list(range(1, 2 + len(weights))) if weights else 1
        for part in _parts(hidden_SD.shape[0]):
            (_, loss), found = mx.value_and_grad(scaled_and_loss, argnums=wanted)(
                targets_S[part], hidden_SD[part], *weights
            )
            grad_CD, *more = found if weights else [found]
            loss_sum = loss_sum + loss
            grads.append(grad_CD)
            of_weights = [total + grad for total, grad in zip(of_weights, more, strict=True)]
        return loss_sum, mx.concatenate(grads), *of_weights

    @loss_and_gradients.vjp
    def _(primals: Any, cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, ...]) -> Any:
        inputs = primals if isinstance(primals, (tuple, list)) else (primals,)
        found = tuple(
            (cotangents[0] * grad).astype(value.dtype)
            for value, grad in zip(inputs, outputs[1:], strict=True)
        )
        return found if len(found) > 1 else found[0]

    return cast(Callable[..., tuple[mx.array, ...]], loss_and_gradients)
