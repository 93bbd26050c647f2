"""The driver of a run over ranks that come to harm. For tests only.

Owns the order of a step and of a restart, as the training loop has them, and what must be true
whenever the driver goes on; ring, ranks, shadows and recovery are the real ones.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from exo_train.agent.recovery import Recovery
from exo_train.agent.run_plan import Run, RunPlan
from exo_train.backends.base import Arrays
from exo_train.config import TrainConfig
from exo_train.errors import DoesNotFitError, ExoTrainError
from exo_train.lora_config import LoraConfig
from exo_train.models.manifest import ModelManifest
from exo_train.optimizer_config import OptimizerConfig
from exo_train.peer import NodeId
from exo_train.plan.history import StepId
from exo_train.plan.plan import Key, Plan, RankPlan
from exo_train.plan.stages import StageSpec
from exo_train.train.batches import Microbatch
from exo_train.train.checkpoint import Checkpoint
from exo_train.train.collecting import split_state
from exo_train.train.regrouping import Known, Restored, from_checkpoint
from exo_train.train.ring import START, RankChannel, Ring, WeightsAccess
from exo_train.train.shadowing import Shadowing
from tests.property.hostile_ranks import Applied, Channel, Harm, from_array, layer_name

TIMEOUT_S = 60.0
MICROBATCH = Microbatch(
    index=0,
    tokens_BT=np.zeros((1, 2), np.int32),
    targets_BT=np.zeros((1, 2), np.int32),
    mask_BT=np.ones((1, 2), np.bool_),
    row_keys=(0,),
)


class SeededRecovery(Recovery):
    """Plans by chance over the devices that are on; all else is the real one's."""

    driver: Driver

    def _planned(self, attempt: Any) -> RunPlan:
        return RunPlan(plan=self.driver.make_plan(attempt.generation))

    def _plan(self, attempt: Any, restored: Restored, *rest: Any) -> None:
        if restored.checkpoint is None:  # before anybody takes it
            self.driver.check_whole(restored)
        super()._plan(attempt, restored, *rest)

    def _restore(self, attempt: Any, known: Known) -> None:
        try:
            super()._restore(attempt, known)
        finally:
            self.driver.lost |= {rank.name for rank, _ in self.driver.ring.losses()}


