"""Keeps mDNS in step with the network: addresses come, go and change under a running agent.

Owns the one Discovery and what the user is told of it. Must not dial, and has no thread: the agent
calls `follow`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from exo_train.cluster.discovery import Heard
from exo_train.cluster.interface_kinds import VPN
from exo_train.cluster.interfaces import ONLY_THIS, LocalAddress, default_route
from exo_train.errors import PeerError

ALONE_HINT_AFTER_S = 15.0
ASK_AGAIN_S = 30.0
# While nobody was met: one who hears us, and whom we do not hear, may have come after we announced.
SAY_AGAIN_ALONE_S = 4.0
# An interface that could not be used is tried again, ever more rarely.
FIRST_RETRY_S = 10.0
MAX_RETRY_S = 160.0
MAX_ADDRESSES_SAID = 3
MAX_SAID = 64

NOTHING_HEARD = Heard(interfaces={}, left_out={}, seen=(), other_clusters=frozenset(), copies=())

log = logging.getLogger(__name__)


class Announced(Protocol):
    """What `start` gives; Discovery is one."""

    def heard(self) -> Heard: ...
    def ask_again(self) -> None: ...
    def say_again(self) -> None: ...
    def announce_pairing(self, pairing_id: str, port: int) -> None: ...
    def withdraw_pairing(self) -> None: ...
    def close(self) -> None: ...


class Announcer:
    """`start` announces on the addresses it is given; `follow` and `close` are for one thread."""

    def __init__(
        self,
        start: Callable[[list[LocalAddress]], Announced],
        *,
        say: Callable[[str], None] = log.info,
        route: Callable[[], LocalAddress | None] = default_route,
        cluster: str = "",
    ) -> None:
        self._start = start
        self._say = say
        self._route = route
        self._cluster = cluster
        self._lock = threading.Lock()  # over _discovery and _pairing, for announce_pairing
        self._discovery: Announced | None = None
        self._pairing: tuple[str, int] | None = None
        self._announced: list[LocalAddress] = []
        self._before: list[LocalAddress] | None = None
        self._first_s: float | None = None  # since when the hint is due to run
        self._asked_s = self._told_s = 0.0
        self._retry_at_s = 0.0
        self._retry_s = FIRST_RETRY_S
        self._said: set[str] = set()
        self._hinted = False

    def follow(self, addresses: list[LocalAddress], *, is_alone: bool, now_s: float) -> None:
        """Announce anew once changed addresses have stayed the same from one call to the next.

        So flapping faster than the calls come is not announced at all.
        """
        is_first = self._before is None
        is_settled = is_first or addresses == self._before
        self._before = addresses
        if is_first and not addresses:
            self._say_once("no usable network yet: only this device can train")
        is_changed = addresses != self._announced
        if is_settled and is_changed:
            self._retry_s = FIRST_RETRY_S
        if is_settled and (is_changed or self._is_retry_due(now_s)):
            self._announce_anew(addresses, now_s)
        if self._discovery is not None and now_s - self._asked_s >= ASK_AGAIN_S:
            self._asked_s = now_s
            self._discovery.ask_again()
        every_s = SAY_AGAIN_ALONE_S if is_alone else ASK_AGAIN_S
        if self._discovery is not None and now_s - self._told_s >= every_s:
            self._told_s = now_s
            self._discovery.say_again()
        self._hint(is_alone, now_s)

    def heard(self) -> Heard:
        """Give what was heard since the addresses last changed; for any thread."""
        with self._lock:
            return self._discovery.heard() if self._discovery else NOTHING_HEARD

    def announce_pairing(self, pairing_id: str, port: int) -> None:
        """Announce an open invitation, on later addresses too; for any thread."""
        with self._lock:
            self._pairing = (pairing_id, port)
            self._announce_pairing()

    def withdraw_pairing(self) -> None:
        with self._lock:
            self._pairing = None
            if self._discovery is not None:
                self._discovery.withdraw_pairing()

    def close(self) -> None:
        """Say goodbye on the network."""
        with self._lock:
            closing, self._discovery = self._discovery, None
        if closing is not None:
            closing.close()

    def _is_retry_due(self, now_s: float) -> bool:
        """Tell whether to try again what did not work: all of mDNS, or (some times) a part."""
        if not self._announced or now_s < self._retry_at_s:
            return False
        if self._discovery is None:
            return True
        return self._retry_s < MAX_RETRY_S and bool(self._discovery.heard().left_out)

    def _announce_anew(self, addresses: list[LocalAddress], now_s: float) -> None:
        self.close()
        self._announced, self._asked_s, self._told_s = addresses, now_s, now_s
        self._retry_at_s = now_s + self._retry_s
        self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
        if not addresses:
            return
        self._first_s = now_s if self._first_s is None else self._first_s
        only = sorted({a.interface for a in addresses if a.reason == ONLY_THIS})
        if only:
            self._say_once(
                f"only {' and '.join(only)} ({VPN}) is there, so it is used; name another network "
                f"with --interface once there is one"
            )
        try:
            discovery = self._start(addresses)
        except PeerError as error:
            self._say_once(str(error))
            return
        for part, why in discovery.heard().left_out.items():
            self._say_once(f"mDNS goes without {part}: {why}")
        with self._lock:
            self._discovery = discovery
            self._announce_pairing()

    def _announce_pairing(self) -> None:
        """Announce the open invitation, if there are one and a network; the code works without."""
        if self._discovery is None or self._pairing is None:
            return
        try:
            self._discovery.announce_pairing(*self._pairing)
        except PeerError as error:
            self._say_once(str(error))

    def _hint(self, is_alone: bool, now_s: float) -> None:
        if self._first_s is None or self._discovery is None:
            return
        is_due = now_s - self._first_s >= ALONE_HINT_AFTER_S
        if is_alone and is_due and not self._hinted:
            heard = self._discovery.heard()
            self._say(alone_sentence(self._announced, heard, self._cluster, self._route()))
        self._hinted = self._hinted or is_due or not is_alone

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said and len(self._said) < MAX_SAID:
            self._said.add(sentence)
            self._say(sentence)


def alone_sentence(
    addresses: list[LocalAddress], heard: Heard, cluster: str, route: LocalAddress | None
) -> str:
    """Say why nobody was met, as far as it can be told, what was tried, and what to do."""
    where = " and ".join(sorted({a.interface for a in addresses}))
    families = " and ".join(sorted({a.family for a in addresses}))
    tried = f"tried: mDNS over {families} on {where}"
    if heard.left_out:
        tried += f" (not on {', '.join(heard.left_out)})"
    sentences = [f"no other device was met in {ALONE_HINT_AFTER_S:.0f} s ({tried}): "]
    sentences[0] += _cause(where, heard, cluster)
    if others := len(heard.other_clusters):
        plural = "s" if others > 1 else ""
        sentences.append(
            f"{others} other cluster{plural} seen: if it is yours, run `exo-train leave` here and "
            f"join with a code of its `exo-train invite`"
        )
    if route is not None and route.kind == VPN:
        sentences.append(
            f"the VPN {route.interface} takes this device's traffic: pause it, or let it leave "
            f"out the local network"
        )
    return "; ".join(sentences)


def _cause(where: str, heard: Heard, cluster: str) -> str:
    by_address = "name one of them with --peer HOST:PORT (its screen shows both)"
    own = [seen for seen in heard.seen if seen.cluster == cluster]
    if own:
        addresses = [str(a) for seen in own for a in seen.addresses][:MAX_ADDRESSES_SAID]
        return (
            f"one of this cluster is announced at {', '.join(addresses)} but does not answer; "
            f"its firewall may drop it: run `exo-train doctor` there"
        )
    if any(counts.heard for counts in heard.interfaces.values()):
        return (
            f"multicast of other devices arrives on {where}, but none of this cluster; where "
            f"`exo-train join` runs on others, {by_address}"
        )
    return (
        f"no multicast arrives on {where}; where `exo-train join` runs on others of this network, "
        f"{by_address}"
    )
