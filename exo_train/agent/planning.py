"""From who is here to a plan: dtypes, ranks, and the split by memory alone.

Owns what a plan says of its ranks. The split by measured speed is decided in `live_plan`; the one
by memory needs no measurement, so `verify` and `train --profile-s 0` take it.
"""

from __future__ import annotations

import functools
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from exo_train.config import TrainConfig
from exo_train.errors import ConfigError
from exo_train.models.manifest import ModelManifest
from exo_train.models.spec import EMBEDDING, LM_HEAD, ModelSpec, is_projection
from exo_train.peer import Address, NodeId
from exo_train.plan.device_memory import Processor
from exo_train.plan.memory import (
    DENSE,
    ModelShape,
    WeightForm,
    boundary_cost,
    pseudo_layer_costs,
)
from exo_train.plan.partition import (
    DeviceBudget,
    StageAssignment,
    gpipe_depth,
    one_f_one_b_depth,
    partition,
)
from exo_train.plan.plan import Key, Plan, RankPlan
from exo_train.plan.stages import StageSpec
from exo_train.plan.workloads import held_shape, run_copies, weights_held
from exo_train.train.batches import choose_microbatch_size

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A processor of a live member as the planner sees it: a computer may have several GPUs."""

    node_id: NodeId
    name: str
    backend: str
    device: str
    usable_memory_bytes: int
    dtypes: tuple[str, ...]
    addresses: tuple[Address, ...]

    @property
    def key(self) -> Key:
        return self.node_id, self.device

    @classmethod
    def from_status(cls, member: dict[str, Any]) -> Candidate:
        """Read one entry of `status --json`'s members: its first processor."""
        return cls(
            node_id=NodeId(member["id"]),
            name=member["name"],
            backend=member["backend"],
            device=member["device"],
            usable_memory_bytes=member["usable_memory_bytes"],
            dtypes=tuple(member["dtypes"]),
            addresses=tuple(Address.parse(text) for text in member["addresses"]),
        )

    @classmethod
    def all_from_status(cls, member: dict[str, Any]) -> list[Candidate]:
        """Read all processors of one entry; with several, each is named with its device."""
        first = cls.from_status(member)
        more = member.get("more_devices", ())
        if not more:
            return [first]
        others = [
            replace(
                first,
                device=other["device"],
                usable_memory_bytes=other["usable_memory_bytes"],
                dtypes=tuple(other["dtypes"]),
            )
            for other in more
        ]
        return [replace(c, name=f"{c.name} {c.device}") for c in (first, *others)]


def ring_order(candidates: Sequence[Candidate], coordinator: NodeId) -> list[Candidate]:
    """Put the coordinator first (it has the data), then by memory: the last has the head."""
    return sorted(
        candidates, key=lambda c: (c.node_id != coordinator, c.usable_memory_bytes, c.node_id)
    )


