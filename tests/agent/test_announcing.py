"""mDNS follows the network; the user hears when nobody answers. With a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from exo_train.agent.announcing import ALONE_HINT_AFTER_S, NOTHING_HEARD, Announcer
from exo_train.cluster.discovery import Heard
from exo_train.cluster.interfaces import ONLY_THIS, LocalAddress
from exo_train.cluster.mdns_record import Seen
from exo_train.cluster.multicast import MulticastCounts
from exo_train.errors import PeerError
from exo_train.peer import Address, NodeId

LAN = [
    LocalAddress(interface="lan0", host="10.56.0.2", kind="Ethernet"),
    LocalAddress(interface="lan0", host="fe80::2%lan0", kind="Ethernet", index=2),
]
OTHER = [LocalAddress(interface="lan0", host="10.56.0.22", kind="Ethernet")]
TUNNEL = LocalAddress(interface="tun0", host="10.8.0.1", kind="VPN or tunnel")
QUIET = replace(NOTHING_HEARD, interfaces={"lan0": MulticastCounts(sent=6)})


def seen(cluster: str) -> Seen:
    return Seen(
        node_id=NodeId(cluster * 4),
        cluster=cluster,
        protocol=2,
        addresses=(Address("10.56.0.9", 5000),),
    )


class Household:
    """Records what was announced and said."""

    def __init__(
        self,
        *,
        heard: Heard = QUIET,
        fails: int = 0,
        route: Callable[[], LocalAddress | None] = lambda: LAN[0],
    ) -> None:
        self.events: list[str] = []
        self.said: list[str] = []
        self.heard = heard
        self.fails = fails
        self.announcer = Announcer(self._start, say=self.said.append, route=route, cluster="ours")
        self._now_s = 0.0

    def _start(self, addresses: list[LocalAddress]) -> Record:
        if self.fails:
            self.fails -= 1
            self.events.append("failure")
            raise PeerError("mDNS does not work here (no route)")
        self.events.append(f"announce {addresses[0].host}")
        return Record(self)

    def after(self, seconds: float, addresses: list[LocalAddress], *, alone: bool = False) -> None:
        self._now_s += seconds
        self.announcer.follow(addresses, is_alone=alone, now_s=self._now_s)

    def hint(self, addresses: list[LocalAddress] = LAN) -> str:
        """Give what someone is told who has been alone for long enough."""
        self.after(0, addresses, alone=True)
        self.after(ALONE_HINT_AFTER_S, addresses, alone=True)
        (sentence,) = self.said
        return sentence


class Record:
    def __init__(self, home: Household) -> None:
        self._home = home

    def heard(self) -> Heard:
        return self._home.heard

    def ask_again(self) -> None:
        self._home.events.append("ask")

    def say_again(self) -> None:
        self._home.events.append("say")

    def announce_pairing(self, pairing_id: str, port: int) -> None:
        if self._home.fails:
            raise PeerError("mDNS does not work here (just now)")
        self._home.events.append(f"pairing {pairing_id} {port}")

    def withdraw_pairing(self) -> None:
        self._home.events.append("no pairing")

    def close(self) -> None:
        self._home.events.append("goodbye")


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
    assert home.said == ["no usable network yet: only this device can train"]


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
    for addresses in (LAN, [], [], [], []):
        home.after(20, addresses)
    assert home.events == ["announce 10.56.0.2", "goodbye"]


def test_it_asks_again_and_says_again_every_half_minute() -> None:
    home = Household()
    for _ in range(46):
        home.after(2, LAN)
    assert home.events == ["announce 10.56.0.2", *["ask", "say"] * 3]


def test_alone_it_says_again_every_few_seconds() -> None:
    """For one who came later, whom we do not hear: multicast may pass one way only."""
    home = Household()
    for _ in range(7):
        home.after(2, LAN, alone=True)
    assert home.events == ["announce 10.56.0.2", "say", "say", "say"]


def test_an_invitation_outlives_a_change_of_addresses_until_it_is_withdrawn() -> None:
    home = Household()
    home.announcer.announce_pairing("ab", 7)
    home.after(2, LAN)
    home.after(2, OTHER)
    home.after(2, OTHER)
    home.announcer.withdraw_pairing()
    home.after(2, LAN)
    home.after(2, LAN)
    home.announcer.announce_pairing("cd", 8)
    assert home.events == [
        "announce 10.56.0.2",
        "pairing ab 7",
        "goodbye",
        "announce 10.56.0.22",
        "pairing ab 7",
        "no pairing",
        "goodbye",
        "announce 10.56.0.2",
        "pairing cd 8",
    ]


def test_an_invitation_that_cannot_be_announced_is_said_and_no_end() -> None:
    home = Household()
    home.after(2, LAN)
    home.fails = 1
    home.announcer.announce_pairing("ab", 7)
    assert home.said == ["mDNS does not work here (just now)"]
    home.fails = 0
    home.after(2, OTHER)
    home.after(2, OTHER)
    assert home.events[-1] == "pairing ab 7"


def test_who_hears_nothing_is_told_once_that_multicast_does_not_arrive() -> None:
    home = Household()
    home.after(0, LAN, alone=True)
    home.after(ALONE_HINT_AFTER_S - 1, LAN, alone=True)
    assert home.said == []
    for _ in range(5):
        home.after(1, LAN, alone=True)
    (sentence,) = home.said
    assert "no other device was met in 15 s" in sentence
    assert "mDNS over IPv4 and IPv6 on lan0" in sentence
    assert "no multicast arrives on lan0" in sentence
    assert "--peer HOST:PORT" in sentence
    assert "cluster" not in sentence
    assert "VPN" not in sentence


def test_who_hears_others_but_no_exo_train_is_told_so() -> None:
    counts = {"lan0": MulticastCounts(sent=6, heard=40)}
    sentence = Household(heard=replace(QUIET, interfaces=counts)).hint()
    assert "multicast of other devices arrives on lan0, but none of this cluster" in sentence
    assert "no multicast" not in sentence
    assert "--peer HOST:PORT" in sentence


def test_who_hears_a_member_that_does_not_answer_is_told_where_it_is() -> None:
    sentence = Household(heard=replace(QUIET, seen=(seen("ours"), seen("else")))).hint()
    assert "announced at 10.56.0.9:5000 but does not answer" in sentence
    assert "exo-train doctor" in sentence


@pytest.mark.parametrize(("number", "said"), [(1, "1 other cluster seen"), (2, "2 other clusters")])
def test_other_clusters_are_counted(number: int, said: str) -> None:
    others = frozenset(f"c{n}" for n in range(number))
    assert said in Household(heard=replace(QUIET, other_clusters=others)).hint()


def test_a_vpn_that_takes_the_traffic_is_named() -> None:
    assert "the VPN tun0 takes this device's traffic" in Household(route=lambda: TUNNEL).hint()


def test_no_default_route_is_no_trouble() -> None:
    assert "VPN" not in Household(route=lambda: None).hint()


def test_who_met_somebody_is_not_told_later() -> None:
    home = Household()
    home.after(0, LAN, alone=True)
    home.after(5, LAN)
    home.after(60, LAN, alone=True)
    assert home.said == []


def test_a_vpn_used_for_want_of_anything_else_is_said_once() -> None:
    home = Household()
    only = [replace(TUNNEL, reason=ONLY_THIS)]
    for addresses in (only, LAN, LAN, only, only):
        home.after(2, addresses)
    (sentence,) = home.said
    assert sentence.startswith("only tun0 (VPN or tunnel) is there, so it is used")
    assert home.events[-1] == "announce 10.8.0.1"


def test_a_system_without_mdns_is_no_end_and_tried_ever_more_rarely() -> None:
    home = Household(fails=4)
    for _ in range(100):
        home.after(2, LAN, alone=True)
    events = [event for event in home.events if event != "say"]
    assert events == ["failure"] * 4 + ["announce 10.56.0.2"] + ["ask"] * 1
    assert home.said[0] == "mDNS does not work here (no route)"
    assert len(home.said) == 2, "and the hint, when mDNS works and nobody is there"


def test_one_bad_interface_is_said_once_and_tried_some_times() -> None:
    left_out = {"utun9 (IPv6)": "Cannot assign requested address"}
    home = Household(heard=replace(QUIET, left_out=left_out))
    for _ in range(400):
        home.after(2, LAN)
    assert home.said == ["mDNS goes without utun9 (IPv6): Cannot assign requested address"]
    assert home.events.count("announce 10.56.0.2") == 4
    home.heard = QUIET
    home.after(2, OTHER)
    home.after(2, OTHER)
    for _ in range(200):
        home.after(2, OTHER)
    assert home.events.count("announce 10.56.0.22") == 1


def test_what_was_heard_can_be_asked_at_any_time() -> None:
    home = Household()
    assert home.announcer.heard() == NOTHING_HEARD
    home.after(2, LAN)
    assert home.announcer.heard() == QUIET
    home.announcer.close()
    assert home.announcer.heard() == NOTHING_HEARD
