"""The pins of `make install` satisfy what pyproject.toml asks for."""

from __future__ import annotations

import re
import sys

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from source_tree import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXTRAS = ("torch", "dev")  # what the Makefile installs


def constraints() -> dict[str, str]:
    """Give package → version; every line is a plain public pin."""
    pins: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines():
        if line.startswith("#"):
            continue
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][A-Za-z0-9.]*)", line)
        assert match, f"constraints.txt: '{line}' is no exact pin of a public version"
        name = canonicalize_name(match[1])
        assert name not in pins, f"constraints.txt pins {name} twice"
        pins[name] = match[2]
    return pins


def test_every_direct_dependency_is_pinned_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    texts = list(project["dependencies"])
    for extra in EXTRAS:
        texts += project["optional-dependencies"][extra]
    pins = constraints()
    for text in texts:
        wanted = Requirement(text)
        pin = pins.get(canonicalize_name(wanted.name))
        assert pin is not None, f"constraints.txt lacks {wanted.name}"
        assert wanted.specifier.contains(pin, prereleases=True), f"{text} against {pin}"
