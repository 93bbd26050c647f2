"""Reading data files: what is accepted, and what each refusal says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exo_train.errors import DataError
from exo_train.train.rows import (
    MAX_LINE_BYTES,
    ChatRow,
    CompletionRow,
    Message,
    RowFile,
    TextRow,
    read_data,
    read_rows,
)

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
CHAT = {"messages": [USER, ANSWER]}
TEXT = {"text": "café"}


def write(path: Path, *rows: Any) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_bytes("".join(line + "\n" for line in lines).encode("utf-8"))
    return path


def read(tmp_path: Path, *rows: Any) -> RowFile:
    return read_rows(write(tmp_path / "data.jsonl", *rows))


def refusal(tmp_path: Path, *rows: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(tmp_path, *rows)
    return str(caught.value)


def test_mixed_kinds_are_recognised_row_by_row(tmp_path: Path) -> None:
    completion = {"prompt": "2+2=", "completion": "4", "id": 7}
    found = read(tmp_path, CHAT, completion, TEXT, {"prompt": "unused", **CHAT})
    place = f"{tmp_path / 'data.jsonl'}, line"
    messages = (Message(role="user", content="Hi"), Message(role="assistant", content="Hello"))
    assert found.rows == (
        ChatRow(where=f"{place} 1", messages=messages),
        CompletionRow(where=f"{place} 2", prompt="2+2=", completion="4"),
        TextRow(where=f"{place} 3", text="café"),
        ChatRow(where=f"{place} 4", messages=messages),
    )
    assert found.kind_counts == {"messages": 2, "prompt/completion": 1, "text": 1}


@pytest.mark.parametrize(
    "data",
    [
        b'\xef\xbb\xbf{"text": "caf\xc3\xa9"}\n{"text": "b"}\n',
        b'{"text": "caf\xc3\xa9"}\r\n\r\n  \r\n{"text": "b"}\r\n',
        b'\n{"text": "caf\xc3\xa9"}\n\n{"text": "b"}',
        b'[{"text": "caf\xc3\xa9"},\n {"text": "b"}]\n\n',
        b'\xef\xbb\xbf\r\n[\r\n{"text": "caf\xc3\xa9"}, {"text": "b"}]',
    ],
    ids=["bom", "crlf", "blank-lines", "array", "bom-array"],
)
def test_saved_by_other_programs_reads_the_same(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "données é 数据.jsonl"
    path.write_bytes(data)
    assert [row.text for row in read_rows(path).rows if isinstance(row, TextRow)] == ["café", "b"]


def test_line_separator_inside_a_text_is_no_line_end(tmp_path: Path) -> None:
    (row,) = read(tmp_path, {"text": "a\u2028b\x85c"}).rows
    assert isinstance(row, TextRow)
    assert row.text == "a\u2028b\x85c"


def test_text_parts_are_joined(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    (row,) = read(tmp_path, {"messages": [{"role": "user", "content": parts}, ANSWER]}).rows
    assert isinstance(row, ChatRow)
    assert row.messages[0].content == "Hi there"


def test_sharegpt_speakers_are_mapped(tmp_path: Path) -> None:
    turns = [
        {"from": "system", "value": "S"},
        {"from": "hummany", "value": "A"},
        {"from": "GPT", "value": "B"},
        {"from": "User", "value": "C"},
        {"from": "bot", "value": "D"},
    ]
    (row,) = read(tmp_path, {"conversations": turns}).rows
    assert isinstance(row, ChatRow)
    assert [(m.role, m.content) for m in row.messages] == [
        ("system", "S"),
        ("user", "A"),
        ("assistant", "B"),
        ("user", "C"),
        ("assistant", "D"),
    ]


def chat(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"text": "half', "not valid JSON at column 10: Unterminated string starting"),
        ("[" * 50, "not valid JSON"),
        ('{"a":' * 100_000, "not valid JSON"),
        ('"hi"', 'a row must be a JSON object, got "hi"'),
        ({"text": 5}, "'text' must be text, got 5"),
        ({"text": True}, "'text' must be text, got true"),
        ({"prompt": None, "completion": "a"}, "'prompt' must be text, got null"),
        ({"txt": "a"}, "its keys are 'txt' (did you mean 'text'?)"),
        ({"prompt": "a", "answer": "b"}, "its keys are 'prompt', 'answer'"),
        ({}, "its keys are none"),
        ('{"text": "\\ud83d"}', "half of a surrogate pair"),
        ({"messages": "hi"}, "'messages' must be a list, got \"hi\""),
        (chat("hi"), 'message 1 must be a JSON object, got "hi"'),
        (
            chat({"role": "tool", "content": "x"}),
            'message 1 has the role "tool"; known roles: system, user, assistant',
        ),
        (chat({"content": "x"}), "message 1 has the role null"),
        (chat({"role": ["user"], "content": "x"}), 'message 1 has the role ["user"]'),
        (
            chat(USER, {"role": "assistant", "content": None}),
            "the content of assistant message 2 must be text, got null",
        ),
        (chat(USER, {"role": "assistant"}), "the content of assistant message 2 must be text"),
        (
            chat(USER, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}),
            "'tool_calls' is not supported",
        ),
        (chat(USER, {**ANSWER, "train": False}), "'train' is not supported"),
        (
            chat({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, ANSWER),
            "message 1 has a part of type \"image_url\"; only 'text' parts can be trained",
        ),
        (chat(ANSWER, USER), "the first message is the assistant's"),
        ({"conversations": [{"from": "martian", "value": "x"}]}, 'message 1 is from "martian"'),
    ],
)
def test_bad_row_is_named_with_line_reason_and_start(tmp_path: Path, row: Any, reason: str) -> None:
    message = refusal(tmp_path, CHAT, "", row)
    start = row if isinstance(row, str) else json.dumps(row)
    assert message.startswith(f"{tmp_path / 'data.jsonl'}, line 3: ")
    assert reason in message
    assert message.endswith(f"; it starts with {start[:60]!r}")


def test_all_bad_rows_are_counted_in_one_message(tmp_path: Path) -> None:
    message = refusal(tmp_path, {"text": 1}, CHAT, {"text": 2}, {"text": 3})
    assert "line 1: 'text' must be text, got 1" in message
    assert message.endswith("(2 more bad rows: line 3, line 4)")


def test_bad_byte_is_named_by_line_and_offset(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "ok"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"line 2: byte 0xe9 at offset 13 is not UTF-8"):
        read_rows(path)


@pytest.mark.parametrize("mark", ["utf-16-le", "utf-16-be"])
def test_utf16_is_named(tmp_path: Path, mark: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes('\ufeff{"text": "a"}'.encode(mark))
    with pytest.raises(DataError, match="UTF-16 text; save it as UTF-8"):
        read_rows(path)


def test_broken_array_names_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", '[{"text": "a"},', '{"text": }]')
    with pytest.raises(DataError, match=r"line 2: not valid JSON at column 10: Expecting value"):
        read_rows(path)


def test_bad_item_of_an_array_is_named(tmp_path: Path) -> None:
    assert "item 2: 'text' must be text, got 5" in refusal(tmp_path, '[{"text":"a"},{"text":5}]')


def test_overlong_line_is_refused_by_its_limit(tmp_path: Path) -> None:
    message = refusal(tmp_path, CHAT, {"text": "a" * MAX_LINE_BYTES})
    assert message.endswith("line 2 is longer than 16,777,216 bytes; split the row")


def test_empty_rows_are_skipped_and_counted(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        CHAT,
        {"text": " \n"},
        {"messages": []},
        chat(USER),
        chat(USER, {"role": "assistant", "content": ""}),
        {"prompt": "a", "completion": ""},
        {"text": ""},
    )
    assert len(found.rows) == 1
    assert found.notes == (
        f"{found.path}: 1 usable of 7 rows; skipped: 1 × an empty assistant message, "
        "1 × empty 'completion', 1 × empty 'messages', 2 × empty 'text', 1 × no assistant message",
    )


def test_nothing_usable_says_why(tmp_path: Path) -> None:
    assert "0 usable of 2 rows: 2 × empty 'text'" in refusal(tmp_path, {"text": ""}, {"text": " "})
    assert "0 usable of 0 rows, the file is empty" in refusal(tmp_path, "")


def test_directory_gives_train_and_valid(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", CHAT, TEXT)
    assert read_data(tmp_path).valid is None
    write(tmp_path / "valid.jsonl", TEXT)
    data = read_data(str(tmp_path))
    assert data.valid is not None
    assert (len(data.train.rows), len(data.valid.rows), data.notes) == (2, 1, ())


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"\xef\xbb\xbf", b"[]"])
def test_empty_validation_file_counts_as_absent(tmp_path: Path, content: bytes) -> None:
    write(tmp_path / "train.jsonl", CHAT)
    (tmp_path / "valid.jsonl").write_bytes(content)
    data = read_data(tmp_path)
    assert data.valid is None
    assert data.notes == (f"{tmp_path / 'valid.jsonl'} is empty: treated as absent",)


def test_mistyped_path_suggests_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "mydata").mkdir()
    write(tmp_path / "mydata" / "train.jsonl", CHAT)
    with pytest.raises(DataError) as caught:
        read_data(tmp_path / "mydata" / "trian.jsonl")
    assert str(caught.value).endswith(f"did you mean '{tmp_path / 'mydata' / 'train.jsonl'}'?")
    with pytest.raises(DataError) as caught:
        read_data(tmp_path / "mydta" / "train.jsonl")
    assert str(caught.value).endswith(f"did you mean '{tmp_path / 'mydata'}'?")


def test_relative_path_is_never_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    with pytest.raises(DataError, match="did you mean 'data'"):
        read_data("./dta")


def test_directory_without_training_rows_lists_what_it_has(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", CHAT)
    with pytest.raises(DataError, match=r"no train\.jsonl \(JSON files there: rows\.jsonl\)"):
        read_data(tmp_path)


def test_other_file_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"does not end in \.jsonl"):
        read_data(write(tmp_path / "data.csv", "a,b"))
