"""A household inside this process for tests of recovery: real stages, ring, loop and planner.

Owns who is "here"; devices are threads. A device whose rank was killed can be started again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from exo_train.agent.live_plan import Asking
from exo_train.agent.local_ring import LocalNetwork, LocalRank
from exo_train.agent.planning import Candidate
from exo_train.agent.recovery import Recovery
from exo_train.agent.run_plan import Run, choose_plan
from exo_train.config import TrainConfig
from exo_train.plan.history import StepId
from exo_train.plan.plan import Key, Plan
from exo_train.train.checkpoint import Checkpoint
from exo_train.train.metrics import StepMetrics
from exo_train.train.progress import Progress
from exo_train.train.ring import RankChannel, Ring, WeightsAccess
from exo_train.train.rundir import RunDir
from exo_train.train.step_shapes import steps_of
from exo_train.train.watcher import Watcher
from tests.ring.rings import candidates, manifest_of
from tests.ring.trainers import make_trainer, random_data


@dataclass
class LocalHousehold:
    """Stands in for `HouseholdNow`; `faults` by device name are for that device's next ranks."""

    model: Path
    devices: list[Candidate]
    faults: dict[str, str] = field(default_factory=dict)
    away: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    network: LocalNetwork = field(default_factory=LocalNetwork)

    def look(self) -> list[tuple[Candidate, float]]:
        return [(c, 1e9) for c in self.devices if c.name not in self.away]

    def asking(self, *, fresh: bool = False, from_thread: bool = False) -> Asking:
        def status() -> dict[str, Any]:
            raise AssertionError("nobody is to be asked where nothing is measured")

        return Asking(status=status, tls_to=lambda node_id: None, on_note=self.notes.append)  # type: ignore[arg-type,return-value]

    def channels(self, plan: Plan) -> dict[Key, RankChannel]:
        return {
            (rank.node_id, rank.device): LocalRank(
                self.network, self.model, fault=self.faults.get(rank.name, "")
            )
            for rank in plan.ranks
        }

    def bring_up(self, ring: Ring, *, at: StepId) -> None:
        ring.prepare()
        access = WeightsAccess(
            manifest=manifest_of(self.model),
            endpoints=(),
            token="secret",
            coordinator_name=self.devices[0].name,
            coordinator_id=self.devices[0].node_id,
        )
        ring.load(access, step_timeout_s=30.0, at=at)


def household_of(
    model: Path,
    backends: Sequence[str],
    *,
    weights: Sequence[int] | None = None,
    faults: dict[str, str] | None = None,
) -> LocalHousehold:
    return LocalHousehold(model, candidates(backends, weights), faults=faults or {})


@dataclass
class Disturbed:
    """What a run came to."""

    losses: list[float]
    progress: Progress
    plan: Plan
    notes: list[str]


def run_in(
    household: LocalHousehold,
    run_dir: Path,
    config: TrainConfig,
    *,
    on_step: Callable[[int], None] = lambda step: None,
    wants_stop: Callable[[], bool] = lambda: False,
    resumed: Checkpoint | None = None,
    sleep: Callable[[float], None] = lambda seconds: None,
) -> Disturbed:
    """Train `config.steps` steps in the household, recovering as a real run does."""
    manifest = manifest_of(household.model)
    data = random_data(manifest.spec.vocab_size, replace(config, seed=3), num_rows=18)
    run = Run(
        config=config,
        manifest=manifest,
        steps=steps_of(data.batches, config),
        cluster="test",
        coordinator=household.devices[0].node_id,
        again="",
    )
    here = [c for c in household.devices if c.name not in household.away]
    chosen = choose_plan(run, here, household.asking())

    def step_done(metrics: StepMetrics, remaining_s: float | None) -> None:
        on_step(metrics.step)

    watcher = Watcher(on_step=step_done, on_note=household.notes.append, wants_stop=wants_stop)
    channels = household.channels(chosen.plan)
    ordered = [channels[rank.node_id, rank.device] for rank in chosen.plan.ranks]
    with Ring(chosen.plan, ordered, wants_stop=wants_stop, on_note=household.notes.append) as ring:
        recovery = Recovery(
            ring,
            run,
            chosen,
            household,  # type: ignore[arg-type]
            on_note=household.notes.append,
            wants_stop=wants_stop,
            sleep=sleep,
        )
        trainer = make_trainer(
            ring,
            config,
            data,
            run_dir,
            num_steps=config.steps,
            watcher=watcher,
            resumed=resumed,
            regrouping=recovery,
        )
        trainer.run(resumed, bring_up=lambda at: household.bring_up(ring, at=at))
        losses = [row["loss"] for row in RunDir(run_dir).read_metrics()]
        return Disturbed(losses, trainer.progress, ring.plan, household.notes)


def only_memory(config: TrainConfig, **changes: Any) -> TrainConfig:
    return replace(config, profile_s=0.0, **changes)
