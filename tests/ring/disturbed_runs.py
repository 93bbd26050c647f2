"""A household whose devices come to harm, and what must hold after any harm. For tests only.

Owns the faults in its agents' environments, which are armed one by one so that agents are not
started anew for each, the mending of what they did, and the oracle that all runs are held to.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from exo_train.agent.driver import Outcome, train
from exo_train.agent.local_client import LocalClient, stop_process
from exo_train.agent.opening import Narrator
from exo_train.agent.resuming import resumed_options
from exo_train.config import TrainConfig
from exo_train.errors import PeerError
from exo_train.train.checkpoint import FOLDER, load_checkpoint
from exo_train.train.fault_points import VARIABLE, KilledError, Strikes, parse_fault
from exo_train.train.watcher import Watcher
from tests.agent.running_agents import wait_until
from tests.ring.household import Household
from tests.ring.household_runs import losses, metrics

COORDINATOR, OTHERS = "attic", ("desk", "hall")
NAMES = (COORDINATOR, *OTHERS)
STEPS, SAVE_EVERY = 6, 2
# Each device has its own step, so that both can come to harm in one run.
HARM_STEP = {"desk": 5, "hall": 3}
PHASES = ("loading", "forward", "backward", "between", "commit", "committed", "snapshot")
ACTIONS = ("kill", "term", "stop", "kill-agent", "stop-agent", "kill-both", "stop-both")
QUIET_WITHIN_S = 30.0
MEET_WITHIN_S = 60.0
DRIVER_TIMEOUT_S = 120.0
REL = 1e-4  # fp32, where another split adds the same numbers in another order


@dataclass(frozen=True, slots=True)
class Harm:
    """One fault that a device's environment has; `once` is a folder of its own."""

    device: str
    action: str
    phase: str
    root: Path

    @property
    def once(self) -> Path:
        return self.root / f"{self.device}-{self.action}-{self.phase}"

    @property
    def setting(self) -> str:
        step = "" if self.phase == "loading" else f",step={HARM_STEP[self.device]}"
        return f"{self.action}@phase={self.phase}{step},once={self.once}"

    def arm(self) -> None:
        self.once.mkdir(parents=True, exist_ok=True)
        for strike in self.once.iterdir():
            strike.unlink()

    def disarm(self) -> None:
        """Have it strike a thread, once: there is no second time for the workers."""
        self.arm()
        strikes = Strikes(faults=(parse_fault(self.setting),), in_process=True)
        with contextlib.suppress(KilledError):
            strikes.reach(self.phase, step=HARM_STEP[self.device])

    @property
    def has_struck(self) -> bool:
        return any(self.once.iterdir())


@dataclass
class Told:
    """What a run said and left on its way."""

    notes: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    checkpoints: set[str] = field(default_factory=set)
    outcome: Outcome | None = None

    @property
    def text(self) -> str:
        return "\n".join(self.notes)

    @property
    def steps_lost(self) -> int:
        """Give how many steps were reported more than once."""
        return len(self.steps) - len(set(self.steps))


