"""mDNS follows the network; the user hears when nobody answers. With a virtual clock."""

from __future__ import annotations

from exo_train.agent.announcing import ALONE_HINT_AFTER_S, Announcer
from exo_train.cluster.interfaces import LocalAddress
from exo_train.errors import PeerError

LAN = [LocalAddress("lan0", "10.56.0.2", True)]
OTHER = [LocalAddress("lan0", "10.56.0.22", True)]


class Household:
    """Records what was announced and said."""

    def __init__(self, fails: bool = False) -> None:
        self.events: list[str] = []
        self.said: list[str] = []
        self._fails = fails
        self.announcer = Announcer(self._start, say=self.said.append)
        self._now_s = 0.0

    def _start(self, addresses: list[LocalAddress]) -> Record:
        if self._fails:
            raise PeerError("mDNS does not work here (no route)")
        self.events.append(f"announce {addresses[0].host}")
        return Record(self.events)

    def after(self, seconds: float, addresses: list[LocalAddress], *, alone: bool = False) -> None:
        self._now_s += seconds
        self.announcer.follow(addresses, is_alone=alone, now_s=self._now_s)


class Record:
    def __init__(self, events: list[str]) -> None:
        self._events = events

    def close(self) -> None:
        self._events.append("goodbye")


def test_it_announces_at_once_and_once() -> None:
    home = Household()
    for _ in range(5):
        home.after(2, LAN)
    home.announcer.close()
    assert home.events == ["announce 10.56.0.2", "goodbye"]
    assert home.said == []


def test_a_network_that_comes_later_is_used() -> None:
    home = Household()
    for addresses in ([], [], LAN, LAN):
        home.after(2, addresses)
    assert home.events == ["announce 10.56.0.2"]
    assert home.said == ["no usable network with IPv4 yet: only this device can train"]


def test_a_changed_address_is_announced_and_flapping_is_not() -> None:
    home = Household()
    for addresses in (LAN, OTHER, LAN, OTHER, LAN):
        home.after(2, addresses)
    assert home.events == ["announce 10.56.0.2"]
    for _ in range(3):
        home.after(2, OTHER)
    assert home.events == ["announce 10.56.0.2", "goodbye", "announce 10.56.0.22"]


def test_a_network_that_goes_is_left() -> None:
    home = Household()
    for addresses in (LAN, [], []):
        home.after(2, addresses)
    assert home.events == ["announce 10.56.0.2", "goodbye"]


def test_who_hears_nobody_is_told_once_what_to_do() -> None:
    home = Household()
    home.after(0, LAN, alone=True)
    home.after(ALONE_HINT_AFTER_S - 1, LAN, alone=True)
    assert home.said == []
    for _ in range(5):
        home.after(1, LAN, alone=True)
    (sentence,) = home.said
    assert "heard on lan0 for 15 s" in sentence
    assert "--peer HOST:PORT" in sentence


def test_who_met_somebody_is_not_told_later() -> None:
    home = Household()
    home.after(0, LAN, alone=True)
    home.after(5, LAN)
    home.after(60, LAN, alone=True)
    assert home.said == []


def test_a_system_without_mdns_is_no_end() -> None:
    home = Household(fails=True)
    for _ in range(3):
        home.after(10, LAN, alone=True)
    home.announcer.close()
    assert home.said == ["mDNS does not work here (no route)"]
