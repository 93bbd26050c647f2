"""A long run over four devices with a fault every few steps: same losses, nothing piles up."""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from exo_train.agent import losses, recovery
from exo_train.config import TrainConfig
from exo_train.train import state_copies
from tests.ring.local_household import Disturbed, LocalHousehold, household_of, only_memory, run_in

pytestmark = pytest.mark.timeout(300)

STEPS = 300
WARM_STEPS = 100  # then all that is loaded once is loaded, and pools have grown
BETWEEN_FAULTS = (6, 11)  # steps
SEED = 20261201
BACKENDS = ("torch", "torch", "mlx", "torch")
PHASES = ("forward", "backward", "between", "commit", "committed", "snapshot")
LEAVE = "kill-agent"  # the device is away until the next fault
ACTIONS = ("kill", "kill", "error", LEAVE)
REL = 1e-4  # fp32, where another split adds the same numbers in another order
# Over two hundred steps and some thirty recoveries: what each would leave behind is more.
MORE_MEMORY_BYTES = 64 << 20
MORE_DESCRIPTORS = MORE_THREADS = 10
OF_A_RANK = ("StageRunner", "SnapshotStore")  # one of each while it lives


@dataclass(frozen=True, slots=True)
class Fault:
    step: int
    device: str
    action: str
    phase: str


@dataclass(frozen=True, slots=True)
class Usage:
    memory_bytes: int
    descriptors: int
    threads: int
    objects: Counter[str]

    @classmethod
    def now(cls) -> Usage:
        gc.collect()
        process = psutil.Process()
        kinds = (type(thing).__name__ for thing in gc.get_objects())
        return cls(
            process.memory_info().rss,
            process.num_fds(),
            threading.active_count(),
            Counter(kind for kind in kinds if kind in OF_A_RANK),
        )


@contextlib.contextmanager
def frameworks_out_of_garbage() -> Iterator[None]:
    """Leave what is there now out of collections: each rank makes one when it goes back, and
    would look through all frameworks' objects while the other ranks of this process wait.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def seeded_faults() -> Iterator[Fault]:
    chance = random.Random(SEED)
    step = chance.randint(*BETWEEN_FAULTS)
    while step < STEPS:
        device = f"device{chance.randrange(len(BACKENDS))}"
        yield Fault(step, device, chance.choice(ACTIONS), chance.choice(PHASES))
        step += chance.randint(*BETWEEN_FAULTS)


@dataclass
class Soak:
    """Has devices leave and come back, and looks at what the process uses."""

    household: LocalHousehold
    faults: tuple[Fault, ...]
    used: dict[int, Usage] = field(default_factory=dict)
    back: list[str] = field(default_factory=list)

    def on_step(self, step: int) -> None:
        if step in (WARM_STEPS, STEPS):
            self.used[step] = Usage.now()
        for fault in self.faults:
            if fault.step == step + 1:
                self.back += sorted(self.household.away - {fault.device})
                self.household.away.clear()
                if fault.action == LEAVE:
                    self.household.away.add(fault.device)

    def wanted(self, *, steps_left: int, step_s: float) -> str:
        """Stand in for the look after devices that came back."""
        names, self.back = self.back, []
        return f"{' and '.join(names)} can take part" if names else ""


@pytest.fixture(scope="module")
def long() -> TrainConfig:
    config = TrainConfig(
        batch_size=2, microbatch_size=1, max_seq_length=32, learning_rate=1e-3, dtype="fp32"
    )
    return only_memory(config, steps=STEPS, save_every=50, shadow="1")


def test_soak_ends_with_the_undisturbed_runs_losses_and_uses_no_more_than_at_first(
    tiny_model: Path,
    long: TrainConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # pytest keeps each log record, the error in it, and the rank that its traceback leads to.
    caplog.set_level(logging.ERROR, state_copies.__name__)
    undisturbed = run_in(household_of(tiny_model, BACKENDS), tmp_path / "undisturbed", long)
    faults = tuple(seeded_faults())
    assert len(faults) > 30
    household = household_of(tiny_model, BACKENDS, faults=_settings(faults, tmp_path))
    soak = Soak(household, faults)
    # This run is too short for these bounds, which are against what would never end.
    monkeypatch.setattr(losses, "MAX_LOSSES", len(faults) + 1)
    monkeypatch.setattr(losses, "MOURNING_S", 0.0)
    monkeypatch.setattr(recovery.Recovery, "wanted", lambda self, **now: soak.wanted(**now))

    with frameworks_out_of_garbage():
        disturbed = run_in(household, tmp_path / "run", long, on_step=soak.on_step)

    assert len(disturbed.losses) == STEPS
    assert disturbed.losses == pytest.approx(undisturbed.losses, rel=REL)
    _check_recoveries(disturbed, faults)
    warm, end = soak.used[WARM_STEPS], soak.used[STEPS]
    assert end.memory_bytes < warm.memory_bytes + MORE_MEMORY_BYTES, (warm, end)
    assert end.descriptors < warm.descriptors + MORE_DESCRIPTORS, (warm, end)
    assert end.threads < warm.threads + MORE_THREADS, (warm, end)
    assert max(end.objects.values()) <= len(BACKENDS) + 1, (warm, end)  # one may be ending


def _settings(faults: tuple[Fault, ...], root: Path) -> dict[str, str]:
    once = root / "once"
    once.mkdir()
    settings: dict[str, list[str]] = {}
    for fault in faults:
        text = f"{fault.action}@step={fault.step},phase={fault.phase},once={once}"
        settings.setdefault(fault.device, []).append(text)
    return {device: ";".join(texts) for device, texts in settings.items()}


def _check_recoveries(disturbed: Disturbed, faults: tuple[Fault, ...]) -> None:
    """Some strike nobody: the device was away, or has no part of the step with that phase."""
    interruptions = disturbed.progress.interruptions
    assert len(interruptions) > 0.8 * len(faults)
    assert max(one.steps_lost for one in interruptions) <= 1
    assert any(one.joined for one in interruptions)
    assert any(one.lost for one in interruptions)
