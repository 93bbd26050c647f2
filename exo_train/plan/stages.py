"""A stage: the range of layers on one rank. Pure value type."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """Decoder layers [start, end); `head` includes the final norm."""

    start: int
    end: int
    embedding: bool
    head: bool

    @property
    def num_layers(self) -> int:
        return self.end - self.start

    @property
    def layers(self) -> range:
        return range(self.start, self.end)
