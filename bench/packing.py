"""Tokens per second on short rows: packed and grouped by length against batches as drawn.

One stage with the whole model and random weights, forward and backward of the same rows on each
side, the sides in turn. Losses must be equal before speeds are compared.

Usage: python -m bench.packing [--backend torch|mlx] [--shape NAME] [--rows N] [--microbatch N]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bench.random_models import SHAPES, random_spec
from exo_train.backends.base import Stage, StageOptions
from exo_train.config import LoraConfig, TrainConfig
from exo_train.plan.stages import StageSpec
from exo_train.train.batches import BatchPlan, Microbatch, plan_batches, split_microbatches
from exo_train.train.examples import Example
from exo_train.train.profiling import StageTimer
from exo_train.train.step_shapes import padding_note, steps_of
from exo_train.wire.tensor import DType

LONGEST = 256
MEDIAN = 50
DRAWN = TrainConfig(batch_size=8, max_seq_length=LONGEST)
EQUAL = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("torch", "mlx"), default="torch")
    parser.add_argument("--shape", choices=SHAPES, default="tiny384")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--microbatch",
        type=int,
        default=1,
        help="rows in one that is not packed; 1: as a ring of two has for a batch of 8",
    )
    options = parser.parse_args()
    sides = {
        "as drawn": (DRAWN, options.microbatch),
        "grouped": (replace(DRAWN, group_by_length=True), options.microbatch),
        "packed": (replace(DRAWN, packing=True), 1),
    }
    rows = short_rows(options.rows, vocab_size=random_spec(options.shape).vocab_size)
    stage = whole_model(options.shape, options.backend)
    given = {
        side: microbatches(plan_batches(rows, config), size)
        for side, (config, size) in sides.items()
    }
    for side, (config, size) in sides.items():
        shape = steps_of(plan_batches(rows, config), config)(size)
        print(f"{side:9} {padding_note(shape, config)}")
    losses = {side: epoch(stage, part)[0] for side, part in given.items()}  # warms up, too
    for side, loss in losses.items():
        if abs(loss / losses["as drawn"] - 1) > EQUAL:
            raise SystemExit(f"{side}: the loss is {loss}, as drawn it is {losses['as drawn']}")
    num_tokens = sum(len(row.tokens) - 1 for row in rows)
    speeds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(options.repeats):
        for side, part in given.items():
            speeds[side].append(num_tokens / epoch(stage, part)[1])
    drawn = statistics.median(speeds["as drawn"])
    for side, found in speeds.items():
        middle = statistics.median(found)
        ends = f"{min(found):.0f} to {max(found):.0f}"
        print(f"{side:9} {middle:7.0f} tokens/s ({ends})  ratio {middle / drawn:.2f}")


def short_rows(num_rows: int, *, vocab_size: int) -> tuple[Example, ...]:
    """Draw rows as chats are: most short, a few long."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(MEDIAN), 0.7, num_rows), 8, LONGEST).astype(int)
    return tuple(
        Example(
            tokens=tuple(rng.integers(0, vocab_size, length).tolist()),
            supervised=(False,) + (True,) * (length - 1),
            where="bench",
        )
        for length in lengths.tolist()
    )


def whole_model(shape: str, backend: str) -> Stage:
    dtypes = {"compute_dtype": DType.FP32, "wire_dtype": DType.FP32}
    timer = StageTimer(
        random_spec(shape),
        backend=backend,
        device="cpu",
        lora=LoraConfig(),
        options=StageOptions(seed=0, **dtypes),
        microbatch_size=1,
        sequence=LONGEST,
        clock=time.perf_counter,
    )
    return timer.load(StageSpec(start=0, end=SHAPES[shape][0], embedding=True, head=True))


def microbatches(plan: BatchPlan, size: int) -> list[Microbatch]:
    return [
        microbatch
        for step in range(plan.steps_per_epoch)
        for microbatch in split_microbatches(
            plan.batch_for_step(step), microbatch_size=size, max_seq_length=LONGEST
        )
    ]


def epoch(stage: Stage, given: Sequence[Microbatch]) -> tuple[float, float]:
    """Give the summed loss of all rows, and the seconds of their forwards and backwards."""
    stage.begin_step(step=0, loss_scale=1e-4)
    started_s = time.perf_counter()
    for microbatch in given:
        stage.forward(microbatch.to_input())
        stage.backward(microbatch.index, None)
    return stage.loss_sum(), time.perf_counter() - started_s


if __name__ == "__main__":
    main()
