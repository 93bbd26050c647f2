"""Tensors of a model by their Hugging Face names, wherever they lie.

Owns the value types and the `TensorSource` protocol. Must not open a socket: the source that
fetches from another device lives in `transport`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from exo_train.wire.tensor import Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One stored tensor: how it is encoded and what it decodes to.

    `name` has the global layer index, e.g. `model.layers.7.self_attn.q_proj.weight`.
    `encoding` is a safetensors dtype ("F32", "F16", "BF16"), "GGUF:<type>" (e.g. "GGUF:Q4_1"), or
    one of the packed ones that `decode` has.
    `shape` is the decoded shape. `num_bytes` counts the encoded bytes.
    `rope_heads` > 0 marks rows stored in GGUF's permuted order for that many heads.
    """

    name: str
    encoding: str
    shape: tuple[int, ...]
    num_bytes: int
    rope_heads: int = 0


class TensorSource(Protocol):
    """Gives encoded tensors by name; `decode` in this package turns them into numbers."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors of the model that this source can give."""
        ...

    def read(self, name: str) -> Bytes:
        """Give the encoded bytes; raises ModelError when they cannot be had or are damaged."""
        ...
