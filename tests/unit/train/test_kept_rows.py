"""The rows that a run keeps: the same ones come back, or a sentence says why not."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from exo_train.agent.run_data import fingerprint
from exo_train.errors import DataError
from exo_train.train.examples import Example
from exo_train.train.kept_rows import ROWS_FILE, read_rows, write_rows

TRAIN = (
    *(
        Example(tokens=(7, n, 9, 31), supervised=(False, False, True, True), where=f"line {n}")
        for n in range(1, 6)
    ),
    Example(tokens=(3, 4), supervised=(False, True), where="line 6"),
)
HELD_OUT = (Example(tokens=(1, 2, 3), supervised=(False, True, True), where="valid line 1"),)


def content(examples: tuple[Example, ...]) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    return [(example.tokens, example.supervised) for example in examples]


@pytest.mark.parametrize("held_out", [HELD_OUT, ()], ids=["held out", "none held out"])
def test_all_rows_come_back_in_their_order(tmp_path: Path, held_out: tuple[Example, ...]) -> None:
    run_dir = tmp_path / "dônnées é 数据"
    run_dir.mkdir()
    write_rows(run_dir, train=TRAIN, held_out=held_out)
    train_again, held_out_again = read_rows(run_dir, vocab_size=32)
    assert content(train_again) == content(TRAIN)
    assert content(held_out_again) == content(held_out)
    again, before = fingerprint(train_again, held_out_again), fingerprint(TRAIN, held_out)
    assert again == before, "so that a resumed run takes them"
    assert train_again[5].where == "rows.safetensors train row 6"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)


def replace_by_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"train.tokens": [1]}))


def take_a_part_away(path: Path) -> None:
    arrays = load(path.read_bytes())
    del arrays["held_out.tokens"]
    path.write_bytes(save(arrays))


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [truncate, flip, replace_by_pickle, take_a_part_away, remove])
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    damage(write_rows(tmp_path, train=TRAIN, held_out=HELD_OUT))
    with pytest.raises(DataError, match=rf"{ROWS_FILE} (is damaged|cannot be read)"):
        read_rows(tmp_path, vocab_size=32)


def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    """On a GPU they would be an illegal access in the middle of a step."""
    write_rows(tmp_path, train=TRAIN, held_out=HELD_OUT)
    with pytest.raises(DataError, match="token ids beyond the model's 31"):
        read_rows(tmp_path, vocab_size=31)
    write_rows(
        tmp_path, train=(Example(tokens=(-1, 2), supervised=(False, True), where=""),), held_out=()
    )
    with pytest.raises(DataError, match="token ids beyond"):
        read_rows(tmp_path, vocab_size=32)


def test_rows_longer_than_what_is_there_are_refused(tmp_path: Path) -> None:
    """The digest is right: whoever made the file made it so."""
    from exo_train.train import kept_rows

    arrays = load(write_rows(tmp_path, train=TRAIN, held_out=()).read_bytes())
    arrays["train.lengths"] = np.array([10**6] * 6, np.int32)
    del arrays["sha256"]
    arrays["sha256"] = kept_rows._digest(arrays)
    (tmp_path / ROWS_FILE).write_bytes(save(arrays))
    with pytest.raises(DataError, match="do not fill its 22 tokens"):
        read_rows(tmp_path, vocab_size=32)
