"""All rows that `--data` names: which places, what a bad row leads to, and what is counted."""

from __future__ import annotations

import json
import sys
import types
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from exo_train.agent.run_data import parted_rows, rows_of_run
from exo_train.config import TrainConfig
from exo_train.errors import ConfigError, DataError
from exo_train.train.data_set import DataSet, read_data
from exo_train.train.data_sources import Source, absolute, read_sources
from exo_train.train.rows import Row, TextRow


def write(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def numbered(path: Path, count: int, letter: str) -> Path:
    return write(path, *({"text": f"{letter}{number}"} for number in range(count)))


def texts(rows: Sequence[Row]) -> list[str]:
    return [row.text for row in rows if isinstance(row, TextRow)]


def refusal(data: Path | str, **options: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        read_data(str(data), **options)
    return str(refused.value)


# Places


def test_places_are_parted_at_commas_and_weights_at_the_last_colon() -> None:
    assert read_sources(r"C:\new\a.jsonl, D:\b.csv:0.5,hub:me/set:train[:10%]:2,x.txt:3") == (
        Source(place=r"C:\new\a.jsonl"),
        Source(place=r"D:\b.csv", weight=0.5),
        Source(place="hub:me/set:train[:10%]", weight=2),
        Source(place="x.txt", weight=3),
    )


def test_what_exists_is_a_place_whatever_is_in_its_name(tmp_path: Path) -> None:
    odd = write(tmp_path / "a,b:2", {"text": "a"})
    plain = write(tmp_path / "c.jsonl", {"text": "a"})
    assert read_sources(str(odd)) == (Source(place=str(odd)),)
    assert read_sources(f"{plain}:2,{odd}:3,{plain}") == (
        Source(place=str(plain), weight=2),
        Source(place=str(odd), weight=3),
        Source(place=str(plain)),
    )


def test_places_hold_for_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.jsonl", {"text": "a"})
    monkeypatch.chdir(tmp_path)
    place = tmp_path.resolve()
    said = absolute("a.jsonl:2,hub:me/set,b.csv:0.5")
    assert said == f"{place / 'a.jsonl'}:2,hub:me/set,{place / 'b.csv'}:0.5"
    assert absolute(said) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a.jsonl,,b.jsonl", "nothing between two commas"),
        ("a.jsonl:0", "the weight of 'a.jsonl' must be above 0 and at most 1000, got 0"),
        ("a.jsonl:1001", "at most 1000, got 1001"),
        ("hub:", "names no data set of the hub"),
        ("hub:../x", "names no data set of the hub"),
        (",".join("x" * 65), "'data' names 65 places; 64 are the most"),
    ],
)
def test_what_names_no_place_is_refused(text: str, said: str) -> None:
    assert said in refusal(text)


def test_mistyped_path_suggests_the_nearest_name(tmp_path: Path) -> None:
    right = write(tmp_path / "mydata" / "train.jsonl", {"text": "a"})
    wrong = tmp_path / "mydata" / "trian.jsonl"
    assert refusal(wrong) == f"no data file or directory at '{wrong}'; did you mean '{right}'?"
    assert refusal(f"{right},{wrong}:2").endswith(f"did you mean '{right}'?")
    assert refusal(tmp_path / "mydta" / "train.jsonl").endswith(
        f"did you mean '{tmp_path / 'mydata'}'?"
    )


def test_name_without_hub_before_it_is_never_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)  # whoever asks for it fails
    (tmp_path / "data").mkdir()
    assert refusal("./dta").endswith("did you mean 'data'?")
    assert refusal("~nobody-here/a.jsonl").endswith("; check the spelling")
    assert refusal("~/nowhere.jsonl").startswith("no data file or directory at '~/nowhere.jsonl'")
    assert refusal("me/chats").endswith("; a data set of the hub is written hub:me/chats")


# Directories


@pytest.mark.parametrize("valid", ["valid.jsonl", "validation.jsonl", "val.jsonl", "VALID.jsonl"])
def test_directory_has_train_and_perhaps_valid(tmp_path: Path, valid: str) -> None:
    (tmp_path / "train.txt").write_text("one\n\ntwo\n")
    write(tmp_path / valid, {"text": "three"})
    found = read_data(str(tmp_path))
    assert texts(found.train[0].rows) == ["one", "two"]
    assert texts(found.valid_rows) == ["three"]
    assert found.notes == ()


