"""How long one decoder block of a model takes on a device: the question and the answer.

Owns both as values, their JSON forms, and the sum that gives a stage's time. Pure. Must not
measure, and must not choose a split.

Times are of one microbatch of the run's shape, in seconds.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exo_train.errors import ProtocolError
from exo_train.lora_config import LoraConfig
from exo_train.plan.fields import Fields, parse_json
from exo_train.plan.lora_fields import read_lora
from exo_train.run_options import QUANTIZE_BITS

SCHEMA = 1
MAX_REQUEST_CHARS = 2 << 20  # the model's config may have half of it
MAX_ANSWER_CHARS = 1 << 16
MAX_SEQUENCES = 1 << 16
MAX_POSITIONS = 1 << 24
MAX_BUDGET_S = 60.0
# A profiler is ended long before; and no device starts a kernel in less.
MAX_TIME_S = 1000.0
MIN_LAYER_S = 1e-7
MAX_SLOWDOWN = 1e6
MAX_BYTES = 1 << 44

# Above the one, other work on the device took part; below the other, chance did.
STEADY_SLOWDOWN = 1.3
STEADY_REPETITIONS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """What is to be timed, and for how long (`budget_s`, without loading the framework).

    `config_json` is the model's Hugging Face config, which says how its weights are quantised;
    `quantize` is the run's, `base_weights` how the device is to hold them. `with_ends`: embedding
    and head too.
    """

    config_json: str
    backend: str
    device: str
    compute_dtype: str
    lora: LoraConfig
    microbatch_size: int
    sequence: int
    checkpoint_activations: bool
    with_ends: bool
    budget_s: float = 3.0
    quantize: int = 0
    base_weights: str = "packed"

    def to_json(self) -> str:
        plain = {
            **dataclasses.asdict(self),
            "schema": SCHEMA,
            "config_json": json.loads(self.config_json),
        }
        return json.dumps(plain, sort_keys=True)

    @classmethod
    def from_json(cls, document: str, *, place: str) -> ProfileRequest:
        """Read what another process sent; `place` names it in messages."""
        value = parse_json(document, place=place, max_chars=MAX_REQUEST_CHARS)
        config = value.pop("config_json", None) if isinstance(value, dict) else None
        if not isinstance(config, dict):
            raise ProtocolError(f"{place}: 'config_json' must be an object")
        with Fields(value, place) as fields:
            fields.whole("schema", low=SCHEMA, high=SCHEMA)
            return cls(
                config_json=json.dumps(config),
                backend=fields.text("backend"),
                device=fields.text("device"),
                compute_dtype=fields.text("compute_dtype", choices=("fp32", "bf16", "fp16")),
                lora=read_lora(fields.inner("lora"), f"{place}.lora"),
                microbatch_size=fields.whole("microbatch_size", low=1, high=MAX_SEQUENCES),
                sequence=fields.whole("sequence", low=1, high=MAX_POSITIONS),
                checkpoint_activations=fields.flag("checkpoint_activations"),
                with_ends=fields.flag("with_ends"),
                budget_s=fields.number("budget_s", low=0.0, high=MAX_BUDGET_S),
                quantize=fields.whole("quantize", low=0, high=max(QUANTIZE_BITS)),
                base_weights=fields.text("base_weights", choices=("packed", "dense")),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTimes:
    """What embedding and head add to a stage, forward and backward.

    `head_layer_s` is a decoder layer's time on the stage with the head: a backend that makes its
    gradients in the forward there runs its layers once less. `head_s` is of a microbatch whose
    tokens are all supervised. `head_workspace_bytes` is that stage's need while it computes.
    """

    embedding_s: float
    head_s: float
    head_layer_s: float
    head_workspace_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMemory:
    """What a stage takes beside its weights: once per microbatch in flight, and while computing.

    A stage of L layers needs `workspace_bytes + L * layer_workspace_bytes` to compute.
    """

    layer_in_flight_bytes: int
    layer_workspace_bytes: int
    workspace_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTimes:
    """One decoder layer; `layer_backward_s` has the recomputation where there is one.

    `overhead_s` is what any stage adds, `layer_update_s` a layer's share of what is done once a
    step (clearing gradients, norm, AdamW). `slowdown` is the median call over the fastest one: 1
    on a quiet device. `memory` is None on a device too slow to measure it in time; there
    `overhead_s` is part of the layer, and looking up the embedding costs nothing. `process_bytes`
    is what a process with this framework takes before it holds a model; 0: not measured.
    """

    layer_forward_s: float
    layer_backward_s: float
    overhead_s: float
    layer_update_s: float
    slowdown: float
    num_repetitions: int
    ends: EndTimes | None = None
    memory: BlockMemory | None = None
    process_bytes: int = 0

    @property
    def layer_s(self) -> float:
        return self.layer_forward_s + self.layer_backward_s

    @property
    def is_steady(self) -> bool:
        """Tell whether measuring again would give about the same."""
        many = self.num_repetitions >= STEADY_REPETITIONS
        return many and self.slowdown <= STEADY_SLOWDOWN

    def stage_s(self, num_layers: int, *, embedding: bool = False, head: bool = False) -> float:
        """Give forward plus backward of one microbatch on a stage."""
        if not (embedding or head):
            return self.overhead_s + num_layers * self.layer_s
        assert self.ends is not None, "a stage with an end needs a profile with ends"
        layer_s = self.ends.head_layer_s if head else self.layer_s
        ends_s = embedding * self.ends.embedding_s + head * self.ends.head_s
        return self.overhead_s + num_layers * layer_s + ends_s

    def to_fields(self) -> dict[str, Any]:
        """Give plain values; what was not measured is an empty list."""
        plain = dataclasses.asdict(self)
        for part in ("ends", "memory"):
            plain[part] = [plain[part]] if plain[part] else []
        return plain

    @classmethod
    def from_fields(cls, value: object, *, place: str) -> BlockTimes:
        """Read `to_fields` from a file or another process; raises ProtocolError.

        A layer must take some time: one that costs nothing would draw all layers to its device.
        """
        if isinstance(value, dict):
            value = {"process_bytes": 0, **value}  # as older releases stored it
        with Fields(value, place) as fields:
            ends = fields.each("ends", most=1, read=_read_ends)
            memory = fields.each("memory", most=1, read=_read_memory)
            times = cls(
                layer_forward_s=fields.number("layer_forward_s", low=0, high=MAX_TIME_S),
                layer_backward_s=fields.number("layer_backward_s", low=0, high=MAX_TIME_S),
                overhead_s=fields.number("overhead_s", low=0, high=MAX_TIME_S),
                layer_update_s=fields.number("layer_update_s", low=0, high=MAX_TIME_S),
                slowdown=fields.number("slowdown", low=1, high=MAX_SLOWDOWN),
                num_repetitions=fields.whole("num_repetitions", low=1),
                ends=ends[0] if ends else None,
                memory=memory[0] if memory else None,
                process_bytes=fields.whole("process_bytes", low=0, high=MAX_BYTES),
            )
        if times.layer_s < MIN_LAYER_S:
            raise ProtocolError(
                f"{place}: layer_forward_s and layer_backward_s must be at least {MIN_LAYER_S:g} s "
                f"together, not {times.layer_s:g}"
            )
        return times


def _read_ends(value: object, place: str) -> EndTimes:
    with Fields(value, place) as fields:
        return EndTimes(
            embedding_s=fields.number("embedding_s", low=0, high=MAX_TIME_S),
            head_s=fields.number("head_s", low=0, high=MAX_TIME_S),
            head_layer_s=fields.number("head_layer_s", low=MIN_LAYER_S, high=MAX_TIME_S),
            head_workspace_bytes=fields.whole("head_workspace_bytes", low=0, high=MAX_BYTES),
        )


def _read_memory(value: object, place: str) -> BlockMemory:
    names = [field.name for field in dataclasses.fields(BlockMemory)]
    with Fields(value, place) as fields:
        read: Mapping[str, int] = {n: fields.whole(n, low=0, high=MAX_BYTES) for n in names}
        return BlockMemory(**read)
