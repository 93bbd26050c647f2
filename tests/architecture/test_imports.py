"""Who may import whom, and that every module stands on its own."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from importlinter.cli import lint_imports
from source_tree import PACKAGE, ROOT, imported_names, package_files, place

PURE = (
    "plan",
    "wire/codec.py",
    "wire/tensor.py",
    "cluster/membership.py",
    "cluster/member.py",
    "cluster/whom_to_ask.py",
    "cluster/roster.py",
    "cluster/links.py",
    "cluster/link_facts.py",
    "cluster/mdns_record.py",
    "cluster/checks/finding.py",
    "cluster/checks/network.py",
    "cluster/checks/peers.py",
    "cluster/checks/machine.py",
    "agent/saying.py",
    "agent/status.py",
    "config.py",
    "peer.py",
    "errors.py",
)
# Frameworks, the network, clocks and chance: what a pure module takes as an argument instead.
IMPURE = {
    "torch", "mlx", "mlx_lm", "transformers", "grpc", "socket", "ssl", "select", "selectors",
    "asyncio", "threading", "subprocess", "time", "datetime", "random", "secrets", "uuid", "os",
    "pathlib", "numpy.random",
}  # fmt: skip
FRAMEWORKS = ("torch", "mlx", "mlx_lm")

# Drops the package between imports, so that no module lives from what another one imported.
IMPORT_EACH_ALONE = """
import importlib, sys, traceback
frameworks = sys.argv[1].split(",")
failed = False
for name in sys.argv[2:]:
    for loaded in [m for m in sys.modules if m.partition(".")[0] == "exo_train"]:
        del sys.modules[loaded]
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        # An optional framework may be missing on this system; nothing else may.
        if (error.name or "").partition(".")[0] not in frameworks:
            failed = True
            print(name, traceback.format_exc(), sep="\\n")
    except BaseException:
        failed = True
        print(name, traceback.format_exc(), sep="\\n")
sys.exit(failed)
"""


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _pure_files() -> list[Path]:
    files: list[Path] = []
    for name in PURE:
        path = PACKAGE / name
        assert path.exists(), f"{place(path)} is declared pure and does not exist"
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return files


@pytest.fixture
def loggers_kept() -> Iterator[None]:
    """Import-linter's own logging set-up silences every logger of the process, for good."""
    loggers = [one for one in logging.root.manager.loggerDict.values() if hasattr(one, "disabled")]
    before = [(one, one.disabled) for one in loggers]
    yield
    for one, was_disabled in before:
        one.disabled = was_disabled


@pytest.mark.usefixtures("loggers_kept")
def test_imports_point_down(capfd: pytest.CaptureFixture[str]) -> None:
    broken = lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True, no_logo=True)
    assert broken == 0, capfd.readouterr().out


def test_each_module_imports_alone() -> None:
    names = [
        _module_name(path)
        for path in package_files()
        if path.name != "__main__.py"  # importing it runs the command
    ]
    done = _python("-c", IMPORT_EACH_ALONE, ",".join(FRAMEWORKS), *names)
    assert done.returncode == 0, done.stdout + done.stderr


def test_command_and_agent_load_no_framework() -> None:
    """A GPU abort must not take the agent down, and `--help` must not wait for PyTorch."""
    code = (
        "import sys, exo_train.cli.main, exo_train.agent.agent; "
        f"print([m for m in {FRAMEWORKS!r} if m in sys.modules])"
    )
    done = _python("-c", code)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("path", _pure_files(), ids=place)
def test_pure_module_imports_nothing_impure(path: Path) -> None:
    found = {
        name
        for name in imported_names(path)
        if any(name == impure or name.startswith(f"{impure}.") for impure in IMPURE)
    }
    assert not found, f"{place(path)} is declared pure and imports {sorted(found)}"
