"""Ranks of the real kind in a household and a network that are out for harm. For tests only.

Owns what goes wrong and when, on a clock of its own. A rank's weights are the steps that were
applied to them, so that two histories can be told apart.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from exo_train.agent import recovery
from exo_train.agent.local_ring import LocalNetwork, LocalSurroundings
from exo_train.backends.base import Arrays, MicrobatchInput
from exo_train.backends.preference import PairSums
from exo_train.errors import ExoTrainError, PeerLostError, ProtocolError
from exo_train.models.manifest import ModelManifest
from exo_train.plan.plan import Plan
from exo_train.train import conversation, stage_runner
from exo_train.train.conversation import Event, LostRankError
from exo_train.train.faults import KilledError
from exo_train.train.snapshots import Snapshot
from exo_train.train.stage_runner import StageRunner
from exo_train.train.surroundings import interrupt_early
from exo_train.wire.pb import control_pb2 as pb

LOOK_S = 4.0  # how much time passes each time that the driver looks and nothing is there
Applied = tuple[tuple[int, int, int], ...]  # generation, step, number of the gradient


@dataclass
class Fate:
    """What happens to a message of `kind` to or from a device, or when it is at a point.

    `after` says how many such messages come through before. "late" takes a message out of its
    stream and brings it `looks` looks of the driver later, which may be in another generation;
    "stall" holds up all that follow it, too.
    """

    kind: str
    device: str
    what: str
    looks: int = 1
    after: int = 0


@dataclass(eq=False)
class Harm:
    """All devices, what is to go wrong, and what is under way; the time is that of the driver."""

    off: set[str] = field(default_factory=set)
    fates: list[Fate] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)  # looks to go, and what is done then
    channels: dict[str, Channel] = field(default_factory=dict)
    network: LocalNetwork = field(default_factory=LocalNetwork)
    ordered: set[int] = field(default_factory=set)  # the gradients that are to be applied
    copies_disturbed: bool = False
    now_s: float = field(default_factory=time.monotonic)
    starting: Channel = field(init=False)

    current: ClassVar[Harm]  # the one whose time passes

    def __post_init__(self) -> None:
        Harm.current = self

    def take(self, kind: str, device: str) -> Fate | None:
        """Give what is to happen here, once."""
        for fate in self.fates:
            if (fate.kind, fate.device) == (kind, device):
                if fate.after:
                    fate.after -= 1
                    continue
                self.fates.remove(fate)
                self.copies_disturbed |= kind in ("mark", "shadowed") or "copy" in kind
                if fate.what == "off":
                    self.off.add(device)
                return fate
        return None

    def reach(self, point: str, device: str) -> None:
        fate = self.take(point, device)
        if fate is not None and fate.what == "error":
            raise ExoTrainError(f"{device} failed at '{point}'")
        if fate is not None:
            raise KilledError(point)

    def idle(self) -> None:
        """Nothing is there for the driver: others come to their turn."""
        for channel in list(self.channels.values()):
            if channel.copies is not None:
                channel.copies.run()
        self.let_through(1)
        for channel in list(self.channels.values()):
            channel.beat()

    def let_through(self, looks: int) -> None:
        """Bring what is held up for no longer than that."""
        waiting, self.held = self.held, []
        for to_go, bring in waiting:
            if to_go > looks:
                self.held.append((to_go - looks, bring))
            else:
                bring()


class History:
    """A stage whose weights are what was applied to them, layer by layer."""

    take_pair_sums = PairSums  # there are none

    def __init__(self, harm: Harm, device: str, plan: Plan, layers: range) -> None:
        self._harm, self._device, self.generation = harm, device, plan.generation
        self.adapters: dict[int, Applied] = dict.fromkeys(layers, ())
        self.moments: dict[int, Applied] = dict.fromkeys(layers, ())
        self._step = self._gradient = 0

    def begin_step(self, *, step: int, loss_scale: float) -> None:
        self._step, self._gradient = step, int(loss_scale)

    def forward(self, microbatch: MicrobatchInput) -> None:
        self._harm.reach("compute", self._device)

    def backward(self, index: int, grad_BTD: object) -> None: ...

    def loss_sum(self) -> float:
        return 1.0

    def grad_square_sum(self) -> float:
        return 1.0

    def find_bad_gradient(self) -> str:
        return ""

    def peak_memory_bytes(self) -> int:
        return 0

    def apply(self, *, learning_rate: float, grad_scale: float) -> None:
        self._harm.reach("before apply", self._device)
        number = int(learning_rate)
        assert number == self._gradient, "a commit is applied to the gradient of another step"
        assert number in self._harm.ordered, "a step is applied that the driver dropped"
        entry = (self.generation, self._step, number)
        for place, layer in enumerate(self.adapters):
            done = [step for _, step, _ in self.adapters[layer]]
            assert self._step not in done, f"step {self._step} is applied twice"
            self.adapters[layer] += (entry,)
            if place == 0:
                self._harm.reach("half apply", self._device)
        self.moments = {layer: (*m, entry) for layer, m in self.moments.items()}
        self._harm.reach("after apply", self._device)

    def adapter(self) -> Arrays:
        self._harm.reach("keep", self._device)
        return {layer_name(layer): _to_array(applied) for layer, applied in self.adapters.items()}

    def optimizer_state(self) -> Arrays:
        self._harm.reach("keep", self._device)
        arrays = {f"{layer_name(layer)}.exp_avg": _to_array(m) for layer, m in self.moments.items()}
        return {**arrays, "step": np.array(0, np.int64)}

    def load_adapter(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.adapters = self._taken(arrays, "")

    def load_optimizer_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.moments = self._taken(arrays, ".exp_avg")

    def _taken(self, arrays: Mapping[str, np.ndarray], ending: str) -> dict[int, Applied]:
        self._harm.reach("take", self._device)
        try:
            return {n: from_array(arrays[layer_name(n) + ending]) for n in self.adapters}
        except KeyError as error:
            raise ProtocolError(f"{self._device}: {error} is missing") from None


class Around(LocalSurroundings):
    """A process' own surroundings, without links, model or time."""

    def __init__(self, harm: Harm, device: str) -> None:
        super().__init__(harm.network, Path())
        self._harm, self._device = harm, device
        self.stage: History | None = None

    @property
    def snapshots(self) -> list[Snapshot]:
        return [] if self._store is None else list(self._store._kept.values())

    def connect(self, plan: Plan, rank: int, token: str) -> tuple[None, None]:
        if self.stage is not None:
            self.stage.generation = plan.generation  # it may stay
        return None, None

    def tensors(self, manifest: ModelManifest, *args: Any, **options: Any) -> Any:
        return None

    def load_stage(self, plan: Plan, rank: int, *args: Any) -> Any:
        self._harm.reach("loading", self._device)
        self.stage = History(self._harm, self._device, plan, plan.ranks[rank].stage.layers)
        return self.stage

    def send_shadow(self, plan: Plan, rank: int, snapshot: Snapshot, token: str) -> None:
        self._harm.reach("before copy", self._device)
        super().send_shadow(plan, rank, snapshot, token)
        self._harm.reach("after copy", self._device)


