"""Nothing that arrives from outside is executed or unpickled: the calls that could do it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_tree import dotted_name, imported_names, package_files, place, syntax_tree

UNPICKLERS = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen",
    "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "torch.load",
}  # fmt: skip
# True makes an otherwise harmless call run code from a file.
SWITCHES = {"allow_pickle", "trust_remote_code", "shell"}


def _forbidden(path: Path) -> Iterator[str]:
    for name in imported_names(path):
        if name.partition(".")[0] in UNPICKLERS or name in CALLS:
            yield f"imports {name}"
    for node in ast.walk(syntax_tree(path)):
        if not isinstance(node, ast.Call):
            continue
        called = dotted_name(node.func)
        if called in CALLS:
            yield f"line {node.lineno} calls {called}"
        for keyword in node.keywords:
            literal_false = isinstance(keyword.value, ast.Constant) and not keyword.value.value
            if keyword.arg in SWITCHES and not literal_false:
                yield f"line {node.lineno} passes {keyword.arg}"


@pytest.mark.parametrize("path", package_files(), ids=place)
def test_nothing_executes_or_unpickles(path: Path) -> None:
    assert not list(_forbidden(path))


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from torch import load",
        "def f(x):\n    import marshal",
        "yaml.load(x, Loader=yaml.SafeLoader)",
        "np.load(x, allow_pickle=True)",
        "eval(x)",
    ],
)
def test_forbidden_code_is_seen(tmp_path: Path, code: str) -> None:
    path = tmp_path / "guilty.py"
    path.write_text(code, "utf-8")
    assert list(_forbidden(path))


def test_framework_methods_of_the_same_name_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / "innocent.py"
    path.write_text("model.eval()\nmx.eval(x)\nre.compile('a')\nyaml.safe_load(x)\n", "utf-8")
    assert not list(_forbidden(path))
