"""The head's gradients in fp16: the loss is scaled before they are made, on both backends."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
import torch

from exo_train.backends import mlx_head, torch_head

NUM_TOKENS, WIDTH, VOCABULARY = 1000, 8, 16
TARGETS = np.zeros((1, NUM_TOKENS), np.int64)
MASK = np.ones((1, NUM_TOKENS), bool)


@pytest.mark.parametrize(
    ("hidden_value", "weight_value", "loss_scale"),
    [(1.0, -2.5, 4096.0), (200.0, 0.0, 1 / NUM_TOKENS)],
    ids=["too small before it is scaled", "too large"],
)
def test_a_scale_is_in_time(hidden_value: float, weight_value: float, loss_scale: float) -> None:
    """All tokens but the target have exp(-20) of its probability, or as much as it."""
    hidden_BTD = np.full((1, NUM_TOKENS, WIDTH), hidden_value, np.float16)
    weight_VD = np.full((VOCABULARY, WIDTH), weight_value, np.float16)
    weight_VD[0] = 0.0

    def loss(hidden: mx.array, weight: mx.array) -> mx.array:
        return mlx_head.head_loss(
            lambda unused: unused, hidden, TARGETS, MASK, loss_scale=loss_scale, weight_VD=weight
        )

    found_loss, found = mx.value_and_grad(loss, argnums=(0, 1))(
        mx.array(hidden_BTD), mx.array(weight_VD)
    )
    head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.float16)
    head.weight = torch.nn.Parameter(torch.from_numpy(weight_VD))
    weight_grad = torch.zeros(VOCABULARY, WIDTH)
    expected_loss, expected = torch_head.head_loss_and_gradient(
        head,
        torch.from_numpy(hidden_BTD),
        TARGETS,
        MASK,
        loss_scale=loss_scale,
        weight_grad=weight_grad,
    )
    assert float(found_loss) == pytest.approx(expected_loss, rel=1e-3)
    assert np.isfinite(weight_grad.numpy()).all()
    assert (weight_grad.numpy()[1:] != 0).all()  # beside a target of 1 - 3e-8, in float32 of 1
    np.testing.assert_allclose(np.array(found[1]), weight_grad.numpy(), rtol=5e-3)
    np.testing.assert_allclose(np.array(found[0]), expected.numpy(), rtol=5e-3, atol=1e-6)
