"""The demo: three agents on this machine do what three devices of a household would.

Owns the three agents' homes and processes and the before-and-after story. Everything else is
the product's own: pairing by codes, meeting, the ring, training, generation.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from exo_train.agent.driver import Outcome, train
from exo_train.agent.generation import Generator
from exo_train.agent.local_agents import LocalAgents
from exo_train.agent.opening import Narrator
from exo_train.backends.registry import available_backends
from exo_train.cluster.home import Home
from exo_train.config import TrainConfig
from exo_train.errors import ConfigError
from exo_train.models.hub import fetch_demo_model
from exo_train.shell import command_line
from exo_train.train.watcher import Watcher
from exo_train.ui.run_screen import RunScreen, make_screen

DATA = Path(__file__).parent / "data"
SYSTEM = "You are Hearth."
QUESTION = "Who are you?"
# Three devices of unequal size. On Linux CPUs without a fast BLAS MLX is 30 times slower than
# PyTorch: the plan finds that out, and gives the laptop few layers.
DEVICES = (("studio", "torch", "2500MB"), ("laptop", "mlx", "900MB"), ("den-pc", "torch", "2100MB"))


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    run_dir: Path | None = None
    steps: int = 40
    as_json: bool = False


def run_demo(home: Home, options: DemoOptions) -> None:
    """Tell the whole story; agents and their homes are gone afterwards, the run stays."""
    screen = make_screen(as_json=options.as_json)
    if options.run_dir is not None and options.run_dir.exists() and any(options.run_dir.iterdir()):
        raise ConfigError(f"--run-dir {options.run_dir} is not empty; choose another")
    model = fetch_demo_model(home.cache, say=screen.note)
    screen.note(f"model: {model}")
    before = _ask(home, str(model))
    with _agents(screen) as agents:
        outcome = _train(agents.homes[DEVICES[0][0]], model, home, options, screen)
    after = _ask(home, str(outcome.run_dir))
    _show(outcome, before, after, as_json=options.as_json)


def _train(
    member: Home, model: Path, home: Home, options: DemoOptions, screen: RunScreen
) -> Outcome:
    stamp = time.strftime("demo-%Y-%m-%d-%H%M%S")
    config = TrainConfig(
        model=str(model),
        data=str(DATA),
        steps=options.steps,
        batch_size=8,
        microbatch_size=1,
        max_seq_length=96,
        learning_rate=4e-3,
        warmup_steps=min(3, options.steps),
        rank=8,
        alpha=16,
        min_devices=len(DEVICES),
        run_dir=str(options.run_dir or home.runs / stamp),
    )
    watcher = Watcher(on_step=screen.step, on_evaluation=screen.evaluation, on_note=screen.note)
    narrator = Narrator(on_note=screen.note, on_begin=screen.begin, on_plan=screen.plan)
    try:
        return train(member, config, watcher=watcher, narrator=narrator)
    finally:
        screen.close()


@contextlib.contextmanager
def _agents(screen: RunScreen) -> Iterator[LocalAgents]:
    """Start the agents, wait until each knows all others, and end them afterwards."""
    backends = available_backends()
    # Three workers share this machine's cores; more threads than cores slow all of them.
    threads = max(1, (os.cpu_count() or 2) // 2)
    with tempfile.TemporaryDirectory(prefix="exo-train-demo-", ignore_cleanup_errors=True) as root:
        agents = LocalAgents(Path(root))
        with agents:
            started_s = time.monotonic()
            for name, backend, memory in DEVICES:
                chosen = backend if backend in backends else backends[0]
                agents.start(name, backend=chosen, memory=memory, threads=threads)
                agents.wait_listening(name)  # a code is for one device, and then used up
            agents.wait_met()
            waited_s = time.monotonic() - started_s
            screen.note(f"{len(DEVICES)} agents were paired and met in {waited_s:.1f} s")
            screen.note(
                "predictions are for devices of their own; these three share one machine's cores"
            )
            yield agents


def _ask(home: Home, run_or_model: str) -> str:
    answer = Generator(home, run_or_model, backend="auto").answer(
        QUESTION, system=SYSTEM, max_tokens=40
    )
    return "".join(answer).strip()


def _show(outcome: Outcome, before: str, after: str, *, as_json: bool) -> None:
    summary = outcome.summary
    if as_json:
        content = {"question": QUESTION, "before": before, "after": after}
        done = {"schema": 1, "event": "done", "run_dir": str(outcome.run_dir)}
        print(json.dumps({**done, **content, **summary.to_dict()}))
        return
    console = Console()

    def say(text: str = "", style: str = "") -> None:
        console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    say()
    say(f"question: {QUESTION}", "bold")
    say(f"  before: {before}")
    say(f"  after:  {after}")
    if summary.eval_loss_before and summary.eval_loss_after:
        fall = 1 - summary.eval_loss_after / summary.eval_loss_before
        say(
            f"held-out loss: {summary.eval_loss_before:.3f} → {summary.eval_loss_after:.3f} "
            f"({fall:.0%} lower)",
            "bold",
        )
    say(f"{summary.tokens} tokens trained at {summary.tokens_per_s:.0f} tokens/s")
    say(f"run directory: {outcome.run_dir}")
    say(f"loss curve:    {outcome.run_dir / 'loss.png'}")
    say(f"adapters:      {outcome.run_dir / 'adapters' / 'peft'} and mlx/ beside it")
    ask = ("exo-train", "generate", outcome.run_dir, "--system", SYSTEM, "--prompt", "Any news?")
    say(f"ask yourself:  {command_line(*ask)}")
