"""How fast, and how surely, devices become one membership. For tests and bench/meeting.py."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from tests.lan.frames import is_multicast
from tests.lan.hub import ANY, Rule
from tests.lan.lan_agents import LanAgents, wait_all_see
from tests.lan.namespaces import Lan

NUM_DEVICES = 5
MAX_OFFSET_S = 3.0
MULTICAST_LOSS = 0.2
JOINED_WITHIN_S = 30.0
SETTLED_AFTER_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    took_s: float  # from the last device's start to one membership
    view_hashes: frozenset[str]


def join_under_loss(lan: Lan, launch: LanAgents, *, seed: int) -> Joined:
    """Start hosts 1 to 5, all on the hub, at random times; wait until they are one membership.

    Raises AssertionError, with everyone's view, when they are not within JOINED_WITHIN_S.
    """
    lan.hub.set_rules(ANY, ANY, Rule(matches=is_multicast, loss=MULTICAST_LOSS))
    chance = random.Random(seed)
    agents = [launch.prepare(number) for number in range(1, NUM_DEVICES + 1)]
    offsets_s = [chance.uniform(0.0, MAX_OFFSET_S) for _ in agents]
    launch.start_one_by_one(agents, offsets_s)
    took_s = wait_all_see(agents, JOINED_WITHIN_S)
    return Joined(
        took_s=took_s, view_hashes=frozenset(agent.status()["view_hash"] for agent in agents)
    )


def time_to_member_s(launch: LanAgents) -> float:
    """Give the seconds from the start of `join` on host 2 until hosts 1 and 2 both list both."""
    (first,) = launch(1)
    time.sleep(SETTLED_AFTER_S)
    start_s = time.monotonic()
    (second,) = launch(2, wait=False)
    wait_all_see([first, second], JOINED_WITHIN_S)
    return time.monotonic() - start_s
