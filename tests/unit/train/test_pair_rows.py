"""Preference pairs as files have them: what each says, what is learnt, and every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exo_train.errors import DataError
from exo_train.models.tokenizer import load_tokenizer
from exo_train.train.chat import encode_rows
from exo_train.train.data_set import DataSet, inspect_data, read_data
from exo_train.train.examples import Example
from exo_train.train.rows import ChatRow, CompletionRow, PairRow
from exo_train.train.templates import use_template
from tests.tiny_models import write_tiny_tokenizer

ASK = {"role": "user", "content": "Is it late?"}
SYSTEM = {"role": "system", "content": "Be brief."}
GOOD = {"role": "assistant", "content": "Yes."}
BAD = {"role": "assistant", "content": "Who knows."}
AGAIN = {"role": "user", "content": "Sure?"}
TEXTS = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
WHOLE = {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}


def read(tmp_path: Path, *rows: Any, objective: str = "dpo", **how: Any) -> DataSet:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_data(str(path), objective=objective, **how)


def pair(tmp_path: Path, row: Any, **how: Any) -> PairRow:
    (file,) = read(tmp_path, row, **how).train
    (found,) = file.rows
    assert isinstance(found, PairRow)
    return found


def said(half: ChatRow | CompletionRow) -> list[tuple[str, str, bool]]:
    assert isinstance(half, ChatRow)
    return [(m.role, m.content, m.role == "assistant" and m.train) for m in half.messages]


def test_texts(tmp_path: Path) -> None:
    found = pair(tmp_path, TEXTS)
    where = f"{tmp_path / 'pairs.jsonl'}, line 1"
    assert found.chosen == CompletionRow(where=where, prompt="2+2=", completion="4")
    assert found.rejected == CompletionRow(where=where, prompt="2+2=", completion="5")
    assert (found.form, found.where) == ("prompt/chosen/rejected", where)


@pytest.mark.parametrize(
    "row",
    [
        WHOLE,
        {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "Is it late?", "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [ASK], "chosen": "Yes.", "rejected": "Who knows."},
        {"messages": [ASK], "chosen": GOOD, "rejected": BAD},
        {
            "conversations": [{"from": "human", "value": "Is it late?"}],
            "chosen": {"from": "gpt", "value": "Yes."},
            "rejected": {"from": "gpt", "value": "Who knows."},
        },
        # As published sets have it, with the prompt and one answer said once more.
        {"prompt": "Is it late?", "prompt_id": "7", "messages": [ASK, GOOD], **WHOLE},
    ],
    ids=lambda row: "+".join(row),
)
def test_ways_to_write_the_same_pair(row: dict[str, Any], tmp_path: Path) -> None:
    found = pair(tmp_path, row)
    assert said(found.chosen) == [("user", "Is it late?", False), ("assistant", "Yes.", True)]
    assert said(found.rejected) == [
        ("user", "Is it late?", False),
        ("assistant", "Who knows.", True),
    ]


def test_what_both_begin_with_is_the_prompt(tmp_path: Path) -> None:
    before = [SYSTEM, ASK, GOOD, AGAIN]
    found = pair(tmp_path, {"chosen": [*before, GOOD], "rejected": [*before, BAD, AGAIN, GOOD]})
    assert [learnt for *_, learnt in said(found.chosen)] == [False] * 4 + [True]
    assert [learnt for *_, learnt in said(found.rejected)] == [False] * 4 + [True, False, True]
    system = pair(tmp_path, {**WHOLE, "system": "Be brief."})
    assert said(system.chosen)[0][:2] == ("system", "Be brief.")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**TEXTS, "rejected": "4"}, "say the same"),
        ({"chosen": [ASK, GOOD], "rejected": [ASK, GOOD]}, "say the same"),
        ({"prompt": [ASK], "chosen": [GOOD], "rejected": [GOOD]}, "say the same"),
        ({**TEXTS, "rejected": " "}, "'rejected' is empty"),
        ({**TEXTS, "rejected": 5}, "'rejected' must be text or a list of messages, got 5"),
        ({"prompt": [ASK], "chosen": [GOOD], "rejected": []}, "'rejected' is empty after"),
        ({**WHOLE, "rejected": [ASK, {**BAD, "content": ""}]}, "'rejected' has an empty answer"),
        ({**WHOLE, "rejected": [ASK, {**BAD, "train": False}]}, "nothing of 'rejected' is to be"),
        ({**WHOLE, "rejected": [AGAIN, BAD]}, "begin with different messages"),
        (
            {"chosen": [SYSTEM, ASK, GOOD], "rejected": [SYSTEM, AGAIN, BAD]},
            "message 2 of 'chosen' is the user's; they must be answers to one prompt",
        ),
        ({"chosen": [ASK, GOOD], "rejected": [ASK]}, "'rejected' is empty after the prompt"),
        ({"prompt": "Other", **WHOLE}, "'prompt' is none of the messages"),
        ({"chosen": "4", "rejected": "5"}, "so the row needs 'prompt'"),
        ({**TEXTS, "system": "Be brief."}, "'system' belongs to a chat, and 'prompt' is a text"),
        ({"prompt": "2+2=", "chosen": "4"}, "needs 'rejected' beside 'chosen'"),
        ({"prompt": "2+2=", "rejected": "4"}, "needs 'chosen' beside 'rejected'"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "the first message is the assistant's"),
        (
            {"messages": [ASK, GOOD]},
            "dpo learns from preference pairs, and the row has no 'chosen'",
        ),
        ({"text": "x"}, "but 'text'; use --objective sft"),
    ],
    ids=str,
)
def test_bad_pairs_are_refused_with_their_place(
    row: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as refused:
        read(tmp_path, TEXTS, row)
    assert str(refused.value).startswith(f"{tmp_path / 'pairs.jsonl'}, line 2: ")
    assert reason in str(refused.value)
    (file,) = read(tmp_path, TEXTS, row, on_bad_row="drop").train
    assert (len(file.rows), len(file.bad)) == (1, 1)


def test_pairs_are_none_of_sft_s_rows(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"preference pair .* which sft cannot learn; train with --o"
    ):
        read(tmp_path, TEXTS, objective="sft")
    # Where a row has both, each objective takes its own.
    both = {"messages": [ASK, GOOD], **WHOLE}
    (file,) = read(tmp_path, both, objective="sft").train
    assert isinstance(file.rows[0], ChatRow)


def test_columns_and_counts(tmp_path: Path) -> None:
    row = {"question": "2+2=", "better": "4", "worse": "5"}
    columns = ("prompt=question", "chosen=better", "rejected=worse")
    assert pair(tmp_path, row, columns=columns) == pair(tmp_path, TEXTS)
    (path,) = tmp_path.glob("*.jsonl")
    path.write_text("\n".join(map(json.dumps, (TEXTS, TEXTS, WHOLE, {"text": "t"}))))
    found = inspect_data(str(path))
    (file,) = found.train
    assert file.forms == {"prompt/chosen/rejected": 2, "chosen/rejected": 1, "text": 1}
    assert found.num_duplicates == 1


def encoded(tmp_path: Path, *rows: Any, max_seq_length: int = 200) -> tuple[Example, ...]:
    write_tiny_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    use_template(tokenizer, "chatml")
    (file,) = read(tmp_path, *rows).train
    return encode_rows(file.rows, tokenizer, max_seq_length=max_seq_length, vocab_size=320).examples


def test_both_halves_have_one_prompt_and_only_answers_are_learnt(tmp_path: Path) -> None:
    for row in (TEXTS, {"chosen": [SYSTEM, ASK, GOOD], "rejected": [SYSTEM, ASK, BAD]}):
        chosen, rejected = encoded(tmp_path, row)
        starts = [example.supervised.index(True) for example in (chosen, rejected)]
        assert starts[0] == starts[1] > 1
        assert chosen.tokens[: starts[0]] == rejected.tokens[: starts[0]]
        assert chosen.tokens != rejected.tokens
        assert chosen.num_supervised_tokens < len(chosen.tokens) - 1


def test_answers_that_become_the_same_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 1: 'chosen' and 'rejected' are the same tokens"):
        encoded(tmp_path, {**TEXTS, "chosen": "4", "rejected": "4</s>"})
