"""Files and functions stay small; names say what a thing is. Exceptions carry their reason."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from source_tree import GENERATED, PACKAGE, ROOT, place, syntax_tree

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
LARGE_FOR_A_REASON: dict[str, str] = {}
SAY_NOTHING = {"util", "utils", "common", "helper", "helpers", "manager", "misc"}


def _python_files() -> Iterator[Path]:
    for folder in (PACKAGE, ROOT / "tests", ROOT / "bench", ROOT / "examples"):
        yield from (path for path in sorted(folder.rglob("*.py")) if path.parent != GENERATED)


def _large(path: Path) -> Iterator[tuple[str, int]]:
    num_lines = len(path.read_text("utf-8").splitlines())
    if num_lines > MAX_FILE_LINES:
        yield place(path), num_lines
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                yield f"{place(path)}:{node.name}", num_lines


def test_large_files_and_functions_have_a_reason() -> None:
    large = dict(found for path in _python_files() for found in _large(path))
    unexplained = {name: lines for name, lines in large.items() if name not in LARGE_FOR_A_REASON}
    assert not unexplained, "split them, or write the reason into LARGE_FOR_A_REASON"
    outdated = LARGE_FOR_A_REASON.keys() - large.keys()
    assert not outdated, "they are small again; take them out of LARGE_FOR_A_REASON"


def test_no_name_that_says_nothing() -> None:
    for path in _python_files():
        parts = path.relative_to(ROOT).with_suffix("").parts
        words = {word for part in parts for word in part.lower().split("_")}
        assert not words & SAY_NOTHING, f"{place(path)}: name it after what it owns"


def test_every_module_says_what_it_is_for() -> None:
    for path in _python_files():
        if path.read_text("utf-8").strip():
            assert ast.get_docstring(syntax_tree(path)), f"{place(path)} has no docstring"


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports them by their names alone."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
