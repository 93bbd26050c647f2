"""How many bytes each pseudo-layer takes. Owns the memory formulas; must not decide who gets what.

Pure arithmetic. Symbols: h hidden size, a heads x head_dim, k kv_heads x head_dim, f intermediate
size, V vocabulary, r adapter rank, n tokens of one microbatch (sequences x positions).

The formulas follow the PyTorch stage and count what is live. What a process, an allocator or
another backend adds is `device_memory`'s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from exo_train.lora_config import (
    ALL_TARGETS,
    LoraConfig,
    densest_layer,
    module_path,
    trains_ends,
)
from exo_train.optimizer_config import OptimizerConfig

ADAMW = OptimizerConfig()
# The loss runs the head over this many tokens at a time; the frozen head needs no logits later.
LOGITS_CHUNK_TOKENS = 1024
# PyTorch makes packed weights dense in blocks of rows of so many values.
DENSE_BLOCK_VALUES = 1 << 24
# What is made while a rule moves a trained matrix, in fp32 matrices as large: new values, new state
# and what is between (measured in PyTorch on CPUs; muon's of one three times as wide as high).
UPDATE_MATRICES = {"adamw": 6.0, "adafactor": 5.1, "sgd": 4.0, "muon": 7.0}

_FP32_BYTES = 4
_EMBEDDING, _NORMS = "model.embed_tokens.weight", ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightForm:
    """What a value of a frozen matrix takes: bytes of its code, and numbers of the compute dtype.

    4 bits in groups of 64 are half a byte and two numbers (scale, bias) for 64 values; NF4 has no
    bias.
    """

    code_bytes: float = 0.0
    floats: float = 1.0

    @classmethod
    def packed(cls, *, bits: int, group_size: int, numbers_per_group: int = 2) -> WeightForm:
        return cls(code_bytes=bits / 8, floats=numbers_per_group / group_size)

    @property
    def is_packed(self) -> bool:
        return self.code_bytes > 0

    def bytes_per_value(self, value_bytes: int) -> float:
        return self.code_bytes + self.floats * value_bytes


DENSE = WeightForm()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The numbers of a Llama-family model that decide its memory.

    The forms are those of a layer's projections, and of embedding and head.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    layer_weights: WeightForm = DENSE
    vocabulary_weights: WeightForm = DENSE

    @property
    def attention_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def widest_values(self) -> int:
        """Count the values of the largest projection."""
        return self.hidden_size * max(self.intermediate_size, self.attention_size)

    def projection(self, target: str) -> tuple[int, int]:
        """Give (inputs, outputs) of the projection called `target`."""
        h, a, k, f = self.hidden_size, self.attention_size, self.kv_size, self.intermediate_size
        return {
            "q_proj": (h, a),
            "k_proj": (h, k),
            "v_proj": (h, k),
            "o_proj": (a, h),
            "gate_proj": (h, f),
            "up_proj": (h, f),
            "down_proj": (f, h),
        }[target]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """Memory of one pseudo-layer.

    `static_bytes` are there all the time, `per_microbatch_bytes` once for each microbatch in
    flight, and `workspace_bytes` only while this pseudo-layer computes: a stage needs the largest
    of its workspaces, not their sum. `tied_bytes` are what costs nothing on the stage
    that has the whole model, known to its head; `adapter_bytes` are the part that is
    trained: adapters, their gradients and the optimizer's state. `computing_bytes` are the part of
    the static bytes that is no weight: what all layers of a stage need together to compute.
    `copies_bytes` are the part that is kept for a rewind: the stage's own trained state at earlier
    points, and a neighbour's. `tied_copies_bytes` are the part of `tied_bytes` that is a
    neighbour's: a ring of one has none, so the head has them for all layers.
    `update_bytes` are there while the optimizer moves the largest matrix: activations are gone, so
    what counts is the larger of these and the workspace, `transient_bytes`.
    """

    static_bytes: int
    per_microbatch_bytes: int
    workspace_bytes: int = 0
    tied_bytes: int = 0
    adapter_bytes: int = 0
    computing_bytes: int = 0
    copies_bytes: int = 0
    tied_copies_bytes: int = 0
    update_bytes: int = 0

    @property
    def transient_bytes(self) -> int:
        return max(self.workspace_bytes, self.update_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """How many copies a stage keeps of its own trained state, and of a neighbour's.

    The neighbour's stage is taken to be as large.
    """

    own: int
    neighbours: int


NO_COPIES = Copies(own=0, neighbours=0)


def pseudo_layer_costs(
    shape: ModelShape,
    *,
    lora: LoraConfig,
    microbatch_tokens: int,
    activation_bytes: int,
    checkpoint_activations: bool,
    masked: bool = False,
    copies: Copies = NO_COPIES,
    optimizer: OptimizerConfig = ADAMW,
) -> tuple[LayerCost, ...]:
    """Give the costs of embedding, decoder layers and head, in that order.

    Weights that are not packed take `activation_bytes` too. Each layer is reckoned with all
    adapters that any layer has. `masked`: `activation_bytes_per_token`.
    """
    n = microbatch_tokens
    activations = n * activation_bytes_per_token(
        shape, lora=lora, activation_bytes=activation_bytes, masked=masked
    )
    # The gradients of gate, up and their product live at the same time (derived).
    gradients = 3 * n * shape.intermediate_size * activation_bytes
    # A checkpointed layer keeps its input and recomputes the rest when its gradient comes
    # (Chen et al. 2016, arXiv:1604.06174).
    layer_input = n * shape.hidden_size * activation_bytes
    num_values = adapter_params(shape, lora)
    copy_bytes = copied_bytes(shape, lora, optimizer)
    adapter_bytes = copy_bytes + _FP32_BYTES * num_values
    copies_bytes = (copies.own + copies.neighbours) * copy_bytes
    tied_copies_bytes = shape.num_layers * copies.neighbours * copy_bytes
    # In fp32 a trained weight is what the layer computes with, else that is a copy.
    is_held_twice = not lora.full or activation_bytes < _FP32_BYTES
    weight_bytes = layer_weight_bytes(shape, activation_bytes) * is_held_twice
    layer = LayerCost(
        static_bytes=weight_bytes + adapter_bytes + copies_bytes,
        per_microbatch_bytes=layer_input if checkpoint_activations else activations,
        workspace_bytes=gradients
        # A weight's new gradient, before it is added (derived).
        + shape.widest_values * activation_bytes * lora.full
        + (activations if checkpoint_activations else 0)
        + _unpacked_bytes(shape.layer_weights, shape.widest_values, activation_bytes),
        adapter_bytes=adapter_bytes,
        copies_bytes=copies_bytes,
        update_bytes=lora.full * _update_bytes(optimizer.name, shape.widest_values),
    )
    embedding, head = _vocabulary_costs(shape, n, activation_bytes, tied_copies_bytes)
    if trains_ends(lora, shape.num_layers):
        embedding, head = _with_trained_vocabulary(
            shape, embedding, head, activation_bytes, copies, optimizer
        )
    return (embedding, *[layer] * shape.num_layers, head)


def _vocabulary_costs(
    shape: ModelShape, num_tokens: int, activation_bytes: int, tied_copies_bytes: int
) -> tuple[LayerCost, LayerCost]:
    """Give the costs of embedding and head."""
    vocabulary_values = shape.vocab_size * shape.hidden_size
    matrix_bytes = _rounded(
        vocabulary_values * shape.vocabulary_weights.bytes_per_value(activation_bytes)
    )
    head = LayerCost(
        static_bytes=matrix_bytes + shape.hidden_size * activation_bytes,
        # The final norm keeps its input in fp32, and the gradient found together with the loss
        # waits for its turn in the schedule.
        per_microbatch_bytes=num_tokens * shape.hidden_size * (activation_bytes + _FP32_BYTES),
        # In fp32: the softmax, the loss's gradient at it, and the logits' gradient (derived). The
        # logits themselves are gone by then.
        workspace_bytes=min(num_tokens, LOGITS_CHUNK_TOKENS) * shape.vocab_size * 3 * _FP32_BYTES
        + _unpacked_bytes(shape.vocabulary_weights, vocabulary_values, activation_bytes),
        tied_bytes=matrix_bytes * shape.tied_embeddings + tied_copies_bytes,
        tied_copies_bytes=tied_copies_bytes,
    )
    embedding = LayerCost(static_bytes=matrix_bytes, per_microbatch_bytes=0)
    return embedding, head


def _with_trained_vocabulary(
    shape: ModelShape,
    embedding: LayerCost,
    head: LayerCost,
    activation_bytes: int,
    copies: Copies,
    optimizer: OptimizerConfig,
) -> tuple[LayerCost, LayerCost]:
    """Add what training takes: fp32 values beside 16-bit ones, gradients, optimizer, copies.

    It is counted with the weights. A tied matrix is one on a stage alone; on two, each end has it,
    and its gradient and update pass through NumPy: values and both gradients, beside the update
    (derived).
    """
    matrix = (shape.vocab_size, shape.hidden_size)
    values = math.prod(matrix)
    kept = sum(math.prod(slot) for slot in optimizer.slots(_EMBEDDING, matrix).values())
    own_bytes = _FP32_BYTES * (values * (activation_bytes < _FP32_BYTES) + values + kept)
    copy_bytes = _FP32_BYTES * (values + kept)
    neighbours_bytes = copies.neighbours * copy_bytes
    own_copies_bytes = copies.own * copy_bytes
    exchange_bytes = 3 * _FP32_BYTES * values * shape.tied_embeddings
    added_bytes = own_bytes + own_copies_bytes + neighbours_bytes + exchange_bytes
    update_bytes = _update_bytes(optimizer.rule_of(_EMBEDDING, matrix), values)
    alone_bytes = 2 * exchange_bytes + own_bytes * shape.tied_embeddings
    alone_copies_bytes = 2 * neighbours_bytes + own_copies_bytes * shape.tied_embeddings
    return (
        replace(
            embedding,
            static_bytes=embedding.static_bytes + added_bytes,
            copies_bytes=own_copies_bytes + neighbours_bytes,
            update_bytes=update_bytes,
        ),
        replace(
            head,
            static_bytes=head.static_bytes + added_bytes,
            copies_bytes=own_copies_bytes + neighbours_bytes,
            update_bytes=update_bytes,
            # The gradient of one chunk's logits at the matrix, before it is added (derived).
            workspace_bytes=head.workspace_bytes + values * activation_bytes,
            tied_bytes=head.tied_bytes + alone_bytes + alone_copies_bytes,
            tied_copies_bytes=head.tied_copies_bytes + alone_copies_bytes,
        ),
    )


def _update_bytes(rule: str, num_values: int) -> int:
    return _rounded(UPDATE_MATRICES[rule] * _FP32_BYTES * num_values)


def layer_weight_bytes(shape: ModelShape, value_bytes: int) -> int:
    """Give a layer's projections in their form, and its norms."""
    norms = 2 * shape.hidden_size
    per_value = shape.layer_weights.bytes_per_value(value_bytes)
    return norms * value_bytes + _rounded((decoder_params(shape) - norms) * per_value)