def test_parts_that_the_hub_makes_are_read_in_their_order(tmp_path: Path) -> None:
    for number in (1, 0):
        write(tmp_path / f"train-0000{number}-of-00002.jsonl", {"text": f"part {number}"})
    files = read_data(str(tmp_path)).train
    assert [texts(file.rows) for file in files] == [["part 0"], ["part 1"]]


def test_two_files_for_one_split_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", {"text": "a"})
    (tmp_path / "train.csv").write_text("text\na\n")
    assert "has 2 files for the train rows: train.csv, train.jsonl; leave one" in refusal(tmp_path)


def test_test_rows_are_left_alone_by_training(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", {"text": "a"})
    test = write(tmp_path / "test.jsonl", {"text": 5})
    found = read_data(str(tmp_path))
    assert found.notes == (f"{test} is left alone: training needs no test rows",)


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"\xef\xbb\xbf", b"[]"])
def test_empty_validation_file_counts_as_absent(tmp_path: Path, content: bytes) -> None:
    write(tmp_path / "train.jsonl", {"text": "a"})
    (tmp_path / "valid.jsonl").write_bytes(content)
    found = read_data(str(tmp_path))
    assert found.valid == ()
    assert found.notes == (f"{tmp_path / 'valid.jsonl'} is empty: treated as absent",)


def test_directory_without_training_rows_lists_what_it_has(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", {"text": "a"})
    assert "no train.jsonl, nor train in another format (data files there: rows.jsonl)" in (
        refusal(tmp_path)
    )


# Bad rows


BAD = (
    {"text": "good"},
    {"text": 1},
    {"text": 2},
    {"text": ""},
    {"text": " "},
    {"txt": "a"},
    {"text": 1},
)


def test_bad_row_ends_it_with_the_places_of_the_others(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *BAD)
    other = write(tmp_path / "b.jsonl", {"text": 3}, {"text": "good"})
    assert refusal(f"{path},{other}") == (
        f"{path}, line 2: 'text' must be text, got 1; it starts with '{{\"text\": 1}}' "
        f"(4 more bad rows: line 3, line 6, line 7, {other}, line 1)"
    )


def test_dropped_rows_are_counted_by_reason(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *BAD)
    found = read_data(str(path), on_bad_row="drop")
    assert texts(found.train[0].rows) == ["good"]
    (note,) = found.notes
    assert note.startswith(
        f"{path}: 1 usable of 7 rows; left out: 2 × 'text' must be text, got 1, 2 × empty 'text', "
    )
    assert "1 × a row needs 'messages'" in note


def test_empty_rows_are_left_out_and_counted_without_being_asked(tmp_path: Path) -> None:
    answer, user = {"role": "assistant", "content": ""}, {"role": "user", "content": "a"}
    path = write(
        tmp_path / "a.jsonl",
        {"text": "good"},
        {"text": " \n"},
        {"messages": []},
        {"messages": [user]},
        {"messages": [user, answer]},
        {"prompt": "a", "completion": ""},
        {"text": ""},
    )
    assert read_data(str(path)).notes == (
        f"{path}: 1 usable of 7 rows; left out: 2 × empty 'text', 1 × empty 'messages', "
        "1 × no assistant message, 1 × an empty assistant message, 1 × empty 'completion'",
    )


def test_nothing_usable_says_why(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"text": ""}, {"text": " "})
    assert refusal(path) == f"{path}: 0 usable of 2 rows: 2 × empty 'text'"
    write(path, {"text": ""}, {"text": 1})
    dropped = refusal(path, on_bad_row="drop")
    assert (
        dropped == f"{path}: 0 usable of 2 rows: 1 × empty 'text', 1 × 'text' must be text, got 1"
    )
    assert refusal(path).endswith(dropped.removeprefix(f"{path}: "))
    write(path)
    assert refusal(path) == f"{path}: 0 usable of 0 rows, the file is empty"


def test_several_kinds_and_duplicates_are_counted(tmp_path: Path) -> None:
    alpaca = {"instruction": "a", "output": "b"}
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    path = write(tmp_path / "d" / "train.jsonl", alpaca, chat, {"text": "a"}, {"text": "a"})
    write(tmp_path / "d" / "valid.jsonl", {"text": "a"}, {"text": "b"})
    assert read_data(str(tmp_path / "d")).notes == (
        f"{path}: 4 rows of several kinds: 1 instruction/input/output, 1 messages, 2 text",
        "2 of 4 training rows say what an earlier one says",
        "1 of 2 held-out rows are trained on, too",
    )


