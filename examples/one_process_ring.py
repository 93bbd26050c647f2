"""Train a tiny random model on a ring of three ranks, all in this process, and on one rank.

    python examples/one_process_ring.py

Prints loss and gradient norm of both runs. They agree to float tolerance: that is the property the
project rests on. (Losses alone would not do: AdamW takes the same step for gradients that are all
twice as large.) Where MLX and PyTorch are both installed, the ring mixes them. Exits with 1 if the
runs differ.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from exo_train.agent.local_ring import LocalNetwork, LocalRank
from exo_train.agent.planning import Candidate, make_plan
from exo_train.backends.registry import available_backends
from exo_train.config import TrainConfig
from exo_train.models.manifest import build_manifest
from exo_train.models.open import open_model
from exo_train.models.spec import ModelSpec
from exo_train.peer import NodeId
from exo_train.plan.plan import Plan
from exo_train.train.batches import BatchPlan, split_microbatches
from exo_train.train.examples import Example
from exo_train.train.learning_rate import clip_scale
from exo_train.train.ring import Ring, WeightsAccess

STEPS = 5
TIMEOUT_S = 60.0
TOLERANCE = 1e-4  # relative, fp32: where frameworks differ in the order of sums
CONFIG = TrainConfig(batch_size=8, max_seq_length=32, learning_rate=1e-2, dtype="fp32")
VOCAB_SIZE = 128
MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def main() -> int:
    available = available_backends()
    mixed = [available[rank % len(available)] for rank in range(3)]
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(Path(folder))
        one = train(model, available[-1:])
        ring = train(model, mixed)
    print("step   loss: one, three ranks   gradient norm: one, three ranks")
    for step, ((loss_1, norm_1), (loss_3, norm_3)) in enumerate(zip(one, ring, strict=True), 1):
        print(f"{step:>4}   {loss_1:.6f}  {loss_3:.6f}   {norm_1:.6f}  {norm_3:.6f}")
    difference = float(np.max(np.abs(np.array(ring) / np.array(one) - 1)))
    equal = difference <= TOLERANCE
    print(f"largest relative difference {difference:.1e}: {'equal' if equal else 'NOT EQUAL'}")
    return 0 if equal else 1


def train(model: Path, backends: Sequence[str]) -> list[tuple[float, float]]:
    """Give loss and gradient norm of each step on a ring with one rank per backend."""
    spec, source = open_model(model)
    manifest = build_manifest(source, spec, cache_dir=None)
    devices = [make_device(rank, backend) for rank, backend in enumerate(backends)]
    plan = make_plan(devices, CONFIG, manifest, cluster="example", on_note=print)
    for rank in plan.ranks:
        print(f"rank {rank.rank}: {rank.backend}, layers {rank.stage.start}..{rank.stage.end - 1}")
    network = LocalNetwork()
    access = WeightsAccess(
        manifest=manifest,
        endpoints=(),
        token="",
        coordinator_name="here",
        coordinator_id=NodeId(""),
    )
    with Ring(plan, [LocalRank(network, model) for _ in plan.ranks]) as ring:
        ring.prepare()
        ring.load(access, step_timeout_s=TIMEOUT_S)
        return [train_step(ring, plan, step) for step in range(1, STEPS + 1)]


def train_step(ring: Ring, plan: Plan, step: int) -> tuple[float, float]:
    """Run and commit one step as the training loop does; give its loss and gradient norm."""
    batches = BatchPlan(examples=random_rows(), batch_size=CONFIG.batch_size, seed=CONFIG.seed)
    batch = batches.batch_for_step(step - 1)
    microbatches = split_microbatches(
        batch, microbatch_size=plan.microbatch_size, max_seq_length=CONFIG.max_seq_length
    )
    loss_scale = 1.0 / batch.num_supervised_tokens
    reports = ring.run_step(step, microbatches, loss_scale=loss_scale, timeout_s=TIMEOUT_S)
    grad_norm = math.sqrt(math.fsum(report.grad_square_sum for report in reports))
    ring.commit(
        step,
        apply=True,
        learning_rate=CONFIG.learning_rate,
        grad_scale=clip_scale(grad_norm, CONFIG.max_grad_norm),
        timeout_s=TIMEOUT_S,
    )
    return reports[-1].loss_sum * loss_scale, grad_norm


def make_device(rank: int, backend: str) -> Candidate:
    """Describe a device as the planner sees it.

    With equal memory the later ranks get more layers: they hold fewer microbatches at a time.
    """
    return Candidate(
        node_id=NodeId(f"{rank:032x}"),
        name=f"device-{rank}",
        backend=backend,
        device="gpu" if backend == "mlx" and sys.platform == "darwin" else "cpu",
        usable_memory_bytes=10**9,
        dtypes=("fp32",),
        addresses=(),
    )


def random_rows() -> tuple[Example, ...]:
    """Make rows of different lengths; the first third of each is a prompt, not learnt."""
    rng = np.random.default_rng(0)
    rows = []
    for number, length in enumerate(rng.integers(8, CONFIG.max_seq_length, 24)):
        tokens = rng.integers(0, VOCAB_SIZE, length)
        learnt = tuple(place > length // 3 for place in range(length))
        rows.append(Example(tokens=tuple(map(int, tokens)), supervised=learnt, where=f"{number}"))
    return tuple(rows)


def write_random_model(folder: Path) -> Path:
    """Write config.json and model.safetensors with the names and shapes the config implies."""
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    spec = ModelSpec.from_config(MODEL, place="this example")
    rng = np.random.default_rng(0)
    weights = {}
    for name, shape in spec.all_tensor_shapes().items():
        values = np.ones(shape) if "norm" in name else rng.normal(0, shape[-1] ** -0.5, shape)
        weights[name] = values.astype(np.float32)
    save_file(weights, folder / "model.safetensors")
    return folder


if __name__ == "__main__":
    sys.exit(main())
