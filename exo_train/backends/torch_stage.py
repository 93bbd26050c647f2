"""A stage in PyTorch: forward, backward, update. Owns the adapter and its gradients.

Keeps the graph of each microbatch from forward to backward, or only each layer's input when
activations are checkpointed. Must not talk to a network or decide a learning rate.

Shapes: B sequences, T positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import DynamicCache

from exo_train.backends.base import Arrays, MicrobatchInput, StageOptions
from exo_train.backends.lora import (
    Dropout,
    dropout_of,
    select_arrays,
)
from exo_train.backends.memory import memory_errors_named, peak_process_bytes
from exo_train.backends.noise import noise_of
from exo_train.backends.optimizers import Optimizer
from exo_train.backends.preference import Pairs, PairSums
from exo_train.backends.stage_model import input_name
from exo_train.backends.torch_finite import all_finite, first_bad_gradient, outputs_watched
from exo_train.backends.torch_full import Trained
from exo_train.backends.torch_head import (
    head_log_probs,
    head_log_probs_and_gradients,
    head_loss,
    head_loss_and_gradient,
)
from exo_train.backends.torch_lora import DropoutSlot
from exo_train.backends.torch_masks import attention_arguments
from exo_train.backends.torch_model import (
    TORCH_DTYPES,
    to_host,
    to_torch,
)
from exo_train.backends.torch_noise import with_noise
from exo_train.errors import DoesNotFitError
from exo_train.lora_config import LoraConfig
from exo_train.models.spec import EMBEDDING
from exo_train.optimizer_config import OptimizerConfig
from exo_train.plan.stages import StageSpec
from exo_train.wire.tensor import HostTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stashed:
    """A microbatch between forward and backward; the output holds the graph."""

    name: str
    tokens_BT: np.ndarray | None
    input_BTD: torch.Tensor
    output_BTD: torch.Tensor
    loss_grad_BTD: torch.Tensor | None
    dropout: Dropout | None


class TorchStage:
    """Implements `backends.base.Stage`."""

    def __init__(
        self,
        stage: StageSpec,
        model: Any,
        adapter: Trained,
        *,
        head_name: str,
        shared: Sequence[str],
        refresh: Callable[[], None],
        slot: DropoutSlot,
        device: torch.device,
        lora: LoraConfig,
        optimizer: OptimizerConfig,
        options: StageOptions,
    ) -> None:
        self._stage, self._model, self._device, self._options = stage, model, device, options
        self._dropout_rate = lora.dropout
        self._adapter, self._refresh, self._slot = adapter, refresh, slot
        self._head_name = head_name
        self._embeds_trained = stage.embedding and EMBEDDING in adapter
        self._optimizer = Optimizer(
            optimizer,
            self._shapes(),
            xp=torch,
            from_numpy=lambda array: torch.from_numpy(array).to(device),
            to_numpy=_numpy_copy,
            shared=shared,
        )
        if options.checkpoint_activations:
            for block in model.model.layers:
                # No framework randomness to keep: dropout is a hash.
                block.forward = functools.partial(
                    checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
                )
        self._stash: dict[int, _Stashed] = {}
        self._pairs = Pairs(options.objective)
        self.begin_step(step=0, loss_scale=1.0)

    def begin_step(self, *, step: int, loss_scale: float) -> None:
        self._step, self._loss_scale, self._loss_sum = step, loss_scale, 0.0
        self._pairs.begin()
        self._stash.clear()
        with self._memory_errors_named("beginning a step"):
            for value in self._adapter.values():
                # Zeros, not None: every value is then moved in every step, as in MLX.
                value.grad = torch.zeros_like(value)

    def refer(self, microbatch: MicrobatchInput) -> HostTensor | None:
        with self._computing(f"asking the base about {microbatch}"), torch.no_grad():
            input_BTD = self._input(microbatch, noisy=False)
            output_BTD = self._run(input_BTD, None, microbatch.row_starts, adapter_on=False)
            if not self._stage.head:
                return to_host(output_BTD, self._options.wire_dtype)
            targets_BT, mask_BT = microbatch.supervision()
            log_probs_S = head_log_probs(self._model.lm_head, output_BTD, targets_BT, mask_BT)
            self._pairs.refer(microbatch.index, log_probs_S, mask_BT)
            return None

    def forward(self, microbatch: MicrobatchInput) -> HostTensor | None:
        with self._computing(f"doing the forward of {microbatch}"):
            # A first stage whose embedding is frozen has no use for a gradient there.
            wants_gradient = self._embeds_trained or not self._stage.embedding
            input_BTD = self._input(microbatch).requires_grad_(wants_gradient)
            dropout = self._dropout(microbatch)
            output_BTD = self._run(input_BTD, dropout, microbatch.row_starts)
            loss_grad_BTD = None
            if self._stage.head:
                loss_sum, loss_grad_BTD = self._loss_and_gradient(microbatch, output_BTD)
                self._loss_sum += loss_sum
            self._stash[microbatch.index] = _Stashed(
                name=str(microbatch),
                tokens_BT=microbatch.tokens_BT,
                input_BTD=input_BTD,
                output_BTD=output_BTD,
                loss_grad_BTD=loss_grad_BTD,
                dropout=dropout,
            )
            return None if self._stage.head else to_host(output_BTD, self._options.wire_dtype)

    def _loss_and_gradient(
        self, microbatch: MicrobatchInput, output_BTD: torch.Tensor
    ) -> tuple[float, torch.Tensor]:
        """Give the summed loss, and the gradient of loss * scale at `output_BTD`."""
        head, objective = self._model.lm_head, self._options.objective
        targets_BT, mask_BT = microbatch.supervision()
        if not objective.has_pairs:
            trained_head = self._adapter.get(self._head_name)
            return head_loss_and_gradient(
                head,
                output_BTD,
                targets_BT,
                mask_BT,
                loss_scale=self._loss_scale,
                label_smoothing=objective.label_smoothing,
                weight_grad=None if trained_head is None else trained_head.grad,
            )
        log_probs_S, grad_BTD = head_log_probs_and_gradients(head, output_BTD, targets_BT, mask_BT)
        loss = self._pairs.loss(microbatch.index, log_probs_S, mask_BT)
        factors_B = torch.from_numpy(loss.slopes_B * self._loss_scale).float().to(self._device)
        return loss.loss_sum, (grad_BTD * factors_B[:, None, None]).to(grad_BTD.dtype)

    def backward(self, index: int, grad_BTD: HostTensor | None) -> HostTensor | None:
        stashed = self._stash.pop(index)
        with self._computing(f"doing the backward of {stashed.name}"):
            gradient = stashed.loss_grad_BTD
            if gradient is None:
                assert grad_BTD is not None
                gradient = to_torch(grad_BTD, device=self._device, dtype=stashed.output_BTD.dtype)
            # Read where layers are computed again.
            self._slot.dropout, self._slot.is_off = stashed.dropout, False
            if stashed.output_BTD.requires_grad:  # not on a first stage without an adapter
                torch.autograd.backward(stashed.output_BTD, gradient)
            if self._embeds_trained:
                self._add_to_embedding(stashed)
            if self._stage.embedding:
                return None
            assert stashed.input_BTD.grad is not None
            return to_host(stashed.input_BTD.grad, self._options.wire_dtype)

    def evaluate(self, microbatch: MicrobatchInput) -> HostTensor | float:
        with self._computing(f"evaluating {microbatch}"), torch.no_grad():
            input_BTD = self._input(microbatch, noisy=False)
            output_BTD = self._run(input_BTD, None, microbatch.row_starts)
            if not self._stage.head:
                return to_host(output_BTD, self._options.wire_dtype)
            head, (targets_BT, mask_BT) = self._model.lm_head, microbatch.supervision()
            if not self._options.objective.has_pairs:
                return head_loss(head, output_BTD, targets_BT, mask_BT)
            log_probs_S = head_log_probs(head, output_BTD, targets_BT, mask_BT)
            return self._pairs.loss(
                microbatch.index, log_probs_S, mask_BT, evaluation=True
            ).loss_sum

    def loss_sum(self) -> float:
        return self._loss_sum

    def take_pair_sums(self) -> PairSums:
        return self._pairs.take_sums()

    def grad_square_sum(self) -> float:
        with self._memory_errors_named("adding up its gradients"):
            return sum(
                float(gradient.square().sum())
                for name, gradient in self._gradients().items()
                # The tied matrix counts on the first stage.
                if name != EMBEDDING or self._stage.embedding
            )

    def find_bad_activation(self, microbatch: MicrobatchInput, *, evaluation: bool = False) -> str:
        with self._computing(f"looking for a bad value in {microbatch}"), torch.no_grad():
            input_BTD = self._input(microbatch, noisy=not evaluation)
            dropout = None if evaluation else self._dropout(microbatch)
            with outputs_watched(self._stage.layers, self._model.model.layers) as bad_layers:
                output_BTD = self._run(input_BTD, dropout, microbatch.row_starts)
            if not all_finite(input_BTD):
                return input_name(self._stage, self._options)
            if bad_layers:
                return f"layer {bad_layers[0]}"
            return "" if all_finite(output_BTD) else "the final norm"

    def find_bad_gradient(self) -> str:
        with self._memory_errors_named("looking at its gradients"):
            return first_bad_gradient(self._gradients())

    def apply(self, *, learning_rate: float, grad_scale: float) -> None:
        with self._memory_errors_named("updating its adapter"), torch.no_grad():
            gradients = self._gradients()
            for gradient in gradients.values():
                gradient.mul_(grad_scale)
            updated = self._optimizer.updated(self._adapter, gradients, learning_rate=learning_rate)
            for name, value in updated:
                self._adapter[name].copy_(value)
            self._refresh()

    def adapter(self) -> Arrays:
        with self._memory_errors_named("giving its adapter"):
            return {name: _numpy_copy(value) for name, value in self._adapter.items()}

    def gradients(self) -> Arrays:
        with self._memory_errors_named("giving its gradients"):
            return {name: _numpy_copy(gradient) for name, gradient in self._gradients().items()}

    def gradient_of(self, name: str) -> np.ndarray:
        with self._memory_errors_named("giving a gradient"):
            return _numpy_copy(self._gradients()[name])

    def set_gradient(self, name: str, gradient: np.ndarray) -> None:
        with self._memory_errors_named("taking a gradient"):
            self._gradients()[name].copy_(torch.from_numpy(gradient))

    def load_adapter(self, arrays: Mapping[str, np.ndarray]) -> None:
        chosen = select_arrays(arrays, self._shapes(), layers=self._stage.layers)
        with self._memory_errors_named("taking an adapter"), torch.no_grad():
            for name, value in self._adapter.items():
                value.copy_(torch.from_numpy(chosen[name]))
            self._refresh()

    def optimizer_state(self) -> Arrays:
        with self._memory_errors_named("giving its optimizer's state"):
            return self._optimizer.state()

    def load_optimizer_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        with self._memory_errors_named("taking an optimizer's state"):
            self._optimizer.load(arrays, layers=self._stage.layers)

    def peak_memory_bytes(self) -> int:
        """Give the process' largest resident size on a CPU, the allocator's peak on CUDA.

        The latter leaves out the context and freed blocks that the allocator keeps.
        """
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return peak_process_bytes()

    def start_decoding(self) -> Callable[[list[int]], np.ndarray]:
        decoder = self._model.model
        cache = DynamicCache(config=self._model.config)
        # Transformers renamed the argument in 5.2x.
        known = inspect.signature(decoder.forward).parameters
        keyword = "cache" if "cache" in known else "past_key_values"

        def next_logits(unseen: list[int]) -> np.ndarray:
            with self._memory_errors_named("generating"), torch.no_grad():
                self._slot.dropout, self._slot.is_off = None, False
                tokens_BT = torch.tensor([unseen], device=self._device)
                output = decoder(tokens_BT, use_cache=True, **{keyword: cache})
                return _numpy_copy(self._model.lm_head(output.last_hidden_state[0, -1]).float())

        return next_logits

    def _memory_errors_named(self, doing: str) -> AbstractContextManager[None]:
        return memory_errors_named(
            self._stage,
            str(self._device),
            doing=doing,
            checkpointed=self._options.checkpoint_activations,
        )

    @contextmanager
    def _computing(self, doing: str) -> Iterator[None]:
        """Free all graphs of the step when memory runs out: it cannot be finished any more."""
        try:
            with self._memory_errors_named(doing):
                yield
        except DoesNotFitError:
            self._stash.clear()
            raise

    def _dropout(self, microbatch: MicrobatchInput) -> Dropout | None:
        return dropout_of(microbatch, self._dropout_rate, seed=self._options.seed, step=self._step)

    def _input(self, microbatch: MicrobatchInput, *, noisy: bool = True) -> torch.Tensor:
        if self._stage.embedding:
            assert microbatch.tokens_BT is not None
            tokens_BT = torch.from_numpy(microbatch.tokens_BT.astype(np.int64)).to(self._device)
            alpha = self._options.neftune_alpha if noisy else 0.0
            noise = noise_of(microbatch, alpha, seed=self._options.seed, step=self._step)
            with torch.no_grad():  # its gradient is `_add_to_embedding`'s
                return with_noise(self._model.model.embed_tokens(tokens_BT), noise)
        assert microbatch.hidden_BTD is not None
        dtype = TORCH_DTYPES[self._options.compute_dtype]
        return to_torch(microbatch.hidden_BTD, device=self._device, dtype=dtype)

    def _add_to_embedding(self, stashed: _Stashed) -> None:
        """Add each position's gradient to its token's row; noise was added, so it is the same."""
        total_VD, grad_BTD = self._adapter[EMBEDDING].grad, stashed.input_BTD.grad
        assert total_VD is not None
        assert grad_BTD is not None
        assert stashed.tokens_BT is not None
        tokens_N = torch.from_numpy(stashed.tokens_BT.reshape(-1).astype(np.int64))
        total_VD.index_add_(0, tokens_N.to(self._device), grad_BTD.flatten(0, 1).float())

    def _run(
        self,
        input_BTD: torch.Tensor,
        dropout: Dropout | None,
        row_starts: tuple[int, ...],
        *,
        adapter_on: bool = True,
    ) -> torch.Tensor:
        """Run the layers, and the final norm where the head is."""
        self._slot.dropout, self._slot.is_off = dropout, not adapter_on
        attention = attention_arguments(row_starts, input_BTD, config=self._model.config)
        output = self._model.model(inputs_embeds=input_BTD, use_cache=False, **attention)
        return output.last_hidden_state  # type: ignore[no-any-return]

    def _gradients(self) -> dict[str, torch.Tensor]:
        return {name: value.grad for name, value in self._adapter.items() if value.grad is not None}

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(value.shape) for name, value in self._adapter.items()}


def _numpy_copy(value: torch.Tensor) -> np.ndarray:
    return value.detach().cpu().numpy().copy()
