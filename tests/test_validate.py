"""`validate`: what it counts is right, a bad row is exit code 2, and no weights are needed."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tokenizers import Tokenizer

from exo_train.cli.main import main
from exo_train.ui.validation_screen import validation_screen
from tests.tiny_models import make_tiny_model

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without its weights."""
    path = make_tiny_model(tmp_path_factory.mktemp("validate") / "modèle 数据", num_layers=2)
    (path / "model.safetensors").unlink()
    return path


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process; gives exit code, standard output and standard error."""
    monkeypatch.setenv("EXO_TRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["exo-train", "validate", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        printed = capsys.readouterr()
        code = caught.value.code
        return (code if isinstance(code, int) else 0), printed.out, printed.err

    return run


def write(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def test_tokens_are_counted_as_the_tokenizer_counts_them(
    run: Run, model: Path, tmp_path: Path
) -> None:
    lengths = [*range(1, 100), 300]
    texts = [chr(65 + n % 26) * n for n in lengths]
    pair = {"prompt": "ab", "completion": "cde"}
    data = write(tmp_path / "dônnées.jsonl", *({"text": text} for text in texts), pair)
    code, printed, error = run(str(data), "--model", str(model), "--max-seq-length", "64", "--json")
    assert (code, error) == (0, "")
    report = json.loads(printed)
    raw = Tokenizer.from_file(str(model / "tokenizer.json"))
    counts = sorted([*(len(raw.encode(text).ids) + 1 for text in texts), 2 + 3 + 1])  # and </s>
    assert report["schema"] == 1
    assert (report["rows"], report["usable"], report["sequences"]) == (101, 101, 101)
    assert report["bad"] == []
    assert report["formats"] == {"text": 100, "prompt/completion": 1}
    assert report["tokens"] == sum(counts)
    # The first token of a text has nothing before it; of the pair 'cde' and </s> are learnt.
    assert report["supervised_tokens"] == sum(counts) - 6 - 100 + 4
    assert report["over_long"] == sum(count > 64 for count in counts) > 0
    assert report["percentiles"] == {
        "50": counts[50], "90": counts[90], "95": counts[95], "99": counts[99], "max": counts[100],
    }  # fmt: skip
    assert counts[100] == 301


def test_bad_rows_are_listed_with_file_line_and_reason(
    run: Run, model: Path, tmp_path: Path
) -> None:
    good = write(tmp_path / "good.jsonl", CHAT, CHAT)
    bad = write(tmp_path / "bad.jsonl", {"text": 5}, CHAT, {"text": ""})
    bad.write_text(bad.read_text() + '{"text": "ha\n')
    code, printed, error = run(f"{good},{bad}:2", "--model", str(model), "--json")
    report = json.loads(printed)
    assert code == 2
    assert [(row["file"], row["line"], row["reason"]) for row in report["bad"]] == [
        (str(bad), 1, "'text' must be text, got 5"),
        (str(bad), 3, "empty 'text'"),
        (str(bad), 4, "not valid JSON at column 10: Unterminated string starting"),
    ]
    assert (report["rows"], report["usable"], report["num_bad"]) == (6, 3, 3)
    assert report["duplicates"] == 2
    assert error == (
        f"exo-train: 3 of 6 rows cannot be trained on; the first is {bad}, line 1: "
        "'text' must be text, got 5\n"
    )
    assert run(str(good), "--model", str(model))[0] == 0, "negative control"


def test_row_that_the_chat_template_refuses_is_bad(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = tmp_path / "strict"
    strict.mkdir()
    for file in model.iterdir():
        (strict / file.name).write_bytes(file.read_bytes())
    settings = json.loads((strict / "tokenizer_config.json").read_text("utf-8"))
    settings["chat_template"] = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        + settings["chat_template"]
    )
    (strict / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    system = {"messages": [{"role": "system", "content": "S"}, *CHAT["messages"]]}
    data = write(tmp_path / "data.jsonl", CHAT, system)
    code, printed, _ = run(str(data), "--model", str(strict), "--json")
    (row,) = json.loads(printed)["bad"]
    assert (code, row["line"]) == (2, 2)
    assert "refuses the roles system, user" in row["reason"]
    assert "no system" in row["reason"]


def test_template_and_turns_decide_what_is_learnt(run: Run, model: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}({{ m.role[0] }} {{ m.content }}){% endfor %}"
                        "{% if add_generation_prompt %}(a {% endif %}")  # fmt: skip
    data = write(tmp_path / "data.jsonl", {"messages": [*CHAT["messages"]] * 2})

    def learnt(*options: str) -> list[str]:
        _, printed, _ = run(str(data), "--model", str(model), "--json", *options)
        return [p["text"] for p in json.loads(printed)["sample"]["parts"] if p["supervised"]]

    assert learnt() == ["Ho<|im_end|>", "Ho<|im_end|>"]
    assert learnt("--train-turns", "last") == ["Ho<|im_end|>"]
    assert learnt("--chat-template", str(template)) == ["Ho)", "Ho)"]


def test_without_a_model_rows_alone_are_checked(run: Run, tmp_path: Path) -> None:
    rows = [{"question": "a", "answer": "b"}]
    data = write(tmp_path / "data.jsonl", *rows)
    code, _, error = run(str(data))
    assert (code, "did you mean" in error or "--columns" in error) == (2, True)
    code, printed, _ = run(str(data), "--columns", "prompt=question,completion=answer", "--json")
    report = json.loads(printed)
    assert code == 0
    assert report["formats"] == {"prompt/completion": 1}
    assert report["tokens"] is report["percentiles"] is report["sample"] is None


def test_all_parts_of_a_directory_are_checked(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "d" / "train.jsonl", CHAT, {"text": "a"})
    write(tmp_path / "d" / "valid.jsonl", CHAT)
    write(tmp_path / "d" / "test.jsonl", {"text": 5})
    code, printed, _ = run(str(tmp_path / "d"), "--json")
    report = json.loads(printed)
    assert code == 2
    assert [(f["split"], f["rows"], f["usable"]) for f in report["files"]] == [
        ("train", 2, 2),
        ("valid", 1, 1),
        ("test", 1, 0),
    ]
    assert report["held_out_seen"] == 1


def test_empty_file_and_missing_model_are_refused(run: Run, tmp_path: Path) -> None:
    empty = write(tmp_path / "empty.jsonl")
    assert run(str(empty))[::2] == (
        2,
        f"exo-train: {empty}: 0 usable of 0 rows, there is nothing in it\n",
    )
    data = write(tmp_path / "data.jsonl", CHAT)
    code, _, error = run(str(data), "--model", "./nowhere")
    assert code == 2
    assert "no such model directory or file" in error


def test_sample_shows_what_is_learnt_with_and_without_colour(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    data = write(tmp_path / "data.jsonl", CHAT)
    _, printed, _ = run(str(data), "--model", str(model))
    assert "<|im_start|>assistant\n[[Ho<|im_end|>]]" in printed
    assert "\x1b" not in printed
    report = json.loads(run(str(data), "--model", str(model), "--json")[1])
    screen = io.StringIO()
    monkeypatch.delenv("NO_COLOR")
    console = Console(file=screen, force_terminal=True, color_system="standard", width=200)
    console.print(validation_screen(report, has_colour=True))
    assert "\x1b[1;32mHo<|im_end|>\x1b[0m" in screen.getvalue()
    assert "[[" not in screen.getvalue()
