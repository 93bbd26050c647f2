"""The invented facts of `examples/facts`: what is asked was taught, in other words."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from exo_train.train.data_set import read_data
from exo_train.train.rows import CompletionRow

FACTS = Path(__file__).parents[3] / "examples" / "facts"


def _rows(name: str) -> list[CompletionRow]:
    rows = read_data(str(FACTS / f"{name}.jsonl")).train[0].rows
    assert all(isinstance(row, CompletionRow) for row in rows)
    return [row for row in rows if isinstance(row, CompletionRow)]


def test_each_of_thirty_facts_is_taught_five_times_and_asked_twice() -> None:
    taught, asked = (Counter(row.completion for row in _rows(name)) for name in ("train", "valid"))
    assert len(taught) == 30
    assert set(taught.values()) == {5}
    assert asked == dict.fromkeys(taught, 2)


def test_no_question_is_asked_as_it_was_taught() -> None:
    taught, asked = ({row.prompt for row in _rows(name)} for name in ("train", "valid"))
    assert len(taught) == 150
    assert len(asked) == 60
    assert not taught & asked
