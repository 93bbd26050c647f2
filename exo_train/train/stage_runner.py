"""One rank of a run, driven by messages: load, step, commit, mark, rewind, give state.

Owns the order of a rank's life and the checks of what arrives. Must not know how messages
travel, which backend computes or which transport carries tensors: `Surroundings` has them.
"""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable

from exo_train.backends.base import Arrays, MicrobatchInput, Stage
from exo_train.backends.lora import adapter_shapes
from exo_train.errors import ExoTrainError, ProtocolError
from exo_train.models.manifest import ModelManifest
from exo_train.peer import NodeId
from exo_train.plan.history import StepId, shadow_holder
from exo_train.plan.plan import Plan
from exo_train.train.executor import OnPhase, StageExecutor
from exo_train.train.messages import (
    StateAssembler,
    from_endpoints,
    from_microbatch_data,
    from_step_id,
    to_endpoints,
    to_failure,
    to_state_arrays,
    to_step_id,
    to_step_report,
)
from exo_train.train.snapshots import MetricsTail, Snapshot, SnapshotStore
from exo_train.train.stage_loading import LINK_TIMEOUT_S, LOAD_TIMEOUT_S, StageRecipe
from exo_train.train.state_copies import BackgroundCopies
from exo_train.train.surroundings import Surroundings, next_generation
from exo_train.train.tied import tied_matrix
from exo_train.wire.pb import control_pb2 as pb

MAX_MICROBATCHES = 1 << 18