def _unpacked_bytes(form: WeightForm, num_values: int, value_bytes: int) -> int:
    """Give what a block of a packed matrix takes while it is dense: codes, numbers, a product."""
    if not form.is_packed:
        return 0
    return min(num_values, DENSE_BLOCK_VALUES) * (1 + 2 * value_bytes)


def boundary_cost(
    *, hidden_size: int, microbatch_tokens: int, wire_bytes: int, mask_bytes: int = 0
) -> LayerCost:
    """Give what every stage adds per microbatch: the tensor received and the one on its way out.

    `mask_bytes` are those of an attention mask that all its layers share.
    """
    tensors_bytes = 2 * microbatch_tokens * hidden_size * wire_bytes
    return LayerCost(static_bytes=0, per_microbatch_bytes=tensors_bytes + mask_bytes)


def decoder_params(shape: ModelShape) -> int:
    """Count a decoder layer: projections (2 h a + 2 h k + 3 h f) and two norms.

    With a = h the projections are 2h² + 2hk + 3hf: 218.1 M for Llama 3.1 8B.
    """
    h = shape.hidden_size
    return (
        2 * h * shape.attention_size
        + 2 * h * shape.kv_size
        + 3 * h * shape.intermediate_size
        + 2 * h
    )


def adapter_params(shape: ModelShape, lora: LoraConfig) -> int:
    """Count a layer's adapters: r (inputs + outputs) per target (Hu et al. 2021, section 4).

    DoRA has one value more per output (Liu et al. 2024, section 4.1). Without an adapter it is
    the layer itself.
    """
    if lora.full:
        return decoder_params(shape)
    num_values = 0
    for target, rank in densest_layer(lora, shape.num_layers).items():
        inputs, outputs = shape.projection(target)
        num_values += rank * (inputs + outputs) + outputs * lora.dora
    return num_values


