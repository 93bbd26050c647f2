"""Connections to the agent's port from elsewhere than its members: scanners, browsers, silence.

Owns their count. gRPC closes them by itself, without a word, after five seconds at the latest, so
this looks at the process' own sockets now and then; shorter ones stay uncounted.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection

import psutil

from exo_train.cluster.interfaces import without_zone

MAX_HOSTS = 64
MAX_KNOWN = 4096


class Strangers:
    """`look` is for one thread; `counts` for any."""

    def __init__(self, port: int, *, say: Callable[[str], None]) -> None:
        self._port = port
        self._say = say
        self._seen: set[tuple[str, int]] = set()  # at the last look
        self._known: set[tuple[str, int]] = set()  # counted already
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def counts(self) -> dict[str, int]:
        """Give connections by host that were no member's."""
        with self._lock:
            return dict(self._counts)

    def look(self, members: Collection[str]) -> None:
        """Count the connections open now that were not open before; `members` are hosts."""
        try:
            open_now = {
                (without_zone(c.raddr.ip.removeprefix("::ffff:")), c.raddr.port)
                for c in psutil.Process().net_connections("tcp")
                if c.raddr and c.laddr.port == self._port
            }
        except psutil.Error:  # macOS may refuse; then nothing is counted
            return
        strangers = {c for c in open_now if c[0] not in members}
        # Only what is still there at the next look: a new member is unknown for a moment.
        new = (strangers & self._seen) - self._known
        self._known, self._seen = (strangers & self._seen), set(list(strangers)[:MAX_KNOWN])
        with self._lock:
            before = set(self._counts)
            for host, _ in new:
                if host in self._counts or len(self._counts) < MAX_HOSTS:
                    self._counts[host] += 1
            first = sorted(set(self._counts) - before)
        for host in first:
            self._say(
                f"{host}, which is no member, connects to port {self._port}; such connections "
                f"get nothing, and are counted (`exo-train doctor` shows how many)"
            )
