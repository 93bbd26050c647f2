"""What becomes of sequences above the length limit: cut, left out, split into windows, refused.

Owns the four policies and their counts. Must not know rows or templates: a sequence that is
learnt from its second token on is plain text, every other one has a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from exo_train.errors import DataError
from exo_train.train.examples import Example


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Sequences within the limit; the counts are of sequences as they were before.

    `num_long` were above the limit, `num_cut_answers` are cut within what is learnt, `num_left_out`
    are gone (as the policy is, or as nothing of them is learnt within the limit).
    """

    examples: tuple[Example, ...]
    num_long: int
    num_cut_answers: int
    num_left_out: int
    notes: tuple[str, ...]


def fit_lengths(examples: Sequence[Example], *, max_seq_length: int, on_long: str) -> Fitted:
    """Apply one of `ON_LONG` of config; raises DataError for "error" and a sequence too long."""
    long = [example for example in examples if len(example.tokens) > max_seq_length]
    if long and on_long == "error":
        others = f" ({len(long) - 1} more are too long)" if len(long) > 1 else ""
        raise DataError(
            f"{long[0].where}: the row has {len(long[0].tokens)} tokens, and 'max_seq_length' is "
            f"{max_seq_length}{others}; raise 'max_seq_length', shorten the row, or use --on-long "
            "truncate, drop or split"
        )
    fitted: list[Example] = []
    counts = _Counts()
    for example in examples:
        parts: tuple[Example, ...] = (example,)
        if len(example.tokens) > max_seq_length:
            parts = tuple(_POLICIES[on_long](example, max_seq_length, counts))
            counts.dropped += not parts
        learnt = [part for part in parts if part.num_supervised_tokens]
        if parts and not learnt:
            if example.num_supervised_tokens:
                counts.learn_nothing_within += 1
            else:
                counts.learn_nothing += 1
        fitted += learnt
    longest = max((len(example.tokens) for example in long), default=0)
    return Fitted(
        examples=tuple(fitted),
        num_long=len(long),
        num_cut_answers=counts.cut_answers,
        num_left_out=counts.dropped + counts.learn_nothing_within + counts.learn_nothing,
        notes=tuple(counts.sentences(len(long), longest, len(examples), max_seq_length)),
    )


@dataclass(slots=True)
class _Counts:
    cut: int = 0
    cut_answers: int = 0
    dropped: int = 0
    split: int = 0
    windows: int = 0
    learn_nothing: int = 0
    learn_nothing_within: int = 0

    def sentences(self, long: int, longest: int, num_all: int, limit: int) -> Iterator[str]:
        if long:
            fates = [
                words
                for count, words in (
                    (self.dropped, f"{self.dropped} are left out"),
                    (self.split, f"{self.split} texts are split into {self.windows} windows"),
                    (
                        self.cut,
                        f"{self.cut} are cut at the end, {self.cut_answers} of them in an answer",
                    ),
                )
                if count
            ]
            yield (
                f"{long} of {num_all} sequences are longer than {limit} tokens (the longest: "
                f"{longest}): {', '.join(fates)}"
            )
        if self.split and self.cut:
            yield "sequences with a prompt cannot be split: an answer needs its prompt before it"
        if self.learn_nothing_within:
            yield (
                f"{self.learn_nothing_within} of {num_all} sequences have nothing to learn within "
                f"{limit} tokens and are left out; raise 'max_seq_length' to train on them"
            )
        if self.learn_nothing:
            yield f"{self.learn_nothing} of {num_all} sequences learn nothing and are left out"


def _truncate(example: Example, limit: int, counts: _Counts) -> Iterator[Example]:
    """Cut at the end. No EOS in place of what is gone: the model would learn to stop there."""
    counts.cut += 1
    counts.cut_answers += example.supervised[limit - 1] and example.supervised[limit]
    yield replace(example, tokens=example.tokens[:limit], supervised=example.supervised[:limit])


def _drop(example: Example, limit: int, counts: _Counts) -> Iterator[Example]:
    yield from ()


def _split(example: Example, limit: int, counts: _Counts) -> Iterator[Example]:
    """Cut a text into windows that overlap by one token, which is context in the later one.

    So each token but the text's first is learnt exactly once. BOS is in the first window and EOS
    in the last one only, as they are in the text.
    """
    if limit < 2 or not all(example.supervised[1:]):
        yield from _truncate(example, limit, counts)
        return
    counts.split += 1
    for start in range(0, len(example.tokens) - 1, limit - 1):
        counts.windows += 1
        tokens = example.tokens[start : start + limit]
        yield Example(
            tokens=tokens,
            supervised=(False,) + (True,) * (len(tokens) - 1),
            where=f"{example.where}, from token {start + 1} on",
        )


_POLICIES: dict[str, Callable[[Example, int, _Counts], Iterator[Example]]] = {
    "truncate": _truncate,
    "drop": _drop,
    "split": _split,
}
