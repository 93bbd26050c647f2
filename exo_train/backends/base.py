"""The backend seam: what a stage can do, in either framework.

Owns the `Stage` protocol and the values that cross it. Must not import a framework. Everything
that crosses is a HostTensor or a NumPy array, already evaluated and copied out, so no network
traffic can sit inside a framework's graph.

Shapes: B sequences, T positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from exo_train.backends.preference import PairSums
from exo_train.objective_config import ObjectiveConfig
from exo_train.wire.tensor import DType, HostTensor

Arrays = dict[str, np.ndarray]

# Logits are made for this many tokens at a time, so their memory is bounded by it times V.
HEAD_CHUNK_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchInput:
    """What one stage needs for the forward of one microbatch.

    `tokens_BT` int32 on the stage with the embedding; `hidden_BTD` on all others.
    `targets_BT` int32 (already shifted: the token that position t must predict) and `mask_BT`
    bool (True: supervised) on the stage with the head. Rows are padded on the right; causal
    attention keeps pads from mattering. `row_keys` has one number per row, the same for any
    split and microbatch size: with step, layer and target it decides the dropout mask.
    `row_starts` is empty where each sequence is one row; else it has each row's first position,
    counted through all sequences (sequence * T + position), and rows do not see each other.
    `row_lengths` are the rows' positions without pads, on the stage with the embedding.
    Where the objective has pairs, the first half of the rows are chosen answers and the second half
    the rejected ones, in the same order.
    """

    index: int
    tokens_BT: np.ndarray | None = None
    hidden_BTD: HostTensor | None = None
    targets_BT: np.ndarray | None = None
    mask_BT: np.ndarray | None = None
    row_keys: tuple[int, ...] = ()
    row_starts: tuple[int, ...] = ()
    row_lengths: tuple[int, ...] = ()

    def supervision(self) -> tuple[np.ndarray, np.ndarray]:
        """Give targets and mask, which the stage with the head is always sent."""
        assert self.targets_BT is not None
        assert self.mask_BT is not None
        return self.targets_BT, self.mask_BT

    def __str__(self) -> str:
        values = self.tokens_BT if self.hidden_BTD is None else self.hidden_BTD
        size = "" if values is None else f" ({values.shape[0]} x {values.shape[1]} positions)"
        return f"microbatch {self.index}{size}"


class Stage(Protocol):
    """One rank's layers with what is trained, gradients, optimizer state and stashed activations.

    What is trained is called the adapter, also where it is the layers' own weights, under the
    names that the model's files give them.

    Not thread-safe: one thread drives it. All of it may raise DoesNotFitError; the forward or
    backward that does has dropped what was stashed, and changed neither adapter nor optimizer.
    Adapter arrays are float32 and named
    `model.layers.<global index>.<module path>.lora_a` (in, rank) and `.lora_b` (rank, out).
    """

    def begin_step(self, *, step: int, loss_scale: float) -> None:
        """Zero gradients and loss; `loss_scale` is 1 / what the step's loss is a mean over.

        That are all its supervised tokens, or its pairs.
        """
        ...

    def refer(self, microbatch: MicrobatchInput) -> HostTensor | None:
        """Forward of the base alone: its adapter off, no dropout, no stash; objective dpo.

        Goes before the microbatch's `forward` or `evaluate`. None on the stage with the head, which
        keeps the answers' log-probabilities for it.
        """
        ...

    def forward(self, microbatch: MicrobatchInput) -> HostTensor | None:
        """Run the layers and stash what backward needs; None on the stage with the head."""
        ...

    def backward(self, index: int, grad_BTD: HostTensor | None) -> HostTensor | None:
        """Accumulate gradients of microbatch `index`; give the gradient for the stage before.

        `grad_BTD` is None on the stage with the head; the result is None on the first stage.
        """
        ...

    def evaluate(self, microbatch: MicrobatchInput) -> HostTensor | float:
        """Forward without dropout or stash; the summed loss (not scaled) on the last stage."""
        ...

    def loss_sum(self) -> float:
        """Summed loss (nats, not scaled) of this step's microbatches; 0.0 without head."""
        ...

    def take_pair_sums(self) -> PairSums:
        """Give what pairs came to since the last call or `begin_step`; zeros without head."""
        ...

    def grad_square_sum(self) -> float:
        """Sum of squares of all accumulated gradients (of the scaled loss) on this stage.

        A tied matrix counts where the embedding is: of two stages that train it, on the first.
        """
        ...

    def find_bad_activation(self, microbatch: MicrobatchInput, *, evaluation: bool = False) -> str:
        """Run a microbatch again to name the first place where a value is not finite.

        "the embedding" or, on other stages, "the cast to <dtype>"; "layer <global index>"; "the
        final norm". Empty when all are finite in the dtype of computing. To be called in the
        microbatch's own step or evaluation.
        """
        ...

    def find_bad_gradient(self) -> str:
        """Name the adapter array whose accumulated gradient is the first not to be finite.

        First in the order of computing, so from the last layer down; empty when all are finite.
        """
        ...

    def apply(self, *, learning_rate: float, grad_scale: float) -> None:
        """Multiply gradients by `grad_scale` (clipping) and take one update of the optimizer."""
        ...

    def adapter(self) -> Arrays: ...

    def gradients(self) -> Arrays: ...

    def gradient_of(self, name: str) -> np.ndarray:
        """Copy one array's accumulated gradient out."""
        ...

    def set_gradient(self, name: str, gradient: np.ndarray) -> None:
        """Put a gradient, float32, in the place of the accumulated one."""
        ...

    def load_adapter(self, arrays: Mapping[str, np.ndarray]) -> None: ...

    def optimizer_state(self) -> Arrays:
        """Give what the optimizer keeps of each array, `<adapter name>.<slot>`, and `step`.

        `step` is an int64 array of shape () with the number of updates taken.
        """
        ...

    def load_optimizer_state(self, arrays: Mapping[str, np.ndarray]) -> None: ...

    def peak_memory_bytes(self) -> int: ...

    def start_decoding(self) -> Callable[[list[int]], np.ndarray]:
        """Give a function from the tokens it has not seen to the next one's logits (V).

        With the adapter on; the stage is the whole model.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """Run-wide settings every stage needs; identical on all ranks.

    `adapter_init` "zero" is LoRA's usual start (B = 0); "random" fills B too, so that every
    gradient is non-zero in a comparison. `quantize` is 4 or 8 bits for the projections of an
    unquantised base, 0: none. `base_weights` "packed" keeps quantised weights as they are, "dense"
    the same numbers in the compute dtype. An evaluation's loss is without label smoothing.
    """

    seed: int
    compute_dtype: DType
    wire_dtype: DType
    checkpoint_activations: bool = False
    adapter_init: str = "zero"
    neftune_alpha: float = 0.0  # noise on the embeddings in training
    objective: ObjectiveConfig = ObjectiveConfig()  # noqa: RUF009 - frozen
    quantize: int = 0
    base_weights: str = "packed"
