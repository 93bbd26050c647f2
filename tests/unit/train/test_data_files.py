"""Files of rows: every format gives the same rows, and damage is named by line and reason."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exo_train.errors import DataError
from exo_train.train.data_files import MAX_LINE_BYTES
from exo_train.train.data_set import RowFile, read_data
from exo_train.train.rows import ChatRow, CompletionRow, TextRow

PAIRS = [("What, then?", 'Café \u2028 "so"\nand so'), ("b", "c")]


def read_rows(path: Path) -> RowFile:
    (file,) = read_data(str(path)).train
    return file


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as refused:
        read_data(str(path))
    return str(refused.value)


def write(path: Path, *rows: Any) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_bytes("".join(line + "\n" for line in lines).encode("utf-8"))
    return path


def as_jsonl(pairs: list[tuple[str, str]]) -> bytes:
    rows = [json.dumps({"prompt": p, "completion": c}, ensure_ascii=False) for p, c in pairs]
    return "\n".join(rows).encode("utf-8")


def as_array(pairs: list[tuple[str, str]]) -> bytes:
    return b"[" + b",".join(as_jsonl(pairs).split(b"\n")) + b"]"


def as_csv(pairs: list[tuple[str, str]], delimiter: str = ",") -> bytes:
    def quoted(cell: str) -> str:
        return '"' + cell.replace('"', '""') + '"'

    rows = [("prompt", "completion"), *pairs]
    text = "".join(delimiter.join(map(quoted, row)) + "\r\n" for row in rows)
    return b"\xef\xbb\xbf" + text.encode("utf-8")


def as_parquet(pairs: list[tuple[str, str]]) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    sink = pyarrow.BufferOutputStream()
    prompts, completions = zip(*pairs, strict=True)
    parquet.write_table(pyarrow.table({"prompt": prompts, "completion": completions}), sink)
    return bytes(sink.getvalue())


FORMATS: dict[str, Callable[[list[tuple[str, str]]], bytes]] = {
    "jsonl": as_jsonl,
    "ndjson": as_jsonl,
    "json": as_array,
    "csv": as_csv,
    "tsv": lambda pairs: as_csv(pairs, "\t"),
    "CSV": lambda pairs: as_csv(pairs, ";"),
    "parquet": as_parquet,
}


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str, packed: str) -> None:
    data = FORMATS[suffix](PAIRS)
    path = tmp_path / f"données é 数据, 2.{suffix}{packed}"
    path.write_bytes(gzip.compress(data) if packed else data)
    rows = read_rows(path).rows
    assert [(r.prompt, r.completion) for r in rows if isinstance(r, CompletionRow)] == PAIRS


def test_text_files_have_a_row_a_paragraph(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9\r\nand\r\n\r\n  \r\n\r\nnext\n")
    rows = read_rows(path).rows
    assert [(row.where, row.text) for row in rows if isinstance(row, TextRow)] == [
        (f"{path}, line 1", "café\nand"),
        (f"{path}, line 6", "next"),
    ]
    path.write_bytes(b"one\n\ntwo\nth\xe9\n")
    assert "line 4: byte 0xe9 at offset 2 is not UTF-8" in refusal(path)


def test_csv_cell_may_hold_messages(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    cell = json.dumps(messages).replace('"', '""')
    path = write(tmp_path / "chats.csv", "messages,id", f'"{cell}",7')
    (row,) = read_rows(path).rows
    assert isinstance(row, ChatRow)
    assert [m.content for m in row.messages] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'prompt,completion\na,b\n"c\nd",e,f\n', "line 3: it has 3 cells, the header names 2"),
        (b'prompt,completion\n"a"b,c\n', "line 2: not valid CSV: ',' expected after '\"'"),
        (b'prompt,completion\na,b\n"a,c\nd,e\n', "line 3: not valid CSV: unexpected end of data"),
        (b"prompt,completion\nb,caf\xe9\n", "line 2: byte 0xe9 at offset 5 is not UTF-8"),
        (b"prompt,prompt\na,b\n", "line 1: the header names the column 'prompt' twice"),
        (b"prompt,completion\n", "0 usable of 0 rows, the file is empty"),
        (b"\xff\xfep\x00,\x00c\x00\n\x00", "UTF-16 text; save it as UTF-8"),
        (b"question,answer\na,b\n", "its keys are 'question', 'answer'; --columns names others"),
    ],
)
def test_broken_csv_is_named(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "data.csv"
    path.write_bytes(text)
    assert said in refusal(path)


def test_keys_that_only_other_rows_of_a_parquet_file_have_are_not_there(tmp_path: Path) -> None:
    """Parquet gives each message `tool_calls` and `train` as null once one has them."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    chats = [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "train": False},
         {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}],
    ]  # fmt: skip
    path = tmp_path / "chats.parquet"
    tools = [[{"name": "now", "parameters": None}, {"name": "say", "parameters": {"type": "x"}}]]
    table = {"messages": chats, "tools": tools, "text": [None]}
    parquet.write_table(pyarrow.table(table), path)
    (row,) = read_rows(path).rows
    assert isinstance(row, ChatRow)
    assert [(m.train, dict(m.more)) for m in row.messages] == [
        (True, {}), (False, {}), (True, {}), (True, {}),
    ]  # fmt: skip
    assert row.tools == ({"name": "now"}, {"name": "say", "parameters": {"type": "x"}})
    path.write_bytes(path.read_bytes()[:-20])
    assert "cannot be read as Parquet" in refusal(path)


def test_missing_reader_of_parquet_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    path = tmp_path / "data.parquet"
    path.write_bytes(b"PAR1")
    assert refusal(path).endswith("is not installed: pip install 'exo-train[datasets]'")


def test_damaged_gzip_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(gzip.compress(as_jsonl(PAIRS * 50))[:-12])
    assert "is no whole gzip file" in refusal(path)
    path.write_bytes(as_jsonl(PAIRS))
    assert "is no whole gzip file" in refusal(path)


def test_other_file_types_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "data.xlsx", "a,b")
    assert f"'{path}' is none of .jsonl, .json, .ndjson, .csv, .tsv, .txt" in refusal(path)


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
    (row,) = read_rows(write(tmp_path / "data.jsonl", {"text": "a\u2028b\x85c"})).rows
    assert isinstance(row, TextRow)
    assert row.text == "a\u2028b\x85c"


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
    assert "item 2: 'text' must be text, got 5" in refusal(
        write(tmp_path / "data.jsonl", '[{"text":"a"},{"text":5}]')
    )


def test_overlong_line_is_refused_by_its_limit(tmp_path: Path) -> None:
    message = refusal(write(tmp_path / "data.jsonl", {"text": "a"}, {"text": "a" * MAX_LINE_BYTES}))
    assert message.endswith("line 2 is longer than 16,777,216 bytes; split the row")
