"""All rows that `--data` names, read and checked before any model loads.

Owns what a bad row leads to, what is counted, and the sentences about it. Must not tokenise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from exo_train.errors import DataError
from exo_train.options import nearest
from exo_train.train.data_files import Record, read_records
from exo_train.train.data_sources import Source, exists, missing, read_sources, split_files
from exo_train.train.hub_data import hub_splits
from exo_train.train.row_kinds import Columns, nothing_to_learn, read_row
from exo_train.train.rows import Row, row_digest

MAX_LISTED = 8  # reasons or lines listed in one message


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A row that cannot be trained on; `is_empty`: well-formed, with nothing to learn."""

    file: str
    place: str
    reason: str
    start: str
    is_empty: bool = False

    @property
    def where(self) -> str:
        return f"{self.file}, {self.place}"

    @property
    def line(self) -> int:
        """Give the number in `place`: a line, or an item or row where a file has no lines."""
        return int(self.place.rpartition(" ")[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFile:
    """The usable rows of one file, and those that are not; each row comes `weight` times."""

    place: str
    rows: tuple[Row, ...]
    bad: tuple[BadRow, ...]
    weight: float = 1.0

    @property
    def num_found(self) -> int:
        return len(self.rows) + len(self.bad)

    @property
    def forms(self) -> dict[str, int]:
        return dict(Counter(row.form for row in self.rows))

    @property
    def reasons(self) -> str:
        """List why rows are left out, the most frequent reason first."""
        counts = Counter(row.reason for row in self.bad).most_common()
        listed = ", ".join(f"{count} × {reason}" for reason, count in counts[:MAX_LISTED])
        return listed + (", …" if len(counts) > MAX_LISTED else "")

    @property
    def notes(self) -> Iterator[str]:
        if len(self.forms) > 1:
            kinds = ", ".join(f"{count} {form}" for form, count in sorted(self.forms.items()))
            yield f"{self.place}: {len(self.rows)} rows of several kinds: {kinds}"
        if self.bad:
            yield (
                f"{self.place}: {len(self.rows)} usable of {self.num_found} rows; left out: "
                f"{self.reasons}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """Training rows, and those to hold out or to test with where the user brought some."""

    train: tuple[RowFile, ...]
    valid: tuple[RowFile, ...] = ()
    test: tuple[RowFile, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[RowFile, ...]:
        return (*self.train, *self.valid, *self.test)

    @property
    def num_train_rows(self) -> int:
        return sum(len(file.rows) for file in self.train)

    @property
    def valid_rows(self) -> tuple[Row, ...]:
        return tuple(row for file in self.valid for row in file.rows)

    @property
    def num_duplicates(self) -> int:
        """Count the training rows that say what an earlier one says."""
        return self.num_train_rows - len(_digests(self.train))

    @property
    def num_held_out_seen(self) -> int:
        """Count the held-out rows that are trained on, too."""
        seen = _digests(self.train) if self.valid else set()
        return sum(row_digest(row) in seen for row in self.valid_rows)


def read_data(
    text: str,
    *,
    columns: Sequence[str] = (),
    on_bad_row: str = "error",
    objective: str = "sft",
) -> DataSet:
    """Read all rows for a run that learns `objective` of them.

    Raises DataError naming the first bad row, unless these are dropped; and where a file has no
    usable row at all.
    """
    found = inspect_data(text, columns=columns, with_test=False, objective=objective)
    used = (*found.train, *found.valid)
    refused = [row for file in used for row in file.bad if not row.is_empty]
    if refused and on_bad_row == "error":
        raise DataError(_refusal(refused, used))
    for file in used:
        if not file.rows:
            reasons = f": {file.reasons}" if file.bad else ", the file is empty"
            raise DataError(f"{file.place}: 0 usable of {file.num_found} rows{reasons}")
    return replace(found, notes=(*found.notes, *_notes(found)))


def inspect_data(
    text: str, *, columns: Sequence[str] = (), with_test: bool = True, objective: str = ""
) -> DataSet:
    """Read all rows, good and bad; raises DataError only for what cannot be read at all.

    With an `objective` those are bad, too, that it cannot learn.
    """
    wanted = Columns.read(columns)
    seen_columns: set[str] = set()
    splits: dict[str, list[RowFile]] = {"train": [], "valid": [], "test": []}
    notes: list[str] = []
    for source in read_sources(text):
        for split, place, records in _records(source):
            if split == "test" and not with_test:
                notes.append(f"{place} is left alone: training needs no test rows")
                continue
            file = _check(place, records, wanted, seen_columns, objective)
            if split == "train":
                file = replace(file, weight=source.weight)
            elif not file.num_found:
                notes.append(f"{place} is empty: treated as absent")
                continue
            splits[split].append(file)
    _check_columns(wanted, seen_columns)
    parts = {split: tuple(files) for split, files in splits.items()}
    return DataSet(**parts, notes=tuple(notes))


def _records(source: Source) -> Iterator[tuple[str, str, Iterator[Record]]]:
    """Give split, place and rows of each file of a source."""
    if source.hub_name:
        name, split = source.hub_name
        for ours, records in hub_splits(name, split).items():
            yield ours, source.place if ours == "train" else f"{source.place}:{ours}", records
        return
    if not exists(source.place):
        raise missing(source.place)
    path = source.path
    files: Mapping[str, Sequence[Path]] = split_files(path) if path.is_dir() else {"train": [path]}
    for split in ("train", "valid", "test"):
        for file in files.get(split, ()):
            yield split, str(file), read_records(file)


def _check(
    place: str,
    records: Iterator[Record],
    columns: Columns,
    seen_columns: set[str],
    objective: str,
) -> RowFile:
    rows: list[Row] = []
    bad: list[BadRow] = []
    for record in records:
        if isinstance(record.value, dict):
            seen_columns.update(record.value)
        try:
            if record.problem:
                raise DataError(record.problem)
            where = f"{place}, {record.place}"
            row = read_row(record.value, where=where, columns=columns, objective=objective)
        except DataError as error:
            bad.append(_bad(place, record, str(error)))
            continue
        if reason := nothing_to_learn(row):
            bad.append(replace(_bad(place, record, reason), is_empty=True))
        else:
            rows.append(row)
    return RowFile(place=place, rows=tuple(rows), bad=tuple(bad))


def _bad(file: str, record: Record, reason: str) -> BadRow:
    return BadRow(file=file, place=record.place, reason=reason, start=record.start)


def _check_columns(columns: Columns, seen: set[str]) -> None:
    """Refuse a foreign column that no row has: it is misspelt."""
    for ours, theirs in columns.sources.items():
        if seen and theirs not in seen:
            there = ", ".join(sorted(map(str, seen))[:MAX_LISTED])
            raise DataError(
                f"'columns' takes '{ours}' of '{theirs}', which no row has"
                f"{nearest(theirs, seen)}; the rows have: {there}"
            )


def _refusal(refused: list[BadRow], files: Sequence[RowFile]) -> str:
    first = refused[0]
    said = f"{first.where}: {first.reason}; it starts with {first.start!r}"
    others = [row.place if row.file == first.file else row.where for row in refused[1:]]
    if others:
        more = ", …" if len(others) > MAX_LISTED else ""
        said += f" ({len(others)} more bad rows: {', '.join(others[:MAX_LISTED])}{more})"
    file = next(file for file in files if file.place == first.file)
    if not file.rows:
        said += f"; 0 usable of {file.num_found} rows: {file.reasons}"
    return said


def _notes(found: DataSet) -> Iterator[str]:
    for file in (*found.train, *found.valid):
        yield from file.notes
    if count := found.num_duplicates:
        yield f"{count} of {found.num_train_rows} training rows say what an earlier one says"
    if count := found.num_held_out_seen:
        yield f"{count} of {len(found.valid_rows)} held-out rows are trained on, too"


def _digests(files: Sequence[RowFile]) -> set[bytes]:
    return {row_digest(row) for file in files for row in file.rows}