class Copies:
    """In place of `BackgroundCopies`: a copy is made when the driver waits, or later."""

    def __init__(self) -> None:
        self._channel = Harm.current.starting
        self._channel.copies = self
        self._waiting: Callable[[], None] | None = None

    def begin(self, copy: Callable[[], None]) -> None:
        self._waiting = copy

    def forget(self) -> None:
        self._waiting = None

    def run(self) -> None:
        copy, self._waiting = self._waiting, None
        if copy is None or self._channel.is_dead:
            return
        fate = Harm.current.take("copy", self._channel.device)
        if fate is None:
            self._channel.alive(copy)
        elif fate.what == "late":  # it is at work meanwhile: nobody can take it back
            channel = self._channel
            Harm.current.held.append((fate.looks, lambda: channel.alive(copy)))


class Channel:
    """One rank and its stream; whatever comes, it answers in the driver's thread."""

    def __init__(self, harm: Harm, device: str) -> None:
        self._harm, self.device = harm, device
        self.is_dead = self._is_cut = self._is_closed = False
        self._stalled: list[Callable[[], None]] | None = None
        self._is_late = 0
        self._on_event: Callable[[Event], None] = lambda event: None
        self.around = Around(harm, device)
        self.copies: Copies | None = None
        self._runner: StageRunner | None = None

    def start(self, on_event: Callable[[Event], None]) -> None:
        if self.device in self._harm.off:
            raise PeerLostError(f"{self.device} is off")
        self._on_event = on_event
        self._harm.starting = self
        self._runner = StageRunner(self.around, send=lambda m: self._pass(m, self._to_driver))
        self._harm.channels[self.device] = self
        self.beat()

    def send(self, message: pb.RunMessage) -> None:
        if self._runner is not None:
            self.alive(lambda: self._pass(message, self._to_rank))

    def close(self) -> None:
        self._is_closed = True
        self._end()

    def beat(self) -> None:
        """Send a sign of life; one whose message is under way waits, and is not stuck itself."""
        if not (self.is_dead or self._is_cut or self._is_closed):
            phase = "waiting for a neighbour" if self._is_late else "working"
            self._on_event(pb.RunMessage(progress=pb.Progress(phase=phase)))

    def alive(self, work: Callable[[], object]) -> None:
        """Do a piece of the rank's work, which may be its last."""
        if self.is_dead:
            return
        try:
            work()
        except KilledError:
            self._lose("its worker was killed")
            self._end()
        except ExoTrainError:  # only copies: the rank reports its own itself
            pass

    def _pass(self, message: pb.RunMessage, bring: Callable[[pb.RunMessage], None]) -> None:
        if self._is_cut:
            return
        if self._stalled is not None:
            self._stalled.append(lambda: bring(message))
            return
        fate = self._harm.take(message.WhichOneof("body") or "", self.device)
        match fate.what if fate is not None else "":
            case "double":
                bring(message)
                bring(message)
            case "late" | "stall" as how:
                assert fate is not None
                self._hold(message, bring, fate.looks, stall=how == "stall")
            case "cut" | "silence" as how:
                if how == "cut":
                    self._lose("its stream ended")
                self._is_cut = True
            case "kill" | "off":
                raise KilledError(message.WhichOneof("body"))
            case _:
                bring(message)

    def _hold(
        self,
        message: pb.RunMessage,
        bring: Callable[[pb.RunMessage], None],
        looks: int,
        *,
        stall: bool,
    ) -> None:
        if stall:
            self._stalled = []
        self._is_late += 1

        def release() -> None:
            self._is_late -= 1
            bring(message)
            if stall:
                stalled, self._stalled = self._stalled or [], None
                for following in stalled:
                    following()

        self._harm.held.append((looks, release))

    def _to_driver(self, message: pb.RunMessage) -> None:
        self._on_event(message)

    def _to_rank(self, message: pb.RunMessage) -> None:
        def work() -> None:
            assert self._runner is not None
            interrupt_early(self.around, message)
            if not self._runner.handle(message):
                self._end()

        self.alive(work)

    def _lose(self, why: str) -> None:
        if not (self._is_closed or self._is_cut):
            self._on_event(LostRankError(f"{self.device}: {why}"))

    def _end(self) -> None:
        if not self.is_dead:
            self.is_dead = True
            if self._runner is not None:
                self._runner.close()


