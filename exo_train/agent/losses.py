"""How often devices of a run were lost, and who is left out of it for that.

Owns the limits. Must not know how a loss is noticed nor what is done then. Thread-safe to read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from exo_train.plan.plan import Key, RankPlan

# A device that is lost so often within so long is left out until the run ends.
MAX_LOSSES = 3
LOSS_WINDOW_S = 600.0
# An agent that is gone still counts as alive for so long (cluster/member.py).
MOURNING_S = 20.0
# One whose memory was taken by other programs is not tried again before.
SHORT_OF_MEMORY_S = 60.0
# What an allocator's failure says was needed is not known: so much of the stage's share more.
MORE_RESERVE = 0.25


@dataclass(slots=True)
class _Account:
    name: str
    lost_s: list[float] = field(default_factory=list)
    agent_gone_s: float | None = None
    short_s: float | None = None  # when it had less memory than planned
    ran_out: bool = False
    aside: str = ""


class Losses:
    """`on_note` is told once of each device that is set aside."""

    def __init__(
        self, on_note: Callable[[str], None], *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_note = on_note
        self._clock_s = clock_s
        self._accounts: dict[Key, _Account] = {}

    def lost(self, rank: RankPlan, *, agent_gone: bool) -> None:
        account, now_s = self._account(rank), self._clock_s()
        account.lost_s = [t for t in account.lost_s if now_s - t < LOSS_WINDOW_S] + [now_s]
        account.agent_gone_s = now_s if agent_gone else None
        if len(account.lost_s) >= MAX_LOSSES:
            minutes = LOSS_WINDOW_S / 60
            self.set_aside(rank, f"it was lost {MAX_LOSSES} times within {minutes:.0f} minutes")

    def ran_out(self, rank: RankPlan) -> None:
        """Take note that memory ran out in a step; planned with more reserve it may do."""
        account = self._account(rank)
        if account.ran_out:
            self.set_aside(rank, "its memory ran out again, with more of it kept free")
        account.ran_out = True

    def short(self, rank: RankPlan) -> None:
        """Take note that less memory was free than the plan reckoned with."""
        self._account(rank).short_s = self._clock_s()

    def set_aside(self, rank: RankPlan, why: str) -> None:
        account = self._account(rank)
        if not account.aside:
            account.aside = why
            self._on_note(f"{rank.name} is set aside until the run ends: {why}")

    def reserves(self, ranks: tuple[RankPlan, ...]) -> Mapping[Key, int]:
        """Give how much less those may take of whom memory ran out."""
        return {
            rank.key: round(MORE_RESERVE * rank.memory_bytes)
            for rank in ranks
            if rank.key in self._accounts and self._accounts[rank.key].ran_out
        }

    def is_usable(self, key: Key, *, live_s: float) -> bool:
        """Tell whether a device may take part now, whose agent has been live for so long."""
        account = self._accounts.get(key)
        if account is None:
            return True
        gone_s, short_s = self._since_s(account.agent_gone_s), self._since_s(account.short_s)
        is_gone = gone_s < MOURNING_S and live_s > gone_s
        return not (account.aside or is_gone or short_s < SHORT_OF_MEMORY_S)

    def unwanted(self) -> set[Key]:
        """Give those that are no stand-by now; also for another thread to ask."""
        return {
            key for key in tuple(self._accounts) if not self.is_usable(key, live_s=float("inf"))
        }

    def aside(self, key: Key) -> str:
        """Say why a device is set aside; empty: it is not."""
        account = self._accounts.get(key)
        return f"{account.name}: {account.aside}" if account and account.aside else ""

    def _since_s(self, at_s: float | None) -> float:
        return float("inf") if at_s is None else self._clock_s() - at_s

    def _account(self, rank: RankPlan) -> _Account:
        return self._accounts.setdefault(rank.key, _Account(rank.name))
