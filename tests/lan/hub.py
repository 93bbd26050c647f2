"""A switch in userspace, for what this machine's kernel cannot do to frames. For tests only.

Owns one TAP per plugged host and one thread that forwards: delay, jitter, loss, one-way drops,
size limits, refusals, and several hosts on one shared air. Must not know what the frames are for.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import random
import select
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tests.lan.frames import ETHERNET_BYTES, is_tcp_syn, reset_answer
from tests.lan.inside import open_tap

MAX_FRAME_BYTES = 9216
MAX_HELD_FRAMES = 20_000  # in delays; what comes on top is lost
MAX_AIR_WAIT_S = 1.0  # an access point's queue; what would wait longer is lost
MAX_FRAMES_A_TURN = 64
MAX_LEARNT = 1024
ANY = 0  # in rules: every host

Matches = Callable[[bytes], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What happens to the frames that match, on the way from one host to another."""

    matches: Matches | None = None  # None: all frames
    delay_s: float = 0.0
    jitter_s: float = 0.0  # added evenly between none and this; order is kept
    loss: float = 0.0  # 1.0 is a one-way cut
    mtu_bytes: int | None = None  # larger packets vanish without a word
    refuses: bool = False  # openings of TCP connections are answered by a reset


@dataclass(slots=True, kw_only=True)
class Air:
    """One medium for several hosts: each frame waits for those before it, and for stalls."""

    bits_per_s: float
    stall_s: tuple[float, float] = (0.0, 0.0)
    stall_every_s: tuple[float, float] = (1.0, 3.0)
    free_at_s: float = 0.0
    next_stall_s: float = 0.0

    def take(self, num_bytes: int, now_s: float, chance: random.Random) -> float | None:
        """Give when the frame is through; None when the queue is full."""
        if self.stall_s[1] and now_s >= self.next_stall_s:
            self.free_at_s = max(now_s, self.free_at_s) + chance.uniform(*self.stall_s)
            self.next_stall_s = self.free_at_s + chance.uniform(*self.stall_every_s)
        start_s = max(now_s, self.free_at_s)
        if start_s - now_s > MAX_AIR_WAIT_S:
            return None
        self.free_at_s = start_s + num_bytes * 8 / self.bits_per_s
        return self.free_at_s


@dataclass(slots=True)
class _Plug:
    number: int
    descriptor: int
    airs: list[Air] = field(default_factory=list)
    is_cut: bool = False


