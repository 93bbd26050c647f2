"""One rank of a run, driven by messages: load, step, commit, give state.

Owns the order of a rank's life and the checks of what arrives. Must not know how messages
travel, which backend computes or which transport carries tensors: `Surroundings` has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from exo_train.backends.base import Arrays, MicrobatchInput, Stage
from exo_train.errors import ExoTrainError, ProtocolError
from exo_train.models.manifest import ModelManifest
from exo_train.models.tensors import TensorSource
from exo_train.peer import Address, NodeId
from exo_train.plan.plan import Plan
from exo_train.train.executor import OnPhase, StageExecutor, StepOutcome
from exo_train.train.messages import (
    StateAssembler,
    from_endpoints,
    from_microbatch_data,
    to_endpoints,
    to_failure,
    to_state_arrays,
)
from exo_train.train.stage_loading import LINK_TIMEOUT_S, LOAD_TIMEOUT_S
from exo_train.transport.base import Link
from exo_train.wire.pb import control_pb2 as pb

MAX_MICROBATCHES = 1 << 18


class Surroundings(Protocol):
    """What a rank's process (or thread) provides."""

    def open_data(self) -> tuple[Address, ...]:
        """Listen for the neighbour; gives the addresses it may dial."""
        ...

    def connect(self, plan: Plan, rank: int, token: str) -> tuple[Link | None, Link | None]:
        """Prove the links to rank - 1 and rank + 1; raises PeerLostError naming who is missing."""
        ...

    def tensors(
        self,
        manifest: ModelManifest,
        addresses: tuple[Address, ...],
        *,
        token: str,
        peer: str,
        peer_id: NodeId,
    ) -> TensorSource:
        """Give the stage's tensors from this device's disk or from the device `peer`."""
        ...

    def load_stage(
        self, plan: Plan, rank: int, manifest: ModelManifest, source: TensorSource
    ) -> Stage: ...

    def fetched_bytes(self) -> tuple[int, int]:
        """Give tensor bytes that came over the network, and that lay in the cache."""
        ...

    def close(self) -> None: ...


