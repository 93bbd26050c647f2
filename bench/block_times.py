"""Predicted against measured time of whole stages, from the profile of one block.

Each profile is taken by the profiler's process, as an agent does it, before and after a real
stage of the same model runs its steps here. Weights are random; no model is downloaded. On a
machine that does other work, `OMP_NUM_THREADS=1` and `--processor-time` compare processor time
instead, and profile in this process.

Usage: python bench/block_times.py [--budget 4] [--steps 6] [--only smol] [--processor-time]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.random_models import SHAPES, random_spec
from exo_train.agent.profiler_process import run_profiler
from exo_train.backends.base import StageOptions
from exo_train.lora_config import LoraConfig
from exo_train.plan.block_times import BlockTimes, ProfileRequest
from exo_train.plan.stages import StageSpec
from exo_train.train.profiling import StageTimer, profile
from exo_train.train.stage_loading import CONFIG_DTYPES

NUM_MICROBATCHES = 2
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    shape: str
    backend: str
    sequence: int
    checkpoint: bool
    layers: tuple[int, int]  # embedding and head come with the first and the last layer


SETTINGS = (
    Setting(shape="smol135", backend="torch", sequence=128, checkpoint=False, layers=(0, 30)),
    Setting(shape="smol135", backend="torch", sequence=256, checkpoint=False, layers=(0, 15)),
    Setting(shape="smol135", backend="torch", sequence=256, checkpoint=True, layers=(15, 30)),
    Setting(shape="smol135", backend="torch", sequence=512, checkpoint=True, layers=(10, 20)),
    Setting(shape="smol135", backend="mlx", sequence=128, checkpoint=False, layers=(0, 10)),
    Setting(shape="tiny256", backend="torch", sequence=256, checkpoint=False, layers=(0, 12)),
    Setting(shape="tiny256", backend="torch", sequence=512, checkpoint=True, layers=(0, 6)),
    Setting(shape="tiny256", backend="mlx", sequence=256, checkpoint=False, layers=(0, 12)),
    Setting(shape="tiny256", backend="mlx", sequence=256, checkpoint=True, layers=(4, 8)),
    Setting(shape="tiny384", backend="torch", sequence=512, checkpoint=False, layers=(4, 8)),
    Setting(shape="tiny384", backend="mlx", sequence=128, checkpoint=False, layers=(0, 4)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=4.0, help="seconds of each profile")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", default="", help="settings whose line has this word")
    parser.add_argument("--processor-time", action="store_true")
    options = parser.parse_args()
    print(
        f"{'setting':44} {'predicted':>10} {'measured':>10} {'error':>7} {'fastest':>8}  slowdown"
    )
    for setting in SETTINGS:
        if options.only in _line(setting):
            take = _profile_here if options.processor_time else _profile_elsewhere
            clock = time.process_time if options.processor_time else time.perf_counter
            profiles = [take(setting, options.budget)]
            totals_s = _measure(setting, options.steps, clock)
            profiles.append(take(setting, options.budget))
            _print_line(setting, profiles, totals_s)


def _print_line(setting: Setting, profiles: list[BlockTimes], totals_s: list[float]) -> None:
    """Compare median with median, and fastest with fastest."""
    predicted_s = statistics.mean(_step_s(setting, times) for times in profiles)
    fastest_s = min(_step_s(setting, times) / times.slowdown for times in profiles)
    measured_s = statistics.median(totals_s)
    slowdowns = " ".join(f"{times.slowdown:.2f}" for times in profiles)
    print(
        f"{_line(setting):44} {predicted_s * 1e3:7.1f} ms {measured_s * 1e3:7.1f} ms "
        f"{predicted_s / measured_s - 1:+6.1%} {fastest_s / min(totals_s) - 1:+7.1%}  {slowdowns}",
        flush=True,
    )


def _step_s(setting: Setting, times: BlockTimes) -> float:
    stage = _stage(setting)
    microbatch_s = times.stage_s(stage.num_layers, embedding=stage.embedding, head=stage.head)
    return NUM_MICROBATCHES * microbatch_s + stage.num_layers * times.layer_update_s


def _profile_here(setting: Setting, budget_s: float) -> BlockTimes:
    stage = _stage(setting)
    return profile(
        random_spec(setting.shape),
        backend=setting.backend,
        device="cpu",
        compute_dtype=CONFIG_DTYPES["fp32"],
        lora=LoraConfig(),
        microbatch_size=1,
        sequence=setting.sequence,
        checkpoint_activations=setting.checkpoint,
        with_ends=stage.embedding or stage.head,
        budget_s=budget_s,
        clock=time.process_time,
    )


def _profile_elsewhere(setting: Setting, budget_s: float) -> BlockTimes:
    stage = _stage(setting)
    request = ProfileRequest(
        config_json=random_spec(setting.shape).config_json,
        backend=setting.backend,
        device="cpu",
        compute_dtype="fp32",
        lora=LoraConfig(),
        microbatch_size=1,
        sequence=setting.sequence,
        checkpoint_activations=setting.checkpoint,
        with_ends=stage.embedding or stage.head,
        budget_s=budget_s,
    )
    with tempfile.TemporaryDirectory(prefix="exo-train-bench-") as folder:
        log_path = Path(folder) / "profiler.log"
        return run_profiler(request, timeout_s=TIMEOUT_S, log_path=log_path)


def _measure(setting: Setting, steps: int, clock: Callable[[], float]) -> list[float]:
    """Give the seconds of each step of a real stage, after one that warms up."""
    timer = StageTimer(
        random_spec(setting.shape),
        backend=setting.backend,
        device="cpu",
        lora=LoraConfig(),
        options=StageOptions(
            seed=0,
            compute_dtype=CONFIG_DTYPES["fp32"],
            wire_dtype=CONFIG_DTYPES["fp32"],
            checkpoint_activations=setting.checkpoint,
        ),
        microbatch_size=1,
        sequence=setting.sequence,
        clock=clock,
    )
    stage = _stage(setting)
    loaded = timer.load(stage)
    totals_s = [
        sum(timer.step_times(loaded, stage, num_microbatches=NUM_MICROBATCHES))
        for _ in range(steps + 1)
    ]
    return totals_s[1:]


def _stage(setting: Setting) -> StageSpec:
    start, end = setting.layers
    num_layers = SHAPES[setting.shape][0]
    return StageSpec(start=start, end=end, embedding=start == 0, head=end == num_layers)


def _line(setting: Setting) -> str:
    checkpoint = "checkpoint" if setting.checkpoint else "-"
    start, end = setting.layers
    return (
        f"{setting.shape} {setting.backend:5} {setting.sequence:4} {checkpoint:10} {start:2}..{end}"
    )


if __name__ == "__main__":
    main()
