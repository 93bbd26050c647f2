"""What becomes of preference pairs above the length limit. Owns what is cut, and the counts.

The answers of a pair stay whole, and stay together: the log-probability of a part of an answer is
not the answer's, and a pair is nothing without either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from exo_train.errors import DataError
from exo_train.train.examples import Example
from exo_train.train.lengths import Fitted


def fit_pairs(examples: Sequence[Example], *, max_seq_length: int, on_long: str) -> Fitted:
    """Apply one of `ON_LONG` of config to pairs, chosen and rejected in turns; counts are of pairs.

    Cut is the prompt, of both answers alike, behind its first token (BOS, where there is one) until
    the longer one fits; where that is not enough the pair is left out. A pair cannot be split, so
    "split" cuts, too. Raises DataError for "error" and a pair too long.
    """
    pairs = list(zip(examples[::2], examples[1::2], strict=True))
    lengths = [max(len(example.tokens) for example in pair) for pair in pairs]
    long = [length for length in lengths if length > max_seq_length]
    if long and on_long == "error":
        pair = next(p for p, n in zip(pairs, lengths, strict=True) if n > max_seq_length)
        others = f" ({len(long) - 1} more are too long)" if len(long) > 1 else ""
        raise DataError(
            f"{pair[0].where}: an answer of the pair has {long[0]} tokens with its prompt, and "
            f"'max_seq_length' is {max_seq_length}{others}; raise 'max_seq_length', shorten the "
            "row, or use --on-long truncate or drop"
        )
    counts = _Counts(num_pairs=len(pairs), num_long=len(long))
    fitted: list[Example] = []
    for pair, length in zip(pairs, lengths, strict=True):
        if not all(example.num_supervised_tokens for example in pair):
            counts.learn_nothing += 1
        elif length <= max_seq_length:
            fitted += pair
        elif on_long == "drop":
            counts.dropped += 1
        elif all(_answer_start(example) - 1 >= length - max_seq_length for example in pair):
            counts.cut += 1
            fitted += [_cut(example, length - max_seq_length) for example in pair]
        else:
            counts.answers_too_long += 1
    return Fitted(
        examples=tuple(fitted),
        num_long=len(long),
        num_cut_answers=0,
        num_left_out=counts.dropped + counts.answers_too_long + counts.learn_nothing,
        notes=tuple(counts.sentences(max(long, default=0), max_seq_length)),
    )


def _answer_start(example: Example) -> int:
    return example.supervised.index(True)


def _cut(example: Example, num_tokens: int) -> Example:
    """Take tokens out of the prompt, behind its first one."""
    rest = 1 + num_tokens
    return replace(
        example,
        tokens=example.tokens[:1] + example.tokens[rest:],
        supervised=example.supervised[:1] + example.supervised[rest:],
    )


@dataclass(slots=True, kw_only=True)
class _Counts:
    num_pairs: int
    num_long: int
    cut: int = 0
    dropped: int = 0
    answers_too_long: int = 0
    learn_nothing: int = 0

    def sentences(self, longest: int, limit: int) -> Iterator[str]:
        if self.num_long:
            fates = [
                words
                for count, words in (
                    (self.cut, f"of {self.cut} the prompt is cut at its beginning"),
                    (self.dropped, f"{self.dropped} are left out"),
                    (
                        self.answers_too_long,
                        f"{self.answers_too_long} are left out, as an answer does not fit whole",
                    ),
                )
                if count
            ]
            yield (
                f"{self.num_long} of {self.num_pairs} pairs are longer than {limit} tokens (the "
                f"longest: {longest}): {', '.join(fates)}"
            )
        if self.learn_nothing:
            yield f"{self.learn_nothing} of {self.num_pairs} pairs learn nothing and are left out"
