"""Loss of the last stage in PyTorch, a bounded number of tokens at a time.

Nothing comes after the loss, so the gradients at the head's input and of its weight are made chunk
by chunk in the forward, and no logits live until the backward. Must not touch the layers' graph.

Shapes: B sequences, T positions, N = B*T, D hidden size, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from exo_train.backends.base import HEAD_CHUNK_TOKENS

Head = Any  # a module from hidden states to logits; a trained one has its `weight`


def head_loss(
    head: Head, hidden_BTD: torch.Tensor, targets_BT: np.ndarray, mask_BT: np.ndarray
) -> float:
    """Give the cross-entropy (nats) summed over supervised positions, in float32."""
    with torch.no_grad():
        return sum(
            float(_cross_entropy(head, hidden_CD, targets_C))
            for _, hidden_CD, targets_C in _chunks(hidden_BTD, targets_BT, mask_BT)
        )


def head_loss_and_gradient(
    head: Head,
    hidden_BTD: torch.Tensor,
    targets_BT: np.ndarray,
    mask_BT: np.ndarray,
    *,
    loss_scale: float,
    label_smoothing: float = 0.0,
    weight_grad: torch.Tensor | None = None,
) -> tuple[float, torch.Tensor]:
    """Give the summed loss, and the gradient of loss * `loss_scale` at `hidden_BTD`.

    That of the head's weight is added to `weight_grad`, where it is trained.

    Smoothing s makes a target 1 - s of itself and s of all V alike (Szegedy et al. 2015,
    arXiv:1512.00567, section 7).
    """
    loss_sum = 0.0
    hidden_BTD = hidden_BTD.detach()
    grad_BTD = torch.zeros_like(hidden_BTD)
    grad_ND = grad_BTD.view(-1, grad_BTD.shape[-1])
    for rows_C, hidden_CD, targets_C in _chunks(hidden_BTD, targets_BT, mask_BT):
        hidden_CD.requires_grad_()
        with torch.enable_grad():
            loss = _cross_entropy(head, hidden_CD, targets_C, label_smoothing)
        wanted = [hidden_CD] if weight_grad is None else [hidden_CD, head.weight]
        grad_ND[rows_C], *of_weight = torch.autograd.grad(loss * loss_scale, wanted)
        if weight_grad is not None:
            weight_grad += of_weight[0]
        loss_sum += float(loss.detach())
    return loss_sum, grad_BTD


def head_log_probs(
    head: Head, hidden_BTD: torch.Tensor, targets_BT: np.ndarray, mask_BT: np.ndarray
) -> np.ndarray:
    """Give the log-probability (nats) of each supervised position, in their order."""
    with torch.no_grad():
        parts = [
            -_cross_entropies(head, hidden_CD, targets_C)
            for _, hidden_CD, targets_C in _chunks(hidden_BTD, targets_BT, mask_BT)
        ]
    return torch.cat(parts).cpu().numpy()


def head_log_probs_and_gradients(
    head: Head, hidden_BTD: torch.Tensor, targets_BT: np.ndarray, mask_BT: np.ndarray
) -> tuple[np.ndarray, torch.Tensor]:
    """Give the same, and at `hidden_BTD` the gradient of each position's own.

    What a loss makes of them is known only when all are there; its slope is a factor of a row.
    """
    parts = []
    hidden_BTD = hidden_BTD.detach()
    grad_BTD = torch.zeros_like(hidden_BTD)
    grad_ND = grad_BTD.view(-1, grad_BTD.shape[-1])
    for rows_C, hidden_CD, targets_C in _chunks(hidden_BTD, targets_BT, mask_BT):
        hidden_CD.requires_grad_()
        with torch.enable_grad():
            log_probs_C = -_cross_entropies(head, hidden_CD, targets_C)
            (grad_CD,) = torch.autograd.grad(log_probs_C.sum(), hidden_CD)
        grad_ND[rows_C] = grad_CD
        parts.append(log_probs_C.detach())
    return torch.cat(parts).cpu().numpy(), grad_BTD


def _cross_entropies(head: Head, hidden_CD: torch.Tensor, targets_C: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(head(hidden_CD).float(), targets_C, reduction="none")


def _cross_entropy(
    head: Head, hidden_CD: torch.Tensor, targets_C: torch.Tensor, label_smoothing: float = 0.0
) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(
        head(hidden_CD).float(), targets_C, reduction="sum", label_smoothing=label_smoothing
    )


def _chunks(
    hidden_BTD: torch.Tensor, targets_BT: np.ndarray, mask_BT: np.ndarray
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield the places, inputs and targets of supervised positions; nothing when there are none."""
    hidden_ND = hidden_BTD.flatten(0, 1)
    rows = np.flatnonzero(mask_BT)
    targets = targets_BT.reshape(-1)[rows].astype(np.int64)
    for start in range(0, len(rows), HEAD_CHUNK_TOKENS):
        part = slice(start, start + HEAD_CHUNK_TOKENS)
        rows_C = torch.from_numpy(rows[part]).to(hidden_ND.device)
        yield rows_C, hidden_ND[rows_C], torch.from_numpy(targets[part]).to(hidden_ND.device)
