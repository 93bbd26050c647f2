"""Ranks of a real tiny model in threads, spoken to message by message. For tests only.

Owns what an agent and a worker's pipes do elsewhere: messages reach a rank in order, and wake it
early. The surroundings are those of one process, or a worker's with gRPC and TLS on loopback.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from exo_train.agent.local_ring import LocalNetwork, LocalSurroundings
from exo_train.backends.base import Arrays
from exo_train.cluster.home import Home
from exo_train.models.manifest import ModelManifest
from exo_train.plan.history import StepId
from exo_train.plan.plan import Plan
from exo_train.plan.stages import StageSpec
from exo_train.train.batches import BatchPlan, split_microbatches
from exo_train.train.messages import (
    StateAssembler,
    from_endpoints,
    to_microbatch_data,
    to_state_arrays,
)
from exo_train.train.stage_runner import StageRunner
from exo_train.train.surroundings import Surroundings, interrupt_early
from exo_train.wire.pb import control_pb2 as pb
from exo_train.worker import GrpcSurroundings
from tests.paired_homes import admit
from tests.ring.hand_plans import plan_by_hand
from tests.ring.rings import CONFIG, manifest_of, random_examples

LOOPBACK = "127.0.0.1"
WAIT_S = 60.0


class RankThread:
    """One rank; `answers` has what it says, in order."""

    def __init__(self, surroundings: Surroundings) -> None:
        self.answers: queue.Queue[pb.RunMessage] = queue.Queue()
        self.phase = ""
        self._surroundings = surroundings
        self._inbox: queue.SimpleQueue[pb.RunMessage] = queue.SimpleQueue()
        runner = StageRunner(surroundings, send=self.answers.put, on_phase=self._on_phase)
        self._thread = threading.Thread(target=self._run, args=(runner,), daemon=True)
        self._thread.start()

    def send(self, message: pb.RunMessage) -> None:
        interrupt_early(self._surroundings, message)
        self._inbox.put(message)

    def wait_phase(self, phase: str) -> None:
        for _ in range(int(WAIT_S / 0.02)):
            if phase in self.phase:
                return
            threading.Event().wait(0.02)
        raise AssertionError(f"'{phase}' was not seen; the rank is at '{self.phase}'")

    def join(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def _run(self, runner: StageRunner) -> None:
        while runner.handle(self._inbox.get()):
            pass
        runner.close()

    def _on_phase(self, phase: str, limit_s: float = 0.0) -> None:
        self.phase = phase


@dataclass
class RankThreads:
    """The ranks of `plan`, whose generation goes on with `rewind`."""

    plan: Plan
    manifest: ModelManifest
    ranks: list[RankThread]
    batches: BatchPlan
    failures: list[pb.RunMessage] = field(default_factory=list)

    def say(self, rank: int, **body: Any) -> None:
        self.ranks[rank].send(
            pb.RunMessage(
                run_id=self.plan.run_id, generation=self.plan.generation, rank=rank, **body
            )
        )

    def hear(self, rank: int, kind: str) -> pb.RunMessage:
        """Wait for an answer of this kind; failures of earlier generations are kept."""
        while True:
            answer = self.ranks[rank].answers.get(timeout=WAIT_S)
            body = answer.WhichOneof("body")
            if answer.generation < self.plan.generation:
                self.failures.append(answer)
            elif body == kind:
                return answer
            else:
                raise AssertionError(f"rank {rank} said {answer} instead of {kind}")

    def hear_all(self, kind: str) -> list[pb.RunMessage]:
        return [self.hear(rank, kind) for rank in range(len(self.plan.ranks))]

    def prepare(self) -> None:
        placed = []
        for rank in self.plan.ranks:
            self.say(rank.rank, prepare=pb.Prepare())
            told = self.hear(rank.rank, "prepared").prepared.data_endpoints
            placed.append(replace(rank, addresses=from_endpoints(told)))
        self.plan = replace(self.plan, ranks=tuple(placed))

    def load(self, rank: int, at: StepId) -> None:
        stage = self.plan.ranks[rank].stage
        part = self.manifest.subset(
            start=stage.start, end=stage.end, embedding=stage.embedding, head=stage.head
        )
        body = pb.Load(
            plan_json=self.plan.to_json(),
            manifest_json=part.to_json(),
            token="secret",
            step_timeout_s=WAIT_S,
            coordinator_name="attic",
            committed_step=at.step,
            committed_generation=at.generation,
        )
        self.say(rank, load=body)

    def load_all(self, at: StepId, state: Arrays | None = None) -> None:
        """Load every stage, and give each what it is to know of `state`."""
        for rank in range(len(self.plan.ranks)):
            self.load(rank, at)
        self.hear_all("loaded")
        for rank in range(len(self.plan.ranks)) if state else ():
            layers = self.plan.ranks[rank].stage.layers
            for kind, is_its in ((pb.ADAPTER, _is_adapter), (pb.OPTIMIZER, _is_optimizer)):
                assert state is not None
                own = {n: a for n, a in state.items() if is_its(n) and _layer(n) in (-1, *layers)}
                for message in to_state_arrays(kind, own):
                    self.say(rank, state_array=message)
                self.hear(rank, "state_stored")

    def begin_step(self, step: int, ranks: Sequence[int] | None = None) -> float:
        """Give the step to these ranks (all); gives the number of supervised tokens."""
        batch = self.batches.batch_for_step(step - 1)
        microbatches = split_microbatches(
            batch,
            microbatch_size=self.plan.microbatch_size,
            max_seq_length=self.plan.max_seq_length,
        )
        last = len(self.plan.ranks) - 1
        for rank in range(last + 1) if ranks is None else ranks:
            data = [
                to_microbatch_data(m, with_tokens=rank == 0, with_targets=rank == last)
                for m in microbatches
            ]
            scale = 1 / batch.num_supervised_tokens
            body = pb.StepInput(step=step, loss_scale=scale, microbatches=data)
            self.say(rank, step_input=body)
        return batch.num_supervised_tokens

    def train(self, *steps: int) -> list[float]:
        """Give the loss of each step."""
        losses = []
        for step in steps:
            num_tokens = self.begin_step(step)
            losses.append(self.hear_all("step_report")[-1].step_report.loss_sum / num_tokens)
            for rank in range(len(self.plan.ranks)):
                body = pb.Commit(step=step, apply=True, learning_rate=1e-3, grad_scale=1.0)
                self.say(rank, commit=body)
            self.hear_all("committed")
        return losses

    def mark(self, at: StepId) -> None:
        """Wait for all copies, too."""
        point = pb.StepId(generation=at.generation, step=at.step)
        for rank in range(len(self.plan.ranks)):
            self.say(rank, mark=pb.Mark(at=point, safe=point, copy=True))
        for told in self.hear_all("shadowed"):
            assert told.shadowed.at == point

    def rewind(
        self, generation: int, ranks: Sequence[int] | None = None
    ) -> list[set[tuple[StepId, int, int]]]:
        """Give what each of these ranks (all) holds."""
        self.plan = replace(self.plan, generation=generation)
        told = range(len(self.ranks)) if ranks is None else ranks
        for rank in told:
            self.say(rank, rewind=pb.Rewind())
        return [self.rewound(rank) for rank in told]

    def rewound(self, rank: int) -> set[tuple[StepId, int, int]]:
        holdings = self.hear(rank, "rewound").rewound.holdings
        return {
            (StepId(generation=h.at.generation, step=h.at.step), h.start, h.end) for h in holdings
        }

    def held(self, rank: int, at: StepId) -> Arrays:
        point = pb.StepId(generation=at.generation, step=at.step)
        self.say(rank, state_request=pb.StateRequest(kind=pb.HELD, at=point))
        assembler = StateAssembler()
        while True:
            arrays = assembler.add(self.hear(rank, "state_array").state_array)
            if arrays is not None:
                return arrays

    def split(self, *stages: tuple[int, int]) -> None:
        """Plan anew: the first ranks get these layers, the others are gone."""
        ranks = tuple(
            replace(
                self.plan.ranks[rank],
                stage=StageSpec(
                    start=start, end=end, embedding=rank == 0, head=rank == len(stages) - 1
                ),
            )
            for rank, (start, end) in enumerate(stages)
        )
        self.plan = replace(self.plan, ranks=ranks)

    def finish(self) -> None:
        for rank in range(len(self.ranks)):
            self.say(rank, finish=pb.Finish())
        for thread in self.ranks:
            thread.join()


def make_ranks(
    kind: str, model: Path, folder: Path, layers: Sequence[tuple[int, int]]
) -> RankThreads:
    """Make one rank per range of layers, "local" or "grpc", each on a computer of its own."""
    manifest = manifest_of(model)
    homes = [Home(folder / f"home{rank}") for rank in range(len(layers))]
    ids = [homes[0].found().node_id] + [admit(home, homes[0]).node_id for home in homes[1:]]
    for home in homes[1:]:  # each knows all: the first has admitted them
        roster = homes[0].roster(homes[0].paired_identity())
        home.save_roster(roster)
    names = [("attic", ids[0]), *((f"den{rank}", node) for rank, node in enumerate(ids[1:], 1))]
    cluster = homes[0].paired_identity().cluster
    plan = plan_by_hand(manifest, names, layers, cluster=cluster)
    network = LocalNetwork()
    make: Callable[[int], Surroundings] = (
        (lambda rank: LocalSurroundings(network, model))
        if kind == "local"
        else (
            lambda rank: GrpcSurroundings(
                homes[rank],
                listen_hosts=[LOOPBACK],
                hosts=[LOOPBACK],
                model=model,
                trust_memory=True,
            )
        )
    )
    batches = BatchPlan(
        examples=random_examples(manifest.spec.vocab_size), batch_size=CONFIG.batch_size, seed=3
    )
    ranks = [RankThread(make(rank)) for rank in range(len(layers))]
    return RankThreads(plan, manifest, ranks, batches)


def _layer(name: str) -> int:
    """Give the layer of an array, -1 for what belongs to none."""
    return int(name.split(".")[2]) if name.startswith("model.layers.") else -1


def _is_adapter(name: str) -> bool:
    return name.endswith((".lora_a", ".lora_b"))


def _is_optimizer(name: str) -> bool:
    return not _is_adapter(name)
