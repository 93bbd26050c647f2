"""The plan of a run: what every device must agree on before the first step.

Owns its canonical JSON, its hash and the check that it makes sense; each device checks it on
receipt. Pure. Must not choose anything: that is `partition` and `schedule`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from exo_train.errors import ProtocolError
from exo_train.lora_config import LoraConfig
from exo_train.objective_config import MAX_BETA, OBJECTIVES, ObjectiveConfig
from exo_train.optimizer_config import MUON_RATES, OPTIMIZERS, OptimizerConfig
from exo_train.peer import Address, NodeId
from exo_train.plan.fields import Fields, parse_json
from exo_train.plan.lora_fields import placements_of, read_lora
from exo_train.plan.stages import StageSpec
from exo_train.run_options import DTYPES, PIPELINE_SCHEDULES, QUANTIZE_BITS

SCHEMA = 1
MAX_PLAN_CHARS = 1_000_000
MAX_RANKS = 256
MAX_LAYERS = 4096
MAX_ADDRESSES = 32
BACKENDS = ("mlx", "torch")
WEIGHTS_HELD = ("packed", "dense")
ADAPTER_INITS = ("zero", "random")

_REAL_DTYPES = tuple(name for name in DTYPES if name != "auto")
_MAX_SIZE = 2**24  # widths, ranks of adapters, sequence lengths
_BELOW_ONE = 1 - 2**-53


Key = tuple[NodeId, str]  # a processor: its computer, and its name there


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One rank: which device, how it computes, which layers; `addresses` once it listens."""

    rank: int
    node_id: NodeId
    name: str
    backend: str
    device: str
    compute_dtype: str
    stage: StageSpec
    addresses: tuple[Address, ...] = ()
    memory_bytes: int = 0  # what the plan reckons with; read again before the stage is loaded
    base_weights: str = "packed"

    @property
    def key(self) -> Key:
        return self.node_id, self.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A generation of a run. Equal plans have equal `hash`."""

    cluster: str
    run_id: str
    generation: int
    model_hash: str
    num_layers: int
    hidden_size: int
    ranks: tuple[RankPlan, ...]
    pipeline_schedule: str
    microbatch_size: int
    max_seq_length: int
    wire_dtype: str
    lora: LoraConfig
    optimizer: OptimizerConfig
    seed: int
    checkpoint_activations: bool = False
    adapter_init: str = "zero"
    objective: ObjectiveConfig = ObjectiveConfig()  # noqa: RUF009 - frozen
    neftune_alpha: float = 0.0
    quantize: int = 0

    @property
    def hash(self) -> str:
        """Give the SHA-256 of the canonical JSON, in hex."""
        return hashlib.sha256(self.to_json().encode("ascii")).hexdigest()

    def to_json(self) -> str:
        """Write canonical JSON: sorted keys, no spaces, ASCII."""
        plain = dataclasses.asdict(self) | {
            "schema": SCHEMA,
            "ranks": [_rank_to_dict(rank) for rank in self.ranks],
            "lora": _with_floats(self.lora),
            "optimizer": _with_floats(self.optimizer),
            "objective": _with_floats(self.objective),
            "neftune_alpha": float(self.neftune_alpha),
        }
        return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read and check a plan from another device; raises ProtocolError."""
        plain = parse_json(text, place="plan", max_chars=MAX_PLAN_CHARS)
        with Fields(plain, "plan") as fields:
            fields.whole("schema", low=SCHEMA, high=SCHEMA)
            plan = cls(
                cluster=fields.text("cluster"),
                run_id=fields.text("run_id"),
                generation=fields.whole("generation", low=0),
                model_hash=fields.text("model_hash"),
                num_layers=fields.whole("num_layers", low=1, high=MAX_LAYERS),
                hidden_size=fields.whole("hidden_size", low=1, high=_MAX_SIZE),
                ranks=fields.each("ranks", most=MAX_RANKS, read=_rank_from),
                pipeline_schedule=fields.text("pipeline_schedule", choices=PIPELINE_SCHEDULES),
                microbatch_size=fields.whole("microbatch_size", low=1, high=_MAX_SIZE),
                max_seq_length=fields.whole("max_seq_length", low=1, high=_MAX_SIZE),
                wire_dtype=fields.text("wire_dtype", choices=_REAL_DTYPES),
                lora=read_lora(fields.inner("lora"), "plan.lora"),
                optimizer=_optimizer_from(fields.inner("optimizer")),
                seed=fields.whole("seed", low=0),
                checkpoint_activations=fields.flag("checkpoint_activations"),
                adapter_init=fields.text("adapter_init", choices=ADAPTER_INITS),
                neftune_alpha=fields.number("neftune_alpha", low=0.0),
                objective=_objective_from(fields.inner("objective")),
                quantize=fields.whole("quantize", low=0, high=max(QUANTIZE_BITS)),
            )
        plan.validate()
        return plan

    def validate(self) -> None:
        """Refuse a plan in which a layer, a rank or a device is missing or there twice."""
        if not self.ranks:
            raise ProtocolError("plan has no ranks")
        if self.quantize not in QUANTIZE_BITS:
            raise ProtocolError(f"plan.quantize must be 0, 4 or 8, not {self.quantize}")
        for place, rank in enumerate(self.ranks):
            if rank.rank != place:
                raise ProtocolError(f"plan lists rank {rank.rank} ({rank.name}) at place {place}")
        self._check_layers()
        placements_of(self.lora, self.num_layers, "plan.lora")
        for rank in self.ranks:
            for has_it, place, part in (
                (rank.stage.embedding, 0, "embedding"),
                (rank.stage.head, len(self.ranks) - 1, "head"),
            ):
                if has_it != (rank.rank == place):
                    verb = "has" if has_it else "lacks"
                    raise ProtocolError(
                        f"plan: rank {rank.rank} ({rank.name}) {verb} the {part}, "
                        f"which belongs to rank {place} only"
                    )

    def _check_layers(self) -> None:
        """Check that each layer has one owner, in order."""
        owned = 0  # layers [0, owned) have an owner
        for rank in self.ranks:
            stage = rank.stage
            who = f"rank {rank.rank} ({rank.name})"
            if stage.end <= stage.start:
                raise ProtocolError(f"plan: {who} has no layer ([{stage.start}, {stage.end}))")
            if stage.start > owned:
                raise ProtocolError(f"plan: {_layers(owned, stage.start)} no owner before {who}")
            if stage.start < owned:
                end = min(stage.end, owned)
                raise ProtocolError(
                    f"plan: {_layers(stage.start, end)} an owner before {who} already"
                )
            owned = stage.end
        if owned < self.num_layers:
            raise ProtocolError(f"plan: {_layers(owned, self.num_layers)} no owner")
        if owned > self.num_layers:
            raise ProtocolError(
                f"plan: rank {self.ranks[-1].rank} ({self.ranks[-1].name}) ends at layer "
                f"{owned - 1}, the model's last is {self.num_layers - 1}"
            )


