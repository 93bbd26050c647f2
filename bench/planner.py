"""Is the planner right? Its split against others, and its promises against what came.

`speeds`: three agents on this machine, slowed to 1:2:4 by sleeping in every layer; the planned
split against an even one and one by memory. `rings`: real rings of two and three workers with one
thread each, and the errors of period, step, and peak memory. `links`: two hosts (network
namespaces, needs root on Linux) whose link is shaped with tc. There each agent times its layer
before the others do, as devices of their own would: here they share cores while they load.

Every row is a run of `exo-train train` over real agents; the errors are those of its summary.json.

Usage, in the repository: python -m bench.planner [speeds] [rings] [links] [--steps 10]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from exo_train.agent.driver import train
from exo_train.agent.local_agents import LocalAgents
from exo_train.agent.opening import Narrator
from exo_train.config import TrainConfig
from exo_train.train.watcher import Watcher
from tests.lan.lan_agents import LanAgent, LanAgents, wait_all_see
from tests.lan.namespaces import Lan, why_not
from tests.tiny_models import make_tiny_model

WORD = "river "
# Milliseconds that each layer sleeps, forward and again backward.
SPEEDS = {"fast": 10.0, "middle": 20.0, "slow": 40.0}
MEMORY = {"fast": "2GB", "middle": "2GB", "slow": "4GB"}
SLEEPING_LAYERS = 30
MAX_SPEED_STEPS = 5  # they sleep: more would say the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A random model; `length` in tokens of every row."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    length: int
    vocab: int = 4096

    def make(self, root: Path) -> Path:
        path = root / self.name
        if not path.exists():
            make_tiny_model(
                path,
                num_layers=self.layers,
                hidden_size=self.hidden,
                intermediate_size=self.intermediate,
                num_heads=self.hidden // 32,
                num_kv_heads=self.hidden // 64,
                vocab_size=self.vocab,
                max_position=1024,
            )
        return path


SLEEPER = Model(
    name="sleeper", layers=SLEEPING_LAYERS, hidden=64, intermediate=96, length=64, vocab=320
)
SMALL = Model(name="small", layers=8, hidden=256, intermediate=704, length=128)
LARGER = Model(name="larger", layers=10, hidden=512, intermediate=1408, length=256)
WIDE_MESSAGE = Model(name="wide-message", layers=4, hidden=512, intermediate=512, length=512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Agents by backend; each computes with one thread, and sleeps by the layer if told."""

    name: str
    model: Model
    backends: Sequence[str]
    sleep_ms: Sequence[float] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    rate: str = ""  # of the link, in tc's words


RINGS = (
    Ring(name="2 torch", model=LARGER, backends=("torch", "torch")),
    Ring(
        name="2 torch, checkpointing",
        model=LARGER,
        backends=("torch", "torch"),
        options={"checkpoint_activations": True},
    ),
    Ring(name="2 torch, rank 64", model=LARGER, backends=("torch", "torch"), options={"rank": 64}),
    Ring(name="torch and mlx", model=LARGER, backends=("torch", "mlx")),
    Ring(
        name="3 mixed, sleeping 1:2:1",
        model=SMALL,
        backends=("torch", "mlx", "torch"),
        sleep_ms=(40, 80, 40),
    ),
    Ring(
        name="3 torch, sleeping 1:2:4",
        model=SLEEPER,
        backends=("torch", "torch", "torch"),
        sleep_ms=tuple(SPEEDS.values()),
    ),
)
LINKS = (
    Ring(name="2 torch, 300 Mbit/s", model=WIDE_MESSAGE, backends=("torch",) * 2, rate="300mbit"),
    Ring(name="2 torch, 100 Mbit/s", model=WIDE_MESSAGE, backends=("torch",) * 2, rate="100mbit"),
)
TRAIN_TIMEOUT_S = 600
PARTS = ("speeds", "rings", "links")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", default="", help="rings whose name has this word")
    options = parser.parse_args()
    parts = options.parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}")
    os.environ["OMP_NUM_THREADS"] = "1"  # two workers with two threads each would fight for cores
    with tempfile.TemporaryDirectory(prefix="exo-train-bench-") as folder:
        root = Path(folder)
        if "speeds" in parts:
            _speeds(root, min(options.steps, MAX_SPEED_STEPS))
        chosen = [ring for ring in RINGS if "rings" in parts and options.only in ring.name]
        if "links" in parts:
            if missing := why_not():
                sys.exit(f"bench/planner.py: links: {missing}")
            chosen += [ring for ring in LINKS if options.only in ring.name]
        if chosen:
            _print_heading()
        for ring in chosen:
            _print_ring(ring, _run_ring(root, ring, options.steps))


