"""The lab of each test: hosts on a LAN of their own, and agents on them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lan.lan_agents import LanAgents
from tests.lan.namespaces import Lan, why_no_hub, why_not


@pytest.fixture(scope="session", autouse=True)
def _a_lan_can_be_made() -> None:
    missing = why_not() or why_no_hub()
    if missing:
        pytest.skip(missing)


@pytest.fixture
def lan() -> Iterator[Lan]:
    with Lan() as lan:
        yield lan


@pytest.fixture
def launch(lan: Lan, tmp_path: Path) -> Iterator[LanAgents]:
    """Starts agents on hosts: `launch(1, 2)`; they are gone after the test."""
    with LanAgents(lan, tmp_path) as launch:
        yield launch
