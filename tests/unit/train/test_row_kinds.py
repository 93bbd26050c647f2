"""Rows: which kinds there are, what each says, and what each refusal says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exo_train.errors import ConfigError, DataError
from exo_train.train.data_set import RowFile, read_data
from exo_train.train.rows import ChatRow, CompletionRow, Message, TextRow

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
CHAT = {"messages": [USER, ANSWER]}
TEXT = {"text": "café"}


def write(path: Path, *rows: Any) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_bytes("".join(line + "\n" for line in lines).encode("utf-8"))
    return path


def read(tmp_path: Path, *rows: Any) -> RowFile:
    (file,) = read_data(str(write(tmp_path / "data.jsonl", *rows))).train
    return file


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
    assert found.forms == {"messages": 2, "prompt/completion": 1, "text": 1}


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
        pytest.param('{"a":' * 100_000, "not valid JSON", id="deep"),
        ('"hi"', 'a row must be a JSON object, got "hi"'),
        ({"text": 5}, "'text' must be text, got 5"),
        ({"text": True}, "'text' must be text, got true"),
        ({"prompt": None, "completion": "a"}, "'prompt' must be text, got null"),
        ({"txt": "a"}, "its keys are 'txt'; did you mean 'text'?"),
        ({"prompt": "a", "answer": "b"}, "its keys are 'prompt', 'answer'"),
        ({}, "its keys are none"),
        ('{"text": "\\ud83d"}', "half of a surrogate pair"),
        ({"messages": "hi"}, "'messages' must be a list, got \"hi\""),
        (chat("hi"), 'message 1 must be a JSON object, got "hi"'),
        (
            chat({"role": "critic", "content": "x"}),
            'message 1 has the role "critic"; known roles: system, user, assistant, tool',
        ),
        (chat({"content": "x"}), "message 1 has the role null"),
        (chat({"role": ["user"], "content": "x"}), 'message 1 has the role ["user"]'),
        (
            chat(USER, {"role": "assistant", "content": None}),
            "the content of assistant message 2 must be text, got null",
        ),
        (chat(USER, {"role": "assistant"}), "the content of assistant message 2 must be text"),
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


def only_row(tmp_path: Path, row: Any, *columns: str) -> Any:
    path = write(tmp_path / "data.jsonl", row)
    ((found,),) = (file.rows for file in read_data(str(path), columns=columns).train)
    return found


CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def test_tools_and_calls_are_handed_on_as_the_file_has_them(tmp_path: Path) -> None:
    row = only_row(
        tmp_path,
        {
            "tools": TOOLS,
            "messages": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "name": "weather", "tool_call_id": "1", "content": "4 °C"},
                ANSWER,
            ],
        },
    )
    assert isinstance(row, ChatRow)
    assert row.tools == tuple(TOOLS)
    call, result = row.messages[1:3]
    assert (call.role, call.content) == ("assistant", "")
    assert call.more == {"tool_calls": [CALL]}
    assert (result.role, result.content) == ("tool", "4 °C")
    assert result.more == {"name": "weather", "tool_call_id": "1"}


def test_tools_may_be_json_text_as_parquet_files_have_them(tmp_path: Path) -> None:
    row = only_row(tmp_path, {"messages": [USER, ANSWER], "tools": json.dumps(TOOLS)})
    assert row.tools == tuple(TOOLS)


@pytest.mark.parametrize("said", [{"train": False}, {"weight": 0}, {"weight": 0.0}])
def test_answer_that_is_not_to_be_learnt_says_so(tmp_path: Path, said: dict[str, Any]) -> None:
    row = only_row(tmp_path, chat(USER, ANSWER | said, USER, ANSWER | {"weight": 1}))
    assert [m.train for m in row.messages if m.role == "assistant"] == [False, True]
    assert all(not m.more for m in row.messages), "no template is handed these"


def test_row_with_no_answer_to_learn_is_skipped(tmp_path: Path) -> None:
    found = read(tmp_path, CHAT, chat(USER, ANSWER | {"train": False}))
    assert [row.reason for row in found.bad] == ["no assistant message is to be learnt"]


def test_empty_answer_that_is_not_learnt_is_no_fault(tmp_path: Path) -> None:
    empty = {"role": "assistant", "content": "", "train": False}
    row = only_row(tmp_path, chat(USER, empty, USER, ANSWER))
    assert [m.train for m in row.messages] == [True, False, True, True]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"instruction": "Add", "input": "1 2", "output": "3"}, ["user Add\n\n1 2", "assistant 3"]),
        ({"instruction": "Add", "input": " ", "output": "3"}, ["user Add", "assistant 3"]),
        ({"instruction": "Add", "output": "3"}, ["user Add", "assistant 3"]),
        (
            {"system": "S", "instruction": "Add", "input": None, "output": "3"},
            ["system S", "user Add", "assistant 3"],
        ),
    ],
)
def test_instructions_become_a_conversation(tmp_path: Path, row: Any, messages: list[str]) -> None:
    found = only_row(tmp_path, row)
    assert [f"{m.role} {m.content}" for m in found.messages] == messages
    assert found.form == "instruction/input/output"


def test_system_beside_a_conversation_comes_first(tmp_path: Path) -> None:
    turns = [{"from": "HUMAN", "value": "A"}, {"from": "Gpt", "value": "B"}]
    row = only_row(tmp_path, {"conversations": turns, "system": "S"})
    assert [m.role for m in row.messages] == ["system", "user", "assistant"]
    row = only_row(tmp_path, {"messages": [{"role": "system", "content": "own"}, USER, ANSWER],
                              "system": "S"})  # fmt: skip
    assert [m.content for m in row.messages] == ["own", "Hi", "Hello"]


def test_both_lists_of_messages_learn_the_completion_only(tmp_path: Path) -> None:
    row = only_row(tmp_path, {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]})
    assert [(m.role, m.train) for m in row.messages] == [
        ("user", False),
        ("assistant", False),
        ("user", False),
        ("assistant", True),
    ]


def test_columns_say_what_foreign_names_mean(tmp_path: Path) -> None:
    row = {"question": "2+2=", "answer": "4", "text": "ignored", "id": 1}
    found = only_row(tmp_path, row, "prompt=question", "completion=answer")
    assert (found.prompt, found.completion) == ("2+2=", "4")
    told = only_row(tmp_path, {**CHAT, "story": "once"}, "text=story")
    assert told.text == "once", "what is mapped is meant, though chats come first otherwise"
    swapped = only_row(tmp_path, {"prompt": "a", "completion": "b"}, "prompt=completion",
                       "completion=prompt")  # fmt: skip
    assert (swapped.prompt, swapped.completion) == ("b", "a")


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (("promt=question",), "'columns': a row has no 'promt'; did you mean 'prompt'?"),
        (("question",), "'columns' must be pairs such as prompt=question, got 'question'"),
        (("text=a", "text=b"), "'columns' names 'text' twice"),
        (("text=txet",), "takes 'text' of 'txet', which no row has; did you mean 'text'?"),
    ],
)
def test_wrong_columns_are_refused(tmp_path: Path, columns: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_data(str(write(tmp_path / "data.jsonl", TEXT)), columns=columns)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (chat(USER, {"role": "assistant", "content": None, "tool_calls": []}), "got null"),
        (
            chat(USER, {"role": "assistant", "function_call": {"name": "f"}, "content": "x"}),
            "'function_call' is not supported; write it as 'tool_calls'",
        ),
        (chat(USER, {**ANSWER, "tool_calls": "no"}), "must be JSON, got \"no\""),
        (chat(USER, {**ANSWER, "tool_calls": [{"id": "1"}]}), "name no function"),
        (
            chat(USER, {**ANSWER, "tool_calls": [{"name": "f", "arguments": "{x"}]}),
            "the arguments in 'tool_calls' of message 2 must be JSON, got \"{x\"",
        ),
        (chat({**USER, "tool_calls": [CALL]}, ANSWER), "only the assistant calls tools"),
        (chat(USER, {**ANSWER, "train": "no"}), "must be true or false, got \"no\""),
        (chat(USER, {**ANSWER, "weight": 0.5}), "must be 0 or 1, got 0.5"),
        (chat(USER, {**ANSWER, "weight": 1, "train": False}), "contradict each other"),
        (chat({**USER, "train": True}, ANSWER), "only the assistant's messages are"),
        ({**CHAT, "tools": [1]}, "'tools' must be a list of JSON objects, got [1]"),
        ({**CHAT, "weight": 0.5}, "'weight' of a whole row is not supported"),
        (chat(USER, {**ANSWER, "reasoning_content": "\ud83d"}), "half of a surrogate pair"),
        ({"instruction": "a", "output": 5}, "'output' must be text, got 5"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "'history'"),
        ({"question": "a"}, "its keys are 'question'; --columns names others"),
    ],
)  # fmt: skip
def test_what_would_be_learnt_wrongly_is_refused(tmp_path: Path, row: Any, reason: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(CHAT) + "\n" + json.dumps(row) + "\n", "utf-8")
    with pytest.raises(DataError) as refused:
        read_data(str(path))
    assert str(refused.value).startswith(f"{path}, line 2: ")
    assert reason in str(refused.value)
