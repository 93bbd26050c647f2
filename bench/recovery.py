"""What does the loss of a device cost? Seconds to the next committed step, and steps lost.

Four agents on this machine's loopback train SmolLM2-135M (a random model of its shape where it
cannot be had), undisturbed and again while workers and agents are killed (SIGKILL) or stand still
(SIGSTOP) at seeded points of the run. A device that was harmed comes back after the next step, as
a lid that is opened. The goal: at most one step lost, median under 10 s and worst under 20 s.

Usage, in the repository: python -m bench.recovery [--steps 40] [--seed 0]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from bench.random_models import SHAPES
from exo_train.agent.driver import train
from exo_train.agent.local_agents import LocalAgents
from exo_train.agent.local_client import stop_process
from exo_train.agent.opening import Narrator
from exo_train.cluster.home import open_home
from exo_train.config import TrainConfig
from exo_train.errors import ModelError
from exo_train.models.hub import fetch_demo_model
from exo_train.train.metrics import StepMetrics
from exo_train.train.watcher import Watcher
from tests.tiny_models import make_tiny_model

COORDINATOR, OTHERS = "desk", ("attic", "hall", "shed")
KINDS = ("kill worker", "kill agent", "stop worker", "stop agent")
BATCH, LENGTH = 4, 64
WARM_STEPS = 2
GOAL_MEDIAN_S, GOAL_WORST_S, GOAL_STEPS = 10.0, 20.0, 1


@dataclass(slots=True)
class Harm:
    """One fault: after `step`, so many of a step's parts later; then what it cost."""

    step: int
    device: str
    kind: str
    part: float
    done_s: float = 0.0
    cost_s: float = 0.0
    steps_lost: int = 0


@dataclass
class Run:
    """One run as it is watched, and the harm that is done in it."""

    agents: LocalAgents
    harms: Sequence[Harm] = ()
    steps: list[tuple[int, float]] = field(default_factory=list)  # with when they were committed
    notes: list[str] = field(default_factory=list)
    open: Harm | None = None
    recovered: bool = False
    timer: threading.Timer | None = None

    def on_note(self, note: str) -> None:
        self.notes.append(note)
        self.recovered = self.recovered or note.startswith("the run goes on after")

    def on_step(self, metrics: StepMetrics, remaining_s: float | None) -> None:
        now_s = time.monotonic()
        before = [step for step, _ in self.steps]
        self.steps.append((metrics.step, now_s))
        if self.open is not None and self.open.done_s and self.recovered:
            self.open.cost_s = now_s - self.open.done_s
            self.open.steps_lost = max(0, max(before) - metrics.step + 1)
            self._print(self.open)
            self._bring_back(self.open)
            self.open = None
        if self.open is None:
            due = [harm for harm in self.harms if not harm.done_s and harm.step <= metrics.step]
            if due:
                self.open, self.recovered = due[0], False
                self.timer = threading.Timer(due[0].part * metrics.step_s, self._harm, due[:1])
                self.timer.start()

    def _harm(self, harm: Harm) -> None:
        action, whom = harm.kind.split()
        agent = psutil.Process(self.agents.processes[harm.device].pid)
        victims = [agent] if whom == "agent" else agent.children()
        harm.done_s = time.monotonic()
        for victim in victims:
            victim.send_signal(signal.SIGKILL if action == "kill" else signal.SIGSTOP)

    def _bring_back(self, harm: Harm) -> None:
        process = self.agents.processes[harm.device]
        if harm.kind == "kill agent":
            stop_process(self.agents.processes.pop(harm.device))
            _start(self.agents, harm.device)
        elif harm.kind == "stop agent":
            process.send_signal(signal.SIGCONT)

    def _print(self, harm: Harm) -> None:
        print(
            f"  {harm.kind:12} {harm.device:6} in step {harm.step + 1:3}: {harm.cost_s:5.1f} s to "
            f"the next committed step, {harm.steps_lost} committed steps lost",
            flush=True,
        )

    @property
    def training_s(self) -> float:
        """Give the time from the end of the warm-up to the last step's end."""
        start_s = next(at_s for step, at_s in self.steps if step == WARM_STEPS)
        return self.steps[-1][1] - start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # workers with two threads each would fight for cores
    with tempfile.TemporaryDirectory(prefix="exo-train-bench-") as folder:
        root = Path(folder)
        config = _config(root, options.steps)
        with LocalAgents(root / "agents") as agents:
            for name in (COORDINATOR, *OTHERS):
                _start(agents, name)
            agents.wait_met()
            undisturbed = Run(agents)
            _train(undisturbed, replace(config, run_dir=str(root / "undisturbed")))
            step_s = undisturbed.training_s / (options.steps - WARM_STEPS)
            print(f"undisturbed: {step_s:.2f} s a step; load {os.getloadavg()[0]:.1f}", flush=True)
            disturbed = Run(agents, harms_of(options.steps, options.seed))
            _train(disturbed, replace(config, run_dir=str(root / "disturbed")))
        _print_result(disturbed, undisturbed)


