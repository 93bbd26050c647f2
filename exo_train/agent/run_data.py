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
from exo_train.train.batches import plan_batches
from exo_train.train.chat import EncodedRows, encode_rows
from exo_train.train.data_set import DataSet, read_data
from exo_train.train.examples import Example
from exo_train.train.loop import Data
from exo_train.train.random_order import repeat_items, split_validation
from exo_train.train.rows import Row
from exo_train.train.templates import use_template


def rows_of_run(config: TrainConfig) -> DataSet:
    """Read the rows that a run's options name, as they say."""
    return read_data(
        config.data,
        columns=config.columns,
        on_bad_row=config.on_bad_row,
        objective=config.objective,
    )


def encode_data(
    files: DataSet,
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
    use_template(tokenizer, config.chat_template)
    rows, held_out_rows = parted_rows(files, config)

    def encode(part: Sequence[Row]) -> EncodedRows:
        encoded = encode_rows(
            part,
            tokenizer,
            max_seq_length=config.max_seq_length,
            vocab_size=spec.vocab_size,
            encoding=config.encoding,
        )
        for note in encoded.notes:
            on_note(note)
        return encoded

    train = encode(rows).examples
    held_out = encode(held_out_rows).examples if held_out_rows else ()
    batches = plan_batches(train, config)
    for note in batches.notes:
        on_note(note)
    return Data(batches=batches, held_out=held_out)


def parted_rows(files: DataSet, config: TrainConfig) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Give the rows of an epoch and those held out: held out first, so that no weight doubles a
    row into both."""
    rows = [(index, row) for index, file in enumerate(files.train) for row in file.rows]
    held_out = files.valid_rows
    num_held_out = config.val_rows
    if config.val_split:
        num_held_out = max(1, round(config.val_split * len(rows)))
    if num_held_out and not held_out:
        left, taken = split_validation(rows, val_rows=num_held_out, seed=config.seed)
        rows, held_out = list(left), tuple(row for _, row in taken)
    return tuple(
        row
        for index, file in enumerate(files.train)
        for row in repeat_items(
            [row for place, row in rows if place == index],
            times=file.weight,
            seed=config.seed,
            source=index,
        )
    ), held_out


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
