"""Sequences above the length limit: each policy by ids, masks and counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from exo_train.encoding_config import ON_LONG, EncodingConfig
from exo_train.errors import DataError
from exo_train.train.chat import EncodedRows, encode_rows
from exo_train.train.examples import Example
from exo_train.train.lengths import Fitted, fit_lengths
from exo_train.train.rows import CompletionRow, Row, TextRow
from tests.tiny_models import write_tiny_tokenizer


def text(num_tokens: int) -> Example:
    return Example(
        tokens=tuple(range(num_tokens)),
        supervised=(False,) + (True,) * (num_tokens - 1),
        where="line 1",
    )


def answer(num_prompt: int, num_answer: int) -> Example:
    return Example(
        tokens=tuple(range(num_prompt + num_answer)),
        supervised=(False,) * num_prompt + (True,) * num_answer,
        where="line 2",
    )


def fit(on_long: str, *examples: Example, limit: int = 4) -> Fitted:
    return fit_lengths(examples, max_seq_length=limit, on_long=on_long)


@pytest.mark.parametrize("on_long", ON_LONG)
def test_what_is_not_too_long_stays_as_it_is(on_long: str) -> None:
    fitted = fit(on_long, text(4), answer(2, 2))
    assert fitted.examples == (text(4), answer(2, 2))
    assert (fitted.num_long, fitted.num_left_out, fitted.notes) == (0, 0, ())


def test_cut_at_the_end_without_an_end_that_is_not_there() -> None:
    fitted = fit("truncate", text(6), answer(3, 3), answer(4, 1), answer(2, 2))
    assert [example.tokens for example in fitted.examples] == [(0, 1, 2, 3)] * 3
    assert [example.supervised for example in fitted.examples] == [
        (False, True, True, True),
        (False, False, False, True),
        (False, False, True, True),
    ]
    assert (fitted.num_long, fitted.num_cut_answers, fitted.num_left_out) == (3, 2, 1)
    assert fitted.notes == (
        "3 of 4 sequences are longer than 4 tokens (the longest: 6): 3 are cut at the end, 2 of "
        "them in an answer",
        "1 of 4 sequences have nothing to learn within 4 tokens and are left out; raise "
        "'max_seq_length' to train on them",
    )


def test_left_out_and_counted() -> None:
    fitted = fit("drop", text(5), answer(2, 2), answer(9, 1))
    assert fitted.examples == (answer(2, 2),)
    assert (fitted.num_long, fitted.num_cut_answers, fitted.num_left_out) == (2, 0, 2)
    assert fitted.notes == (
        "2 of 3 sequences are longer than 4 tokens (the longest: 10): 2 are left out",
    )


def test_text_is_split_into_windows_that_begin_with_context() -> None:
    fitted = fit("split", text(9), answer(2, 4))
    windows = [(e.tokens, e.supervised, e.where) for e in fitted.examples]
    assert windows == [
        ((0, 1, 2, 3), (False, True, True, True), "line 1, from token 1 on"),
        ((3, 4, 5, 6), (False, True, True, True), "line 1, from token 4 on"),
        ((6, 7, 8), (False, True, True), "line 1, from token 7 on"),
        ((0, 1, 2, 3), (False, False, True, True), "line 2"),  # an answer needs its prompt
    ]
    assert (fitted.num_long, fitted.num_cut_answers, fitted.num_left_out) == (2, 1, 0)
    assert fitted.notes == (
        "2 of 2 sequences are longer than 4 tokens (the longest: 9): 1 texts are split into 3 "
        "windows, 1 are cut at the end, 1 of them in an answer",
        "sequences with a prompt cannot be split: an answer needs its prompt before it",
    )


@settings(max_examples=50, deadline=None)
@given(num_tokens=st.integers(2, 60), limit=st.integers(2, 20))
def test_each_token_of_a_split_text_is_learnt_once(num_tokens: int, limit: int) -> None:
    windows = fit("split", text(num_tokens), limit=limit).examples
    learnt = [
        token
        for window in windows
        for token, supervised in zip(window.tokens, window.supervised, strict=True)
        if supervised
    ]
    assert learnt == list(range(1, num_tokens))
    for window in windows:
        assert 2 <= len(window.tokens) <= limit
        assert not window.supervised[0]
        assert window.tokens == tuple(range(window.tokens[0], window.tokens[-1] + 1))


def test_first_row_that_is_too_long_is_named() -> None:
    with pytest.raises(DataError) as refused:
        fit("error", answer(2, 2), text(5), answer(2, 9))
    assert str(refused.value) == (
        "line 1: the row has 5 tokens, and 'max_seq_length' is 4 (1 more are too long); raise "
        "'max_seq_length', shorten the row, or use --on-long truncate, drop or split"
    )


def test_what_learns_nothing_at_all_is_no_matter_of_length() -> None:
    fitted = fit("truncate", answer(3, 0), answer(2, 2))
    assert fitted.examples == (answer(2, 2),)
    assert fitted.num_left_out == 1
    assert fitted.notes == ("1 of 2 sequences learn nothing and are left out",)


# From rows


def encode(path: Path, on_long: str, *rows: Row) -> tuple[PreTrainedTokenizerFast, EncodedRows]:
    write_tiny_tokenizer(path, add_bos=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    return tokenizer, encode_rows(
        rows,
        tokenizer,
        max_seq_length=64,
        vocab_size=320,
        encoding=EncodingConfig(on_long=on_long),
    )


LONG_TEXT = "".join(chr(97 + index % 26) for index in range(500))
SHORT = CompletionRow(where="line 8", prompt="a", completion="b")


def test_row_of_five_hundred_letters_with_each_policy(tmp_path: Path) -> None:
    row = TextRow(where="line 9", text=LONG_TEXT)
    tokenizer, cut = encode(tmp_path, "truncate", row)
    (example,) = cut.examples
    assert f"<s>{LONG_TEXT}".startswith(tokenizer.decode(example.tokens))
    assert (len(example.tokens), example.num_supervised_tokens) == (64, 63)
    assert tokenizer.eos_token_id not in example.tokens

    _, split = encode(tmp_path, "split", row)
    first, *_, last = split.examples
    whole = first.tokens + tuple(t for e in split.examples[1:] for t in e.tokens[1:])
    assert tokenizer.decode(whole) == f"<s>{LONG_TEXT}</s>"
    assert sum(e.num_supervised_tokens for e in split.examples) == len(whole) - 1
    assert last.tokens[-1] == tokenizer.eos_token_id
    assert [e.tokens.count(tokenizer.bos_token_id) for e in split.examples] == [
        1, *[0] * (len(split.examples) - 1)
    ]  # fmt: skip

    _, dropped = encode(tmp_path, "drop", row, SHORT)
    assert [e.where for e in dropped.examples] == ["line 8"]
    with pytest.raises(DataError, match=r"^line 9: the row has \d+ tokens"):
        encode(tmp_path, "error", SHORT, row)


def test_prompt_alone_above_the_limit_is_left_out_by_every_policy(tmp_path: Path) -> None:
    row = CompletionRow(where="line 9", prompt="x" * 220, completion="y")
    for on_long in ("truncate", "drop", "split"):
        _, encoded = encode(tmp_path, on_long, row, SHORT)
        assert [e.where for e in encoded.examples] == ["line 8"]
        assert encoded.num_left_out == 1
