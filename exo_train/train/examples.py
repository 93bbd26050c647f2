"""What a run trains on: one sequence of token ids with a mask of what is learnt.

Owns the type and how it is shown to people. Must not know rows, templates or batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

SAMPLE_TOKENS = 60
# Around what is learnt where a sample is shown as plain text.
LEARNT_MARKS = ("«", "»")


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One token sequence; `supervised[t]` means: learn to predict `tokens[t]` (never t = 0)."""

    tokens: tuple[int, ...]
    supervised: tuple[bool, ...]
    where: str

    @property
    def num_supervised_tokens(self) -> int:
        return sum(self.supervised)


def stretches(
    example: Example, *, start: int = 0, end: int | None = None
) -> Iterator[tuple[bool, tuple[int, ...]]]:
    """Give (is learnt, ids) for each longest stretch of one kind in `tokens[start:end]`."""
    pairs = zip(example.supervised[start:end], example.tokens[start:end], strict=True)
    for supervised, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
        yield supervised, tuple(token for _, token in group)


def marked_sample(example: Example, decode: Callable[[Sequence[int]], str]) -> str:
    """Show some `SAMPLE_TOKENS` tokens around the first one that is learnt, marked where it is."""
    learnt_at = example.supervised.index(True) if any(example.supervised) else 0
    start = max(0, learnt_at - SAMPLE_TOKENS * 2 // 3)
    end = start + SAMPLE_TOKENS
    opening, closing = LEARNT_MARKS
    shown = "".join(
        f"{opening}{decode(ids)}{closing}" if supervised else decode(ids)
        for supervised, ids in stretches(example, start=start, end=end)
    )
    return ("…" if start else "") + shown + ("…" if end < len(example.tokens) else "")
