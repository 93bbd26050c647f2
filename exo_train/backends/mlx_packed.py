"""Quantised projections and embeddings in MLX: packed weights, made dense only while they are used.

Owns the two modules and their gradient at the input. Must not read files or know adapters.

On a GPU MLX's own kernels multiply with packed words. On a CPU theirs are 17 times slower than
the dense product (measured: 256 x 576 by 1536, MLX 0.32), and they know no NF4; so there a matrix
is dequantised in the forward and again in the backward, and is kept in neither.

Shapes: F input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from exo_train.models.packed import PackedMatrix, nf4_pairs


class _Packed(nn.Module):  # type: ignore[misc]
    """Words, scales and biases under the names that mlx_lm gives them.

    NF4 has no biases, but the two numbers of each byte: `pairs` (256, 2).
    """

    def __init__(self, matrix: PackedMatrix, *, dtype: mx.Dtype, fused: bool) -> None:
        super().__init__()
        self.weight = mx.array(matrix.words_RW)
        self.scales = mx.array(matrix.scales_RG).astype(dtype)
        self.bits, self.group_size = matrix.packing.bits, matrix.packing.group_size
        self.is_nf4, self.fused = matrix.biases_RG is None, fused
        if matrix.biases_RG is None:
            self.pairs = mx.array(nf4_pairs()).astype(dtype)
        else:
            self.biases = mx.array(matrix.biases_RG).astype(dtype)
        self.freeze()

    def dense(self, after: mx.array | None = None) -> mx.array:
        """Give the matrix (O, F), made no earlier than `after` is known."""
        scales = self.scales if after is None else mx.depends([self.scales], [after])[0]
        if self.is_nf4:
            numbers: mx.array = self.pairs[self.weight.view(mx.uint8)].reshape(*scales.shape, -1)
            numbers = numbers * scales[..., None]
            return numbers.reshape(scales.shape[0], -1)
        dense_OF: mx.array = mx.dequantize(
            self.weight, scales, self.biases, group_size=self.group_size, bits=self.bits
        )
        return dense_OF

    def product(self, x: mx.array) -> mx.array:
        """Give x (..., F) times the matrix, (..., O)."""
        if self.fused and not self.is_nf4:
            result: mx.array = mx.quantized_matmul(
                x,
                self.weight,
                self.scales,
                self.biases,
                transpose=True,
                group_size=self.group_size,
                bits=self.bits,
            )
            return result
        return _product(self)(x)


class PackedLinear(_Packed):
    """A frozen projection; `bias` is set by whoever loads it, where the model has one."""

    def __call__(self, x: mx.array) -> mx.array:
        y = self.product(x)
        return y + self.bias if "bias" in self else y


class PackedEmbedding(_Packed):
    """A frozen embedding, which is the head too where the two are tied."""

    def __call__(self, tokens: mx.array) -> mx.array:
        rows: mx.array = mx.dequantize(
            self.weight[tokens],
            self.scales[tokens],
            self.biases[tokens],
            group_size=self.group_size,
            bits=self.bits,
        )
        return rows

    def as_linear(self, x: mx.array) -> mx.array:
        return self.product(x)


def _product(packed: _Packed) -> Callable[[mx.array], mx.array]:
    """Give the product with a gradient that dequantises again.

    MLX orders a lazy graph as it likes: without dependencies it makes all matrices of a stage
    at once (measured: 235 MB for 12 layers of 17 MB, 73 MB with them).
    """

    @mx.custom_function
    def product(x: mx.array) -> mx.array:
        return x @ packed.dense(after=x).T

    @product.vjp
    def _(primals: Any, cotangent: mx.array, output: Any) -> mx.array:
        return cotangent @ packed.dense(after=cotangent)

    return cast(Callable[[mx.array], mx.array], product)
