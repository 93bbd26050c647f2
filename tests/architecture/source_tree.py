"""What the architecture tests read: files of the repository and their syntax trees.

Owns paths and parsing. Must not import `exo_train`, so that a module that cannot be imported is
still looked at.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "exo_train"
GENERATED = PACKAGE / "wire" / "pb"


def package_files() -> list[Path]:
    """Give every hand-written file of the package, sorted."""
    return sorted(path for path in PACKAGE.rglob("*.py") if path.parent != GENERATED)


def place(path: Path) -> str:
    """Name a file as one would type it at the root, on any system."""
    return path.relative_to(ROOT).as_posix()


@functools.cache
def syntax_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), filename=str(path))


def imported_names(path: Path) -> set[str]:
    """Give all imports, nested ones too: `from a import b` counts as both `a` and `a.b`."""
    names: set[str] = set()
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{place(path)}:{node.lineno}: imports are absolute"
            assert node.module is not None
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def dotted_name(node: ast.expr) -> str:
    """Give `a.b.c` of such an expression, else nothing."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted_name(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""
