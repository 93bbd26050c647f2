"""Quantised projections and embeddings in PyTorch: packed weights, made dense block by block.

Owns the two modules and their gradient at the input, which dequantises again: no dense weight
outlives the product it is made for. Must not read files or know adapters.

Shapes: F input features, O output features, G groups of a row, N numbers of chosen rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from exo_train.models.packed import PackedMatrix, nf4_pairs
from exo_train.plan.memory import DENSE_BLOCK_VALUES


class _Packed(torch.nn.Module):
    """`codes` are bytes (O, F * bits / 8); of 4 bits the even column lies below the odd one.

    NF4 has no biases, but the two numbers of each byte: `pairs` (256, 2).
    """

    codes: torch.Tensor
    scales: torch.Tensor
    biases: torch.Tensor | None
    pairs: torch.Tensor | None

    def __init__(self, matrix: PackedMatrix, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.bits = matrix.packing.bits
        self.out_features, self.in_features = matrix.shape
        codes = np.ascontiguousarray(matrix.words_RW).view(np.uint8)
        self.register_buffer("codes", _copied(codes).to(device))
        self.register_buffer("scales", _copied(matrix.scales_RG).to(device, dtype))
        self.register_buffer("biases", None)
        self.register_buffer("pairs", None)
        if matrix.biases_RG is None:
            self.pairs = _copied(nf4_pairs()).to(device, dtype)
        else:
            self.biases = _copied(matrix.biases_RG).to(device, dtype)

    def dense(self, rows: slice | torch.Tensor = slice(None)) -> torch.Tensor:
        """Give rows of the matrix (N, F) in the dtype of the scales."""
        codes, scales = self.codes[rows], self.scales[rows].unsqueeze(-1)
        if self.pairs is not None:
            pairs = torch.nn.functional.embedding(codes.int(), self.pairs)
            return pairs.view(*scales.shape[:2], -1).mul_(scales).view(-1, self.in_features)
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], dim=-1)
        assert self.biases is not None
        biases = self.biases[rows].unsqueeze(-1)
        codes = codes.view(*scales.shape[:2], -1)
        if scales.dtype is torch.float32:  # a third faster than the one below, on a CPU
            numbers = (codes * scales).add_(biases)
        else:  # rounded once
            numbers = torch.addcmul(biases, codes.to(scales.dtype), scales)
        return numbers.view(-1, self.in_features)

    def blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the matrix in blocks of rows that hold a bounded number of values."""
        size = max(1, DENSE_BLOCK_VALUES // self.in_features)
        for start in range(0, self.out_features, size):
            rows = slice(start, start + size)
            yield rows, self.dense(rows)


class PackedLinear(_Packed):
    """A frozen projection; `bias` is None, or set by whoever loads it."""

    bias: torch.nn.Parameter | None

    def __init__(self, matrix: PackedMatrix, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(matrix, device=device, dtype=dtype)
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias


class PackedEmbedding(_Packed):
    """A frozen embedding."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.dense(tokens.flatten()).view(*tokens.shape, self.in_features)


class TiedHead(torch.nn.Module):
    """The head of a model that ties it to its embedding, by the embedding's own weights."""

    def __init__(self, embedding: PackedEmbedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Product.apply(x, self.embedding)  # type: ignore[no-untyped-call]
        return y


class _Product(torch.autograd.Function):
    """x (..., F) times the matrix: (..., O)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: _Packed) -> torch.Tensor:
        ctx.packed = packed
        parts = [x @ dense_NF.T for _, dense_NF in packed.blocks()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None
        (grad,) = grads
        parts = (grad[..., rows] @ dense_NF for rows, dense_NF in ctx.packed.blocks())
        total = next(parts)
        for part in parts:
            total += part
        return total, None


def _copied(array: np.ndarray) -> torch.Tensor:
    """Copy: arrays over a file's bytes are read-only, which PyTorch does not take."""
    return torch.from_numpy(np.array(array))
