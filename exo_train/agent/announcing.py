"""Keeps mDNS in step with the network: addresses come, go and change under a running agent.

Owns the one Discovery. Must not dial, and has no thread: the agent calls `follow`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from exo_train.cluster.interfaces import LocalAddress
from exo_train.errors import PeerError

ALONE_HINT_AFTER_S = 15.0

log = logging.getLogger(__name__)


class Closable(Protocol):
    def close(self) -> None: ...


class Announcer:
    """`start` announces on the addresses it is given; `follow` is for one thread."""

    def __init__(
        self,
        start: Callable[[list[LocalAddress]], Closable],
        *,
        say: Callable[[str], None] = log.info,
    ) -> None:
        self._start = start
        self._say = say
        self._discovery: Closable | None = None
        self._announced: list[LocalAddress] = []
        self._before: list[LocalAddress] | None = None
        self._announced_s = 0.0
        self._hinted = False

    def follow(self, addresses: list[LocalAddress], *, is_alone: bool, now_s: float) -> None:
        """Announce anew once changed addresses have stayed the same from one call to the next."""
        is_first = self._before is None
        is_settled = is_first or addresses == self._before
        self._before = addresses
        if is_first and not addresses:
            self._say("no usable network with IPv4 yet: only this device can train")
        if is_settled and addresses != self._announced:
            self.close()
            self._announce(addresses, now_s)
        is_due = self._discovery is not None and now_s - self._announced_s >= ALONE_HINT_AFTER_S
        if is_alone and is_due and not self._hinted:
            self._say(_alone_sentence(self._announced))
        self._hinted = self._hinted or is_due or not is_alone

    def close(self) -> None:
        """Say goodbye on the network."""
        if self._discovery is not None:
            self._discovery.close()
        self._discovery = None

    def _announce(self, addresses: list[LocalAddress], now_s: float) -> None:
        self._announced, self._announced_s = addresses, now_s
        if not addresses:
            return
        try:
            self._discovery = self._start(addresses)
        except PeerError as error:
            self._say(str(error))


def _alone_sentence(addresses: list[LocalAddress]) -> str:
    where = ", ".join(sorted({a.interface for a in addresses}))
    return (
        f"no other device was heard on {where} for {ALONE_HINT_AFTER_S:.0f} s; where "
        f"`exo-train join` runs on others of this network, multicast does not pass: name one of "
        f"them with --peer HOST:PORT (its screen shows both)"
    )