def copied_bytes(shape: ModelShape, lora: LoraConfig, optimizer: OptimizerConfig) -> int:
    """Give a layer's part of a copy for a rewind: what is trained and what the optimizer keeps.

    All in fp32. A stage itself has the gradients besides.
    """
    arrays: dict[str, tuple[int, ...]] = {}
    for target, rank in densest_layer(lora, shape.num_layers).items():
        inputs, outputs = shape.projection(target)
        arrays |= {f"{target}.lora_a": (inputs, rank), f"{target}.lora_b": (rank, outputs)}
        arrays |= {f"{target}.dora_m": (outputs,)} if lora.dora else {}
    if lora.full:  # under their own names: the optimizer's rule goes by these
        arrays = {
            f"model.layers.0.{module_path(target)}.weight": shape.projection(target)
            for target in ALL_TARGETS
        }
        arrays |= {f"model.layers.0.{norm}.weight": (shape.hidden_size,) for norm in _NORMS}
    kept = [slot for each in arrays.items() for slot in optimizer.slots(*each).values()]
    return _FP32_BYTES * sum(math.prod(array) for array in (*arrays.values(), *kept))


def activation_bytes_per_token(
    shape: ModelShape, *, lora: LoraConfig, activation_bytes: int, masked: bool = False
) -> int:
    """Give what one decoder layer keeps per token for its backward pass, without checkpointing.

    The frozen weights need no input kept. What stays: both norms' inputs (in fp32), q, k, v, the
    attention's output, gate, up and the activated gate; and what adapters read, where nobody else
    keeps it: the norms' outputs and down_proj's input. Then the rank-r products (fp32) and the
    fp32 sums of softmax and norms. Measured: bytes seen by `saved_tensors_hooks` in the PyTorch
    stage (transformers 5.24, sdpa), h=256, f=704, fp32 and bf16, all targets and q, v: equal.
    PEFT keeps an fp32 copy of each adapter's input instead, 1.6 times as much in bf16.
    DoRA keeps each projection's output before it is given its length as well (derived).
    Where all weights are trained, each reads what an adapter of it reads, and a norm's weight what
    it multiplies (measured: equal).
    `masked`: attention has a mask of its own, as of packed rows; k and v are then kept once for
    each query head (measured in the same way: equal).
    """
    ranks = densest_layer(lora, shape.num_layers)
    read = set(ALL_TARGETS) if lora.full else set(ranks)
    h, f = shape.hidden_size, shape.intermediate_size
    values = 2 * shape.attention_size + 3 * f
    values += 2 * (shape.attention_size if masked else shape.kv_size)
    values += h * (not {"q_proj", "k_proj", "v_proj"}.isdisjoint(read))
    values += h * (not {"gate_proj", "up_proj"}.isdisjoint(read))
    values += f * ("down_proj" in read)
    values += 2 * h * lora.full
    values += lora.dora * sum(shape.projection(target)[1] for target in ranks)
    fp32_values = 2 * h + sum(ranks.values()) + shape.num_heads + 2
    return values * activation_bytes + fp32_values * _FP32_BYTES


def _rounded(num_bytes: float) -> int:
    return int(-(-num_bytes // 1))
