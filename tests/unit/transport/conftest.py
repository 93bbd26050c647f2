"""Two ends of one link, in-process and over gRPC: one contract for both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from link_ends import LOWER, UPPER, MakePair, Pair, connect

from exo_train.transport.base import LinkLimits
from exo_train.transport.data_server import DataServer
from exo_train.transport.local import local_link_pair


@pytest.fixture(params=["local", "grpc"])
def make_pair(request: pytest.FixtureRequest) -> Iterator[MakePair]:
    with contextlib.ExitStack() as stack:

        def make(limits: LinkLimits | None = None) -> Pair:
            if request.param == "local":
                pair: Pair = local_link_pair(LOWER, UPPER, limits=limits)
            else:
                pair = connect(stack.enter_context(DataServer(["127.0.0.1"])), limits)
            for link in pair:
                stack.callback(link.close)
            return pair

        yield make