class _Events:
    """In place of `queue.SimpleQueue`: who waits lets time pass."""

    def __init__(self) -> None:
        self._events: deque[Any] = deque()

    def put(self, event: Any) -> None:
        self._events.append(event)

    def get(self, timeout: float) -> Any:
        if self._events:
            return self._events.popleft()
        Harm.current.now_s += timeout
        Harm.current.idle()
        raise queue.Empty


@contextmanager
def no_real_time() -> Iterator[None]:
    """Let waits pass in no time, and copies be made in the driver's thread."""
    with pytest.MonkeyPatch.context() as patch:
        clock = SimpleNamespace(monotonic=lambda: Harm.current.now_s)
        patch.setattr(conversation, "time", clock)
        events = SimpleNamespace(SimpleQueue=_Events, Empty=queue.Empty)
        patch.setattr(conversation, "queue", events)
        patch.setattr(conversation, "POLL_S", LOOK_S)
        patch.setattr(stage_runner, "BackgroundCopies", Copies)
        patch.setattr(stage_runner, "gc", SimpleNamespace(collect=lambda: None))
        patch.setattr(recovery, "MAX_FRUITLESS", 1_000_000)  # it is the network's fault
        yield


def layer_name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.q_proj.lora_a"


def _to_array(applied: Applied) -> np.ndarray:
    return np.array(applied, np.int64).reshape(-1, 3)


def from_array(array: np.ndarray) -> Applied:
    return tuple(tuple(int(number) for number in row) for row in array)  # type: ignore[misc]
