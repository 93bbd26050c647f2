"""What is committed and made of something else is what that gives: protobuf code, a page."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
from source_tree import GENERATED, ROOT
from test_constraints import constraints

from exo_train.cli.options_page import options_page

PROTOS = ROOT / "proto"


def _texts(folder: Path) -> dict[str, str]:
    paths = [path for path in folder.iterdir() if path.suffix in (".py", ".pyi")]
    return {path.name: path.read_text("utf-8") for path in paths if path.name != "__init__.py"}


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    wanted = constraints()["grpcio-tools"]
    installed = importlib.metadata.version("grpcio-tools")
    if installed != wanted:
        pytest.skip(f"needs grpcio-tools {wanted}, which `make install` takes; has {installed}")
    sources = [path.relative_to(PROTOS).as_posix() for path in sorted(PROTOS.rglob("*.proto"))]
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", *outputs, *sources],
        cwd=ROOT,
        check=True,
        timeout=60,
    )
    made = _texts(tmp_path / GENERATED.relative_to(ROOT))
    assert made, "protoc made nothing"
    committed = _texts(GENERATED)
    assert committed.keys() == made.keys()
    stale = [name for name in made if committed[name] != made[name]]
    assert not stale, f"{stale} are not what proto/ gives; run `make proto`"


def test_generated_code_names_the_pinned_generator() -> None:
    wanted = f"GRPC_GENERATED_VERSION = '{constraints()['grpcio-tools']}'"
    for path in GENERATED.glob("*_pb2_grpc.py"):
        assert wanted in path.read_text("utf-8"), f"{path.name} was made by another grpcio-tools"


def test_page_of_options_is_fresh() -> None:
    committed = (ROOT / "docs" / "options.md").read_text("utf-8")
    assert committed == options_page(), "run `make options`"
