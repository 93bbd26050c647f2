"""From a plan to a stage and its links' limits, the same in a worker and in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from exo_train.backends.base import Stage, StageOptions
from exo_train.backends.registry import load_backend
from exo_train.lora_config import LoraConfig
from exo_train.models.manifest import ModelManifest
from exo_train.models.tensors import TensorSource
from exo_train.optimizer_config import OptimizerConfig
from exo_train.plan.plan import Plan
from exo_train.plan.stages import StageSpec
from exo_train.train.tied import CHUNK_BYTES, FLOAT_BYTES
from exo_train.transport.base import LinkIdentity, LinkLimits, PeerIdentity
from exo_train.wire.tensor import DType

LINK_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 3600.0  # fetching tensors over Wi-Fi
Identity = TypeVar("Identity", bound=PeerIdentity)
CONFIG_DTYPES = {"fp32": DType.FP32, "bf16": DType.BF16, "fp16": DType.FP16}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecipe:
    """All that a stage is made from: stages of equal recipes differ in their state only."""

    model_hash: str
    backend: str
    device: str
    stage: StageSpec
    lora: LoraConfig
    optimizer: OptimizerConfig
    options: StageOptions

    @classmethod
    def of(cls, plan: Plan, rank: int) -> StageRecipe:
        mine = plan.ranks[rank]
        return cls(
            model_hash=plan.model_hash,
            backend=mine.backend,
            device=mine.device,
            stage=mine.stage,
            lora=plan.lora,
            optimizer=plan.optimizer,
            options=StageOptions(
                seed=plan.seed,
                compute_dtype=CONFIG_DTYPES[mine.compute_dtype],
                wire_dtype=CONFIG_DTYPES[plan.wire_dtype],
                checkpoint_activations=plan.checkpoint_activations,
                adapter_init=plan.adapter_init,
                neftune_alpha=plan.neftune_alpha,
                objective=plan.objective,
                quantize=plan.quantize,
                base_weights=mine.base_weights,
            ),
        )


def load_planned_stage(
    plan: Plan, rank: int, manifest: ModelManifest, source: TensorSource
) -> Stage:
    """Read the rank's tensors, and no others, into its backend."""
    recipe = StageRecipe.of(plan, rank)
    return load_backend(recipe.backend).load_stage(
        manifest.spec,
        recipe.stage,
        source,
        device=recipe.device,
        lora=recipe.lora,
        optimizer=recipe.optimizer,
        options=recipe.options,
    )


def link_limits(plan: Plan) -> LinkLimits:
    """Give the caps of every link of the plan: nothing that goes over it is larger than this."""
    num_sequences = plan.objective.answers_per_row * plan.microbatch_size
    num_values = num_sequences * plan.max_seq_length * plan.hidden_size
    boundary_bytes = num_values * CONFIG_DTYPES[plan.wire_dtype].num_bytes
    # A row of a matrix that is wider than a chunk goes alone.
    chunk_bytes = max(CHUNK_BYTES, FLOAT_BYTES * plan.hidden_size) if plan.lora.full else 0
    return LinkLimits(max_tensor_bytes=max(boundary_bytes, chunk_bytes))


def link_identity(plan: Plan, rank: int, peer_rank: int, token: str) -> LinkIdentity:
    return identity_of(LinkIdentity, plan, rank, peer_rank, token)


def identity_of(
    kind: type[Identity], plan: Plan, rank: int, peer_rank: int, token: str
) -> Identity:
    """Name two ranks of the plan, seen from `rank`."""
    return kind(
        cluster=plan.cluster,
        run=plan.run_id,
        generation=plan.generation,
        rank=rank,
        name=plan.ranks[rank].name,
        peer_rank=peer_rank,
        peer_name=plan.ranks[peer_rank].name,
        token=token,
        peer_id=plan.ranks[peer_rank].node_id,
    )
