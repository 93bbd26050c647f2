"""Files of rows in the formats that people have, plain or gzipped, each row with its place.

Owns formats, encodings and their refusals. A row is given as JSON would have it; what it means is
`row_kinds`' work. Must not touch the network.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exo_train.errors import DataError

MAX_LINE_BYTES = 16 * 1024**2
MAX_WHOLE_BYTES = 256 * 1024**2  # of a JSON array, or a gzipped Parquet file: both are read whole
START_BYTES = 4096  # enough to tell what a file is
START_CHARACTERS = 60  # of a refused row, shown in its message
BOM = b"\xef\xbb\xbf"
DELIMITERS = ",;\t"  # Excel writes a semicolon where the comma is the decimal sign


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A row as its file has it: `place` is "line 3"; `problem` says why it cannot be read."""

    place: str
    value: Any = None
    raw: bytes | None = None
    problem: str = ""

    @property
    def start(self) -> str:
        """Give the first letters, for the sentence that refuses it."""
        raw = self.raw
        if raw is None:
            return json.dumps(self.value, ensure_ascii=False, default=str)[:START_CHARACTERS]
        return (
            raw[: START_CHARACTERS * 4]
            .decode("utf-8", "backslashreplace")
            .strip()[:START_CHARACTERS]
        )


def is_data_file(name: str) -> bool:
    """Say whether a file of that name can hold rows."""
    return _suffix(name) in _READERS


def read_records(path: Path) -> Iterator[Record]:
    """Give all rows of a file; raises DataError for what makes the file as a whole unreadable."""
    read = _READERS.get(_suffix(path.name))
    if read is None:
        raise DataError(
            f"'{path}' is none of {', '.join(_READERS)} (each perhaps with .gz); convert it to "
            ".jsonl, one JSON object a line"
        )
    try:
        with path.open("rb") as plain:
            if path.suffix.lower() != ".gz":
                yield from read(path, plain)
                return
            with gzip.GzipFile(fileobj=plain) as unpacked:
                yield from read(path, unpacked)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"'{path}' is no whole gzip file ({error}); copy it again") from None
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror or error}") from None


def _suffix(name: str) -> str:
    return Path(name.lower().removesuffix(".gz")).suffix


def _lines(path: Path, file: io.BufferedIOBase) -> Iterator[tuple[int, bytes]]:
    """Number the lines of a UTF-8 file, without its byte order mark."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if number == 1:
            _refuse_utf16(path, line)
            line = line.removeprefix(BOM)
        if len(line) > MAX_LINE_BYTES:
            limit = f"{MAX_LINE_BYTES:,} bytes"
            raise DataError(f"{path}, line {number} is longer than {limit}; split the row")
        yield number, line


def _refuse_utf16(path: Path, start: bytes) -> None:
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"{path} is UTF-16 text; save it as UTF-8")


def _read_json(path: Path, file: io.BufferedIOBase) -> Iterator[Record]:
    """Read an object a line; blank lines are none. A file that begins with '[' is one array."""
    start = file.read(START_BYTES)
    file.seek(0)
    _refuse_utf16(path, start)
    if start.removeprefix(BOM).lstrip().startswith(b"["):
        yield from _array(path, _whole(path, file, "a JSON array").removeprefix(BOM))
        return
    for number, line in _lines(path, file):
        if line.strip():
            yield _json_record(f"line {number}", line)


def _json_record(place: str, line: bytes) -> Record:
    try:
        return Record(place=place, value=json.loads(line.decode("utf-8").rstrip()), raw=line)
    except UnicodeDecodeError as error:
        problem = _bad_byte(error)
    except json.JSONDecodeError as error:
        problem = f"not valid JSON at column {error.colno}: {error.msg.removesuffix(' at')}"
    except (ValueError, RecursionError) as error:  # numbers or nesting beyond Python's limits
        problem = f"not valid JSON, {error}"
    return Record(place=place, raw=line, problem=problem)


def _array(path: Path, data: bytes) -> Iterator[Record]:
    try:
        items = json.loads(data)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}, line {error.lineno}: not valid JSON at column {error.colno}: "
            f"{error.msg.removesuffix(' at')} (the file begins with '[', so it was read as one "
            "JSON array)"
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: {_bad_byte(error)}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON, {error}") from None
    for number, item in enumerate(items, start=1):
        yield Record(place=f"item {number}", value=item)


def _read_csv(path: Path, file: io.BufferedIOBase) -> Iterator[Record]:
    """Read rows below a header; a cell may hold line ends, so a row's place is its first line."""
    csv.field_size_limit(MAX_LINE_BYTES)
    lines = _CsvLines(path, file)
    first = next(lines, "")
    delimiter = max(DELIMITERS, key=first.count)  # on a tie the comma, which is the first
    reader = csv.reader(itertools.chain([first], lines), delimiter=delimiter, strict=True)
    try:
        names = [name.strip() for name in next(reader, [])]
    except csv.Error as error:
        raise DataError(f"{path}, line 1: the header is no CSV: {error}") from None
    if lines.problem:
        raise DataError(f"{path}, line 1: {lines.problem}")
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise DataError(f"{path}, line 1: the header names the column '{twice[0]}' twice")
    problem: str
    while True:
        place = f"line {reader.line_num + 1}"
        lines.begin_row()
        try:
            cells = next(reader, None)
            problem = lines.problem
        except csv.Error as error:
            cells, problem = ["?"], f"not valid CSV: {error}"
        if cells is None:
            return
        if not any(cell.strip() for cell in cells):
            continue
        if not problem and len(cells) != len(names):
            problem = f"it has {len(cells)} cells, the header names {len(names)} columns"
        value = {k: _cell(k, v) for k, v in zip(names, cells, strict=False)}
        yield Record(place=place, value=value, raw=lines.row, problem=problem)


