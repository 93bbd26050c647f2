"""A stage in MLX: forward, backward, update. Owns the adapter and its gradients.

An inner stage keeps only a microbatch's input and runs the layers again for its backward; the
stage with the head makes its gradients in the forward. Nothing lazy outlives a call. Must not
talk to a network or decide a learning rate.

Shapes: B sequences, T positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, RotatingKVCache

from exo_train.backends.base import Arrays, MicrobatchInput, StageOptions
from exo_train.backends.lora import (
    dropout_of,
    select_arrays,
)
from exo_train.backends.memory import memory_errors_named, peak_process_bytes
from exo_train.backends.mlx_finite import first_bad_gradient, first_bad_value
from exo_train.backends.mlx_full import in_parts, rows_added
from exo_train.backends.mlx_head import differentiable_log_probs, head_log_probs, head_loss
from exo_train.backends.mlx_lora import Adapter, Slot
from exo_train.backends.mlx_masks import layer_masks
from exo_train.backends.mlx_model import MLX_DTYPES, checked_device, head_logits, to_host, to_mlx
from exo_train.backends.mlx_noise import with_noise
from exo_train.backends.noise import noise_of
from exo_train.backends.optimizers import Optimizer
from exo_train.backends.preference import PairLoss, Pairs, PairSums
from exo_train.backends.stage_model import input_name
from exo_train.errors import DoesNotFitError
from exo_train.lora_config import LoraConfig
from exo_train.models.spec import EMBEDDING, FINAL_NORM
from exo_train.optimizer_config import OptimizerConfig
from exo_train.plan.stages import StageSpec
from exo_train.wire.tensor import HostTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stashed:
    """A microbatch between forward and backward."""

    microbatch: MicrobatchInput
    input_grad: HostTensor | None = None  # where the head is, made in the forward


class MlxStage:
    """Implements `backends.base.Stage`."""

    def __init__(
        self,
        stage: StageSpec,
        model: Any,
        adapter: Adapter,
        *,
        put: Callable[[Adapter], None],
        head_name: str,
        shared: Sequence[str],
        slot: Slot,
        device: str,
        windows: list[int | None],
        lora: LoraConfig,
        optimizer: OptimizerConfig,
        options: StageOptions,
    ) -> None:
        self._stage, self._model, self._device, self._options = stage, model, device, options
        self._windows, self._dropout_rate = windows, lora.dropout
        self._memory_errors_named = partial(
            memory_errors_named, stage, device, checkpointed=options.checkpoint_activations
        )
        self._adapter, self._put, self._slot = adapter, put, slot
        self._trains_weights = lora.full  # in the dtype of computing; an adapter in float32
        self._names = [
            [name for name in adapter if name.startswith(f"model.layers.{layer}.")]
            for layer in stage.layers
        ]
        self._norm_names = [name for name in adapter if name == FINAL_NORM]
        self._head_name = head_name if stage.head and head_name in adapter else ""
        self._embeds_trained = stage.embedding and EMBEDDING in adapter
        self._optimizer = Optimizer(
            optimizer, self._shapes(), xp=mx, from_numpy=lambda a: mx.array(a), shared=shared
        )
        mx.eval(self._adapter, self._optimizer.arrays)
        self._computing: Adapter = {}
        self._refresh(self._adapter)
        self._stash: dict[int, _Stashed] = {}
        self._pairs = Pairs(options.objective)
        self.begin_step(step=0, loss_scale=1.0)

    def begin_step(self, *, step: int, loss_scale: float) -> None:
        self._step, self._loss_scale, self._loss_sum = step, loss_scale, 0.0
        self._pairs.begin()
        self._stash.clear()
        with self._on_device("beginning a step"):
            self._gradients = {name: mx.zeros_like(value) for name, value in self._adapter.items()}
            mx.eval(self._gradients)

    def refer(self, microbatch: MicrobatchInput) -> HostTensor | None:
        with self._on_device(f"asking the base about {microbatch}"):
            self._slot.is_off = True
            try:
                input_BTD = self._input(microbatch, noisy=False)
                output_BTD = self._run(self._computing, input_BTD, microbatch, drops=False)
                if not self._stage.head:
                    return to_host(output_BTD, self._options.wire_dtype)
                targets_BT, mask_BT = microbatch.supervision()
                log_probs_S = head_log_probs(self._head, output_BTD, targets_BT, mask_BT)
            finally:
                self._slot.is_off = False
            self._pairs.refer(microbatch.index, log_probs_S, mask_BT)
            return None

    def forward(self, microbatch: MicrobatchInput) -> HostTensor | None:
        with self._on_device(f"doing the forward of {microbatch}"):
            if self._stage.head:
                input_grad = self._forward_with_loss(microbatch)
                self._stash[microbatch.index] = _Stashed(
                    microbatch=microbatch, input_grad=input_grad
                )
                return None
            self._stash[microbatch.index] = _Stashed(microbatch=microbatch)
            output_BTD = self._run(self._computing, self._input(microbatch), microbatch)
            return to_host(output_BTD, self._options.wire_dtype)

    def _forward_with_loss(self, microbatch: MicrobatchInput) -> HostTensor | None:
        """Add to loss and gradients; give the gradient at the input."""
        targets_BT, mask_BT = microbatch.supervision()
        if not mask_BT.any():
            if self._stage.embedding:
                return None
            return to_host(mx.zeros_like(self._input(microbatch)), self._options.wire_dtype)

        objective = self._options.objective
        found: list[PairLoss] = []

        def loss(adapter: Adapter, input_BTD: mx.array) -> mx.array:
            hidden_BTD = self._run(adapter, input_BTD, microbatch)
            if not objective.has_pairs:
                return head_loss(
                    self._head,
                    hidden_BTD,
                    targets_BT,
                    mask_BT,
                    loss_scale=self._loss_scale,
                    label_smoothing=objective.label_smoothing,
                    weight_VD=adapter.get(self._head_name),
                )
            log_probs_S = differentiable_log_probs(self._head, hidden_BTD, targets_BT, mask_BT)
            found.append(self._pairs.loss(microbatch.index, np.array(log_probs_S), mask_BT))
            # What has the scaled loss's gradient: log-probabilities, each times its slope.
            slopes_S = self._loss_scale * found[0].slopes_B[np.nonzero(mask_BT)[0]]
            return (mx.array(slopes_S, mx.float32) * log_probs_S).sum()

        loss_sum, input_grad = self._pull_back(loss, microbatch, mx.array(1.0))
        self._loss_sum += found[0].loss_sum if found else float(loss_sum)
        return input_grad

    def backward(self, index: int, grad_BTD: HostTensor | None) -> HostTensor | None:
        stashed = self._stash.pop(index)
        if self._stage.head:
            return stashed.input_grad
        if self._stage.embedding and not self._adapter:
            return None  # nobody has a use for a gradient here
        assert grad_BTD is not None
        microbatch = stashed.microbatch

        def run(adapter: Adapter, input_BTD: mx.array) -> mx.array:
            return self._run(adapter, input_BTD, microbatch)

        with self._on_device(f"doing the backward of {microbatch}"):
            grad = to_mlx(grad_BTD, MLX_DTYPES[self._options.compute_dtype])
            return self._pull_back(run, microbatch, grad)[1]

    def evaluate(self, microbatch: MicrobatchInput) -> HostTensor | float:
        with self._on_device(f"evaluating {microbatch}"):
            input_BTD = self._input(microbatch, noisy=False)
            output_BTD = self._run(self._computing, input_BTD, microbatch, drops=False)
            if not self._stage.head:
                return to_host(output_BTD, self._options.wire_dtype)
            targets_BT, mask_BT = microbatch.supervision()
            if not mask_BT.any():
                return 0.0
            if not self._options.objective.has_pairs:
                return float(head_loss(self._head, output_BTD, targets_BT, mask_BT))
            log_probs_S = head_log_probs(self._head, output_BTD, targets_BT, mask_BT)
            return self._pairs.loss(
                microbatch.index, log_probs_S, mask_BT, evaluation=True
            ).loss_sum

    def loss_sum(self) -> float:
        return self._loss_sum

    def take_pair_sums(self) -> PairSums:
        return self._pairs.take_sums()

    def grad_square_sum(self) -> float:
        with self._on_device("adding up its gradients"):
            counted = dict(self._gradients)
            if not self._stage.embedding:
                counted.pop(EMBEDDING, None)  # a tied matrix counts on the first stage
            return sum(float(mx.square(gradient).sum()) for gradient in counted.values())

    def find_bad_activation(self, microbatch: MicrobatchInput, *, evaluation: bool = False) -> str:
        with self._on_device(f"looking for a bad value in {microbatch}"):
            input_BTD = self._input(microbatch, noisy=not evaluation)
            outputs = self._outputs(self._computing, input_BTD, microbatch, drops=not evaluation)
            return first_bad_value(
                chain([(input_name(self._stage, self._options), input_BTD)], outputs)
            )

    def find_bad_gradient(self) -> str:
        with self._on_device("looking at its gradients"):
            return first_bad_gradient(self._gradients)

    def apply(self, *, learning_rate: float, grad_scale: float) -> None:
        with self._on_device("updating its adapter"):
            scaled = {name: value * grad_scale for name, value in self._gradients.items()}
            updated = self._optimizer.updated(self._adapter, scaled, learning_rate=learning_rate)
            for new in in_parts(updated):
                self._adapter |= new
                self._gradients |= {name: scaled[name] for name in new}
                mx.eval(self._adapter, self._gradients, self._optimizer.arrays)
                self._refresh(new)

    def adapter(self) -> Arrays:
        with self._on_device("giving its adapter"):
            return {name: np.array(value) for name, value in self._adapter.items()}

    def gradients(self) -> Arrays:
        with self._on_device("giving its gradients"):
            return {name: np.array(value) for name, value in self._gradients.items()}

    def gradient_of(self, name: str) -> np.ndarray:
        with self._on_device("giving a gradient"):
            return np.array(self._gradients[name])

    def set_gradient(self, name: str, gradient: np.ndarray) -> None:
        with self._on_device("taking a gradient"):
            self._gradients[name] = mx.array(gradient)

    def load_adapter(self, arrays: Mapping[str, np.ndarray]) -> None:
        chosen = select_arrays(arrays, self._shapes(), layers=self._stage.layers)
        with self._on_device("taking an adapter"):
            for name in self._adapter:
                self._adapter[name] = mx.array(chosen[name])
            self._refresh(self._adapter)

    def optimizer_state(self) -> Arrays:
        with self._on_device("giving its optimizer's state"):
            return self._optimizer.state()

    def load_optimizer_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        with self._on_device("taking an optimizer's state"):
            self._optimizer.load(arrays, layers=self._stage.layers)

    def peak_memory_bytes(self) -> int:
        """Give the allocator's peak on a GPU, the process' largest resident size on a CPU."""
        return mx.get_peak_memory() if self._device == "gpu" else peak_process_bytes()

    def start_decoding(self) -> Callable[[list[int]], np.ndarray]:
        caches = [RotatingKVCache(max_size=w) if w else KVCache() for w in self._windows]

        def next_logits(unseen: list[int]) -> np.ndarray:
            with self._on_device("generating"):
                embedded_BTD = self._embed(np.array([unseen]))
                alone = MicrobatchInput(index=0)
                hidden_BTD = self._run(
                    self._computing, embedded_BTD, alone, drops=False, caches=caches
                )
                return np.array(self._head(hidden_BTD[0, -1]).astype(mx.float32))

        return next_logits

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(value.shape) for name, value in self._adapter.items()}

    @contextmanager
    def _on_device(self, doing: str) -> Iterator[None]:
        # MLX's default device belongs to the process, and this stage may not be alone in it.
        device = checked_device(self._device)
        try:
            with mx.stream(device), self._memory_errors_named(doing=doing):
                yield
        except DoesNotFitError:
            self._stash.clear()  # the step cannot be finished any more
            self._put(self._computing)
            raise

    def _head(self, hidden: mx.array) -> mx.array:
        return head_logits(self._model, hidden)

    def _embed(self, tokens_BT: np.ndarray) -> mx.array:
        embedded_BTD: mx.array = self._model.model.embed_tokens(mx.array(tokens_BT))
        return embedded_BTD

    def _input(self, microbatch: MicrobatchInput, *, noisy: bool = True) -> mx.array:
        if self._stage.embedding:
            assert microbatch.tokens_BT is not None
            alpha = self._options.neftune_alpha if noisy else 0.0
            noise = noise_of(microbatch, alpha, seed=self._options.seed, step=self._step)
            return with_noise(self._embed(microbatch.tokens_BT), noise)
        assert microbatch.hidden_BTD is not None
        return to_mlx(microbatch.hidden_BTD, MLX_DTYPES[self._options.compute_dtype])

    def _run(
        self, adapter: Adapter, hidden_BTD: mx.array, microbatch: MicrobatchInput, **how: Any
    ) -> mx.array:
        """Run the layers, and the final norm where the head is; `how` as in `_outputs`."""
        outputs = self._outputs(adapter, hidden_BTD, microbatch, **how)
        ((_, output_BTD),) = deque(outputs, maxlen=1)
        return output_BTD

    def _outputs(
        self,
        adapter: Adapter,
        hidden_BTD: mx.array,
        microbatch: MicrobatchInput,
        *,
        drops: bool = True,
        caches: Sequence[Any] | None = None,
    ) -> Iterator[tuple[str, mx.array]]:
        """Yield what each layer gives, and the final norm, with their names."""
        rate = self._dropout_rate if drops else 0.0
        seed, step = self._options.seed, self._step
        self._slot.dropout = dropout_of(microbatch, rate, seed=seed, step=step)
        masks = layer_masks(hidden_BTD, self._windows, microbatch.row_starts, caches)
        for index, mask in enumerate(masks):
            block = self._block(index, mask, caches[index] if caches else None)
            if self._options.checkpoint_activations and caches is None:
                block = mx.checkpoint(block)
            hidden_BTD = block({name: adapter[name] for name in self._names[index]}, hidden_BTD)
            yield f"layer {self._stage.start + index}", hidden_BTD
        self._put({name: adapter[name] for name in self._norm_names})
        yield "the final norm", self._model.model.norm(hidden_BTD)

    def _block(self, index: int, mask: Any, cache: Any) -> Callable[[Adapter, mx.array], mx.array]:
        """Give one decoder layer as a function of its adapter, for differentiation."""

        def block(layer_adapter: Adapter, hidden_BTD: mx.array) -> mx.array:
            self._put(layer_adapter)
            output_BTD: mx.array = self._model.model.layers[index](hidden_BTD, mask, cache)
            return output_BTD

        return block

    def _pull_back(
        self,
        run: Callable[[Adapter, mx.array], mx.array],
        microbatch: MicrobatchInput,
        grad: mx.array,
    ) -> tuple[mx.array, HostTensor | None]:
        """Accumulate the adapter's gradients; give the output, and the input's gradient.

        Where the embedding is frozen nobody has a use for a gradient there, so none is computed.
        """
        input_BTD = self._input(microbatch)
        # Looking rows up is done before: without a head, the embedding has no part in `run`.
        names = [n for n in self._computing if n != EMBEDDING or n == self._head_name]
        wants_gradient = self._embeds_trained or not self._stage.embedding
        primals = [self._computing[name] for name in names] + [input_BTD] * wants_gradient

        def flat(*arrays: mx.array) -> mx.array:
            adapter = dict(zip(names, arrays, strict=False))
            return run(adapter, arrays[-1] if wants_gradient else input_BTD)

        (output,), grads = mx.vjp(flat, primals, [grad])
        self._put(self._computing)  # tracers must not stay
        for name, gradient in zip(names, grads, strict=False):
            self._gradients[name] = self._gradients[name] + gradient
        if self._embeds_trained:  # noise was added, so its gradient is the input's
            assert microbatch.tokens_BT is not None
            total_VD = self._gradients[EMBEDDING]
            self._gradients[EMBEDDING] = rows_added(total_VD, microbatch.tokens_BT, grads[-1])
        mx.eval(output, self._gradients, grads[len(names) :])
        if self._stage.embedding:
            return output, None
        return output, to_host(grads[-1], self._options.wire_dtype)

    def _refresh(self, names: Iterable[str]) -> None:
        """Have the modules compute with what is trained as it is now."""
        new = {name: self._adapter[name] for name in names}
        if self._trains_weights:
            new = {name: value.astype(self._slot.dtype) for name, value in new.items()}
            mx.eval(new)
            self._put(new)
        self._computing |= new