class StageRunner:
    """Handles one message at a time; `send` is called from the caller's thread and from the one
    that copies state, at the same time.
    """

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
        self._failed = False  # nothing is done any more until a rewind
        self._store = SnapshotStore()
        self._tail = MetricsTail()
        self._copies = BackgroundCopies()
        self._plan: Plan | None = None
        self._token = ""
        self._executor: StageExecutor | None = None
        self._spare: tuple[StageRecipe, Stage] | None = None  # of the plan before, while none is
        self._vocab_size = 0
        self._pending_step: int | None = None  # reported, not yet committed or dropped
        self._committed = StepId(generation=0, step=0)
        # What must come, or end, before the stage's state is that of `_committed`.
        self._missing: set[pb.StateKind] = set()
        self._is_applying = False
        self._inputs: list[MicrobatchInput] = []  # pieces of a step so far
        self._assembler = StateAssembler()

    def handle(self, message: pb.RunMessage) -> bool:
        """Do what `message` asks; False when the run is over for this rank.

        An ExoTrainError is reported to the driver; then the rank waits for a rewind, or the end.
        """
        kind = message.WhichOneof("body") or "empty"
        try:
            return self._dispatch(kind, message) if self._concerns(kind, message) else True
        except ExoTrainError as error:
            self._failed = True
            self._send(failure=to_failure(error))
            return True

    def close(self) -> None:
        self._copies.forget()
        self._surroundings.close()

    def _concerns(self, kind: str, message: pb.RunMessage) -> bool:
        """Tell whether to look at a message; raises ProtocolError for one that cannot be right."""
        if kind == "prepare":
            return not self._failed
        ends_or_rewinds = kind in ("rewind", "finish", "failure")
        if self._failed and not ends_or_rewinds:
            return False
        if message.run_id == self._run_id and message.generation < self._generation:
            return False  # it was on its way when the ring went on without it
        identity: tuple[object, ...] = (message.run_id, message.generation, message.rank)
        expected: tuple[object, ...] = (self._run_id, self._generation, self._rank)
        if ends_or_rewinds:  # may tell of a later generation, whose ranks have other numbers
            identity, expected = identity[:1], expected[:1]
        elif kind == "load":
            identity, expected = identity[:2], expected[:2]
        if identity != expected:
            raise ProtocolError(f"message for run, generation, rank {identity}; this is {expected}")
        return True

    def _dispatch(self, kind: str, message: pb.RunMessage) -> bool:
        match kind:
            case "prepare":
                self._prepare(message)
            case "rewind":
                self._rewind(message)
            case "load":
                self._load(message.load, rank=message.rank)
            case "step_input":
                self._step(message.step_input)
            case "commit":
                self._commit(message.commit)
            case "mark":
                self._mark(message.mark)
            case "state_request":
                self._give_state(message.state_request)
            case "state_array":
                self._take_state(message.state_array)
            case "finish" | "failure":
                return False
            case _:
                raise ProtocolError(f"a rank does not expect a '{kind}' message")
        return True

    def _prepare(self, message: pb.RunMessage) -> None:
        if self._run_id:
            raise ProtocolError(f"this rank is prepared already, for run {self._run_id}")
        self._run_id, self._generation = message.run_id, message.generation
        self._rank = message.rank
        endpoints = to_endpoints(self._surroundings.open_data(self._store))
        self._send(prepared=pb.Prepared(data_endpoints=endpoints))

    def _load(self, load: pb.Load, *, rank: int) -> None:
        if self._executor is not None:
            raise ProtocolError("asked to load again without a rewind before")
        self._rank = rank
        plan = Plan.from_json(load.plan_json)
        plan.validate()
        if (plan.run_id, plan.generation) != (self._run_id, self._generation):
            raise ProtocolError(
                f"the plan is for run {plan.run_id} generation {plan.generation}, "
                f"this is {self._run_id} generation {self._generation}"
            )
        if self._rank >= len(plan.ranks):
            raise ProtocolError(f"the plan has {len(plan.ranks)} ranks, this is rank {self._rank}")
        manifest = ModelManifest.from_json(load.manifest_json, place=load.coordinator_name)
        if manifest.model_hash != plan.model_hash:
            raise ProtocolError("the manifest is of another model than the plan's")
        self._plan, self._token = plan, load.token
        self._committed = StepId(generation=load.committed_generation, step=load.committed_step)
        self._store.forget_after(self._committed)
        self._tail.forget_after(self._committed.step)
        self._executor = self._load_stage(plan, load, manifest)
        self._vocab_size = manifest.spec.vocab_size
        # A stage starts with the state of step 0; that of any other point is sent.
        self._missing = {pb.ADAPTER, pb.OPTIMIZER} if load.committed_step else set()
        fetched_bytes, cached_bytes = self._surroundings.fetched_bytes()
        trained = adapter_shapes(manifest.spec, plan.ranks[rank].stage, plan.lora)
        self._send(
            loaded=pb.Loaded(
                plan_hash=plan.hash,
                num_trainable=sum(map(math.prod, trained.values())),
                fetched_bytes=fetched_bytes,
                cached_bytes=cached_bytes,
            )
        )
        self._on_phase("ready")

    def _load_stage(self, plan: Plan, load: pb.Load, manifest: ModelManifest) -> StageExecutor:
        self._on_phase("connecting to neighbours", LINK_TIMEOUT_S)
        self._surroundings.hold_shadows(plan, self._rank, manifest.spec, load.token)
        below, above = self._surroundings.connect(plan, self._rank, load.token)
        return StageExecutor(
            stage=self._spared(plan, load) or self._loaded_stage(plan, load, manifest),
            rank=self._rank,
            num_ranks=len(plan.ranks),
            schedule_name=plan.pipeline_schedule,
            timeout_s=load.step_timeout_s,
            below=below,
            above=above,
            tied=tied_matrix(manifest.spec, plan.lora, len(plan.ranks)),
            has_reference=plan.objective.has_reference,
            capture=load.capture_boundaries,
            on_phase=self._on_phase,
            check=functools.partial(self._surroundings.check, plan),
        )

    def _loaded_stage(self, plan: Plan, load: pb.Load, manifest: ModelManifest) -> Stage:
        self._on_phase("loading tensors", LOAD_TIMEOUT_S)
        source = self._surroundings.tensors(
            manifest,
            from_endpoints(load.weights_endpoints),
            token=load.token,
            peer=load.coordinator_name,
            peer_id=NodeId(load.coordinator_id),
        )
        return self._surroundings.load_stage(plan, self._rank, manifest, source)

    def _spared(self, plan: Plan, load: pb.Load) -> Stage | None:
        """Give the stage of the plan before if it serves this one; else it is gone from memory.

        Its state is stale: that of `committed_step` is sent, but none is for the run's start.
        """
        spare, self._spare = self._spare, None
        if spare and load.committed_step and spare[0] == StageRecipe.of(plan, self._rank):
            return spare[1]
        del spare
        gc.collect()  # it may hang in cycles, and the next one needs its memory
        return None

    def _set_aside(self, executor: StageExecutor, plan: Plan) -> None:
        """Keep the stage, without what a step has left in it, for the next plan to use."""
        executor.stage.begin_step(step=0, loss_scale=1.0)
        self._spare = StageRecipe.of(plan, executor.rank), executor.stage

    def _rewind(self, message: pb.RunMessage) -> None:
        generation = message.generation
        if generation == self._generation and self._executor is not None:
            raise ProtocolError(f"asked to rewind to generation {generation}, which goes on here")
        self._surroundings.interrupt(next_generation(message), before=generation)
        self._copies.forget()
        if self._executor is not None:
            if not (self._missing or self._is_applying):
                self._keep(self._executor, self._plan_in_use())
            self._set_aside(self._executor, self._plan_in_use())
        self._executor, self._plan = None, None
        self._pending_step, self._is_applying, self._failed = None, False, False
        self._inputs, self._assembler = [], StateAssembler()
        self._generation = generation
        self._on_phase("waiting for a new plan")
        holdings = [
            pb.Holding(at=to_step_id(h.at), start=h.start, end=h.end)
            for h in self._store.holdings()
        ]
        self._send(rewound=pb.Rewound(holdings=holdings, metrics_lines=self._tail.lines()))

    def _keep(self, executor: StageExecutor, plan: Plan) -> Snapshot:
        """Put the committed state, copied out of the stage, into the store."""
        own = plan.ranks[executor.rank].stage
        if (kept := self._store.find(self._committed, own.start, own.end)) is not None:
            return kept
        arrays = executor.stage.adapter() | executor.stage.optimizer_state()
        kept = Snapshot(at=self._committed, start=own.start, end=own.end, arrays=arrays)
        self._store.put(kept)
        return kept

    def _step(self, request: pb.StepInput) -> None:
        executor = self._loaded()
        first = len(self._inputs)
        if first + len(request.microbatches) > MAX_MICROBATCHES:
            raise ProtocolError(
                f"step {request.step} has more than {MAX_MICROBATCHES} microbatches"
            )
        pairs = self._plan_in_use().objective.has_pairs
        self._inputs += [
            from_microbatch_data(first + index, data, vocab_size=self._vocab_size, has_pairs=pairs)
            for index, data in enumerate(request.microbatches)
        ]
        if request.more:
            return
        inputs, self._inputs = self._inputs, []
        if request.evaluation:
            outcome = executor.run_evaluation(request.step, inputs)
        else:
            if self._pending_step is not None or request.step != self._committed.step + 1:
                raise ProtocolError(
                    f"step {request.step} asked for, but step {self._committed.step} is the last "
                    f"committed one and step {self._pending_step} is pending"
                )
            outcome = executor.run_step(request.step, inputs, loss_scale=request.loss_scale)
            self._pending_step = request.step
        self._send(step_report=to_step_report(request, outcome, executor.stage.peak_memory_bytes()))
        self._on_phase(f"step {request.step}: waiting for the commit")

    def _commit(self, commit: pb.Commit) -> None:
        executor = self._loaded()
        if commit.step != self._pending_step:
            raise ProtocolError(f"commit of step {commit.step}, pending is {self._pending_step}")
        if commit.apply:
            if not (math.isfinite(commit.grad_scale) and math.isfinite(commit.learning_rate)):
                raise ProtocolError(f"commit of step {commit.step} carries a non-finite number")
            self._is_applying = True  # and stays so when that fails: the state is half of each
            executor.stage.apply(learning_rate=commit.learning_rate, grad_scale=commit.grad_scale)
            self._is_applying = False
        self._pending_step = None
        self._missing.clear()
        self._committed = StepId(generation=self._generation, step=commit.step)
        self._send(committed=pb.Committed(step=commit.step))

    def _mark(self, mark: pb.Mark) -> None:
        executor, plan = self._loaded(), self._plan_in_use()
        at, safe = from_step_id(mark.at), from_step_id(mark.safe)
        if at != self._committed or self._missing:
            lacking = ", whose state has not come yet" if self._missing else ""
            raise ProtocolError(
                f"mark of {at}, but the last point here is {self._committed}{lacking}"
            )
        snapshot = self._keep(executor, plan)
        self._store.forget_before(safe)
        self._tail.keep(at.step, mark.metrics_lines)
        if mark.copy and shadow_holder(plan, self._rank) is not None:
            self._copies.begin(
                functools.partial(self._copy, plan, self._rank, snapshot, self._token)
            )

    def _copy(self, plan: Plan, rank: int, snapshot: Snapshot, token: str) -> None:
        """Copy the state to its holder, and tell the driver; in a thread of its own."""
        said = pb.RunMessage(run_id=plan.run_id, generation=plan.generation, rank=rank)
        said.shadowed.at.CopyFrom(to_step_id(snapshot.at))
        try:
            self._surroundings.send_shadow(plan, rank, snapshot, token)
        except Exception as error:  # whatever it is: the driver waits for the copy
            self._surroundings.check(plan)  # nobody waits where a rewind or the end cut it off
            if not isinstance(error, ExoTrainError):
                error = ExoTrainError(f"{type(error).__name__}: {error}")
            said.shadowed.failure.CopyFrom(to_failure(error))
            self._send_message(said)
            raise
        self._send_message(said)

    def _give_state(self, request: pb.StateRequest) -> None:
        if request.kind == pb.HELD:  # also after a rewind, without a stage
            arrays = self._store.arrays(from_step_id(request.at))
        else:
            arrays = self._state_of(self._loaded(), request.kind)
        for array in to_state_arrays(request.kind, arrays):
            self._send(state_array=array)

    def _state_of(self, executor: StageExecutor, kind: pb.StateKind) -> Arrays:
        match kind:
            case pb.ADAPTER:
                return executor.stage.adapter()
            case pb.OPTIMIZER:
                return executor.stage.optimizer_state()
            case pb.GRADIENTS:
                return executor.stage.gradients()
            case pb.BOUNDARIES:
                return {n: t.to_numpy() for n, t in executor.boundaries.items()}
        raise ProtocolError(f"unknown kind of state {kind}")

    def _take_state(self, message: pb.StateArray) -> None:
        stage = self._loaded().stage
        arrays: Arrays | None = self._assembler.add(message)
        if arrays is None:
            return
        if message.kind not in (pb.ADAPTER, pb.OPTIMIZER):
            raise ProtocolError(f"state of kind {message.kind} cannot be set")
        # One without the other is the state of no point.
        self._missing = self._missing or {pb.ADAPTER, pb.OPTIMIZER}
        if message.kind == pb.ADAPTER:
            stage.load_adapter(arrays)
        else:
            stage.load_optimizer_state(arrays)
        self._missing.discard(message.kind)
        if not self._missing:  # else each rewind would leave a snapshot where no marks come
            self._store.forget_before(self._committed)
        self._send(state_stored=pb.StateStored(kind=message.kind))

    def _loaded(self) -> StageExecutor:
        if self._executor is None:
            raise ProtocolError("asked to work before the plan was loaded")
        return self._executor

    def _plan_in_use(self) -> Plan:
        assert self._plan is not None, "a stage is loaded for a plan"
        return self._plan

    def _send(self, **body: object) -> None:
        self._send_message(
            pb.RunMessage(
                run_id=self._run_id,
                generation=self._generation,
                rank=self._rank,
                **body,  # type: ignore[arg-type]
            )
        )
