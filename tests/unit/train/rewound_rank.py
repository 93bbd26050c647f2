"""A rank with a stage of two numbers and surroundings without a network. For tests only.

Owns what a driver would say to it. The stage's adapter is the sum of its learning rates.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from exo_train.backends.base import Arrays, MicrobatchInput, Stage
from exo_train.backends.preference import PairSums
from exo_train.errors import ExoTrainError
from exo_train.models.manifest import ModelManifest
from exo_train.models.spec import ModelSpec
from exo_train.models.tensors import TensorSource
from exo_train.peer import Address
from exo_train.plan.history import StepId
from exo_train.plan.plan import Plan
from exo_train.train.messages import StateAssembler, to_state_arrays
from exo_train.train.snapshots import Snapshot, SnapshotStore
from exo_train.train.stage_runner import StageRunner
from exo_train.transport.base import Link
from exo_train.transport.stopping import Generations
from exo_train.wire.pb import control_pb2 as pb
from exo_train.wire.tensor import HostTensor

WAIT_S = 20.0
NAME = "model.layers.0.self_attn.q_proj.lora_a"


class CountingStage:
    """`fails_in` is the method that raises; in `apply` it does so half-way."""

    def __init__(self) -> None:
        self.adapter_value = np.zeros(1, np.float32)
        self.num_updates = self.begun = 0
        self.fails_in = ""

    def begin_step(self, *, step: int, loss_scale: float) -> None:
        self.begun = step

    def forward(self, microbatch: MicrobatchInput) -> HostTensor | None:
        self._fail_in("forward")
        return None

    def backward(self, index: int, grad_BTD: HostTensor | None) -> HostTensor | None:
        return None

    def loss_sum(self) -> float:
        return 1.0

    def grad_square_sum(self) -> float:
        return 1.0

    def take_pair_sums(self) -> PairSums:
        return PairSums()

    def find_bad_gradient(self) -> str:
        return ""

    def apply(self, *, learning_rate: float, grad_scale: float) -> None:
        self.adapter_value += np.float32(learning_rate)
        self._fail_in("apply")
        self.num_updates += 1

    def adapter(self) -> Arrays:
        return {NAME: self.adapter_value.copy()}

    def load_adapter(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._fail_in("load_adapter")
        self.adapter_value[:] = arrays[NAME]

    def optimizer_state(self) -> Arrays:
        return {"step": np.array(self.num_updates, np.int64)}

    def load_optimizer_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.num_updates = int(arrays["step"])

    def peak_memory_bytes(self) -> int:
        return 0

    def _fail_in(self, method: str) -> None:
        if method == self.fails_in:
            raise ExoTrainError(f"{method} failed on purpose")


@dataclass
class NoNetwork:
    """Implements `Surroundings`; what it was asked for is kept."""

    stage: weakref.ref[CountingStage] | None = None
    stages_alive: list[bool] = field(default_factory=list)  # the one before, at each load
    interrupted: list[int] = field(default_factory=list)
    loaded_ranks: list[int] = field(default_factory=list)
    copies: list[Snapshot] = field(default_factory=list)
    copy_fails: Exception | None = None
    hold_copies: threading.Event | None = None  # a copy takes until it is set, or interrupted
    copying: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    generations: Generations = field(default_factory=Generations)

    def open_data(self, store: SnapshotStore) -> tuple[Address, ...]:
        return ()

    def hold_shadows(self, plan: Plan, rank: int, spec: ModelSpec, token: str) -> None: ...

    def connect(self, plan: Plan, rank: int, token: str) -> tuple[Link | None, Link | None]:
        return None, None

    def tensors(self, manifest: ModelManifest, *args: Any, **options: Any) -> TensorSource:
        return None  # type: ignore[return-value]

    def load_stage(
        self, plan: Plan, rank: int, manifest: ModelManifest, source: TensorSource
    ) -> Stage:
        self.stages_alive.append(self.stage is not None and self.stage() is not None)
        self.loaded_ranks.append(rank)
        stage = CountingStage()
        self.stage = weakref.ref(stage)
        return stage  # type: ignore[return-value]

    def fetched_bytes(self) -> tuple[int, int]:
        return 0, 0

    def send_shadow(self, plan: Plan, rank: int, snapshot: Snapshot, token: str) -> None:
        stopper = self.generations.stopper(plan.generation)
        self.copying.release()
        if self.hold_copies is not None:
            ready = self.hold_copies
            with stopper.calling(lambda reason: ready.set()):
                assert ready.wait(WAIT_S)
        stopper.check()
        if self.copy_fails is not None:
            raise self.copy_fails
        self.copies.append(snapshot)

    def check(self, plan: Plan) -> None:
        self.generations.stopper(plan.generation).check()

    def interrupt(self, reason: ExoTrainError, *, before: int) -> None:
        self.interrupted.append(before)
        self.generations.end_before(before, reason)

    def close(self) -> None: ...


class Conversation:
    """Says to one rank what a driver would; `generation` and `rank` are those of the next words."""

    def __init__(self, plan: Plan, manifest: ModelManifest, *, rank: int = 0) -> None:
        self.plan, self.manifest = plan, manifest
        self.generation, self.rank = plan.generation, rank
        self.answers: list[pb.RunMessage] = []
        self.shadowed: queue.Queue[pb.RunMessage] = queue.Queue()
        self.around = NoNetwork()
        self.runner = StageRunner(self.around, send=self._arrived)
        assert self.ask(prepare=pb.Prepare()).WhichOneof("body") == "prepared"

    @property
    def stage(self) -> CountingStage:
        assert self.around.stage is not None
        stage = self.around.stage()
        assert stage is not None
        return stage

    def say(self, **body: Any) -> list[pb.RunMessage]:
        """Give all answers; the rank must go on."""
        before = len(self.answers)
        assert self.runner.handle(self.message(**body))
        return self.answers[before:]

    def ask(self, **body: Any) -> pb.RunMessage:
        """Give the only answer."""
        (answer,) = self.say(**body)
        return answer

    def message(self, **body: Any) -> pb.RunMessage:
        return pb.RunMessage(
            run_id=self.plan.run_id, generation=self.generation, rank=self.rank, **body
        )

    def load(self, at: StepId = StepId(generation=0, step=0)) -> pb.RunMessage:  # noqa: B008
        plan = replace(self.plan, generation=self.generation)
        return self.ask(
            load=pb.Load(
                plan_json=plan.to_json(),
                manifest_json=self.manifest.to_json(),
                token="secret",
                step_timeout_s=WAIT_S,
                coordinator_name="attic",
                committed_generation=at.generation,
                committed_step=at.step,
            )
        )

    def step(self, step: int) -> pb.RunMessage:
        data = pb.MicrobatchData(num_sequences=1, num_positions=4, row_keys=[0])
        return self.ask(step_input=pb.StepInput(step=step, loss_scale=1.0, microbatches=[data]))

    def commit(self, step: int, *, apply: bool = True) -> pb.RunMessage:
        """Add the step's number to the adapter."""
        body = pb.Commit(step=step, apply=apply, learning_rate=step, grad_scale=1.0)
        return self.ask(commit=body)

    def train(self, *steps: int) -> None:
        for step in steps:
            assert self.step(step).WhichOneof("body") == "step_report"
            assert self.commit(step).WhichOneof("body") == "committed"

    def give(self, kind: pb.StateKind, arrays: Arrays) -> list[pb.RunMessage]:
        return [a for m in to_state_arrays(kind, arrays) for a in self.say(state_array=m)]

    def mark(
        self, at: StepId, *, safe: StepId | None = None, copy: bool = False
    ) -> list[pb.RunMessage]:
        return self.say(mark=pb.Mark(at=to_id(at), safe=to_id(safe or at), copy=copy))

    def rewind(self, generation: int) -> list[StepId]:
        """Give the points that the rank holds its layers' state of, in order."""
        self.generation = generation
        answer = self.ask(rewind=pb.Rewind())
        assert answer.WhichOneof("body") == "rewound", answer
        assert answer.generation == generation
        own = self.plan.ranks[self.rank].stage
        held = answer.rewound.holdings
        assert {(h.start, h.end) for h in held} <= {(own.start, own.end)}
        return sorted(StepId(generation=h.at.generation, step=h.at.step) for h in held)

    def held(self, at: StepId) -> Arrays:
        assembler, given = StateAssembler(), None
        for answer in self.say(state_request=pb.StateRequest(kind=pb.HELD, at=to_id(at))):
            assert given is None, "an answer after the last"
            assert answer.state_array.kind == pb.HELD
            given = assembler.add(answer.state_array)
        assert given is not None
        return given

    def _arrived(self, message: pb.RunMessage) -> None:
        if message.WhichOneof("body") == "shadowed":
            self.shadowed.put(message)
        else:
            self.answers.append(message)


def point(step: int, generation: int = 1) -> StepId:
    return StepId(generation=generation, step=step)


def to_id(at: StepId) -> pb.StepId:
    return pb.StepId(generation=at.generation, step=at.step)


def failure_of(answer: pb.RunMessage) -> str:
    assert answer.WhichOneof("body") == "failure", answer
    return answer.failure.message
