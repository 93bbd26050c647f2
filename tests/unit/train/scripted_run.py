"""A whole training loop over ranks that compute nothing, on a clock of its own. For tests only.

The ring, the loop and the run directory are the real ones; what each rank reports of a step, and
how long the step takes, is the test's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from exo_train.config import TrainConfig
from exo_train.lora_config import LoraConfig
from exo_train.optimizer_config import OptimizerConfig
from exo_train.peer import NodeId
from exo_train.plan.plan import Plan, RankPlan
from exo_train.plan.stages import StageSpec
from exo_train.train.batches import BatchPlan
from exo_train.train.checkpoint import Checkpoint
from exo_train.train.disk_pause import DiskPause
from exo_train.train.examples import Example
from exo_train.train.loop import Data, Trainer
from exo_train.train.messages import to_state_arrays
from exo_train.train.ring import Event, Ring
from exo_train.train.rundir import RunDir
from exo_train.train.saving import Saver, SaveTimer
from exo_train.train.watcher import Watcher
from exo_train.wire.pb import control_pb2 as pb

SUPERVISED = 32  # tokens of a step, unless the test has its own rows
NAMES = ("studio", "den-pc", "laptop")
CONFIG = TrainConfig(batch_size=4, microbatch_size=2, max_seq_length=32, shadow="off")


@dataclass(frozen=True, kw_only=True)
class ScriptedStep:
    """What one step is; the lists have an entry per rank."""

    step_s: float
    busy_s: Sequence[float]
    period_s: float = 0.0
    sent_bytes: Sequence[int] = (0,) * 8
    peak_memory_bytes: Sequence[int] = (0,) * 8
    loss_sum: float = 1.0
    held_out_loss_sum: float = 1.0
    largest_loss_scale: float = math.inf  # per supervised token; above it a gradient overflows


Script = Callable[[int], ScriptedStep]  # by step, from 1


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


class ScriptedRank:
    """Answers at once, in the driver's thread; the step's time passes on rank 0."""

    def __init__(self, rank: int, script: Script, clock: Clock) -> None:
        self._rank, self._script, self._clock = rank, script, clock

    def start(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event

    def close(self) -> None: ...

    def send(self, message: pb.RunMessage) -> None:
        match message.WhichOneof("body"):
            case "prepare":
                self._answer(prepared=pb.Prepared())
            case "step_input":
                self._report(message.step_input)
            case "commit":
                self._answer(committed=pb.Committed(step=message.commit.step))
            case "state_request":
                kind = message.state_request.kind
                arrays = {f"model.layers.{self._rank}.lora_a": np.zeros(2, np.float32)}
                if kind == pb.OPTIMIZER:
                    arrays = {"step": np.array(1, np.int64)}
                for array in to_state_arrays(kind, arrays):
                    self._answer(state_array=array)
            case "state_array" if message.state_array.last:
                self._answer(state_stored=pb.StateStored(kind=message.state_array.kind))

    def _report(self, asked: pb.StepInput) -> None:
        if asked.more:
            return
        now = self._script(asked.step)
        fits = asked.loss_scale <= now.largest_loss_scale
        if self._rank == 0 and not asked.evaluation:
            self._clock.now_s += now.step_s
        self._answer(
            step_report=pb.StepReport(
                step=asked.step,
                loss_sum=now.held_out_loss_sum if asked.evaluation else now.loss_sum,
                # Gradients of a loss that is scaled are, too.
                grad_square_sum=(SUPERVISED * asked.loss_scale) ** 2 if fits else math.inf,
                busy_s=now.busy_s[self._rank],
                step_s=now.step_s,
                period_s=now.period_s,
                sent_bytes=now.sent_bytes[self._rank],
                peak_memory_bytes=now.peak_memory_bytes[self._rank],
            )
        )

    def _answer(self, **body: Any) -> None:
        self._on_event(pb.RunMessage(generation=1, rank=self._rank, **body))


def rows(num_inputs: Sequence[int]) -> tuple[Example, ...]:
    return tuple(
        Example(tokens=(1,) * (n + 1), supervised=(False,) + (True,) * n, where="test")
        for n in num_inputs
    )


def run_script(
    script: Script,
    run_dir: Path,
    *,
    num_steps: int,
    num_ranks: int = 2,
    vocab_size: int = 1,
    wire_dtype: str = "fp32",
    examples: tuple[Example, ...] = (),
    batches: Any = None,
    held_out: tuple[Example, ...] = (),
    config: TrainConfig = CONFIG,
    watcher: Watcher | None = None,
    resumed: Checkpoint | None = None,
    on_trainer: Callable[[Trainer], None] = lambda trainer: None,
    **promises: Any,
) -> Trainer:
    """Run the loop; `on_trainer` gets the trainer first, should the run be stopped."""
    clock = Clock()
    ranks = [ScriptedRank(rank, script, clock) for rank in range(num_ranks)]
    batches = batches or BatchPlan(
        examples=examples or rows([8] * 4), batch_size=config.batch_size, seed=0
    )
    plan = replace(_plan(num_ranks, config), wire_dtype=wire_dtype)
    with Ring(plan, ranks) as ring:
        watcher = watcher or Watcher()
        pause = DiskPause(device="studio", say=watcher.on_note)
        directory = RunDir.create(run_dir, allow_existing=resumed is not None)
        trainer = Trainer(
            ring,
            config,
            Data(batches=batches, held_out=held_out),
            directory,
            num_steps=num_steps,
            vocab_size=vocab_size,
            identity={},
            watcher=watcher,
            saver=Saver(directory.path, keep=config.keep, pause=pause, resumed=resumed),
            timer=SaveTimer(every_steps=config.save_every, every_minutes=0),
            pause=pause,
            clock_s=clock,
            **promises,
        )
        on_trainer(trainer)
        trainer.run(resumed, bring_up=lambda at: ring.prepare())
    return trainer


def _plan(num_ranks: int, config: TrainConfig) -> Plan:
    last = num_ranks - 1
    whole = Plan(
        cluster="home",
        run_id="run",
        generation=1,
        model_hash="0" * 64,
        num_layers=num_ranks,
        hidden_size=64,
        ranks=(),
        pipeline_schedule="1f1b",
        microbatch_size=config.microbatch_size or 1,
        max_seq_length=config.max_seq_length,
        wire_dtype="fp32",
        lora=LoraConfig(),
        optimizer=OptimizerConfig(),
        seed=0,
    )
    ranks = tuple(
        RankPlan(
            rank=rank,
            node_id=NodeId(f"{rank:032x}"),
            name=NAMES[rank],
            backend="torch",
            device="cpu",
            compute_dtype="fp32",
            stage=StageSpec(start=rank, end=rank + 1, embedding=rank == 0, head=rank == last),
        )
        for rank in range(num_ranks)
    )
    return replace(whole, ranks=ranks)
