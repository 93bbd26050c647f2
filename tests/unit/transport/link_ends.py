"""Two ring neighbours on loopback, and the members that they may be."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from exo_train.cluster.roster import Roster
from exo_train.identity import (
    Identity,
    found_cluster,
    issue_certificate,
    new_key,
    node_id_of,
    public_key_of,
)
from exo_train.transport.base import Link, LinkIdentity, LinkLimits
from exo_train.transport.data_server import DataServer
from exo_train.transport.dial import dial
from exo_train.transport.tls import MemberTls

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


@dataclass(frozen=True)
class Household:
    """Three members of one cluster; each knows all of them."""

    mac: MemberTls
    pc: MemberTls
    laptop: MemberTls
    roster: Roster

    @classmethod
    def make(cls) -> Household:
        founder = found_cluster()
        roster = Roster.of(founder)
        mac, pc, laptop = (
            MemberTls(identity, roster.certificate)
            for identity in (founder, member_of(founder, roster), member_of(founder, roster))
        )
        return cls(mac, pc, laptop, roster)


def member_of(inviter: Identity, roster: Roster) -> Identity:
    """Make a device, invited by this one, and admit it."""
    key_pem = new_key()
    public_key = public_key_of(key_pem)
    certificate = issue_certificate(inviter, public_key)
    roster.admit(certificate)
    return replace(
        inviter, node_id=node_id_of(public_key), key_pem=key_pem, certificate=certificate
    )


def secure(household: Household) -> tuple[LinkIdentity, LinkIdentity]:
    """Give both ends of the link, each with the id that the other's certificate must prove."""
    return (
        replace(LOWER, peer_id=household.pc.identity.node_id),
        replace(UPPER, peer_id=household.mac.identity.node_id),
    )


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
