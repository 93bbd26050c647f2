"""Choose tokens from logits, one at a time. Owns the loop both backends generate with. NumPy only.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np


def generate_tokens(
    next_logits_V: Callable[[list[int]], np.ndarray],
    tokens: list[int],
    *,
    max_tokens: int,
    temperature: float,
    seed: int,
    stop_ids: set[int],
) -> Iterator[int]:
    """Yield up to `max_tokens` ids; a stop id ends it and is not yielded.

    `next_logits_V` is given the tokens it has not seen yet. Temperature 0 is greedy.
    """
    rng = np.random.default_rng(seed)
    unseen = tokens
    for _ in range(max_tokens):
        token = choose_token(next_logits_V(unseen), temperature=temperature, rng=rng)
        if token in stop_ids:
            return
        yield token
        unseen = [token]


def choose_token(logits_V: np.ndarray, *, temperature: float, rng: np.random.Generator) -> int:
    """Take the largest logit, or draw from softmax(logits / temperature) by Gumbel's trick."""
    if temperature > 0:
        logits_V = logits_V / temperature + rng.gumbel(size=logits_V.shape)
    return int(np.argmax(logits_V))