def make_plan(
    candidates: Sequence[Candidate],
    config: TrainConfig,
    manifest: ModelManifest,
    *,
    cluster: str,
    adapter_init: str = "zero",
    on_note: Callable[[str], None] = lambda note: None,
) -> Plan:
    """Split by memory over `candidates` in their order; raises DoesNotFitError with numbers."""
    microbatch_size = config.microbatch_size or choose_microbatch_size(
        config.batch_size, num_stages=len(candidates)
    )
    microbatch_size = min(microbatch_size, config.batch_size)
    num_microbatches = -(-config.batch_size // microbatch_size)
    dtypes = [compute_dtype(candidate, config.dtype) for candidate in candidates]
    assignments = _assign(
        candidates, dtypes, manifest.spec, config, microbatch_size, num_microbatches
    )
    used = [
        Part(candidate=candidates[a.device], stage=a.stage, memory_bytes=a.needed_bytes)
        for a in assignments
    ]
    note_left_out(candidates, used, on_note, why="no layer fits or none is left")
    if num_microbatches < len(used):
        on_note(
            f"{num_microbatches} microbatches are fewer than the {len(used)} stages: devices "
            f"will wait for each other; a larger --batch-size helps"
        )
    return plan_of(
        used,
        config,
        manifest,
        cluster=cluster,
        microbatch_size=microbatch_size,
        adapter_init=adapter_init,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a candidate gets: its layers, and the bytes that they are reckoned to need."""

    candidate: Candidate
    stage: StageSpec
    memory_bytes: int = 0  # unknown

    @classmethod
    def of(cls, candidate: Candidate, start: int, count: int, rank: int, num_ranks: int) -> Part:
        """Give `count` layers from `start` on, with the ends that the place in the ring brings."""
        stage = StageSpec(
            start=start,
            end=start + count,
            embedding=rank == 0,
            head=rank == num_ranks - 1,
        )
        return cls(candidate=candidate, stage=stage)


def note_left_out(
    candidates: Sequence[Candidate],
    used: Sequence[Part],
    on_note: Callable[[str], None],
    *,
    why: str,
) -> None:
    taken = {part.candidate.key for part in used}
    for candidate in candidates:
        if candidate.key not in taken:
            on_note(f"{candidate.name} has no part in this run: {why}")


def plan_of(
    parts: Sequence[Part],
    config: TrainConfig,
    manifest: ModelManifest,
    *,
    cluster: str,
    microbatch_size: int,
    adapter_init: str = "zero",
) -> Plan:
    """Write the plan of a new run: rank by rank, as decided."""
    spec = manifest.spec
    dtypes = [compute_dtype(part.candidate, config.dtype) for part in parts]
    return Plan(
        cluster=cluster,
        run_id=secrets.token_hex(8),
        generation=1,
        model_hash=manifest.model_hash,
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ranks=tuple(
            _rank(
                index,
                part,
                dtype,
                base_weights=with_weights_held(part.candidate, config, spec).base_weights,
            )
            for index, (part, dtype) in enumerate(zip(parts, dtypes, strict=True))
        ),
        pipeline_schedule=config.pipeline_schedule,
        microbatch_size=microbatch_size,
        max_seq_length=config.max_seq_length,
        wire_dtype=wire_dtype(dtypes, config.wire_dtype),
        lora=config.lora,
        optimizer=config.optimizer_rule,
        seed=config.seed,
        checkpoint_activations=config.checkpoint_activations,
        adapter_init=adapter_init,
        neftune_alpha=config.neftune_alpha,
        objective=config.learnt,
        quantize=config.quantize,
    )


def with_weights_held(candidate: Candidate, config: TrainConfig, spec: ModelSpec) -> TrainConfig:
    """Give the options in which `base_weights` says what the candidate is to do."""
    held = weights_held(
        model_shape(spec),
        Processor(backend=candidate.backend, device=candidate.device),
        wanted=config.base_weights,
        quantize=config.quantize,
        usable_bytes=candidate.usable_memory_bytes,
        value_bytes=DTYPE_BYTES[compute_dtype(candidate, config.dtype)],
    )
    return replace(config, base_weights=held)


def compute_dtype(candidate: Candidate, wanted: str) -> str:
    """Give the dtype of the frozen base on a device: what it does natively, unless told."""
    if wanted == "auto":
        return candidate.dtypes[0]
    if wanted not in candidate.dtypes:
        raise ConfigError(
            f"{candidate.name} ({candidate.backend} on {candidate.device}) does not compute in "
            f"{wanted} natively; use --dtype {candidate.dtypes[0]} or auto, or leave it out "
            f"with --devices"
        )
    return wanted


def wire_dtype(compute_dtypes: Sequence[str], wanted: str) -> str:
    """Give the boundary dtype: 16 bits only where a neighbour computes in them anyway."""
    if wanted != "auto":
        return wanted
    kinds = set(compute_dtypes)
    if kinds == {"fp32"}:
        return "fp32"
    return "fp16" if kinds == {"fp16"} else "bf16"


def model_shape(spec: ModelSpec) -> ModelShape:
    """Give the numbers that decide memory and arithmetic."""
    return ModelShape(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        tied_embeddings=spec.tied_embeddings,
        layer_weights=_layer_form(spec),
        vocabulary_weights=_vocabulary_form(spec),
    )


def _vocabulary_form(spec: ModelSpec) -> WeightForm:
    """Give the form of embedding and head that takes more."""
    forms = [_form(spec, EMBEDDING)]
    if not spec.tied_embeddings:
        forms.append(_form(spec, LM_HEAD))
    return max(forms, key=_bytes_in_16_bit)


@functools.lru_cache(maxsize=32)
def _layer_form(spec: ModelSpec) -> WeightForm:
    """Give the form of the layer whose projections take most."""
    if spec.quantisation is None:
        return DENSE
    shapes = spec.all_tensor_shapes()
    forms = []
    for layer in range(spec.num_layers):
        names = [n for n in shapes if n.startswith(f"model.layers.{layer}.") and is_projection(n)]
        total = sum(math.prod(shapes[name]) for name in names)
        parts = [(_form(spec, name), math.prod(shapes[name]) / total) for name in names]
        forms.append(
            WeightForm(
                code_bytes=sum(form.code_bytes * share for form, share in parts),
                floats=sum(form.floats * share for form, share in parts),
            )
        )
    return max(forms, key=_bytes_in_16_bit)


def _form(spec: ModelSpec, name: str) -> WeightForm:
    packing = spec.quantisation.of(name.removesuffix(".weight")) if spec.quantisation else None
    if packing is None:
        return DENSE
    return WeightForm.packed(bits=packing.bits, group_size=packing.group_size)


def _bytes_in_16_bit(form: WeightForm) -> float:
    return form.bytes_per_value(DTYPE_BYTES["bf16"])


def _assign(
    candidates: Sequence[Candidate],
    dtypes: Sequence[str],
    spec: ModelSpec,
    config: TrainConfig,
    microbatch_size: int,
    num_microbatches: int,
) -> list[StageAssignment]:
    held = [with_weights_held(candidate, config, spec).base_weights for candidate in candidates]
    shape = held_shape(
        model_shape(spec),
        quantize=config.quantize,
        base_weights="dense" if "dense" in held else "packed",
    )
    value_bytes = max(DTYPE_BYTES[dtype] for dtype in dtypes)
    microbatch_tokens = config.learnt.answers_per_row * microbatch_size * config.max_seq_length
    costs = pseudo_layer_costs(
        shape,
        lora=config.lora,
        microbatch_tokens=microbatch_tokens,
        activation_bytes=value_bytes,
        checkpoint_activations=config.checkpoint_activations,
        masked=config.packing,
        copies=run_copies(config),
        optimizer=config.optimizer_rule,
    )
    depth = one_f_one_b_depth if config.pipeline_schedule == "1f1b" else gpipe_depth
    budgets = [
        DeviceBudget(name=c.name, weight=c.usable_memory_bytes, usable_bytes=c.usable_memory_bytes)
        for c in candidates
    ]
    return partition(
        costs,
        budgets,
        in_flight=depth(num_microbatches),
        per_stage=boundary_cost(
            hidden_size=spec.hidden_size,
            microbatch_tokens=microbatch_tokens,
            wire_bytes=value_bytes,
        ),
    )


def _rank(index: int, part: Part, dtype: str, *, base_weights: str) -> RankPlan:
    return RankPlan(
        rank=index,
        node_id=part.candidate.node_id,
        name=part.candidate.name,
        backend=part.candidate.backend,
        device=part.candidate.device,
        compute_dtype=dtype,
        stage=part.stage,
        memory_bytes=part.memory_bytes,
        base_weights=base_weights,
    )