class _CsvLines:
    """An iterator of decoded lines that remembers those of the row being read."""

    def __init__(self, path: Path, file: io.BufferedIOBase) -> None:
        self._lines = _lines(path, file)
        self.row, self.problem = b"", ""

    def begin_row(self) -> None:
        self.row, self.problem = b"", ""

    def __iter__(self) -> _CsvLines:
        return self

    def __next__(self) -> str:
        _, line = next(self._lines)
        if not self.row:
            self.row = line
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError as error:
            self.problem = self.problem or _bad_byte(error)
            return line.decode("utf-8", "backslashreplace")


def _cell(name: str, text: str) -> Any:
    """Give a cell's text; a cell that begins as a JSON list does is one where rows have lists."""
    if name in _LISTS and text.lstrip().startswith("["):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text  # refused as "must be a list"
    return text


def _read_text(path: Path, file: io.BufferedIOBase) -> Iterator[Record]:
    """Read a paragraph a row: lines up to a blank one, with the line ends between them."""
    paragraph: list[bytes] = []
    start = 1
    for number, line in _lines(path, file):
        if line.strip():
            start = start if paragraph else number
            paragraph.append(line)
        elif paragraph:
            yield _paragraph(start, paragraph)
            paragraph = []
    if paragraph:
        yield _paragraph(start, paragraph)


def _paragraph(start: int, lines: list[bytes]) -> Record:
    raw = b"\n".join(line.rstrip(b"\r\n") for line in lines)
    try:
        return Record(place=f"line {start}", value={"text": raw.decode("utf-8")}, raw=raw)
    except UnicodeDecodeError as error:
        number = start + raw[: error.start].count(b"\n")
        offset = error.start - (raw.rfind(b"\n", 0, error.start) + 1)
        problem = _bad_byte_at(raw[error.start], offset)
        return Record(place=f"line {number}", raw=raw, problem=problem)


def _read_parquet(path: Path, file: io.BufferedIOBase) -> Iterator[Record]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            f"'{path}' is a Parquet file, and pyarrow, which reads it, is not installed: "
            "pip install 'exo-train[datasets]'"
        ) from None
    if isinstance(file, gzip.GzipFile):
        file = io.BytesIO(_whole(path, file, "a gzipped Parquet file"))
    number = 0
    try:
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield Record(place=f"row {number}", value=without_nulls(row))
    except pyarrow.ArrowException as error:
        said = str(error).partition("\n")[0]
        raise DataError(f"'{path}' cannot be read as Parquet ({said}); copy it again") from None


def without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Leave out, within a row's objects, the keys that only others have.

    Parquet gives every object of a column all keys that any of them has.
    """
    return {key: _pruned(value) for key, value in row.items()}


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _pruned(item) for key, item in value.items() if item is not None}
    return [_pruned(item) for item in value] if isinstance(value, list) else value


def _bad_byte(error: UnicodeDecodeError) -> str:
    return _bad_byte_at(error.object[error.start], error.start)


def _bad_byte_at(byte: int, offset: int) -> str:
    return f"byte {byte:#04x} at offset {offset} is not UTF-8; save the file as UTF-8"


def _whole(path: Path, file: io.BufferedIOBase, what: str) -> bytes:
    data = file.read(MAX_WHOLE_BYTES + 1)
    if len(data) > MAX_WHOLE_BYTES:
        raise DataError(f"{path} is {what} of more than {MAX_WHOLE_BYTES:,} bytes; split it")
    return data


_LISTS = ("messages", "conversations", "tools")
_READERS: dict[str, Callable[[Path, io.BufferedIOBase], Iterator[Record]]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".ndjson": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".txt": _read_text,
    ".parquet": _read_parquet,
}
