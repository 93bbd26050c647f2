"""Rows of data files: reading, recognising and checking them.

Owns the row types, the file formats and every refusal that needs no tokenizer. Must not tokenise
and must not touch the network: whatever the user typed is a local path.
"""

from __future__ import annotations

import difflib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exo_train.errors import DataError

MAX_LINE_BYTES = 16 * 1024**2
MAX_ARRAY_BYTES = 256 * 1024**2  # a JSON array is parsed whole
START_CHARACTERS = 60  # of a refused line, shown in its message
MAX_LISTED = 8  # names or lines listed in one message

ROLES = ("system", "user", "assistant")
# ShareGPT's names for the speakers, "hummany" included: it occurs in published files.
SPEAKERS = {
    "system": "system",
    "human": "user",
    "hummany": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "assistant": "assistant",
}
ROW_KEYS = ("messages", "conversations", "prompt", "completion", "text")
# Ignoring these would train on something else than the row says.
UNSUPPORTED_KEYS = ("tools", "tool_calls", "function_call", "train", "weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """`train`: an assistant's message is learnt; `more`: what the chat template is handed as well
    (tool calls, a tool's name)."""

    role: str
    content: str
    train: bool = True
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRow:
    """`where` is the file and the line (or the item of an array), for messages."""

    where: str
    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRow:
    where: str
    prompt: str
    completion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRow:
    where: str
    text: str


Row = ChatRow | CompletionRow | TextRow
_KINDS = {ChatRow: "messages", CompletionRow: "prompt/completion", TextRow: "text"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFile:
    """The usable rows of one file; `skipped` counts the well-formed but empty ones by reason."""

    path: Path
    rows: tuple[Row, ...]
    skipped: Mapping[str, int]

    @property
    def num_found(self) -> int:
        return len(self.rows) + sum(self.skipped.values())

    @property
    def kind_counts(self) -> dict[str, int]:
        return dict(Counter(_KINDS[type(row)] for row in self.rows))

    @property
    def notes(self) -> tuple[str, ...]:
        if not self.skipped:
            return ()
        return (
            f"{self.path}: {len(self.rows)} usable of {self.num_found} rows; "
            f"skipped: {_reasons(self.skipped)}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFiles:
    """Training rows, and validation rows where the user brought some."""

    train: RowFile
    valid: RowFile | None
    notes: tuple[str, ...]


def read_data(path: str | Path) -> DataFiles:
    """Read a file, or a directory with train.jsonl and perhaps valid.jsonl."""
    path = Path(path).expanduser()
    if not os.path.exists(path):
        raise DataError(f"no data file or directory at '{path}'{_nearest_path(path)}")
    if not path.is_dir():
        train = read_rows(path)
        return DataFiles(train=train, valid=None, notes=train.notes)
    train_path, valid_path = path / "train.jsonl", path / "valid.jsonl"
    if not train_path.is_file():
        found = ", ".join(sorted(p.name for p in path.glob("*.json*"))[:MAX_LISTED])
        raise DataError(
            f"directory '{path}' has no train.jsonl (JSON files there: {found or 'none'}); "
            "rename the file with the training rows, or give its path"
        )
    train = read_rows(train_path)
    if not valid_path.is_file():
        return DataFiles(train=train, valid=None, notes=train.notes)
    if not any(True for _ in _row_texts(valid_path)):
        note = f"{valid_path} is empty: treated as absent"
        return DataFiles(train=train, valid=None, notes=(*train.notes, note))
    valid = read_rows(valid_path)
    return DataFiles(train=train, valid=valid, notes=train.notes + valid.notes)


def read_rows(path: Path) -> RowFile:
    """Read and check every row; the first bad one is named, with the places of the others."""
    rows: list[Row] = []
    skipped: Counter[str] = Counter()
    problems: list[tuple[str, str]] = []
    for where, line in _row_texts(path):
        try:
            row = _parse(line, where=where)
        except DataError as error:
            start = line[: START_CHARACTERS * 4].decode("utf-8", "backslashreplace")
            start = start.strip()[:START_CHARACTERS]
            problems.append((where, f"{where}: {error}; it starts with {start!r}"))
            continue
        if reason := _nothing_to_learn(row):
            skipped[reason] += 1
        else:
            rows.append(row)
    if problems:
        raise DataError(problems[0][1] + _others([where for where, _ in problems[1:]]))
    if not rows:
        num_found = sum(skipped.values())
        reasons = f": {_reasons(skipped)}" if skipped else ", the file is empty"
        raise DataError(f"{path}: 0 usable of {num_found} rows{reasons}")
    return RowFile(path=path, rows=tuple(rows), skipped=dict(skipped))


def _row_texts(path: Path) -> Iterator[tuple[str, bytes]]:
    """Give the place and the JSON text of each row; blank lines are none."""
    if path.suffix.lower() not in (".jsonl", ".json"):
        raise DataError(f"'{path}' does not end in .jsonl; convert it to one JSON object a line")
    try:
        with path.open("rb") as file:
            start = file.read(4096)
            if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
                raise DataError(f"{path} is UTF-16 text; save it as UTF-8")
            bom = b"\xef\xbb\xbf"
            file.seek(len(bom) if start.startswith(bom) else 0)
            if start.removeprefix(bom).lstrip().startswith(b"["):
                yield from _array_texts(path, file.read(MAX_ARRAY_BYTES + 1))
                return
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    limit = f"{MAX_LINE_BYTES:,} bytes"
                    raise DataError(f"{path}, line {number} is longer than {limit}; split the row")
                if line.strip():
                    yield f"{path}, line {number}", line
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror or error}") from None


def _array_texts(path: Path, data: bytes) -> Iterator[tuple[str, bytes]]:
    if len(data) > MAX_ARRAY_BYTES:
        limit = f"{MAX_ARRAY_BYTES:,} bytes"
        raise DataError(f"{path} is a JSON array of more than {limit}; write one object a line")
    try:
        items = json.loads(data)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}, line {error.lineno}: {_bad_json(error)} "
            "(the file begins with '[', so it was read as one JSON array)"
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: {_bad_byte(error)}") from None
    except RecursionError:
        raise DataError(f"{path}: not valid JSON, it is nested too deeply") from None
    for number, item in enumerate(items, start=1):
        yield f"{path}, item {number}", json.dumps(item).encode("ascii")


def _parse(line: bytes, *, where: str) -> Row:
    """Recognise one row; a DataError from here says what is wrong, the caller says where."""
    try:
        row = json.loads(line.decode("utf-8").rstrip())
    except UnicodeDecodeError as error:
        raise DataError(_bad_byte(error)) from None
    except json.JSONDecodeError as error:
        raise DataError(_bad_json(error)) from None
    except (ValueError, RecursionError) as error:  # numbers or nesting beyond Python's limits
        raise DataError(f"not valid JSON, {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"a row must be a JSON object, got {_shown(row)}")
    _refuse_unsupported(row)
    # Published sets often carry an extra 'prompt' beside 'messages': the richest kind wins.
    if "messages" in row:
        return ChatRow(where=where, messages=_messages(row["messages"]))
    if "conversations" in row:
        return ChatRow(where=where, messages=_conversation(row["conversations"]))
    if "prompt" in row and "completion" in row:
        prompt, completion = (_text(row[key], f"'{key}'") for key in ("prompt", "completion"))
        return CompletionRow(where=where, prompt=prompt, completion=completion)
    if "text" in row:
        return TextRow(where=where, text=_text(row["text"], "'text'"))
    keys = list(row)[:MAX_LISTED]
    hints = [close[0] for key in keys if (close := difflib.get_close_matches(key, ROW_KEYS, n=1))]
    raise DataError(
        "a row needs 'messages', 'prompt' and 'completion', or 'text'; "
        f"its keys are {', '.join(repr(key) for key in keys) or 'none'}"
        + (f" (did you mean '{hints[0]}'?)" if hints and hints[0] not in keys else "")
    )


def _messages(value: Any) -> tuple[Message, ...]:
    messages = []
    for number, message in enumerate(_objects(value, "messages"), start=1):
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise DataError(
                f"message {number} has the role {_shown(role)}; known roles: {', '.join(ROLES)}"
            )
        messages.append(_message(role, message.get("content"), number))
    return _ordered(messages)


def _conversation(value: Any) -> tuple[Message, ...]:
    """Take ShareGPT's form, `[{"from": "human", "value": "..."}, ...]`."""
    messages = []
    for number, message in enumerate(_objects(value, "conversations"), start=1):
        speaker = message.get("from")
        role = SPEAKERS.get(speaker.lower()) if isinstance(speaker, str) else None
        if role is None:
            raise DataError(
                f"message {number} is from {_shown(speaker)}; known speakers: {', '.join(SPEAKERS)}"
            )
        messages.append(_message(role, message.get("value"), number))
    return _ordered(messages)


def _message(role: str, content: Any, number: int) -> Message:
    if isinstance(content, list):
        content = "".join(_part(part, number) for part in content)
    return Message(role=role, content=_text(content, f"the content of {role} message {number}"))


def _part(part: Any, number: int) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise DataError(
            f"message {number} has a part of type {_shown(kind)}; only 'text' parts can be trained"
        )
    return _text(part.get("text"), f"a text part of message {number}")


def _ordered(messages: list[Message]) -> tuple[Message, ...]:
    if messages and messages[0].role == "assistant":
        raise DataError("the first message is the assistant's; put the user's message before it")
    return tuple(messages)


def _objects(value: Any, key: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise DataError(f"'{key}' must be a list, got {_shown(value)}")
    for number, item in enumerate(value, start=1):
        if not isinstance(item, dict):
            raise DataError(f"message {number} must be a JSON object, got {_shown(item)}")
        _refuse_unsupported(item)
    return value


def _refuse_unsupported(item: Mapping[str, Any]) -> None:
    for key in UNSUPPORTED_KEYS:
        if item.get(key) not in (None, [], True, 1):
            raise DataError(f"'{key}' is not supported; remove it or the row")


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{name} must be text, got {_shown(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{name} holds half of a surrogate pair, which is no character") from None
    return value


def _nothing_to_learn(row: Row) -> str:
    """Say why a well-formed row teaches nothing, or give an empty string."""
    match row:
        case ChatRow(messages=messages):
            answers = [m.content.strip() for m in messages if m.role == "assistant"]
            if not messages:
                return "empty 'messages'"
            if not answers:
                return "no assistant message"
            return "" if all(answers) else "an empty assistant message"
        case CompletionRow(completion=completion):
            return "" if completion.strip() else "empty 'completion'"
        case TextRow(text=text):
            return "" if text.strip() else "empty 'text'"


def _nearest_path(path: Path) -> str:
    """Suggest the nearest existing name for the first part of `path` that does not exist."""
    missing = path
    while missing.parent != missing and not os.path.exists(missing.parent):
        missing = missing.parent
    try:
        names = os.listdir(missing.parent)
    except OSError:
        names = []
    close = difflib.get_close_matches(missing.name, names, n=1)
    return f"; did you mean '{missing.parent / close[0]}'?" if close else "; check the spelling"


def _bad_json(error: json.JSONDecodeError) -> str:
    return f"not valid JSON at column {error.colno}: {error.msg.removesuffix(' at')}"


def _bad_byte(error: UnicodeDecodeError) -> str:
    byte = error.object[error.start]
    return f"byte {byte:#04x} at offset {error.start} is not UTF-8; save the file as UTF-8"


def _reasons(skipped: Mapping[str, int]) -> str:
    return ", ".join(f"{count} × {reason}" for reason, count in sorted(skipped.items()))


def _others(places: Iterable[str]) -> str:
    lines = [place.rpartition(", ")[2] for place in places]
    if not lines:
        return ""
    more = ", …" if len(lines) > MAX_LISTED else ""
    return f" ({len(lines)} more bad rows: {', '.join(lines[:MAX_LISTED])}{more})"


def _shown(value: Any) -> str:
    """Show a value as the file has it, cut short."""
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