class Hub:
    """Rules may be changed while it runs; the same seed draws the same losses."""

    def __init__(self, seed: int = 0) -> None:
        self._chance = random.Random(seed)
        self._plugs: dict[int, _Plug] = {}  # by descriptor
        self._rules: dict[tuple[int, int], tuple[Rule, ...]] = {}
        self._learnt: dict[bytes, _Plug] = {}
        self._held: list[tuple[float, int, int, bytes]] = []
        self._last_due_s: dict[tuple[int, int], float] = {}
        self._counter = 0
        self._poll = select.epoll()
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll.register(self._wake, select.EPOLLIN)
        self._closing = False
        self.cpu_s = 0.0
        self.num_lost = 0
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        os.write(self._woken, b"x")
        self._thread.join()
        self._poll.close()
        for descriptor in (*self._plugs, self._wake, self._woken):
            os.close(descriptor)

    def plug(self, number: int, namespace: str, interface: str) -> None:
        """Make the interface there, its other end being this hub."""
        assert number != ANY
        descriptor = open_tap(namespace, interface)
        self._plugs = {**self._plugs, descriptor: _Plug(number, descriptor)}
        self._poll.register(descriptor, select.EPOLLIN)

    def set_rules(self, source: int, target: int, *rules: Rule) -> None:
        """Replace the rules of one direction; ANY stands for each host without rules of its own."""
        self._rules = {**self._rules, (source, target): rules}

    def share_air(self, air: Air, numbers: Iterable[int]) -> None:
        """Put hosts on one air; a frame between two of them takes it twice, as with Wi-Fi."""
        chosen = set(numbers)
        for plug in self._plugs.values():
            plug.airs = [air] if plug.number in chosen else plug.airs

    def cut(self, number: int, *, is_cut: bool = True) -> None:
        for plug in self._plugs.values():
            if plug.number == number:
                plug.is_cut = is_cut

    def _run(self) -> None:
        while not self._closing:
            wait_s = -1.0
            if self._held:
                wait_s = max(0.0, self._held[0][0] - time.monotonic())
            # epoll counts milliseconds, rounded up: good enough for what rules say.
            for descriptor, event in self._poll.poll(wait_s):
                if descriptor in self._plugs:
                    self._read(self._plugs[descriptor], event)
            self._send_due()
            self.cpu_s = time.thread_time()

    def _read(self, plug: _Plug, event: int) -> None:
        for _ in range(MAX_FRAMES_A_TURN):
            try:
                frame = os.read(plug.descriptor, MAX_FRAME_BYTES)
            except BlockingIOError:
                return
            except OSError:  # its namespace is gone, or the interface is down
                if event & (select.EPOLLERR | select.EPOLLHUP):
                    with contextlib.suppress(OSError):
                        self._poll.unregister(plug.descriptor)
                return
            if len(frame) >= ETHERNET_BYTES and not plug.is_cut:
                self._forward(plug, frame)

    def _forward(self, source: _Plug, frame: bytes) -> None:
        if len(self._learnt) >= MAX_LEARNT:
            self._learnt.clear()
        self._learnt[frame[6:12]] = source
        known = None if frame[0] & 1 else self._learnt.get(frame[:6])
        for target in (known,) if known else tuple(self._plugs.values()):
            if target is not source and not target.is_cut:
                self._pass(source, target, frame)

    def _pass(self, source: _Plug, target: _Plug, frame: bytes) -> None:
        now_s = time.monotonic()
        due_s = now_s
        for rule in self._rules_of(source.number, target.number):
            if rule.matches is not None and not rule.matches(frame):
                continue
            if rule.refuses and is_tcp_syn(frame):
                self._write(source.descriptor, reset_answer(frame))
                return
            is_too_large = rule.mtu_bytes is not None and (
                len(frame) > rule.mtu_bytes + ETHERNET_BYTES
            )
            if is_too_large or (rule.loss and self._chance.random() < rule.loss):
                self.num_lost += 1
                return
            due_s += rule.delay_s
            if rule.jitter_s:
                due_s += self._chance.uniform(0.0, rule.jitter_s)
        for air in (*source.airs, *target.airs):
            through_s = air.take(len(frame), now_s, self._chance)
            if through_s is None:
                self.num_lost += 1
                return
            due_s += through_s - now_s
        if due_s <= now_s:
            self._write(target.descriptor, frame)
        else:
            self._hold(source, target, due_s, frame)

    def _rules_of(self, source: int, target: int) -> tuple[Rule, ...]:
        rules = self._rules
        for pair in ((source, target), (source, ANY), (ANY, target), (ANY, ANY)):
            if pair in rules:
                return rules[pair]
        return ()

    def _hold(self, source: _Plug, target: _Plug, due_s: float, frame: bytes) -> None:
        if len(self._held) >= MAX_HELD_FRAMES:
            self.num_lost += 1
            return
        pair = (source.number, target.number)
        due_s = max(due_s, self._last_due_s.get(pair, 0.0))
        self._last_due_s[pair] = due_s
        self._counter += 1
        heapq.heappush(self._held, (due_s, self._counter, target.descriptor, frame))

    def _send_due(self) -> None:
        now_s = time.monotonic()
        while self._held and self._held[0][0] <= now_s:
            _, _, descriptor, frame = heapq.heappop(self._held)
            self._write(descriptor, frame)

    def _write(self, descriptor: int, frame: bytes) -> None:
        try:
            os.write(descriptor, frame)
        except OSError:  # the interface is down, or its queue full: a switch drops, too
            self.num_lost += 1
