"""The measured ways between devices, and the one of each pair that both ends use.

Owns which way is measured when, and the choice among results. Pure: no socket, no clock, no
randomness. Must not measure: the agent does, and brings the results.

Of a pair, the device with the smaller id measures and chooses, for both; the other end takes over
what it hears.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from exo_train.cluster.link_facts import MAX_LINKS, LinkFacts, PairLink
from exo_train.peer import Address, NodeId

MAX_PEERS = MAX_LINKS
MAX_WAYS = 8  # of one pair

MEET_SPREAD_S = 3.0  # first measurements of different pairs start within this, by their ids
AGAIN_S = 600.0
AGAIN_SPREAD = 0.2  # of AGAIN_S, by their ids
CHANGED_AGAIN_S = 30.0  # soonest again after a change nearby: addresses may flap
CONFIRM_S = 5.0  # until a way that looks better is looked at again
TROUBLE_AGAIN_S = 60.0
RETRY_S = 30.0  # doubles with each failure, up to AGAIN_S
MAX_FAILURES = 2  # in a row; then the way's result is no longer believed

SAME_SPEED_SHARE = 0.8
SAME_RTT_FACTOR = 1.2
SWITCH_FACTOR = 1.25  # how much faster a way must be to replace the pinned one,
SWITCH_TIMES = 2  # and how many times in a row
# Smaller is preferred; a kind that is not here comes last.
KIND_RANKS = {"Thunderbolt": 0, "Ethernet": 0, "loopback": 0, "network": 1, "Wi-Fi": 2}


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Way:
    """A way that could be measured: where the peer listens, and what leads there from here.

    `address` is what is dialled, an IPv6 link-local one with its zone.
    """

    address: Address
    local_host: str
    interface: str
    kind: str

    def facts(
        self,
        peer_id: NodeId,
        *,
        rtt_s: float,
        jitter_s: float,
        to_peer_bytes_per_s: float,
        from_peer_bytes_per_s: float,
        trouble: str = "",
    ) -> LinkFacts:
        return LinkFacts(
            peer_id=peer_id,
            local_host=self.local_host.partition("%")[0],
            remote_host=self.address.host.partition("%")[0],
            interface=self.interface,
            kind=self.kind,
            rtt_s=rtt_s,
            jitter_s=jitter_s,
            to_peer_bytes_per_s=to_peer_bytes_per_s,
            from_peer_bytes_per_s=from_peer_bytes_per_s,
            trouble=trouble,
        )


@dataclass(slots=True)
class _WayState:
    due_s: float
    link: LinkFacts | None = None
    measured_s: float = -math.inf
    num_failures: int = 0
    num_better: int = 0  # times in a row that it was clearly faster than the pinned way

    @property
    def is_tried(self) -> bool:
        return self.link is not None or self.num_failures > 0


@dataclass(slots=True)
class _Pair:
    ways: dict[Way, _WayState] = field(default_factory=dict)
    pinned: Way | None = None
    is_settled: bool = False  # every way was tried since there was nothing pinned


class LinkTable:
    """All times are seconds of one monotonic clock, given by the caller. Not thread-safe."""

    def __init__(self, self_id: NodeId) -> None:
        self._self_id = self_id
        self._pairs: dict[NodeId, _Pair] = {}  # that this device measures
        self._heard: dict[NodeId, tuple[LinkFacts, ...]] = {}  # by who measured
        self._measuring: tuple[NodeId, Way] | None = None

    def follow(self, peer_id: NodeId, ways: Iterable[Way], *, now_s: float) -> None:
        """Take in which ways lead to a live peer now; only those of `--interface` if it is given.

        A change at either end makes all of them due. Does nothing when the peer measures.
        """
        if peer_id <= self._self_id:
            return
        if peer_id not in self._pairs and len(self._pairs) >= MAX_PEERS:
            return
        pair = self._pairs.setdefault(peer_id, _Pair())
        current = sorted(set(ways), key=_way_order)[:MAX_WAYS]
        if set(current) == pair.ways.keys():
            return
        start_s = now_s + MEET_SPREAD_S * _fraction(self._self_id, peer_id)
        kept = {way: pair.ways[way] for way in current if way in pair.ways}
        for state in kept.values():
            state.due_s = min(state.due_s, max(start_s, state.measured_s + CHANGED_AGAIN_S))
        pair.ways = {way: kept.get(way) or _WayState(due_s=start_s) for way in current}
        self._choose(pair)

    def forget(self, peer_id: NodeId) -> None:
        """Drop what is known of a device that is gone."""
        self._pairs.pop(peer_id, None)
        self._heard.pop(peer_id, None)

    def next_due(self, *, now_s: float, is_running: bool) -> tuple[NodeId, Way] | None:
        """Give the way to measure now, if any; `measured` or `failed` must follow.

        One at a time, and none during a run but those never tried: measuring takes bandwidth.
        """
        if self._measuring is not None:
            return None
        due = [
            (state.is_tried, state.due_s, peer_id, _way_order(way), way)
            for peer_id, pair in self._pairs.items()
            for way, state in pair.ways.items()
            if state.due_s <= now_s and not (is_running and state.is_tried)
        ]
        if not due:
            return None
        *_, peer_id, _, way = min(due)
        self._measuring = (peer_id, way)
        return self._measuring

    def measured(self, peer_id: NodeId, way: Way, link: LinkFacts, *, now_s: float) -> None:
        """Take in a result, and choose anew."""
        pair, state = self._end_measuring(peer_id, way)
        if pair is None or state is None:
            return
        state.link, state.measured_s, state.num_failures = link, now_s, 0
        spread = 1 + AGAIN_SPREAD * (_fraction(self._self_id, peer_id) - 0.5)
        state.due_s = now_s + (TROUBLE_AGAIN_S if link.trouble else AGAIN_S * spread)
        pinned = pair.ways.get(pair.pinned) if pair.pinned else None
        if pinned is not None and pinned.link is not None and way != pair.pinned:
            state.num_better = state.num_better + 1 if _is_clearly_better(link, pinned.link) else 0
            if pair.is_settled and 0 < state.num_better < SWITCH_TIMES:
                state.due_s = now_s + CONFIRM_S
                pinned.due_s = min(pinned.due_s, now_s + CONFIRM_S)
        self._choose(pair)

    def failed(self, peer_id: NodeId, way: Way, *, now_s: float) -> None:
        """Take in that a way could not be measured; its last result stays for one more try."""
        pair, state = self._end_measuring(peer_id, way)
        if pair is None or state is None:
            return
        state.num_failures += 1
        state.num_better = 0
        if state.num_failures >= MAX_FAILURES:
            state.link = None
        state.due_s = now_s + min(RETRY_S * 2 ** min(state.num_failures - 1, 10), AGAIN_S)
        self._choose(pair)

    def postpone(self, peer_id: NodeId, way: Way, *, now_s: float) -> None:
        """Take in that the other end measures just now: that says nothing about the way."""
        _, state = self._end_measuring(peer_id, way)
        if state is not None:
            state.due_s = now_s + CONFIRM_S

    def doubt(self, peer_id: NodeId, address: Address, *, now_s: float) -> None:
        """Take in that a call by the pinned way failed: look at it again soon."""
        pair = self._pairs.get(peer_id)
        if pair is not None and pair.pinned is not None and pair.pinned.address == address:
            state = pair.ways[pair.pinned]
            soonest_s = state.measured_s + CONFIRM_S
            state.due_s = min(state.due_s, max(now_s, soonest_s))

    def heard(self, measurer_id: NodeId, links: Sequence[LinkFacts]) -> None:
        """Take in the links that a live member has chosen; those that are not its own to
        measure are left out.
        """
        if measurer_id not in self._heard and len(self._heard) >= MAX_PEERS:
            return
        first_of_each = {link.peer_id: link for link in reversed(links[:MAX_PEERS])}
        self._heard[measurer_id] = tuple(
            link for _, link in sorted(first_of_each.items()) if measurer_id < link.peer_id
        )

    def own(self) -> tuple[LinkFacts, ...]:
        """Give the links that this device has chosen, one per peer, to be told to all."""
        return tuple(
            link
            for _, pair in sorted(self._pairs.items())
            if (link := _pinned_link(pair)) is not None
        )

    def pinned_host(self, peer_id: NodeId) -> str | None:
        """Give the peer's host that is to be dialled, or None while nothing is measured.

        Where the peer measured, a link-local host has no zone: the dialling end adds it.
        """
        pair = self._pairs.get(peer_id)
        if pair is not None:
            return pair.pinned.address.host if pair.pinned else None
        for link in self._heard.get(peer_id, ()):
            if link.peer_id == self._self_id:
                return link.local_host
        return None

    def listing(self, live: Collection[NodeId]) -> list[PairLink]:
        """Give the pinned link of each pair of `live` devices once, in the order of their ids."""
        by_measurer = {**self._heard, self._self_id: self.own()}
        return [
            PairLink(measurer_id=measurer_id, link=link)
            for measurer_id, links in sorted(by_measurer.items())
            for link in links
            if measurer_id in live and link.peer_id in live
        ]

    def _end_measuring(self, peer_id: NodeId, way: Way) -> tuple[_Pair | None, _WayState | None]:
        if self._measuring == (peer_id, way):
            self._measuring = None
        pair = self._pairs.get(peer_id)
        return pair, pair.ways.get(way) if pair else None

    def _choose(self, pair: _Pair) -> None:
        """Pin the best way until all were tried once; from then on only a clear winner's."""
        links = {way: state.link for way, state in pair.ways.items() if state.link is not None}
        pinned = links.get(pair.pinned) if pair.pinned else None
        if pinned is None or (pinned.trouble and not all(x.trouble for x in links.values())):
            pair.is_settled = False
        if not pair.is_settled:
            pair.pinned = _best(links)
            pair.is_settled = all(state.is_tried for state in pair.ways.values())
        else:
            winners = {
                way: links[way]
                for way, state in pair.ways.items()
                if state.num_better >= SWITCH_TIMES and way in links
            }
            pair.pinned = _best(winners) or pair.pinned
            if not winners:
                return
        for state in pair.ways.values():
            state.num_better = 0


