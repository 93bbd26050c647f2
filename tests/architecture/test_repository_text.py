"""What the repository's text files say: a true file tree, and nothing of a builder's machine."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_tree import PACKAGE, ROOT, package_files, place

README = ROOT / "README.md"
# One letter of each in brackets, so that this file does not find itself.
FOREIGN = re.compile(r"/[w]ork/|/tmp/[w]\b|/opt/[p]ypi|[c]laude|[a]nthropic", re.IGNORECASE)
TREE_LINE = re.compile(r"(?P<indent>[\s│├└─]*)(?P<names>[\w.-]+/?(?:\s*,\s*[\w.-]+/?)*)(?:\s|$)")


def _file_tree(text: str) -> set[str]:
    """Read the fenced block that starts with `exo_train/`: indented names, then half a line."""
    block = re.search(r"^```\w*\n(exo_train/.*?)^```", text, re.M | re.S)
    assert block, "there is no fenced block that starts with exo_train/"
    paths: set[str] = set()
    parents: list[tuple[int, str]] = []
    for line in block[1].splitlines():
        match = TREE_LINE.match(line)
        if match is None:
            continue
        depth = len(match["indent"])
        while parents and parents[-1][0] >= depth:
            parents.pop()
        above = folder = parents[-1][1] if parents else ""
        for name in re.split(r"\s*,\s*", match["names"]):
            if name.endswith("/"):
                folder = above + name
            if name.endswith("/") or Path(name).suffix:
                paths.add(above + name)
        parents.append((depth, folder))
    return paths


@pytest.mark.parametrize("indents", [("  ", "    "), ("├── ", "│   └── ")])
def test_file_tree_is_read_by_its_indents(indents: tuple[str, str]) -> None:
    one, two = indents
    lines = [
        "exo_train/  the package",
        f"{one}plan/  who gets what; e.g. rank 0",
        f"{two}memory.py, stages.py  bytes and layers",
        f"{one}errors.py  the tree of errors",
        "proto/",
    ]
    assert _file_tree("\n".join(["# Title", "```text", *lines, "```"])) == {
        "exo_train/",
        "exo_train/plan/",
        "exo_train/plan/memory.py",
        "exo_train/plan/stages.py",
        "exo_train/errors.py",
        "proto/",
    }


@pytest.mark.skipif(not README.exists(), reason="README.md is not written yet")
def test_readme_tree_is_true() -> None:
    tree = _file_tree(README.read_text("utf-8"))
    missing = sorted(path for path in tree if not (ROOT / path).exists())
    assert not missing, f"README.md's tree names {missing}, which do not exist"
    packages = {f"{place(init.parent)}/" for init in PACKAGE.glob("*/__init__.py")}
    modules = {place(path) for path in package_files() if not path.name.startswith("__")}
    unlisted = sorted((packages | modules) - tree)
    assert not unlisted, f"README.md's tree lacks {unlisted}"


def _repository_files() -> Iterator[Path]:
    """Give what git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout, so there is no list of the repository's files")
    for name in listed.stdout.decode("utf-8").split("\0"):
        if name and (ROOT / name).is_file():
            yield ROOT / name


def test_nothing_of_a_builders_machine() -> None:
    found = {}
    for path in _repository_files():
        match = FOREIGN.search(place(path)) or FOREIGN.search(
            path.read_bytes().decode("utf-8", errors="ignore")
        )
        if match:
            found[place(path)] = match[0]
    assert not found
