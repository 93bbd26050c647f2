"""Nothing that arrives from outside is executed or unpickled: the calls that could do it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_tree import PACKAGE, dotted_name, imported_names, place, syntax_tree

# Importing one of these is enough: what they read, or carry, can run code.
MODULES = {
    "pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib",
    "jsonpickle", "multiprocessing.connection", "multiprocessing.managers", "xmlrpc", "runpy",
    "code", "codeop", "pty",
}  # fmt: skip
CALLS = {
    "eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec",
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput",
    "asyncio.create_subprocess_shell",
    "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load",
    "yaml.full_load_all", "yaml.Loader", "yaml.UnsafeLoader", "yaml.FullLoader",
    "torch.load", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter",
    "pandas.read_pickle", "numpy.lib.format.read_array",
}  # fmt: skip
# True makes an otherwise harmless call run code from a file, or a shell.
SWITCHES = {"allow_pickle", "trust_remote_code", "shell"}
# These as text, too: a name that is put together, or kept in a string, has no syntax tree.
AS_TEXT = re.compile(
    r"\b(?:c?[Pp]ickle|cloudpickle|dill|joblib|marshal|shelve)\.(?:loads?|Unpickler)\b"
    r"|\btorch\.load\b|\byaml\.(?:unsafe_|full_)?load(?:_all)?\b|\bread_pickle\b"
    r"|allow_pickle\s*=\s*True|trust_remote_code\s*=\s*True|shell\s*=\s*True"
)
USUAL_NAMES = {"np": "numpy", "pd": "pandas"}


def every_file() -> list[Path]:
    """Give every file of the package, generated ones too."""
    return sorted(PACKAGE.rglob("*.py"))


def _aliases(path: Path) -> dict[str, str]:
    """Give what each imported name stands for: `import torch as t` makes `t` torch."""
    names = dict(USUAL_NAMES)
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return names


def _forbidden(path: Path) -> Iterator[str]:
    for name in imported_names(path):
        if name in CALLS or any(name == m or name.startswith(f"{m}.") for m in MODULES):
            yield f"imports {name}"
    aliases = _aliases(path)
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, (ast.Attribute, ast.Name)):  # also uncalled, or handed on
            first, dot, rest = dotted_name(node).partition(".")
            used = aliases.get(first, first) + dot + rest
            if used in CALLS:
                yield f"line {node.lineno} uses {used}"
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                literal_false = isinstance(keyword.value, ast.Constant) and not keyword.value.value
                if keyword.arg in SWITCHES and not literal_false:
                    yield f"line {node.lineno} passes {keyword.arg}"
        elif isinstance(node, ast.Dict):  # `**{"shell": True}` hides a switch
            for key in node.keys:
                if isinstance(key, ast.Constant) and key.value in SWITCHES:
                    yield f"line {node.lineno} may pass {key.value}"
    for found in AS_TEXT.finditer(path.read_text("utf-8")):
        yield f"has the text {found.group()!r}"


@pytest.mark.parametrize("path", every_file(), ids=place)
def test_nothing_executes_or_unpickles(path: Path) -> None:
    assert not list(_forbidden(path))


def test_every_file_is_looked_at() -> None:
    looked_at = {place(path) for path in every_file()}
    assert len(looked_at) > 100
    assert {
        "exo_train/wire/pb/control_pb2.py",
        "exo_train/agent/services.py",
        "exo_train/transport/tls.py",
        "exo_train/worker.py",
    } <= looked_at


GUILTY = [
    *(f"import {module}" for module in sorted(MODULES)),
    *(f"from {module} import x" for module in sorted(MODULES)),
    *(f"{call}(x)" for call in sorted(CALLS)),
    *(f"f({switch}=True)" for switch in sorted(SWITCHES)),
    *(f"f({switch}=setting)" for switch in sorted(SWITCHES)),
    "from torch import load",
    "from os import system as s\ns(x)",
    "def f(x):\n    import marshal",
    "import torch as t\nt.load(x)",
    "import yaml as y\ny.unsafe_load(x)",
    "from torch import jit\njit.load(x)",
    "import numpy as np\nnp.load(x, allow_pickle=True)",
    "np.lib.format.read_array(x)",
    "yaml.load(x, Loader=yaml.SafeLoader)",
    "subprocess.run(x, shell=True)",
    "subprocess.run(x, **{'shell': True})",
    "read = torch.load",
    "run(map(eval, texts))",
    "name = 'pickle.loads'",
]


@pytest.mark.parametrize("code", GUILTY)
def test_forbidden_code_is_seen(tmp_path: Path, code: str) -> None:
    path = tmp_path / "guilty.py"
    path.write_text(code, "utf-8")
    assert list(_forbidden(path))


def test_framework_methods_of_the_same_name_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / "innocent.py"
    path.write_text(
        "model.eval()\nmx.eval(x)\nre.compile('a')\nyaml.safe_load(x)\njson.load(x)\n"
        "np.load(x, allow_pickle=False)\nsubprocess.run([x], shell=False)\n"
        "raise ValueError('the file is a pickle, which may run code')\n",
        "utf-8",
    )
    assert not list(_forbidden(path))