class StageRunner:
    """Handles one message at a time; `send` may be called from the caller's thread only."""

    def __init__(
        self,
        surroundings: Surroundings,
        *,
        send: Callable[[pb.RunMessage], None],
        on_phase: OnPhase = lambda phase, limit_s=0.0: None,
    ) -> None:
        self._surroundings = surroundings
        self._send_message = send
        self._on_phase = on_phase
        self._run_id = ""
        self._generation = 0
        self._rank = 0
        self._executor: StageExecutor | None = None
        self._vocab_size = 0
        self._pending_step: int | None = None  # reported, not yet committed or dropped
        self._committed_step = 0
        self._inputs: list[MicrobatchInput] = []  # pieces of a step so far
        self._assembler = StateAssembler()

    def handle(self, message: pb.RunMessage) -> bool:
        """Do what `message` asks; False when the run is over for this rank.

        An ExoTrainError is reported to the driver and ends the run.
        """
        try:
            return self._dispatch(message)
        except ExoTrainError as error:
            self._send(failure=to_failure(error))
            return False

    def close(self) -> None:
        self._surroundings.close()

    def _dispatch(self, message: pb.RunMessage) -> bool:
        kind = message.WhichOneof("body")
        if kind == "prepare":
            self._prepare(message)
            return True
        identity = (message.run_id, message.generation, message.rank)
        expected = (self._run_id, self._generation, self._rank)
        if identity != expected:
            raise ProtocolError(f"message for run, generation, rank {identity}; this is {expected}")
        match kind:
            case "load":
                self._load(message.load)
            case "step_input":
                self._step(message.step_input)
            case "commit":
                self._commit(message.commit)
            case "state_request":
                self._give_state(message.state_request.kind)
            case "state_array":
                self._take_state(message.state_array)
            case "finish" | "failure":
                return False
            case _:
                raise ProtocolError(f"a rank does not expect a '{kind}' message")
        return True

    def _prepare(self, message: pb.RunMessage) -> None:
        self._run_id, self._generation = message.run_id, message.generation
        self._rank = message.rank
        endpoints = to_endpoints(self._surroundings.open_data())
        self._send(prepared=pb.Prepared(data_endpoints=endpoints))

    def _load(self, load: pb.Load) -> None:
        plan = Plan.from_json(load.plan_json)
        plan.validate()
        if (plan.run_id, plan.generation) != (self._run_id, self._generation):
            raise ProtocolError(
                f"the plan is for run {plan.run_id} generation {plan.generation}, "
                f"this is {self._run_id} generation {self._generation}"
            )
        if self._rank >= len(plan.ranks):
            raise ProtocolError(f"the plan has {len(plan.ranks)} ranks, this is rank {self._rank}")
        self._on_phase("connecting to neighbours", LINK_TIMEOUT_S)
        below, above = self._surroundings.connect(plan, self._rank, load.token)
        self._on_phase("loading tensors", LOAD_TIMEOUT_S)
        manifest = ModelManifest.from_json(load.manifest_json, place=load.coordinator_name)
        if manifest.model_hash != plan.model_hash:
            raise ProtocolError("the manifest is of another model than the plan's")
        source = self._surroundings.tensors(
            manifest,
            from_endpoints(load.weights_endpoints),
            token=load.token,
            peer=load.coordinator_name,
            peer_id=NodeId(load.coordinator_id),
        )
        stage = self._surroundings.load_stage(plan, self._rank, manifest, source)
        self._vocab_size = manifest.spec.vocab_size
        self._committed_step = load.committed_step
        self._executor = StageExecutor(
            stage=stage,
            rank=self._rank,
            num_ranks=len(plan.ranks),
            schedule_name=plan.pipeline_schedule,
            timeout_s=load.step_timeout_s,
            below=below,
            above=above,
            capture=load.capture_boundaries,
            on_phase=self._on_phase,
        )
        fetched_bytes, cached_bytes = self._surroundings.fetched_bytes()
        self._send(
            loaded=pb.Loaded(
                plan_hash=plan.hash,
                num_trainable=sum(array.size for array in stage.adapter().values()),
                fetched_bytes=fetched_bytes,
                cached_bytes=cached_bytes,
            )
        )
        self._on_phase("ready")

    def _step(self, request: pb.StepInput) -> None:
        executor = self._loaded()
        first = len(self._inputs)
        if first + len(request.microbatches) > MAX_MICROBATCHES:
            raise ProtocolError(
                f"step {request.step} has more than {MAX_MICROBATCHES} microbatches"
            )
        self._inputs += [
            from_microbatch_data(first + index, data, vocab_size=self._vocab_size)
            for index, data in enumerate(request.microbatches)
        ]
        if request.more:
            return
        inputs, self._inputs = self._inputs, []
        if request.evaluation:
            outcome = executor.run_evaluation(request.step, inputs)
        else:
            if self._pending_step is not None or request.step != self._committed_step + 1:
                raise ProtocolError(
                    f"step {request.step} asked for, but step {self._committed_step} is the last "
                    f"committed one and step {self._pending_step} is pending"
                )
            outcome = executor.run_step(request.step, inputs, loss_scale=request.loss_scale)
            self._pending_step = request.step
        self._send(step_report=_report(request, outcome, executor.stage.peak_memory_bytes()))
        self._on_phase(f"step {request.step}: waiting for the commit")

    def _commit(self, commit: pb.Commit) -> None:
        executor = self._loaded()
        if commit.step != self._pending_step:
            raise ProtocolError(f"commit of step {commit.step}, pending is {self._pending_step}")
        if commit.apply:
            if not (math.isfinite(commit.grad_scale) and math.isfinite(commit.learning_rate)):
                raise ProtocolError(f"commit of step {commit.step} carries a non-finite number")
            executor.stage.apply(learning_rate=commit.learning_rate, grad_scale=commit.grad_scale)
        self._pending_step = None
        self._committed_step = commit.step
        self._send(committed=pb.Committed(step=commit.step))

    def _give_state(self, kind: pb.StateKind) -> None:
        executor = self._loaded()
        match kind:
            case pb.ADAPTER:
                arrays = executor.stage.adapter()
            case pb.OPTIMIZER:
                arrays = executor.stage.optimizer_state()
            case pb.GRADIENTS:
                arrays = executor.stage.gradients()
            case pb.BOUNDARIES:
                arrays = {n: t.to_numpy() for n, t in executor.boundaries.items()}
            case _:
                raise ProtocolError(f"unknown kind of state {kind}")
        for array in to_state_arrays(kind, arrays):
            self._send(state_array=array)

    def _take_state(self, message: pb.StateArray) -> None:
        stage = self._loaded().stage
        arrays: Arrays | None = self._assembler.add(message)
        if arrays is None:
            return
        if message.kind == pb.ADAPTER:
            stage.load_adapter(arrays)
        elif message.kind == pb.OPTIMIZER:
            stage.load_optimizer_state(arrays)
        else:
            raise ProtocolError(f"state of kind {message.kind} cannot be set")
        self._send(state_stored=pb.StateStored(kind=message.kind))

    def _loaded(self) -> StageExecutor:
        if self._executor is None:
            raise ProtocolError("asked to work before the plan was loaded")
        return self._executor

    def _send(self, **body: object) -> None:
        self._send_message(
            pb.RunMessage(
                run_id=self._run_id,
                generation=self._generation,
                rank=self._rank,
                **body,  # type: ignore[arg-type]
            )
        )


def _report(request: pb.StepInput, outcome: StepOutcome, peak_bytes: int) -> pb.StepReport:
    return pb.StepReport(
        step=request.step,
        evaluation=request.evaluation,
        loss_sum=outcome.loss_sum,
        grad_square_sum=outcome.grad_square_sum,
        busy_s=outcome.busy_s,
        step_s=outcome.step_s,
        sent_bytes=outcome.sent_bytes,
        peak_memory_bytes=peak_bytes,
        period_s=outcome.period_s,
    )
