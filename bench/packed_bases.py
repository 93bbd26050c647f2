"""What it costs to keep a base quantised: time and memory of a step, packed against dense.

    python bench/packed_bases.py MODEL [--quantize 4] [--backends torch,mlx] [--positions 256]

Each line is a process of its own, with the whole model on this device's CPU. Times are of
processor, not of the clock, so that other work on the device disturbs them less.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from exo_train.backends.base import MicrobatchInput, StageOptions
from exo_train.backends.memory import peak_process_bytes
from exo_train.backends.registry import load_backend
from exo_train.config import LoraConfig
from exo_train.models.open import open_model
from exo_train.optimizer_config import OptimizerConfig
from exo_train.plan.stages import StageSpec
from exo_train.train.meter import open_meter
from exo_train.train.stage_loading import CONFIG_DTYPES

MB = 1_000_000
TIMEOUT_S = 1800.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--quantize", type=int, default=0, choices=(0, 4, 8))
    parser.add_argument("--backends", default="torch,mlx")
    parser.add_argument("--dtype", default="fp32", choices=tuple(CONFIG_DTYPES))
    parser.add_argument("--positions", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        backend, base_weights, quantize = options.child
        print(json.dumps(_measure(options, backend, base_weights, int(quantize))))
        return
    spec, _ = open_model(options.model)
    spec.validate_quantize(options.quantize)  # else two lines would be of the same numbers
    kinds = [("dense", options.quantize), ("packed", options.quantize)]
    kinds = [("dense", 0), *kinds] if options.quantize else kinds
    for backend in options.backends.split(","):
        first = None
        for base_weights, quantize in kinds:
            found = _child(backend, base_weights, quantize)
            first = first or found
            name = f"{base_weights}, {quantize} bits" if quantize else base_weights
            print(
                f"{backend:5} {name:15} {found['step_s']:7.2f} s a step "
                f"({found['step_s'] / first['step_s']:.2f})  {found['grown'] / MB:6.0f} MB "
                f"({found['grown'] / first['grown']:.2f})  loss {found['loss']:.5f}",
                flush=True,
            )


def _child(backend: str, base_weights: str, quantize: int) -> dict[str, float]:
    command = [sys.executable, __file__, *sys.argv[1:]]
    command += ["--child", backend, base_weights, str(quantize)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _measure(
    options: argparse.Namespace, backend: str, base_weights: str, quantize: int
) -> dict[str, float]:
    """Give the processor seconds of the fastest step, its loss, and how far the process grew."""
    module = load_backend(backend)
    before = open_meter(backend, "cpu").process_bytes()
    spec, source = open_model(options.model)
    dtype = CONFIG_DTYPES[options.dtype]
    stage = module.load_stage(
        spec,
        StageSpec(start=0, end=spec.num_layers, embedding=True, head=True),
        source,
        device="cpu",
        lora=LoraConfig(),
        optimizer=OptimizerConfig(),
        options=StageOptions(
            seed=0,
            compute_dtype=dtype,
            wire_dtype=dtype,
            quantize=quantize,
            base_weights=base_weights,
        ),
    )
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, min(spec.vocab_size, 1000), (1, options.positions + 1), np.int32)
    microbatch = MicrobatchInput(
        index=0,
        tokens_BT=tokens[:, :-1],
        targets_BT=tokens[:, 1:],
        mask_BT=np.ones((1, options.positions), bool),
        row_keys=(0,),
    )
    times = []
    for step in range(options.steps + 1):  # the first also loads libraries
        started_s = time.process_time()
        stage.begin_step(step=step, loss_scale=1 / options.positions)
        stage.forward(microbatch)
        stage.backward(0, None)
        stage.apply(learning_rate=0.0, grad_scale=1.0)
        times.append(time.process_time() - started_s)
    return {
        "step_s": min(times[1:]),
        "loss": stage.loss_sum() / options.positions,
        "grown": peak_process_bytes() - before,
    }


if __name__ == "__main__":
    main()