class DisturbedHousehold(Household):
    """Three PyTorch members; the coordinator's agent has no faults."""

    def begin(self) -> None:
        self.ports: dict[str, set[int]] = {}
        for device in OTHERS:
            for harm in self._harms(device):
                harm.disarm()
        self.mend()

    def harm(self, device: str, action: str, phase: str) -> Harm:
        return Harm(device, action, phase, self.root / "strikes")

    def mend(self) -> None:
        """Have all agents run, met and idle, whatever the test before did to them."""
        for name in [name for name in self.processes if not self._runs(name)]:
            stop_process(self.processes.pop(name))
        for name in [name for name in NAMES if name not in self.processes]:
            harms = () if name == COORDINATOR else self._harms(name)
            self.add(name, "torch", fault=";".join(harm.setting for harm in harms))
        self.wait_met(NAMES)
        self.wait_quiet()
        self.ports = {name: self._listening(name) for name in NAMES}

    def _harms(self, device: str) -> Iterator[Harm]:
        for action in ACTIONS:
            for phase in PHASES:
                yield self.harm(device, action, phase)

    def send(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def let_go_on(self) -> None:
        """Wake what SIGSTOP holds: a lid is opened."""
        for name in OTHERS:
            with contextlib.suppress(psutil.NoSuchProcess):
                agent = psutil.Process(self.processes[name].pid)
                for process in (agent, *agent.children()):
                    process.send_signal(signal.SIGCONT)

    def live(self) -> list[str]:
        return [name for name in NAMES if self._runs(name)]

    def _runs(self, name: str) -> bool:
        return name in self.processes and self.processes[name].poll() is None

    def status_of(self, name: str) -> dict[str, Any]:
        endpoint = self.homes[name].agent()
        if endpoint is None:
            raise PeerError(f"{name} does not run")
        with LocalClient(endpoint) as client:
            return client.status()

    def wait_quiet(self) -> None:
        """Wait until nobody trains and all that live tell the same story."""

        def is_quiet() -> bool:
            with contextlib.suppress(PeerError):
                told = [self.status_of(name) for name in self.live()]
                same = len({status["view_hash"] for status in told}) == 1
                return same and all(status["run"] is None for status in told)
            return False

        wait_until(is_quiet, QUIET_WITHIN_S, lambda: f"not quiet: {self._stories()}")

    def _stories(self) -> dict[str, Any]:
        stories: dict[str, Any] = {}
        for name in self.live():
            try:
                status = self.status_of(name)
                seen = {m["name"]: m["state"] for m in status["members"]}
                stories[name] = (status["view_hash"][:8], status["run"], seen)
            except PeerError as error:
                stories[name] = str(error)
        return stories

    def _listening(self, name: str) -> set[int]:
        process = psutil.Process(self.processes[name].pid)
        connections = process.net_connections(kind="tcp")
        return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}

    def check_nothing_left(self, run_dir: Path) -> None:
        """No worker, no port of one, no half-written file; all live members say the same."""
        wait_until(
            lambda: not self.workers(), QUIET_WITHIN_S, lambda: f"left over: {self.workers()}"
        )
        self.wait_quiet()
        for name in self.live():
            if name in self.ports:  # started before the run, and not anew
                assert self._listening(name) <= self.ports[name], f"{name} keeps a port"
        left = [path for path in (run_dir, self.root) for path in path.rglob("*.tmp")]
        assert not left, f"half-written files are left: {left}"

    def train(
        self,
        config: TrainConfig,
        run_dir: Path,
        *armed: Harm,
        at_step: Callable[[int], None] = lambda step: None,
        on_note: Callable[[str], None] = lambda note: None,
    ) -> Told:
        """Train with the coordinator's driver in this process while `armed` faults strike."""
        for harm in armed:
            harm.arm()
        told = Told()

        def note(text: str) -> None:
            told.notes.append(text)
            on_note(text)

        def step_done(step: Any, remaining_s: float | None) -> None:
            told.steps.append(step.step)
            told.checkpoints |= finished_checkpoints(run_dir)
            at_step(step.step)

        told.outcome = train(
            self.homes[COORDINATOR],
            replace(config, run_dir=str(run_dir)),
            watcher=Watcher(on_step=step_done, on_note=note),
            narrator=Narrator(on_note=note),
        )
        self._check_struck(armed)
        return told

    def resume(self, run_dir: Path) -> None:
        options = resumed_options(run_dir, {})
        home = self.homes[COORDINATOR]
        train(home, options, watcher=Watcher(), narrator=Narrator(), resume=run_dir)

    def _check_struck(self, armed: Sequence[Harm]) -> None:
        missed = [harm.setting for harm in armed if not harm.has_struck]
        assert not missed, f"{missed} did not strike, so nothing was tested"

    def drive(
        self, *arguments: str, fault: str = "", timeout_s: float = DRIVER_TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a driver as a process of its own, which may come to harm itself."""
        return subprocess.run(
            [sys.executable, "-m", "exo_train", *arguments],
            env=self.environment(COORDINATOR) | {VARIABLE: fault},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


def disturbed_config(config: TrainConfig) -> TrainConfig:
    """Give options under which every checkpoint stays and every step is copied."""
    return replace(
        config, steps=STEPS, save_every=SAVE_EVERY, keep=STEPS, dtype="fp32", shadow="1",
        takeover=False,
        min_devices=len(NAMES),
    )  # fmt: skip


def options_of(config: TrainConfig, run_dir: Path) -> list[str]:
    """Give the same options as a user types them."""
    named = (
        "data", "steps", "batch_size", "microbatch_size", "max_seq_length", "learning_rate",
        "dtype", "save_every", "keep", "shadow", "min_devices", "profile_s",
    )  # fmt: skip
    words = ["train", config.model, "--run-dir", str(run_dir), "--no-takeover"]
    for name in named:
        words += [f"--{name.replace('_', '-')}", str(getattr(config, name))]
    return words


def finished_checkpoints(run_dir: Path) -> set[str]:
    return {path.name for path in (run_dir / FOLDER).glob("step-*")}


def split_of(run_dir: Path) -> list[tuple[str, Any]]:
    plan = json.loads((run_dir / "plan.json").read_text("utf-8"))
    return [(rank["name"], rank["stage"]) for rank in plan["ranks"]]


def check_history(run_dir: Path, undisturbed: Path, *, same_split: bool) -> None:
    """Every step once, with the losses of the undisturbed run, and every checkpoint whole.

    `same_split`: equal to the last digit.
    """
    steps = [row["step"] for row in metrics(run_dir)]
    assert steps == list(range(1, STEPS + 1)), steps
    if same_split:
        splits = split_of(run_dir), split_of(undisturbed)
        assert splits[0] == splits[1], splits
        digits = losses(run_dir), losses(undisturbed)
        assert digits[0] == digits[1], digits
    assert losses(run_dir) == pytest.approx(losses(undisturbed), rel=REL)
    wanted = {f"step-{step:06d}" for step in range(SAVE_EVERY, STEPS + 1, SAVE_EVERY)}
    assert finished_checkpoints(run_dir) == wanted, finished_checkpoints(run_dir)
    for name in sorted(wanted):
        assert load_checkpoint(run_dir / FOLDER / name).step == int(name.removeprefix("step-"))


def check_told(told: Told, victims: Sequence[str]) -> None:
    """Each loss was told with its device, its cause and what is done; none cost two steps."""
    assert told.outcome is not None
    for victim in victims:
        assert any(victim in note and "going on with who is left" in note for note in told.notes), (
            f"nobody said that {victim} was lost:\n{told.text}"
        )
    assert told.steps_lost <= len(victims), told.steps
    assert told.checkpoints <= finished_checkpoints(told.outcome.run_dir), "a checkpoint is gone"