class Driver:
    """`points` has the steps that all layers must have had applied, by point of the history."""

    def __init__(
        self, manifest: ModelManifest, harm: Harm, devices: tuple[str, ...], shadow: str, seed: int
    ) -> None:
        self.manifest, self.harm, self.devices = manifest, harm, devices
        self._shadow, self._rng = shadow, random.Random(seed)
        self.points: dict[StepId, Applied] = {START: ()}
        self.at = START
        self.lost: set[str] = set()
        self._num_gradients = 0
        self._checkpoint: Checkpoint | None = None
        self._saved: Applied = ()
        self._begin(1)

    def make_plan(self, generation: int) -> Plan:
        """Split the layers anew among some of the devices that are on, in any order."""
        there = [device for device in self.devices if device not in self.harm.off]
        if not there:
            raise DoesNotFitError("no device is on")
        num_layers = self.manifest.spec.num_layers
        chosen = self._rng.sample(
            there, self._rng.choice((len(there),) * 3 + (max(1, len(there) - 1),))
        )
        inner = sorted(self._rng.sample(range(1, num_layers), len(chosen) - 1))
        bounds = [0, *inner, num_layers]
        last = len(chosen) - 1
        ranks = [
            RankPlan(
                rank=rank,
                node_id=NodeId(f"{self.devices.index(device):032x}"),
                name=device,
                backend="torch",
                device="cpu",
                compute_dtype="fp32",
                stage=StageSpec(
                    start=bounds[rank],
                    end=bounds[rank + 1],
                    embedding=rank == 0,
                    head=rank == last,
                ),
            )
            for rank, device in enumerate(chosen)
        ]
        return Plan(
            cluster="test",
            run_id="run",
            generation=generation,
            model_hash=self.manifest.model_hash,
            num_layers=num_layers,
            hidden_size=self.manifest.spec.hidden_size,
            ranks=tuple(ranks),
            pipeline_schedule="1f1b",
            microbatch_size=1,
            max_seq_length=2,
            wire_dtype="fp32",
            lora=LoraConfig(),
            optimizer=OptimizerConfig(),
            seed=0,
        )

    # What a household is to a recovery.

    def channels(self, plan: Plan) -> dict[Key, RankChannel]:
        return {(r.node_id, r.device): Channel(self.harm, r.name) for r in plan.ranks}

    def bring_up(self, ring: Ring, *, at: StepId = START) -> None:
        ring.prepare()
        access = WeightsAccess(
            manifest=self.manifest,
            endpoints=(),
            token="secret",
            coordinator_name=self.devices[0],
            coordinator_id=NodeId(f"{0:032x}"),
        )
        ring.load(access, step_timeout_s=TIMEOUT_S, at=at)

    # What a training loop does.

    def train(self, *, is_finite: bool) -> None:
        """Do the next step; when that fails, go back and on in a new ring."""
        step, generation = self.at.step + 1, self.ring.plan.generation
        self._num_gradients += 1
        number = self._num_gradients
        try:
            self.ring.run_step(step, [MICROBATCH], loss_scale=float(number), timeout_s=TIMEOUT_S)
            self._shadowing.before_commit(self.ring, step_s=1.0)
            if is_finite:
                self.harm.ordered.add(number)
            self.ring.commit(
                step,
                apply=is_finite,
                learning_rate=float(number),
                grad_scale=1.0,
                timeout_s=TIMEOUT_S,
            )
            now = StepId(generation=generation, step=step)
            applied = ((generation, step, number),) if is_finite else ()
            assert now not in self.points
            self.points[now] = self.points[self.at] + applied
            self.at = now
            self._shadowing.after_commit(self.ring, now, step_s=1.0)
        except ExoTrainError as error:
            self.form_anew(error)

    def save(self) -> None:
        try:
            self._keep(self.ring.collect_state())
        except ExoTrainError as error:
            self.form_anew(error)

    def form_anew(self, reason: ExoTrainError | str) -> None:
        before, safe = self.at, self._shadowing.safe
        self.lost = set()
        known = Known(
            up_to=self.at, held=self._shadowing.held, newest_checkpoint=lambda: self._checkpoint
        )
        done = self._recovery.form_anew(reason, known, on_pause=self._pause)
        self._go_back(done.restored)
        if len(self.lost) <= 1:
            self._check_promise(before, safe)
        self._shadowing.begin(self.ring, self.at, done.restored.state)
        self.harm.copies_disturbed = False

    def restart(self) -> None:
        """End the run and resume it from its newest checkpoint, with new workers."""
        self.ring.close()
        self._begin(self.ring.plan.generation + 1)

    def check(self) -> None:
        """All ranks have just the steps that the driver recorded, and so has every copy."""
        for rank in self.ring.plan.ranks:
            around = self.harm.channels[rank.name].around
            if not self.harm.channels[rank.name].is_dead:
                assert around.stage is not None
                for applied in (around.stage.adapters, around.stage.moments):
                    assert applied == dict.fromkeys(rank.stage.layers, self.points[self.at])
            for snapshot in around.snapshots:
                if snapshot.at in self.points:
                    layers = range(snapshot.start, snapshot.end)
                    _check_state(snapshot.arrays, layers, self.points[snapshot.at])

    def check_whole(self, restored: Restored) -> None:
        """The run is to go on from a point that it was at, with all layers as they were there."""
        assert restored.at in self.points, "the run goes on from a point that it never was at"
        if restored.state:
            layers = range(self.manifest.spec.num_layers)
            _check_state(restored.state, layers, self.points[restored.at])

    def close(self) -> None:
        self.ring.close()

    def _begin(self, generation: int) -> None:
        """Start a ring; as long as that fails, again, as whoever sits before it would."""
        restored = Restored(at=START, state={})
        if self._checkpoint is not None:
            restored = from_checkpoint(self._checkpoint, generation=0)
        self._go_back(restored)
        while True:
            plan = self.make_plan(generation)
            channels = self.channels(plan)
            ordered = [channels[rank.node_id, rank.device] for rank in plan.ranks]
            self.ring = Ring(plan, ordered)
            self._shadowing = Shadowing(self._shadow, clock_s=lambda: self.harm.now_s)
            try:
                self.bring_up(self.ring, at=self.at)
                if restored.state:
                    self.ring.store_state(restored.state)
                break
            except ExoTrainError as error:
                self.ring.close(error)
                self.harm.off.clear()
                generation += 1
        if restored.state:
            self._shadowing.begin(self.ring, self.at, restored.state)
        config = TrainConfig()
        run = Run(
            config=config,
            manifest=self.manifest,
            steps=(),  # type: ignore[arg-type]
            cluster="test",
            coordinator=NodeId(f"{0:032x}"),
            again="",
        )
        self._recovery = SeededRecovery(
            self.ring,
            run,
            RunPlan(plan=plan),
            self,  # type: ignore[arg-type]
            on_note=lambda note: None,
            wants_stop=lambda: False,
            clock_s=lambda: self.harm.now_s,
            sleep=lambda seconds: self.harm.off.clear(),
        )
        self._recovery.driver = self
        self.harm.copies_disturbed = False

    def _pause(self, restored: Restored) -> None:
        self._go_back(restored)
        if restored.at.step:
            self._keep(restored.state)

    def _keep(self, state: Mapping[str, Any]) -> None:
        _check_state(state, range(self.manifest.spec.num_layers), self.points[self.at])
        self._saved = self.points[self.at]
        adapter, optimizer = split_state(state)
        self._checkpoint = Checkpoint(
            path=Path("checkpoint"),
            step=self.at.step,
            adapter=adapter,
            optimizer=optimizer,
            state={},
        )

    def _go_back(self, restored: Restored) -> None:
        if restored.checkpoint is not None:
            self.points[restored.at] = self._saved
        self.check_whole(restored)
        self.at = restored.at

    def _check_promise(self, before: StepId, safe: StepId) -> None:
        """One device at most was lost since: what its shadow has is not done again."""
        assert self.at.step >= safe.step, "copies were there, and the run went back further"
        if self._shadow != "off" and not self.harm.copies_disturbed:
            assert before.step - self.at.step <= int(self._shadow)


def _check_state(state: Arrays | Mapping[str, Any], layers: range, expected: Applied) -> None:
    for layer in layers:
        for name in (layer_name(layer), f"{layer_name(layer)}.exp_avg"):
            assert from_array(state[name]) == expected, f"{name} is of another history"
