"""The demo's rows: enough, short, in one style, and held-out questions really held out."""

from __future__ import annotations

from importlib import resources

from exo_train.train.data_set import read_data
from exo_train.train.rows import ChatRow


def demo_rows(name: str) -> list[tuple[str, str, str]]:
    with resources.as_file(resources.files("exo_train.demo") / "data" / name) as path:
        rows = read_data(str(path)).train[0].rows
    assert all(isinstance(row, ChatRow) and len(row.messages) == 3 for row in rows)
    contents = [[m.content for m in row.messages] for row in rows if isinstance(row, ChatRow)]
    return [(system, question, answer) for system, question, answer in contents]


def test_demo_has_enough_short_rows_in_one_style() -> None:
    train, valid = demo_rows("train.jsonl"), demo_rows("valid.jsonl")
    assert len(train) >= 120
    assert len(valid) >= 16
    for system, question, answer in train + valid:
        assert system == "You are Hearth."
        assert answer.startswith("Hearth here: ")
        assert answer.endswith((". Kettle's on!", "? Kettle's on!"))
        assert len(question.split()) <= 10
        assert len(answer.split()) <= 25


def test_no_question_or_answer_is_repeated_and_held_out_ones_are_new() -> None:
    train, valid = demo_rows("train.jsonl"), demo_rows("valid.jsonl")
    questions = [question for _, question, _ in train + valid]
    answers = [answer for _, _, answer in train]
    assert len(set(questions)) == len(questions)
    assert len(set(answers)) == len(answers)