# Weights and rows held out


def texts_of_run(data: str, **options: Any) -> tuple[list[str], list[str]]:
    config = TrainConfig.from_mapping({"data": data, **options}, source="")
    train, held_out = parted_rows(read_data(data), config)
    return texts(train), texts(held_out)


def test_weight_is_how_often_a_row_comes_in_an_epoch(tmp_path: Path) -> None:
    a, b = numbered(tmp_path / "a.jsonl", 10, "a"), numbered(tmp_path / "b.jsonl", 8, "b")
    train, _ = texts_of_run(f"{a}:2.3,{b}:0.5")
    counts = Counter(train)
    assert sorted(count for text, count in counts.items() if text[0] == "a") == [2] * 7 + [3] * 3
    assert sorted(count for text, count in counts.items() if text[0] == "b") == [1] * 4
    assert texts_of_run(f"{a}:2.3,{b}:0.5")[0] == train, "the part is fixed"
    assert texts_of_run(f"{a}:2.3,{b}:0.5", seed=1)[0] != train, "by the seed"
    assert len(texts_of_run(f"{a}:0.001,{b}")[0]) == 9, "a file that is named is not left out"


def test_no_weight_brings_a_held_out_row_into_training(tmp_path: Path) -> None:
    a, b = numbered(tmp_path / "a.jsonl", 10, "a"), numbered(tmp_path / "b.jsonl", 10, "b")
    train, held_out = texts_of_run(f"{a}:3,{b}", val_split=0.26)
    assert len(held_out) == len(set(held_out)) == 5
    assert not set(train) & set(held_out)
    assert len(set(train)) == 15
    assert texts_of_run(f"{a}:3,{b}", val_rows=5)[1] == held_out, "the same rows, said otherwise"


def test_rows_of_a_run_are_read_as_its_options_say(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"body": "good"}, {"body": 5})
    options = {"data": str(path), "columns": "text=body", "on_bad_row": "drop"}
    found = rows_of_run(TrainConfig.from_mapping(options, source=""))
    assert texts(found.train[0].rows) == ["good"]


def test_share_and_number_of_held_out_rows_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="'val_rows' and 'val_split' both say"):
        TrainConfig(val_rows=2, val_split=0.1)


# The hub


class FakeHub(types.ModuleType):
    """Stands for the `datasets` library: remembers what it was asked for."""

    def __init__(self, found: Any) -> None:
        super().__init__("datasets")
        self.found = found
        self.asked: list[tuple[str, str | None]] = []

    def load_dataset(self, name: str, *, split: str | None) -> Any:
        self.asked.append((name, split))
        if isinstance(self.found, Exception):
            raise self.found
        return self.found if split is None else self.found[split]


def read_hub(monkeypatch: pytest.MonkeyPatch, name: str, found: Any) -> tuple[DataSet, FakeHub]:
    hub = FakeHub(found)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    return read_data(name), hub


def test_hub_data_set_gives_train_and_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = {"train": [{"text": "a"}], "validation": [{"text": "b"}], "test": [{"text": 5}]}
    found, hub = read_hub(monkeypatch, "hub:me/set", splits)
    assert hub.asked == [("me/set", None)]
    assert texts(found.train[0].rows) == ["a"]
    assert texts(found.valid_rows) == ["b"]
    assert found.train[0].rows[0].where == "hub:me/set, row 1"


def test_named_split_of_the_hub_is_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found, hub = read_hub(monkeypatch, "hub:me/set:test:2", {"test": [{"text": "a"}]})
    assert hub.asked == [("me/set", "test")]
    assert [(texts(file.rows), file.weight) for file in found.train] == [(["a"], 2.0)]


def test_hub_that_cannot_be_reached_or_has_no_train_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(DataError) as refused:
        read_hub(monkeypatch, "hub:me/set", ConnectionError("no route\nand more"))
    assert str(refused.value).startswith(
        "data set 'me/set' cannot be fetched from the hub (no route)"
    )
    with pytest.raises(DataError, match=r"no split 'train' \(there are a, b\).*hub:me/set:SPLIT"):
        read_hub(monkeypatch, "hub:me/set", {"a": [], "b": []})
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'exo-train[datasets]'" in refusal("hub:me/set")