def _layers(start: int, end: int) -> str:
    """Name layers [start, end) with their verb: 'layers 14..15 have', 'layer 3 has'."""
    return f"layer {start} has" if end == start + 1 else f"layers {start}..{end - 1} have"


def _with_floats(settings: LoraConfig | OptimizerConfig | ObjectiveConfig) -> dict[str, Any]:
    """Give plain values in which 16 and 16.0 are the same text, so equal plans hash alike."""
    hints = {f.name: f.type for f in dataclasses.fields(settings)}
    plain = dataclasses.asdict(settings)
    if isinstance(settings, LoraConfig):
        plain["alpha_pattern"] = [(key, float(alpha)) for key, alpha in settings.alpha_pattern]
    return {k: float(v) if hints[k] in ("float", float) else v for k, v in plain.items()}


def _rank_to_dict(rank: RankPlan) -> dict[str, Any]:
    stage = rank.stage
    return dataclasses.asdict(rank) | {
        "stage": {
            "layers": [stage.start, stage.end],
            "embedding": stage.embedding,
            "head": stage.head,
        },
        "addresses": [{"host": a.host, "port": a.port} for a in rank.addresses],
    }


def _rank_from(value: object, place: str) -> RankPlan:
    with Fields(value, place) as fields:
        return RankPlan(
            rank=fields.whole("rank", low=0, high=MAX_RANKS - 1),
            node_id=NodeId(fields.text("node_id")),
            name=fields.text("name"),
            backend=fields.text("backend", choices=BACKENDS),
            device=fields.text("device"),
            compute_dtype=fields.text("compute_dtype", choices=_REAL_DTYPES),
            stage=_stage_from(fields.inner("stage"), place),
            addresses=fields.each("addresses", most=MAX_ADDRESSES, read=_address_from),
            memory_bytes=fields.whole("memory_bytes", low=0),
            base_weights=fields.text("base_weights", choices=WEIGHTS_HELD),
        )


def _stage_from(fields: Fields, place: str) -> StageSpec:
    with fields:
        bounds = fields.each("layers", most=2, read=_layer_bound)
        if len(bounds) != 2:
            raise ProtocolError(f"{place}.stage.layers must be [start, end], got {list(bounds)}")
        return StageSpec(
            start=bounds[0],
            end=bounds[1],
            embedding=fields.flag("embedding"),
            head=fields.flag("head"),
        )


def _layer_bound(value: object, place: str) -> int:
    return Fields({"layer": value}, place).whole("layer", low=0, high=MAX_LAYERS)


def _address_from(value: object, place: str) -> Address:
    with Fields(value, place) as fields:
        return Address(fields.text("host"), fields.whole("port", low=1, high=65535))


def _objective_from(fields: Fields) -> ObjectiveConfig:
    with fields:
        return ObjectiveConfig(
            name=fields.text("name", choices=OBJECTIVES),
            beta=fields.number("beta", low=0.0, high=MAX_BETA),
            label_smoothing=fields.number("label_smoothing", low=0.0, high=_BELOW_ONE),
        )


def _optimizer_from(fields: Fields) -> OptimizerConfig:
    with fields:
        return OptimizerConfig(
            name=fields.text("name", choices=OPTIMIZERS),
            beta1=fields.number("beta1", low=0.0, high=_BELOW_ONE),
            beta2=fields.number("beta2", low=0.0, high=_BELOW_ONE),
            epsilon=fields.number("epsilon", low=0.0),
            momentum=fields.number("momentum", low=0.0, high=_BELOW_ONE),
            muon_momentum=fields.number("muon_momentum", low=0.0, high=_BELOW_ONE),
            muon_rate=fields.text("muon_rate", choices=MUON_RATES),
            lora_plus_ratio=fields.number("lora_plus_ratio", low=0.0),
            weight_decay=fields.number("weight_decay", low=0.0),
        )