def _best(links: Mapping[Way, LinkFacts]) -> Way | None:
    """Choose by speed; among about equally fast ones by round trip, then wired before Wi-Fi."""
    if not links:
        return None
    untroubled = {way: link for way, link in links.items() if not link.trouble}
    left = untroubled or dict(links)
    fastest = max(link.bytes_per_s for link in left.values())
    left = _where(left, lambda link: link.bytes_per_s >= fastest * SAME_SPEED_SHARE)
    quickest_s = min(link.rtt_s for link in left.values())
    left = _where(left, lambda link: link.rtt_s <= quickest_s * SAME_RTT_FACTOR)
    return min(left, key=lambda way: (_kind_rank(way), -left[way].bytes_per_s, way))


def _where(
    links: Mapping[Way, LinkFacts], holds: Callable[[LinkFacts], bool]
) -> dict[Way, LinkFacts]:
    return {way: link for way, link in links.items() if holds(link)}


def _is_clearly_better(link: LinkFacts, pinned: LinkFacts) -> bool:
    """Speed alone: two yardsticks, each with its own margin, could switch to and fro."""
    return not link.trouble and link.bytes_per_s >= SWITCH_FACTOR * pinned.bytes_per_s


def _pinned_link(pair: _Pair) -> LinkFacts | None:
    return pair.ways[pair.pinned].link if pair.pinned else None


def _kind_rank(way: Way) -> int:
    return KIND_RANKS.get(way.kind, len(KIND_RANKS))


def _way_order(way: Way) -> tuple[int, Way]:
    return _kind_rank(way), way


def _fraction(*ids: str) -> float:
    """Spread the ids over 0 to 1, the same on every device."""
    digest = hashlib.sha256("\n".join(ids).encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32
