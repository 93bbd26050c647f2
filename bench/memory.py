"""Predicted against measured memory of whole stages, on CPUs.

Each setting has a fresh process that loads a real stage with random weights and takes two steps
in 1F1B order, and another that profiles one block as an agent would ask for it. Compared is the
growth over the process without a model, and the whole process. No clock takes part, so other work
on the machine does not matter.

Usage: python bench/memory.py [--only smol135]
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from dataclasses import dataclass

from bench.random_models import SHAPES, random_spec
from exo_train.agent.planning import model_shape
from exo_train.backends.base import Stage, StageOptions
from exo_train.backends.memory import peak_process_bytes
from exo_train.lora_config import LoraConfig
from exo_train.plan.block_times import BlockTimes
from exo_train.plan.device_memory import Measured, Processor, stage_costs
from exo_train.plan.memory_kinds import memory_by_kind
from exo_train.plan.profiles import StageCosts
from exo_train.plan.stages import StageSpec
from exo_train.train.meter import open_meter
from exo_train.train.profiling import StageTimer, process_size, profile
from exo_train.train.stage_loading import CONFIG_DTYPES

NUM_STEPS = 2
TIMEOUT_S = 600.0
MB = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    shape: str
    backend: str
    sequence: int
    layers: tuple[int, int]  # embedding and head come with the first and the last layer
    in_flight: int = 1
    checkpoint: bool = False
    rank: int = 8
    dtype: str = "fp32"

    @property
    def stage(self) -> StageSpec:
        start, end = self.layers
        last = end == SHAPES[self.shape][0]
        return StageSpec(start=start, end=end, embedding=start == 0, head=last)

    @property
    def line(self) -> str:
        start, end = self.layers
        checkpoint = "checkpoint" if self.checkpoint else "-"
        return (
            f"{self.shape} {self.backend:5} {self.dtype} {self.sequence:4} {checkpoint:10} "
            f"r{self.rank:<2} {start:2}..{end:<2} x{self.in_flight}"
        )


SETTINGS = (
    Setting(shape="tiny384", backend="torch", sequence=512, layers=(4, 8)),
    Setting(shape="tiny384", backend="torch", sequence=512, layers=(2, 6), in_flight=3,
            checkpoint=True),
    Setting(shape="tiny256", backend="torch", sequence=1024, layers=(0, 6), in_flight=4),
    Setting(shape="tiny384", backend="torch", sequence=256, layers=(0, 5), in_flight=2, rank=64),
    Setting(shape="wide768", backend="torch", sequence=256, layers=(2, 4), in_flight=4,
            dtype="bf16"),
    Setting(shape="smol135", backend="torch", sequence=256, layers=(10, 16), in_flight=2),
    Setting(shape="smol135", backend="torch", sequence=512, layers=(10, 20), in_flight=3,
            checkpoint=True),
    Setting(shape="smol135", backend="torch", sequence=128, layers=(0, 30)),
    Setting(shape="tiny256", backend="mlx", sequence=256, layers=(0, 12)),
    Setting(shape="tiny256", backend="mlx", sequence=512, layers=(4, 8), in_flight=3,
            checkpoint=True),
    Setting(shape="tiny384", backend="mlx", sequence=512, layers=(0, 6), in_flight=2),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="settings whose line has this word")
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "INDEX"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        what, index = options.child
        answer = {"run": _run, "profile": _profile}[what](SETTINGS[int(index)])
        print(json.dumps(answer))
        return
    print(f"{'setting, MB':50} {'growth':>15} {'error':>7}   {'process':>13} {'error':>7}")
    growths, totals = [], []
    for index, setting in enumerate(SETTINGS):
        if options.only in setting.line:
            times = BlockTimes.from_fields(_child("profile", index), place="the profile")
            measured = _child("run", index)
            kinds = memory_by_kind(
                costs_of(setting, times), setting.stage, in_flight=setting.in_flight
            )
            need = kinds.total_bytes
            grown = measured["peak"] - measured["before"]
            growth = need - times.process_bytes
            growths.append(growth / grown - 1)
            totals.append(need / measured["peak"] - 1)
            print(
                f"{setting.line:50} {growth / MB:7.0f} {grown / MB:7.0f} {growths[-1]:+7.1%}   "
                f"{need / MB:6.0f} {measured['peak'] / MB:6.0f} {totals[-1]:+7.1%}",
                flush=True,
            )
    if growths:
        worst, total = max(growths, key=abs), max(totals, key=abs)
        print(f"worst: {worst:+.1%} of the growth, {total:+.1%} of the process")


def costs_of(setting: Setting, times: BlockTimes) -> StageCosts:
    spec = random_spec(setting.shape)
    value_bytes = CONFIG_DTYPES[setting.dtype].num_bytes
    return stage_costs(
        model_shape(spec),
        processor=Processor(
            backend=setting.backend, device="cpu", process_bytes=times.process_bytes
        ),
        value_bytes=value_bytes,
        wire_bytes=value_bytes,
        lora=LoraConfig(rank=setting.rank),
        microbatch_size=1,
        sequence=setting.sequence,
        checkpoint_activations=setting.checkpoint,
        measured=Measured(memory=times.memory, size=1, sequence=setting.sequence)
        if times.memory
        else None,
    )


def _child(what: str, index: int) -> dict[str, int]:
    command = [sys.executable, __file__, "--child", what, str(index)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _profile(setting: Setting) -> dict[str, object]:
    looks = itertools.count()
    return profile(
        random_spec(setting.shape),
        backend=setting.backend,
        device="cpu",
        compute_dtype=CONFIG_DTYPES[setting.dtype],
        lora=LoraConfig(rank=setting.rank),
        microbatch_size=1,
        sequence=setting.sequence,
        checkpoint_activations=setting.checkpoint,
        with_ends=setting.stage.head,
        budget_s=0.05,
        clock=lambda: next(looks) / 1000,
    ).to_fields()


def _run(setting: Setting) -> dict[str, int]:
    """Give the process' size before the model, and its largest."""
    import exo_train.worker  # noqa: F401 - what a worker has loaded

    process_size(setting.backend, "cpu")
    before = open_meter(setting.backend, "cpu").process_bytes()
    timer, stage = _timer(setting), setting.stage
    loaded = timer.load(stage)
    for _ in range(NUM_STEPS):
        _step(timer, loaded, setting)
    return {"before": before, "peak": peak_process_bytes()}


def _step(timer: StageTimer, loaded: Stage, setting: Setting) -> None:
    """Take a step in 1F1B's order, with two microbatches more than may be in flight."""
    held, stage = setting.in_flight, setting.stage
    gradient = None if stage.head else timer.boundary(scale=1e-3)
    loaded.begin_step(step=0, loss_scale=1 / ((held + 2) * setting.sequence))
    for index in range(held + 2):
        if index >= held:
            loaded.backward(index - held, gradient)
        loaded.forward(timer.input(index, stage))
    for index in range(2, held + 2):
        loaded.backward(index, gradient)
    loaded.grad_square_sum()
    loaded.apply(learning_rate=0.0, grad_scale=1.0)


def _timer(setting: Setting) -> StageTimer:
    dtype = CONFIG_DTYPES[setting.dtype]
    return StageTimer(
        random_spec(setting.shape),
        backend=setting.backend,
        device="cpu",
        lora=LoraConfig(rank=setting.rank),
        options=StageOptions(
            seed=0,
            compute_dtype=dtype,
            wire_dtype=dtype,
            checkpoint_activations=setting.checkpoint,
        ),
        microbatch_size=1,
        sequence=setting.sequence,
    )


if __name__ == "__main__":
    main()
