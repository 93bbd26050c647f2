"""Two ring neighbours on loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from exo_train.transport.base import Link, LinkIdentity, LinkLimits
from exo_train.transport.data_server import DataServer
from exo_train.transport.dial import dial

LOWER = LinkIdentity(
    cluster="home",
    run="run-1",
    generation=1,
    rank=0,
    name="mac",
    peer_rank=1,
    peer_name="pc",
    token="secret",
)
UPPER = replace(LOWER, rank=1, name="pc", peer_rank=0, peer_name="mac")

Pair = tuple[Link, Link]
MakePair = Callable[..., Pair]


def connect(server: DataServer, limits: LinkLimits | None = None) -> Pair:
    """Dial and accept at the same time, as two processes would."""
    accepted: list[Link] = []
    thread = threading.Thread(
        target=lambda: accepted.append(server.wait_link(UPPER, timeout_s=10, limits=limits))
    )
    thread.start()
    lower = dial(server.addresses, LOWER, timeout_s=10, limits=limits)
    thread.join()
    return lower, accepted[0]
