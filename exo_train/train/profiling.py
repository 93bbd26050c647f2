"""Times one decoder block of a model on this device, and its ends.

Owns what is run and how times come out of it. The stages are real ones with random weights, so
whatever training does is in the times; no model file is read. Must not know a framework: the
backend's meter waits and counts bytes.

A stage of one layer and one of two tell a layer from what any stage adds. They are loaded one
after the other, so no more than two layers, or one layer and one end, are in memory.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from exo_train.backends.base import MicrobatchInput, Stage, StageOptions
from exo_train.backends.registry import load_backend
from exo_train.lora_config import LoraConfig
from exo_train.models.spec import ModelSpec
from exo_train.optimizer_config import OptimizerConfig
from exo_train.plan.block_times import STEADY_SLOWDOWN, BlockMemory, BlockTimes, EndTimes
from exo_train.plan.device_memory import counts_process, default_process_bytes
from exo_train.plan.stages import StageSpec
from exo_train.train import faults
from exo_train.train.meter import open_meter
from exo_train.train.random_tensors import RandomTensors, encoded
from exo_train.wire.tensor import DType, HostTensor

WARM_UP_TOKENS = 16  # loads kernels and libraries, at hardly any cost
MIN_REPETITIONS, MAX_REPETITIONS = 2, 200  # after the first
SHARES = (0.2, 0.4, 0.3, 0.1)  # of the budget: one layer, two layers, head, embedding
# A device on which a layer takes more than this share of the budget gets no second stage, and
# two calls of each: then about a dozen layers' times are spent, not fifty.
SLOW_SHARE = 0.05
NO_BACKWARD = 0.01  # of a layer's backward: the gradients were made in the forward
MIN_LAYER_SHARE = 0.2  # of a two-layer stage: noise must not make layers free
# A CPU that computes has a thread busy all the time. With less, others had the cores, perhaps in
# every call: then the fastest one is slow too, and `slowdown` does not show it.
MIN_BUSY_SHARE = 0.8
WORKER_BYTES = 20_000_000  # loaded by a worker, not here: gRPC and links (measured on Linux)
SMALLEST_CONFIG = {
    "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16,
    "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 64,
    "max_position_embeddings": WARM_UP_TOKENS, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip


def profile(
    spec: ModelSpec,
    *,
    backend: str,
    device: str,
    compute_dtype: DType,
    lora: LoraConfig,
    microbatch_size: int,
    sequence: int,
    checkpoint_activations: bool,
    with_ends: bool,
    budget_s: float,
    quantize: int = 0,
    base_weights: str = "packed",
    clock: Callable[[], float] = time.perf_counter,
    processor_clock: Callable[[], float] = time.process_time,
) -> BlockTimes:
    """Run stages for about `budget_s`; a few calls of each at least, however long they take.

    Raises DoesNotFitError when a layer, or an end, has no room.
    """
    spec.validate_max_seq_length(sequence)
    process_bytes = process_size(backend, device)
    timer = StageTimer(
        _with_two_layers(spec),
        backend=backend,
        device=device,
        lora=lora,
        options=StageOptions(
            seed=0,
            compute_dtype=compute_dtype,
            wire_dtype=compute_dtype,
            checkpoint_activations=checkpoint_activations,
            quantize=quantize,
            base_weights=base_weights,
        ),
        microbatch_size=microbatch_size,
        sequence=sequence,
        clock=clock,
    )
    one_s, two_s, head_s, embedding_s, slow_s = (s * budget_s for s in (*SHARES, SLOW_SHARE))
    started_s, processor_started_s = clock(), processor_clock()
    one = timer.measure(_stage(0, 1), limit_s=one_s, slow_s=slow_s)
    slow = one.total_s > slow_s
    two = None if slow else timer.measure(_stage(0, 2), limit_s=two_s)
    layer = LayerFit.of(one, two)
    ends = None
    if with_ends:
        num = max(2, spec.num_layers)
        last, first = _stage(num - 1, num, head=True), _stage(0, 1, embedding=True)
        head = timer.measure(last, limit_s=head_s, slow_s=0.0 if slow else math.inf)
        # Looking tokens up takes no time worth measuring on a device where a layer takes long.
        embedding = None if slow else timer.measure(first, limit_s=embedding_s)
        ends = end_times(layer, head, embedding)
    times = dataclasses.replace(layer.block_times(ends), process_bytes=process_bytes)
    had_s, took_s = processor_clock() - processor_started_s, clock() - started_s
    may_sleep = os.environ.get(faults.VARIABLE)  # for a test, which is no other work
    if had_s < MIN_BUSY_SHARE * took_s and counts_process(backend, device) and not may_sleep:
        return dataclasses.replace(times, slowdown=max(times.slowdown, 1.1 * STEADY_SLOWDOWN))
    return times


def process_size(backend: str, device: str) -> int:
    """Give what a worker takes of the device's memory without a model.

    A model of hardly any size takes a step first: model classes and kernels load with it.
    """
    spec = ModelSpec.from_config(SMALLEST_CONFIG, place="a model of hardly any size")
    timer = StageTimer(
        spec,
        backend=backend,
        device=device,
        lora=LoraConfig(),
        options=StageOptions(seed=0, compute_dtype=DType.FP32, wire_dtype=DType.FP32),
        microbatch_size=1,
        sequence=WARM_UP_TOKENS,
    )
    num_bytes = timer.process_bytes()
    if counts_process(backend, device):
        return num_bytes + WORKER_BYTES
    return num_bytes or default_process_bytes(backend, device)


def _stage(start: int, end: int, *, embedding: bool = False, head: bool = False) -> StageSpec:
    return StageSpec(start=start, end=end, embedding=embedding, head=head)


def _with_two_layers(spec: ModelSpec) -> ModelSpec:
    """Give a model of the same shape that has the two layers which are compared."""
    if spec.num_layers > 1:
        return spec
    config = {**json.loads(spec.config_json), "num_hidden_layers": 2}
    config.pop("layer_types", None)
    return ModelSpec.from_config(config, place="a model of two such layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMeasure:
    """The fastest calls of one stage, which other work on the device disturbs least.

    `slowdown` is the median of forward plus backward over the fastest.
    """

    forward_s: float
    backward_s: float
    update_s: float
    slowdown: float
    num_repetitions: int
    in_flight_bytes: int
    workspace_bytes: int

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


class StageTimer:
    """Loads stages of one model and runs them on a full microbatch, as training does."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        backend: str,
        device: str,
        lora: LoraConfig,
        options: StageOptions,
        microbatch_size: int,
        sequence: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._spec, self._device, self._lora, self._options = spec, device, lora, options
        self._backend, self._meter = load_backend(backend), open_meter(backend, device)
        self._size, self._sequence, self._clock = microbatch_size, sequence, clock
        self._source = RandomTensors(spec, options.compute_dtype, quantize=options.quantize)
        self._random = np.random.default_rng(0)

    def load(self, stage: StageSpec) -> Stage:
        loaded = self._backend.load_stage(
            self._spec,
            stage,
            self._source,
            device=self._device,
            lora=self._lora,
            optimizer=OptimizerConfig(),
            options=self._options,
        )
        return faults.with_fault(loaded, os.environ.get(faults.VARIABLE, ""))  # as a worker does

    def process_bytes(self) -> int:
        """Load and run all of the model, let it go, and see what stays of the process."""
        whole = _stage(0, self._spec.num_layers, embedding=True, head=True)
        loaded = self.load(whole)
        self.step_times(loaded, whole)
        del loaded
        self._meter.release()
        return self._meter.process_bytes()

    def measure(
        self, stage: StageSpec, *, limit_s: float, slow_s: float = math.inf
    ) -> StageMeasure:
        """Warm up, find the memory, and repeat a full step until `limit_s` is spent.

        Where a step takes more than `slow_s`, two of them are all, and no memory is found.
        """
        loaded = self.load(stage)
        in_flight_bytes = workspace_bytes = 0
        try:
            self.step_times(loaded, stage, tokens=WARM_UP_TOKENS)
            times = [self.step_times(loaded, stage)]
            if sum(times[0][:2]) > slow_s:
                times.append(self.step_times(loaded, stage))
            else:
                in_flight_bytes, workspace_bytes = self._memory(loaded, stage)
                times += self._repeated(loaded, stage, limit_s)
        finally:
            del loaded
            self._meter.release()
        totals_s = [forward_s + backward_s for forward_s, backward_s, _ in times]
        forward_s, backward_s, update_s = (min(kind) for kind in zip(*times, strict=True))
        return StageMeasure(
            forward_s=forward_s,
            backward_s=backward_s,
            update_s=update_s,
            slowdown=max(1.0, statistics.median(totals_s) / (forward_s + backward_s)),
            num_repetitions=len(times),
            in_flight_bytes=in_flight_bytes,
            workspace_bytes=workspace_bytes,
        )

    def _repeated(
        self, loaded: Stage, stage: StageSpec, limit_s: float
    ) -> list[tuple[float, float, float]]:
        until_s = self._clock() + limit_s
        times = [self.step_times(loaded, stage) for _ in range(MIN_REPETITIONS)]
        while len(times) < MAX_REPETITIONS and self._clock() < until_s:
            times.append(self.step_times(loaded, stage))
        return times

    def step_times(
        self, loaded: Stage, stage: StageSpec, *, tokens: int = 0, num_microbatches: int = 1
    ) -> tuple[float, float, float]:
        """Take one step; give the seconds of all forwards, all backwards, and the update."""
        inputs = [self.input(index, stage, tokens) for index in range(num_microbatches)]
        gradient = None if stage.head else self.boundary(tokens, scale=1e-3)
        forward_s = backward_s = 0.0
        started_s = self._clock()
        loaded.begin_step(step=0, loss_scale=1 / (self._size * self._sequence))
        self._meter.synchronise()
        update_s = self._clock() - started_s
        for microbatch in inputs:
            started_s = self._clock()
            loaded.forward(microbatch)
            self._meter.synchronise()
            between_s = self._clock()
            loaded.backward(microbatch.index, gradient)
            self._meter.synchronise()
            forward_s += between_s - started_s
            backward_s += self._clock() - between_s
        started_s = self._clock()
        loaded.grad_square_sum()
        loaded.apply(learning_rate=0.0, grad_scale=1.0)
        self._meter.synchronise()
        return forward_s, backward_s, update_s + self._clock() - started_s

    def _memory(self, loaded: Stage, stage: StageSpec) -> tuple[int, int]:
        """Give bytes per microbatch in flight, and bytes only while computing.

        Two microbatches are in flight: the second one shows what stays, as the first also fills
        the allocator's pool.
        """
        inputs = [self.input(index, stage, 0) for index in range(2)]
        gradient = None if stage.head else self.boundary(0, scale=1e-3)
        loaded.begin_step(step=0, loss_scale=1 / (self._size * self._sequence))
        before_bytes, after_bytes = self._meter.live_bytes(), []
        with self._meter.peak() as peak:
            for microbatch in inputs:
                loaded.forward(microbatch)
                self._meter.synchronise()
                after_bytes.append(self._meter.live_bytes())
            for microbatch in reversed(inputs):
                loaded.backward(microbatch.index, gradient)
                self._meter.synchronise()
        in_flight_bytes = max(0, after_bytes[1] - after_bytes[0])
        return in_flight_bytes, max(0, peak.num_bytes - before_bytes - 2 * in_flight_bytes)

    def input(self, index: int, stage: StageSpec, tokens: int = 0) -> MicrobatchInput:
        """Give a random microbatch, of full length unless `tokens` says otherwise."""
        shape = (self._size, min(tokens or self._sequence, self._sequence))
        ids_BT = self._random.integers(0, self._spec.vocab_size, shape, dtype=np.int32)
        return MicrobatchInput(
            index=index,
            tokens_BT=ids_BT if stage.embedding else None,
            hidden_BTD=None if stage.embedding else self.boundary(tokens, scale=1.0),
            targets_BT=ids_BT if stage.head else None,
            mask_BT=np.ones(shape, bool) if stage.head else None,
            row_keys=tuple(range(self._size)),
        )

    def boundary(self, tokens: int = 0, *, scale: float) -> HostTensor:
        """Give what a neighbour would send."""
        shape = (self._size, min(tokens or self._sequence, self._sequence), self._spec.hidden_size)
        values = self._random.standard_normal(math.prod(shape), np.float32) * np.float32(scale)
        dtype = self._options.wire_dtype
        return HostTensor(dtype, shape, encoded(values, dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFit:
    """A decoder layer, told from what any stage adds; times are of the fastest calls."""

    forward_s: float
    backward_s: float
    overhead_s: float
    update_s: float
    slowdown: float
    num_repetitions: int
    memory: BlockMemory | None

    @classmethod
    def of(cls, one: StageMeasure, two: StageMeasure | None) -> LayerFit:
        """Compare stages of one and two layers; without the second, all is the layer's."""
        if two is None:
            return cls(
                forward_s=one.forward_s,
                backward_s=one.backward_s,
                overhead_s=0.0,
                update_s=one.update_s,
                slowdown=one.slowdown,
                num_repetitions=one.num_repetitions,
                memory=None,
            )
        forward_s = _of_one_layer(one.forward_s, two.forward_s)
        backward_s = _of_one_layer(one.backward_s, two.backward_s)
        in_flight_bytes = max(0, two.in_flight_bytes - one.in_flight_bytes)
        layer_workspace_bytes = max(0, two.workspace_bytes - one.workspace_bytes)
        return cls(
            forward_s=forward_s,
            backward_s=backward_s,
            overhead_s=two.total_s - 2 * (forward_s + backward_s),
            update_s=_of_one_layer(one.update_s, two.update_s),
            slowdown=two.slowdown,
            num_repetitions=min(one.num_repetitions, two.num_repetitions),
            memory=BlockMemory(
                layer_in_flight_bytes=in_flight_bytes,
                layer_workspace_bytes=layer_workspace_bytes,
                workspace_bytes=max(0, two.workspace_bytes - 2 * layer_workspace_bytes),
            ),
        )

    def block_times(self, ends: EndTimes | None) -> BlockTimes:
        """Bring the fastest calls to the level of the median ones."""
        return BlockTimes(
            layer_forward_s=self.forward_s * self.slowdown,
            layer_backward_s=self.backward_s * self.slowdown,
            overhead_s=max(0.0, self.overhead_s) * self.slowdown,
            layer_update_s=self.update_s * self.slowdown,
            slowdown=self.slowdown,
            num_repetitions=self.num_repetitions,
            ends=ends,
            memory=self.memory,
        )


def _of_one_layer(one_s: float, two_s: float) -> float:
    """Give the slope; what a stage adds is not negative, nor is it nearly everything."""
    return min(max(two_s - one_s, MIN_LAYER_SHARE * two_s), two_s / 2)


def end_times(layer: LayerFit, head: StageMeasure, embedding: StageMeasure | None) -> EndTimes:
    """Take a layer and the overhead from the stages that have one layer and an end."""
    layer_s = layer.forward_s + layer.backward_s
    in_forward = head.backward_s < NO_BACKWARD * layer.backward_s
    head_layer_s = layer.backward_s if in_forward else layer_s
    embedding_s = embedding.total_s - layer_s - layer.overhead_s if embedding else 0.0
    return EndTimes(
        # The first layer needs no gradient at its input, which may save more than the look-up.
        embedding_s=max(0.0, embedding_s) * layer.slowdown,
        head_s=max(0.0, head.total_s - head_layer_s - layer.overhead_s) * layer.slowdown,
        head_layer_s=head_layer_s * layer.slowdown,
        head_workspace_bytes=head.workspace_bytes,
    )
