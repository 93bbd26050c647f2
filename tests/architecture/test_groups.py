"""Tests that share a network run one after the other, also when two processes run tests."""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("groups")
def test_groups_are_kept_together(request: pytest.FixtureRequest) -> None:
    """pytest-xdist tells groups by a suffix of the test's id; some versions of pytest lose it."""
    if request.config.getoption("loadgroup", False):
        assert request.node.nodeid.endswith("@groups")
