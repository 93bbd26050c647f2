"""How a membership begins and ends from the command line: by a code, by leaving, by removal.

Owns their order, and what happens to a membership that was there before. Must not speak to other
devices itself: pairing and the agent do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from exo_train.agent.local_client import LocalClient, own_agent
from exo_train.agent.pairing import SEARCH_S, pair
from exo_train.cluster.discovery import browse_pairing
from exo_train.cluster.home import Home, RememberedPeer
from exo_train.cluster.interfaces import all_dialable, usable_addresses
from exo_train.cluster.pairing import Code
from exo_train.errors import ConfigError, PeerError
from exo_train.identity import read_certificate
from exo_train.peer import Address, short_id

LEAVE_TIMEOUT_S = 10.0
MEET_TIMEOUT_S = 4.0
POLL_S = 0.1


def become_member(
    home: Home,
    code_text: str,
    *,
    peers: Sequence[Address],
    interface: str | None,
    say: Callable[[str], None],
    stopped: threading.Event | None = None,
) -> None:
    """Pair this home with the device that printed the code.

    Typed addresses go first: the network is listened to only when nobody with the code is there.
    Raises ConfigError when the code is none or this device belongs to others already, PeerError
    when pairing fails, InterruptedRunError soon after `stopped` was set; the home is unchanged
    then.
    """
    code = Code.parse(code_text)
    home.check_free()
    check_unattached(home)
    say(f"looking for the device that shows {code} …")
    paired = pair(
        all_dialable(peers),
        code,
        otherwise=lambda ended: _heard(interface, ended, is_all=not peers),
        stopped=stopped,
    )
    home.forget_membership()
    home.store_membership(paired.identity, paired.roster)
    inviter_id = read_certificate(
        paired.identity.certificate,
        authority_certificate=paired.identity.authority_certificate,
    ).invited_by
    inviter = RememberedPeer(
        node_id=inviter_id, name=short_id(inviter_id), addresses=paired.endpoints
    )
    home.remember_peers([inviter])
    num_others = len(home.roster(paired.identity).members()) - 1
    say(f"paired: this device is a member now, with {num_others} other(s)")


def forget_cluster(home: Home) -> None:
    """Delete this home's membership and tell nobody; raises ConfigError while its agent runs."""
    home.check_free()
    if not home.has_membership_files():
        raise ConfigError("this device belongs to no cluster; there is nothing to forget")
    home.forget_membership()


def leave_cluster(home: Home) -> tuple[str, ...]:
    """End this home's membership; gives the names of the members that know.

    The agent does it, so that the others hear; without one that runs, one is started for it. A
    home whose files are damaged just forgets.
    """
    is_running = home.agent() is not None
    if not is_running and _is_over(home):
        home.forget_membership()
        return ()
    with own_agent(home) as client:
        if not is_running:
            _wait_met(client, home)
        told = client.leave()
        deadline_s = time.monotonic() + LEAVE_TIMEOUT_S
        # The agent gives the home free first, and deletes the keys when all its threads are still.
        while _has_agent_or_keys(home) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
    if _has_agent_or_keys(home):
        raise PeerError("the agent is leaving but has not ended yet; try `exo-train leave` again")
    return told


def remove_member(home: Home, device: str) -> tuple[str, tuple[str, ...]]:
    """End another device's membership; gives its name, and the names of those it had invited.

    The members that are here hear at once, the others when they meet one who knows.
    """
    home.paired_identity()
    is_running = home.agent() is not None
    with own_agent(home) as client:
        if not is_running:
            _wait_met(client, home)
        return client.remove(device)


def is_expelled(home: Home) -> bool:
    """Tell whether this device knows that it was removed."""
    identity = home.identity()
    return identity is not None and home.roster(identity).is_removed(identity.node_id)


def check_unattached(home: Home) -> None:
    """Raise ConfigError while this home's device shares a cluster with others."""
    identity = home.identity()
    if identity is None:
        return
    roster = home.roster(identity)
    others = [member for member in roster.members() if member != identity.node_id]
    if is_expelled(home) or not others:
        return
    names = home.remembered_names()
    listed = ", ".join(names.get(other, short_id(other)) for other in others)
    raise ConfigError(
        f"this device belongs to a cluster already, with {listed}; run `exo-train join` without "
        f"--code to meet them, or `exo-train leave` first to join another cluster"
    )


def _is_over(home: Home) -> bool:
    """Tell whether there is no membership to end but only files, damaged or of a removed device.

    Raises ConfigError when there is not even that.
    """
    try:
        identity = home.identity()
        if identity is None:
            raise ConfigError("this device belongs to no cluster; there is nothing to leave")
        return home.roster(identity).is_removed(identity.node_id)
    except ConfigError:
        if not home.has_membership_files():
            raise
        return True


def _has_agent_or_keys(home: Home) -> bool:
    return home.agent() is not None or home.has_membership_files()


def _wait_met(client: LocalClient, home: Home) -> None:
    """Give an agent that was just started a moment to hear those who are to be told."""
    num_members = len(home.roster(home.paired_identity()).members())
    deadline_s = time.monotonic() + MEET_TIMEOUT_S
    while time.monotonic() < deadline_s:
        alive = [m for m in client.status()["members"] if m["state"] == "alive"]
        if len(alive) >= num_members:
            return
        time.sleep(POLL_S)


def _heard(interface: str | None, ended: threading.Event, *, is_all: bool) -> Iterator[Address]:
    """Give what mDNS hears; that it does not work is an error if nothing else was there to try."""
    try:
        usable = usable_addresses(interface)
        for seen in browse_pairing(usable, timeout_s=SEARCH_S, stop=ended):
            yield from all_dialable(seen.addresses)
    except (ConfigError, PeerError):
        if is_all:
            raise
