"""Plans that no planner made: given nodes and layers. For tests only."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from exo_train.models.manifest import ModelManifest
from exo_train.peer import NodeId
from exo_train.plan.plan import Plan, RankPlan
from exo_train.plan.stages import StageSpec
from tests.ring.rings import CONFIG


def plan_by_hand(
    manifest: ModelManifest,
    nodes: Sequence[tuple[str, str]],
    layers: Sequence[tuple[int, int]],
    *,
    cluster: str,
) -> Plan:
    """Give rank i to the i-th (name, id) with the i-th layers, all PyTorch on CPUs in fp32."""
    last = len(nodes) - 1
    ranks = [
        RankPlan(
            rank=rank,
            node_id=NodeId(node_id),
            name=name,
            backend="torch",
            device="cpu",
            compute_dtype="fp32",
            stage=StageSpec(start=start, end=end, embedding=rank == 0, head=rank == last),
        )
        for rank, ((name, node_id), (start, end)) in enumerate(zip(nodes, layers, strict=True))
    ]
    return Plan(
        cluster=cluster,
        run_id=secrets.token_hex(8),
        generation=1,
        model_hash=manifest.model_hash,
        num_layers=manifest.spec.num_layers,
        hidden_size=manifest.spec.hidden_size,
        ranks=tuple(ranks),
        pipeline_schedule=CONFIG.pipeline_schedule,
        microbatch_size=CONFIG.microbatch_size,
        max_seq_length=CONFIG.max_seq_length,
        wire_dtype="fp32",
        lora=CONFIG.lora,
        optimizer=CONFIG.optimizer_rule,
        seed=CONFIG.seed,
    )
