"""Tokens per second: one device alone against a ring, in the same run.

Both sides are real agents on this machine. The ring's two workers compute with half of the
cores each, the single one with all of them, so both have the same hardware.

Usage: python bench/ring.py [MODEL] [--steps N] [--batch-size N] [--length N]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

from exo_train.agent.driver import train
from exo_train.agent.local_agents import LocalAgents
from exo_train.agent.opening import Narrator
from exo_train.cluster.home import open_home
from exo_train.config import TrainConfig
from exo_train.models.hub import fetch_demo_model
from exo_train.train.watcher import Watcher

WORD = "river "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=256, help="tokens per sequence, about")
    options = parser.parse_args()
    model = options.model or str(fetch_demo_model(open_home().cache, say=print))
    cores = os.cpu_count() or 2
    with tempfile.TemporaryDirectory(prefix="exo-train-bench-") as folder:
        root = Path(folder)
        data = root / "data.jsonl"
        row = json.dumps({"text": WORD * options.length})
        data.write_text((row + "\n") * options.batch_size, encoding="utf-8")
        with LocalAgents(root) as agents:
            loopback = ["--interface", "lo"]
            agents.start("one", backend="torch", memory="4GB", threads=cores, options=loopback)
            for name in ("left", "right"):
                agents.start(
                    name,
                    backend="torch",
                    memory="4GB",
                    threads=max(1, cores // 2),
                    options=loopback,
                )
                agents.wait_listening(name)  # a code is for one device
            agents.wait_met()
            speeds = {}
            for side, devices in (("one device", ("one",)), ("ring of two", ("left", "right"))):
                config = TrainConfig(
                    model=model,
                    data=str(data),
                    steps=options.steps,
                    batch_size=options.batch_size,
                    microbatch_size=1,
                    max_seq_length=options.length,
                    devices=devices,
                    save_every=0,
                    run_dir=str(root / side),
                )
                speeds[side] = _measure(agents, config)
                print(f"{side:12}  {speeds[side]:7.1f} tokens/s")
    print(f"ratio         {speeds['ring of two'] / speeds['one device']:7.2f}")


def _measure(agents: LocalAgents, config: TrainConfig) -> float:
    """Give the median speed of the steps after the first, which warms up."""
    seen: list[float] = []
    watcher = Watcher(on_step=lambda metrics, _: seen.append(metrics.tokens_per_s))
    train(agents.homes[config.devices[0]], config, watcher=watcher, narrator=Narrator())
    later = sorted(seen[1:] or seen)
    return later[len(later) // 2]


if __name__ == "__main__":
    main()
