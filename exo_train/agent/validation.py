"""`exo-train validate`: every row checked, and what a model's tokenizer makes of them.

Owns the counts and the sample. Nothing is trained; of the model only config and tokenizer are
needed. Must not draw.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from exo_train.cluster.home import Home
from exo_train.config import TrainConfig
from exo_train.errors import DataError
from exo_train.models.hub import resolve_config, resolve_tokenizer
from exo_train.models.spec import ModelSpec
from exo_train.models.tokenizer import load_tokenizer
from exo_train.train.chat import RowEncoder, check_vocabulary
from exo_train.train.data_set import BadRow, DataSet, RowFile, inspect_data
from exo_train.train.examples import Example, stretches
from exo_train.train.templates import use_template

SCHEMA = 1
PERCENTILES = (50, 90, 95, 99)
MAX_BAD = 1000  # listed one by one; all are counted
MAX_SAMPLE_TOKENS = 400


@dataclass(slots=True)
class _Tokens:
    """What is counted over all sequences, before any is cut."""

    lengths: list[int] = field(default_factory=list)
    supervised_tokens: int = 0
    num_longer: int = 0
    sample: Example | None = None

    def add(self, example: Example, *, max_seq_length: int) -> None:
        self.sample = self.sample or example
        self.lengths.append(len(example.tokens))
        self.supervised_tokens += example.num_supervised_tokens
        self.num_longer += len(example.tokens) > max_seq_length


def validate_report(home: Home, config: TrainConfig) -> dict[str, Any]:
    """Give what `validate --json` prints; token counts are None without a model.

    Raises DataError only for what cannot be read at all.
    """
    found = inspect_data(config.data, columns=config.columns)
    counted = None
    if config.model:
        found, counted = _encoded(home, config, found)
    bad = [row for file in found.files for row in file.bad]
    forms: Counter[str] = Counter()
    for file in found.files:
        forms.update(file.forms)
    return {
        "schema": SCHEMA,
        "data": config.data,
        "model": config.model or None,
        "rows": sum(file.num_found for file in found.files),
        "usable": sum(len(file.rows) for file in found.files),
        "num_bad": len(bad),
        "bad": [_bad_fields(row) for row in bad[:MAX_BAD]],
        "reasons": dict(Counter(row.reason for row in bad).most_common(MAX_BAD)),
        "formats": dict(forms),
        "duplicates": found.num_duplicates,
        "held_out_seen": found.num_held_out_seen,
        "files": _files(found),
        "notes": list(found.notes),
        "max_seq_length": config.max_seq_length,
        **_token_fields(counted),
    }


def _encoded(
    home: Home, config: TrainConfig, found: DataSet
) -> tuple[DataSet, dict[str, Any] | None]:
    """Encode all rows; those that the chat template refuses are bad, too."""
    spec = ModelSpec.from_config(
        resolve_config(config.model, cache_dir=home.cache), place=config.model
    )
    spec.validate_max_seq_length(config.max_seq_length)
    tokenizer = load_tokenizer(resolve_tokenizer(config.model, cache_dir=home.cache))
    use_template(tokenizer, config.chat_template)
    encoder = RowEncoder(tokenizer, config.encoding)
    encoder.check_template(row for file in found.files for row in file.rows)
    tokens = _Tokens()

    def checked(file: RowFile) -> RowFile:
        rows, bad = [], list(file.bad)
        for row in file.rows:
            try:
                examples = encoder.encode(row)
                check_vocabulary(examples, tokenizer, vocab_size=spec.vocab_size)
            except DataError as error:
                place = row.where.removeprefix(f"{file.place}, ")
                reason = str(error).removeprefix(row.where).lstrip(":, ")
                bad.append(BadRow(file=file.place, place=place, reason=reason, start=""))
                continue
            rows.append(row)
            for example in examples:
                tokens.add(example, max_seq_length=config.max_seq_length)
        return dataclasses.replace(file, rows=tuple(rows), bad=tuple(bad))

    train, valid, test = (
        tuple(checked(file) for file in files) for files in (found.train, found.valid, found.test)
    )
    found = dataclasses.replace(found, train=train, valid=valid, test=test)
    return found, _counts(tokens, tokenizer)


def _counts(tokens: _Tokens, tokenizer: Any) -> dict[str, Any] | None:
    if tokens.sample is None:
        return None
    lengths = sorted(tokens.lengths)
    return {
        "sequences": len(lengths),
        "tokens": sum(lengths),
        "supervised_tokens": tokens.supervised_tokens,
        "over_long": tokens.num_longer,
        "percentiles": {
            **{str(p): lengths[math.ceil(p / 100 * len(lengths)) - 1] for p in PERCENTILES},
            "max": lengths[-1],
        },
        "sample": {"where": tokens.sample.where, "parts": _parts(tokens.sample, tokenizer)},
    }


def _token_fields(counted: dict[str, Any] | None) -> dict[str, Any]:
    names = ("sequences", "tokens", "supervised_tokens", "over_long", "percentiles", "sample")
    return counted or dict.fromkeys(names)


def _parts(example: Example, tokenizer: Any) -> list[dict[str, Any]]:
    """Decode stretches that are learnt, or not, apart."""
    return [
        {"text": tokenizer.decode(ids), "supervised": supervised}
        for supervised, ids in stretches(example, end=MAX_SAMPLE_TOKENS)
    ]


def _bad_fields(row: BadRow) -> dict[str, Any]:
    return {"file": row.file, "line": row.line, "place": row.place, "reason": row.reason}


def _files(found: DataSet) -> list[dict[str, Any]]:
    def fields(split: str, files: Sequence[RowFile]) -> list[dict[str, Any]]:
        return [
            {
                "file": file.place,
                "split": split,
                "rows": file.num_found,
                "usable": len(file.rows),
                "weight": file.weight,
            }
            for file in files
        ]

    return [
        *fields("train", found.train),
        *fields("valid", found.valid),
        *fields("test", found.test),
    ]