def harms_of(steps: int, seed: int) -> list[Harm]:
    """Give each kind to two devices, none to the coordinator, and none to a device too often."""
    chance = random.Random(seed)
    kinds = [*KINDS, *KINDS[:2]]
    chance.shuffle(kinds)
    every = (steps - WARM_STEPS) // (len(kinds) + 1)
    return [
        Harm(
            step=WARM_STEPS + every * number + 1,
            device=OTHERS[number % len(OTHERS)],
            kind=kind,
            part=chance.random(),
        )
        for number, kind in enumerate(kinds)
    ]


def _start(agents: LocalAgents, name: str) -> None:
    agents.start(name, backend="torch", memory="4GB", options=["--interface", "lo"])
    agents.wait_listening(name)


def _config(root: Path, steps: int) -> TrainConfig:
    data = root / "data.jsonl"
    data.write_text((json.dumps({"text": "river " * 2 * LENGTH}) + "\n") * BATCH, "utf-8")
    return TrainConfig(
        model=_model(root),
        data=str(data),
        steps=steps,
        batch_size=BATCH,
        microbatch_size=1,
        max_seq_length=LENGTH,
        dtype="fp32",
        min_devices=1 + len(OTHERS),
        profile_s=0.0,
    )


def _model(root: Path) -> str:
    try:
        return str(fetch_demo_model(open_home().cache, say=print))
    except ModelError as error:
        print(f"a random model of SmolLM2-135M's shape is used: {error}")
        layers, hidden, intermediate, heads, kv_heads, vocabulary = SHAPES["smol135"]
        random_model = make_tiny_model(
            root / "model",
            num_layers=layers,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_heads=heads,
            num_kv_heads=kv_heads,
            vocab_size=vocabulary,
        )
        return str(random_model)


def _train(run: Run, config: TrainConfig) -> None:
    home = run.agents.homes[COORDINATOR]
    watcher = Watcher(on_step=run.on_step, on_note=run.on_note)
    try:
        train(home, config, watcher=watcher, narrator=Narrator(on_note=run.on_note))
    except BaseException:
        print("\n".join(run.notes))
        raise
    finally:
        if run.timer is not None:
            run.timer.cancel()
            run.timer.join()
        for process in run.agents.processes.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(process.pid).send_signal(signal.SIGCONT)


def _print_result(disturbed: Run, undisturbed: Run) -> None:
    met = [harm for harm in disturbed.harms if harm.cost_s]
    costs_s = [harm.cost_s for harm in met]
    middle_s, worst_s = statistics.median(costs_s), max(costs_s)
    lost = max(harm.steps_lost for harm in met)
    share = undisturbed.training_s / disturbed.training_s
    print(f"{len(met)} of {len(disturbed.harms)} faults; load {os.getloadavg()[0]:.1f}")
    print(f"median {middle_s:.1f} s (goal {GOAL_MEDIAN_S:.0f}), worst {worst_s:.1f} s (goal "
          f"{GOAL_WORST_S:.0f}), at most {lost} steps lost (goal {GOAL_STEPS})")  # fmt: skip
    print(f"useful time: {share:.0%} of {disturbed.training_s:.0f} s")


if __name__ == "__main__":
    main()
