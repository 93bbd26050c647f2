"""What holds for all tests: threads, and which of them may be tried again."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before any framework: several tests share the cores

from pathlib import Path

import pytest

# Real sockets, processes and clocks: a machine that stops for some seconds breaks a bound there
# that means something on every other day. Said in the summary (R), never done for numbers.
REAL_TIME = ("agent", "lan", "ring", "unit/transport", "unit/cluster")
NUM_RETRIES = 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if any(item.path.is_relative_to(here / folder) for folder in REAL_TIME):
            item.add_marker(pytest.mark.flaky(reruns=NUM_RETRIES))