def _speeds(root: Path, steps: int) -> None:
    """Print the median step of each split, and the ratios."""
    even = SLEEPING_LAYERS // len(SPEEDS)
    splits: dict[str, dict[str, Any]] = {
        "planned": {},
        "even": {"layers": tuple(f"{name}:{even}" for name in SPEEDS)},
        "by memory": {"profile_s": 0.0},
    }
    times_s: dict[str, list[float]] = {}
    layers: dict[str, str] = {}
    with _local(root / "speeds", ("torch",) * 3, tuple(SPEEDS.values()), names=SPEEDS) as agents:
        for name, changes in splits.items():
            config = _config(root, SLEEPER, steps, devices=3, batch_size=16)
            run_dir = root / name
            summary = _train(agents, replace(config, run_dir=str(run_dir), **changes))
            rows = (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()
            times_s[name] = [json.loads(row)["step_s"] for row in rows[2:]]
            layers[name] = ", ".join(
                f"{d['name']} {d['layers'][1] - d['layers'][0]}" for d in summary["devices"]
            )
    print(f"three devices slowed to 1:2:4, {SLEEPING_LAYERS} layers, memory {_memory_text()}")
    best_s = statistics.median(times_s["planned"])
    for name, values in times_s.items():
        middle_s = statistics.median(values)
        print(f"  {name:10} {middle_s:6.2f} s a step  {middle_s / best_s:5.2f}x  ({layers[name]})")


def _memory_text() -> str:
    return ", ".join(f"{name} {memory}" for name, memory in MEMORY.items())


def _run_ring(root: Path, ring: Ring, steps: int) -> dict[str, Any]:
    folder = root / ring.name.replace(" ", "-").replace("/", "-").replace(":", "-")
    config = replace(
        _config(root, ring.model, steps, devices=len(ring.backends)),
        run_dir=str(folder / "run"),
        **ring.options,
    )
    if ring.rate:
        return _train_shaped(folder, config, ring.rate)
    with _local(folder, ring.backends, ring.sleep_ms) as agents:
        for name in agents.homes:
            _train(agents, _alone(config, name))
        return _train(agents, config)


@contextlib.contextmanager
def _local(
    root: Path,
    backends: Sequence[str],
    sleep_ms: Sequence[float],
    names: Sequence[str] | Mapping[str, float] = (),
) -> Iterator[LocalAgents]:
    root.mkdir(parents=True)
    names = list(names) or [f"{backend}{number}" for number, backend in enumerate(backends)]
    with LocalAgents(root) as agents:
        for number, (name, backend) in enumerate(zip(names, backends, strict=True)):
            fault = f"sleep_ms:{sleep_ms[number]}" if sleep_ms else ""
            agents.start(
                name,
                backend=backend,
                memory=MEMORY.get(name, "4GB"),
                options=["--interface", "lo"],
                variables={"EXO_TRAIN_TEST_FAULT": fault},
            )
            agents.wait_listening(name)
        agents.wait_met()
        yield agents


def _config(
    root: Path, model: Model, steps: int, *, devices: int, batch_size: int = 8
) -> TrainConfig:
    data = root / f"{model.name}-{batch_size}.jsonl"
    if not data.exists():
        row = json.dumps({"text": WORD * (2 * model.length)})
        data.write_text((row + "\n") * batch_size, encoding="utf-8")
    return TrainConfig(
        model=str(model.make(root)),
        data=str(data),
        steps=steps,
        batch_size=batch_size,
        microbatch_size=1,
        max_seq_length=model.length,
        min_devices=devices,
        dtype="fp32",
        save_every=0,
    )


def _alone(config: TrainConfig, name: str) -> TrainConfig:
    """Give a short run on one device: it leaves that device's times in its cache."""
    run_dir = f"{config.run_dir}-{name}"
    return replace(config, devices=(name,), min_devices=1, steps=1, run_dir=run_dir)


def _train(agents: LocalAgents, config: TrainConfig) -> dict[str, Any]:
    home = next(iter(agents.homes.values()))
    outcome = train(home, config, watcher=Watcher(), narrator=Narrator())
    return outcome.summary.to_dict()


def _train_shaped(root: Path, config: TrainConfig, rate: str) -> dict[str, Any]:
    """Train between two hosts whose link carries `rate` each way."""
    with Lan() as lan, LanAgents(lan, root) as launch:
        for number in (1, 2):
            lan.add_host(number)
            lan.limit_rate(number, rate)
        agents = launch(1, 2)
        wait_all_see(agents)
        for agent in agents:
            _train_on(agents[0], root, _alone(config, agent.name))
        _train_on(agents[0], root, config)
    return dict(json.loads((Path(config.run_dir) / "summary.json").read_text("utf-8")))


def _train_on(agent: LanAgent, root: Path, config: TrainConfig) -> None:
    file = root / "options.yaml"
    given = {k: v for k, v in config.to_dict().items() if v != getattr(TrainConfig(), k)}
    file.write_text(json.dumps(given), "utf-8")
    done = subprocess.run(
        agent.command("train", "--config", str(file)),
        env=agent.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TRAIN_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        sys.exit(f"bench/planner.py: {done.stderr}")


def _print_heading() -> None:
    print(
        f"{'ring':26} {'layers':10} {'period':>9} {'achieved':>9} {'error':>7} {'step':>8} "
        f"{'error':>7}  memory errors"
    )


def _print_ring(ring: Ring, summary: dict[str, Any]) -> None:
    prediction = summary["prediction"]
    layers = "/".join(str(d["layers"][1] - d["layers"][0]) for d in summary["devices"])
    period, step = prediction["period_s"], prediction["step_s"]
    memory = " ".join(f"{d['peak_memory_bytes']['error']:+.0%}" for d in prediction["devices"])
    print(
        f"{ring.name:26} {layers:10} {1e3 * period['predicted']:6.0f} ms "
        f"{1e3 * period['achieved']:6.0f} ms {period['error']:+7.1%} {step['achieved']:6.2f} s "
        f"{step['error']:+7.1%}  {memory}",
        flush=True,
    )


if __name__ == "__main__":
    main()
