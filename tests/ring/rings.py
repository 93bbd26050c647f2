"""Rings for the tests: one model, any split and backends, in this process.

Owns the way from a list of backends to a trained adapter. For tests only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from exo_train.agent.local_ring import LocalNetwork, LocalRank
from exo_train.agent.planning import Candidate, make_plan
from exo_train.config import TrainConfig
from exo_train.models.manifest import ModelManifest, build_manifest
from exo_train.models.open import open_model
from exo_train.peer import NodeId
from exo_train.plan.plan import Plan
from exo_train.plan.stages import StageSpec
from exo_train.train.batches import plan_batches, split_microbatches
from exo_train.train.collecting import merged
from exo_train.train.examples import Example
from exo_train.train.learning_rate import clip_scale
from exo_train.train.ring import Ring, WeightsAccess
from exo_train.wire.pb import control_pb2 as pb

TIMEOUT_S = 60.0
CONFIG = TrainConfig(
    batch_size=6, microbatch_size=2, max_seq_length=32, learning_rate=1e-3, dtype="fp32"
)


@dataclass(frozen=True)
class Trained:
    """Per-step losses and gradient norms, and the adapter afterwards."""

    losses: list[float]
    grad_norms: list[float]
    adapter: dict[str, np.ndarray]
    sent_bytes: list[int]


def manifest_of(model: Path) -> ModelManifest:
    spec, source = open_model(model)
    return build_manifest(source, spec, cache_dir=None)


def candidates(backends: Sequence[str], weights: Sequence[int] | None = None) -> list[Candidate]:
    """Make one device per backend; uneven `weights` make uneven splits."""
    weights = weights or [1] * len(backends)
    return [
        Candidate(
            node_id=NodeId(f"{index:032x}"),
            name=f"device{index}",
            backend=backend,
            device="cpu",
            usable_memory_bytes=weight * 10**9,
            dtypes=("fp32", "bf16", "fp16"),
            addresses=(),
        )
        for index, (backend, weight) in enumerate(zip(backends, weights, strict=True))
    ]


def random_examples(
    vocab_size: int, *, num_rows: int = 24, max_tokens: int = 30, seed: int = 7
) -> tuple[Example, ...]:
    """Rows of very different lengths and shares of supervised tokens."""
    rng = np.random.default_rng(seed)
    made = []
    for row in range(num_rows):
        length = int(rng.integers(4, max_tokens))
        tokens = tuple(int(t) for t in rng.integers(0, vocab_size, length))
        start = int(rng.integers(1, length - 1))
        supervised = tuple(index >= start for index in range(length))
        made.append(Example(tokens=tokens, supervised=supervised, where=f"row {row}"))
    return tuple(made)


def open_local_ring(
    model: Path, plan: Plan, *, faults: dict[int, str] | None = None
) -> tuple[Ring, WeightsAccess]:
    network = LocalNetwork()
    channels = [
        LocalRank(network, model, fault=(faults or {}).get(rank.rank, "")) for rank in plan.ranks
    ]
    access = WeightsAccess(
        manifest=manifest_of(model),
        endpoints=(),
        token="secret",
        coordinator_name="device0",
        coordinator_id=plan.ranks[0].node_id,
    )
    return Ring(plan, channels), access


def train_ring(
    model: Path,
    backends: Sequence[str],
    *,
    weights: Sequence[int] | None = None,
    config: TrainConfig = CONFIG,
    num_steps: int = 10,
    faults: dict[int, str] | None = None,
    stages: Sequence[StageSpec] | None = None,
    adapter_init: str = "zero",
) -> Trained:
    """Train like the loop does, without its files."""
    manifest = manifest_of(model)
    plan = make_plan(
        candidates(backends, weights), config, manifest, cluster="test", adapter_init=adapter_init
    )
    if stages is not None:
        ranks = zip(plan.ranks, stages, strict=True)
        plan = replace(plan, ranks=tuple(replace(rank, stage=stage) for rank, stage in ranks))
    batches = plan_batches(random_examples(manifest.spec.vocab_size), replace(config, seed=3))
    losses, grad_norms, sent_bytes = [], [], []
    ring, access = open_local_ring(model, plan, faults=faults)
    with ring:
        ring.prepare()
        ring.load(access, step_timeout_s=TIMEOUT_S)
        for step in range(1, num_steps + 1):
            batch = batches.batch_for_step(step - 1)
            reports = ring.run_step(
                step,
                split_microbatches(
                    batch,
                    microbatch_size=plan.microbatch_size,
                    max_seq_length=config.max_seq_length,
                ),
                loss_scale=1 / batch.num_losses,
                timeout_s=TIMEOUT_S,
            )
            norm = float(np.sqrt(sum(report.grad_square_sum for report in reports)))
            losses.append(reports[-1].loss_sum / batch.num_losses)
            grad_norms.append(norm)
            sent_bytes = [report.sent_bytes for report in reports]
            ring.commit(
                step,
                apply=True,
                learning_rate=config.learning_rate,
                grad_scale=clip_scale(norm, config.max_grad_norm),
                timeout_s=TIMEOUT_S,
            )
        adapter = merged(ring.collect(pb.ADAPTER))
    return Trained(losses, grad_norms, adapter, sent_bytes)


def largest_difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """Give the largest difference of any adapter value; inf when the names differ."""
    if one.keys() != other.keys():
        return float("inf")
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)
