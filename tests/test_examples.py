"""The examples run as a reader would run them, and what they print is true."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from exo_train.train.data_set import read_data
from exo_train.train.row_kinds import nothing_to_learn, read_row

ROOT = Path(__file__).parent.parent


def run_example(name: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / name)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_ring_of_three_learns_like_one_rank() -> None:
    pytest.importorskip("torch")
    printed = run_example("one_process_ring.py")
    layers = re.findall(r"^rank \d+: \w+, layers (\d+)\.\.(\d+)$", printed, re.MULTILINE)
    assert [int(first) for first, _ in layers[:2]] == [0, 0]
    assert len(layers) == 4, "one rank first, then three"
    assert all(int(a[1]) + 1 == int(b[0]) for a, b in itertools.pairwise(layers[1:]))
    rows = re.findall(r"^ +\d" + r" +(\d+\.\d+)" * 4 + "$", printed, re.MULTILINE)
    loss_1, loss_3, norm_1, norm_3 = zip(*(map(float, row) for row in rows), strict=True)
    assert len(loss_1) == 5
    assert loss_3 == pytest.approx(loss_1, rel=1e-5)
    assert norm_3 == pytest.approx(norm_1, rel=1e-4)
    assert loss_1[-1] < loss_1[0] - 0.2, "it must learn, or equal losses prove nothing"


def test_data_files_of_the_examples_and_the_page_are_rows() -> None:
    folder = ROOT / "examples" / "data"
    columns = {"questions.csv": ("prompt=question", "completion=answer")}
    forms: Counter[str] = Counter()
    for path in sorted(folder.iterdir()):
        found = read_data(str(path), columns=columns.get(path.name, ()))
        assert found.notes == () or path.name == "chats.jsonl"
        forms.update(found.train[0].forms)
    assert forms == {
        "messages": 3,
        "conversations": 1,
        "instruction/input/output": 1,
        "prompt/completion": 2,
        "text": 2,
    }
    for page, count in (("data.md", 11), ("preference.md", 3)):
        text = (ROOT / "docs" / page).read_text("utf-8")
        lines = [
            line
            for block in re.findall(r"```json\n(.*?)```", text, re.S)
            for line in block.splitlines()
        ]
        assert len(lines) == count
        for line in lines:
            row = read_row(json.loads(line), where=page)
            assert nothing_to_learn(row) == "", line


def test_the_preferences_are_pairs_of_both_kinds() -> None:
    found = read_data(str(ROOT / "examples" / "preferences"), objective="dpo")
    assert found.notes == ()
    assert [file.forms for file in found.files] == [
        {"prompt/chosen/rejected": 12},
        {"chosen/rejected": 4},
    ]


def test_the_planned_split_covers_the_model_and_fits() -> None:
    printed = run_example("plan_a_split.py")
    line = re.compile(r"^(\S+) .*layers (\d+)\.\.(\d+).*: (\d+\.\d) of (\d+\.\d) GB", re.MULTILINE)
    stages = line.findall(printed)
    assert [name for name, *_ in stages] == ["macbook", "mac-mini", "den-pc"]
    owned = [layer for _, a, b, *_ in stages for layer in range(int(a), int(b) + 1)]
    assert owned == list(range(28))
    assert all(float(needed) <= float(usable) for *_, needed, usable in stages)
    assert "does not fit: the model needs at least" in printed
    assert "GB too little" in printed
