"""A run's data: from the file the user named to steps, before any model loads.

Owns the order of the checks: rows first (seconds), then the tokenizer, then the lengths.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from exo_train.config import TrainConfig
from exo_train.models.spec import ModelSpec
from exo_train.models.tokenizer import load_tokenizer
from exo_train.train.batches import BatchPlan, split_validation
from exo_train.train.chat import EncodedRows, Example, encode_rows
from exo_train.train.loop import Data
from exo_train.train.rows import DataFiles, Row


def encode_data(
    files: DataFiles,
    config: TrainConfig,
    *,
    model_path: Path,
    spec: ModelSpec,
    on_note: Callable[[str], None],
) -> Data:
    """Tokenise and mask all rows; what was cut or left out is said."""
    for note in files.notes:
        on_note(note)
    tokenizer = load_tokenizer(model_path)
    rows, held_out_rows = files.train.rows, files.valid.rows if files.valid else ()
    if not held_out_rows and config.val_rows:
        rows, held_out_rows = split_validation(rows, val_rows=config.val_rows, seed=config.seed)

    def encode(part: Sequence[Row]) -> EncodedRows:
        encoded = encode_rows(
            part,
            tokenizer,
            max_seq_length=config.max_seq_length,
            vocab_size=spec.vocab_size,
        )
        for note in encoded.notes:
            on_note(note)
        return encoded

    train = encode(rows).examples
    held_out = encode(held_out_rows).examples if held_out_rows else ()
    batches = BatchPlan(examples=train, batch_size=config.batch_size, seed=config.seed)
    for note in batches.notes:
        on_note(note)
    return Data(batches=batches, held_out=held_out)


def fingerprint(train: Sequence[Example], held_out: Sequence[Example]) -> str:
    """Digest ids and masks: a resumed run must see the same rows, and measure itself by the same.

    Held-out rows decide which checkpoint is the best one.
    """
    digest = hashlib.sha256()
    for part, examples in (("train", train), ("held out", held_out)):
        digest.update(f"{len(examples)} {part}".encode())
        for example in examples:
            digest.update(repr((example.tokens, example.supervised)).encode())
    return digest.hexdigest()
