"""Faults of every kind at every phase on any rank: losses are those of the undisturbed run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from exo_train.agent import losses, recovery
from exo_train.agent.local_ring import LocalRank
from exo_train.config import TrainConfig
from exo_train.errors import InterruptedRunError
from exo_train.plan.plan import Key, Plan
from exo_train.train import conversation, loop
from exo_train.train.checkpoint import newest_checkpoint
from exo_train.train.conversation import Event, LostRankError
from exo_train.train.ring import RankChannel
from exo_train.train.rundir import RunDir
from tests.ring.local_household import Disturbed, LocalHousehold, only_memory, run_in
from tests.ring.rings import candidates

STEPS = 6
STRUCK = 4  # the step that comes to harm
HOUSEHOLDS = {
    2: ("torch", "mlx"),
    3: ("torch", "mlx", "torch"),
    4: ("mlx", "torch", "torch", "mlx"),
}
KINDS = ("kill", "kill-both", "error", "oom")
PHASES = ("forward", "backward", "between", "commit", "committed", "snapshot")
CONFIG = only_memory(
    TrainConfig(
        batch_size=6, microbatch_size=2, max_seq_length=32, learning_rate=1e-2, dtype="fp32"
    ),
    steps=STEPS,
    save_every=0,
)


class MortalRank(LocalRank):
    """Can be killed from outside, whatever it is at."""

    def start(self, on_event: Callable[[Event], None]) -> None:
        self._tell = on_event
        super().start(on_event)

    def kill(self) -> None:
        self._tell(LostRankError("its device was switched off"))
        self.close()


@dataclass
class Household(LocalHousehold):
    """`later_faults` are for workers that are started in later generations."""

    later_faults: dict[str, str] = field(default_factory=dict)
    workers: dict[str, MortalRank] = field(default_factory=dict)

    def channels(self, plan: Plan) -> dict[Key, RankChannel]:
        faults = self.faults if plan.generation == 1 else self.later_faults
        made = {
            rank.name: MortalRank(self.network, self.model, fault=faults.get(rank.name, ""))
            for rank in plan.ranks
        }
        self.workers = made | self.workers if plan.generation > 1 else made
        return {(rank.node_id, rank.device): made[rank.name] for rank in plan.ranks}


def household_of(model: Path, backends: Sequence[str], fault: str = "") -> Household:
    """All devices have the fault: it says itself which rank it strikes."""
    devices = candidates(backends)
    return Household(model, devices, faults={d.name: fault for d in devices if fault})


@pytest.fixture(autouse=True)
def no_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads send none: on a busy machine one that computes is not to count as silent."""
    monkeypatch.setattr(conversation, "SILENCE_TIMEOUT_S", 120.0)


Oracle = Callable[[int], Disturbed]


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """Give the run of so many devices to which nothing happens."""
    runs: dict[int, Disturbed] = {}

    def run(num_devices: int) -> Disturbed:
        if num_devices not in runs:
            household = household_of(tiny_model, HOUSEHOLDS[num_devices])
            runs[num_devices] = run_in(household, tmp_path_factory.mktemp("oracle"), CONFIG)
        return runs[num_devices]

    return run


def split_of(plan: Plan) -> list[tuple[str, int, int]]:
    return [(rank.name, rank.stage.start, rank.stage.end) for rank in plan.ranks]


def assert_nothing_is_lost(disturbed: Disturbed, oracle: Disturbed, run_dir: Path) -> None:
    rows = RunDir(run_dir).read_metrics()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    as_before = split_of(disturbed.plan) == split_of(oracle.plan)
    if as_before and disturbed.plan.microbatch_size == oracle.plan.microbatch_size:
        assert disturbed.losses == oracle.losses
    assert disturbed.losses == pytest.approx(oracle.losses, rel=1e-4)
    owned = [layer for rank in disturbed.plan.ranks for layer in rank.stage.layers]
    assert owned == list(range(disturbed.plan.num_layers))


def cases() -> list[tuple[str, str, int, int, str]]:
    """Give kind, phase, number of devices, rank and shadow, all of them mixed evenly."""
    places = [(n, rank) for n in HOUSEHOLDS for rank in sorted({0, n // 2, n - 1})]
    shadows = itertools.cycle(("1", "3", "auto", "off", "1"))
    where = itertools.cycle(places)
    return [
        # Every third step's state would not be read at the step that is struck.
        (kind, phase, *next(where), "1" if phase == "snapshot" else next(shadows))
        for _ in range(2)
        for kind, phase in itertools.product(KINDS, PHASES)
    ]


@pytest.mark.parametrize(("kind", "phase", "num_devices", "rank", "shadow"), cases())
def test_no_step_is_lost_for_good(
    tiny_model: Path,
    undisturbed: Oracle,
    tmp_path: Path,
    kind: str,
    phase: str,
    num_devices: int,
    rank: int,
    shadow: str,
) -> None:
    strikes = tmp_path / "strikes"
    strikes.mkdir()
    fault = f"{kind}@step={STRUCK},phase={phase},rank={rank},once={strikes}"
    household = household_of(tiny_model, HOUSEHOLDS[num_devices], fault)
    # Without shadows it is the checkpoint that the run goes back to.
    config = replace(CONFIG, shadow=shadow, save_every=2 if shadow == "off" else 0)
    disturbed = run_in(household, tmp_path / "run", config)
    assert list(strikes.iterdir())
    assert_nothing_is_lost(disturbed, undisturbed(num_devices), tmp_path / "run")
    (interruption,) = disturbed.progress.interruptions
    # How often "auto" copies depends on how long that takes.
    promise = {"1": 1, "3": 3, "off": 2, "auto": STRUCK}[shadow]
    assert interruption.steps_lost <= promise
    left = len(disturbed.plan.ranks)
    if kind in ("kill-both", "error"):
        assert left == num_devices - 1
    elif kind == "kill":
        assert left == num_devices
    else:  # with more memory in reserve it may be that no layer is left for the device
        assert left >= num_devices - 1


@pytest.mark.parametrize("num_devices", [2, 3, 4])
@pytest.mark.parametrize("what", ["nan-activation", "nan-gradient"])
def test_a_step_with_bad_numbers_is_dropped_everywhere(
    tiny_model: Path, tmp_path: Path, what: str, num_devices: int
) -> None:
    """The oracle is one device to which the same happens."""
    fault = f"{what}@layer=2,step={STRUCK}"
    alone = run_in(household_of(tiny_model, ["torch"], fault), tmp_path / "alone", CONFIG)
    household = household_of(tiny_model, HOUSEHOLDS[num_devices], fault)
    ring = run_in(household, tmp_path / "ring", CONFIG)
    assert ring.progress.interruptions == []
    assert ring.progress.totals.num_dropped == alone.progress.totals.num_dropped == 1
    rows = [RunDir(tmp_path / name).read_metrics() for name in ("alone", "ring")]
    assert [[row["step"] for row in run] for run in rows] == 2 * [list(range(1, STEPS + 1))]
    kept = [[row["loss"] for row in run if row["step"] != STRUCK] for run in rows]
    assert kept[1] == pytest.approx(kept[0], rel=1e-4)


@pytest.mark.parametrize("num_devices", [2, 3, 4])
def test_a_device_that_is_back_dies_again_while_it_loads(
    tiny_model: Path, undisturbed: Oracle, tmp_path: Path, num_devices: int
) -> None:
    fault = f"kill@step={STRUCK},phase=backward,rank=1,once={tmp_path}"
    household = household_of(tiny_model, HOUSEHOLDS[num_devices], fault)
    again = f"kill@phase=loading,once={tmp_path}"
    household.later_faults = {device.name: again for device in household.devices}
    disturbed = run_in(household, tmp_path / "run", replace(CONFIG, shadow="1"))
    assert_nothing_is_lost(disturbed, undisturbed(num_devices), tmp_path / "run")
    (interruption,) = disturbed.progress.interruptions
    assert interruption.steps_lost <= 1
    assert disturbed.plan.generation == 3
    assert len(disturbed.plan.ranks) == num_devices


@pytest.mark.parametrize("num_devices", [3, 4])
@pytest.mark.parametrize("at", ["recover", "replan"])
def test_a_second_device_dies_during_the_recovery(
    tiny_model: Path,
    undisturbed: Oracle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_devices: int,
    at: str,
) -> None:
    """Two at once may cost what is newer than the last checkpoint, and nothing else."""
    fault = f"kill-both@step={STRUCK + 1},phase=forward,rank=0,once={tmp_path}"
    household = household_of(tiny_model, HOUSEHOLDS[num_devices], fault)
    second = split_of(undisturbed(num_devices).plan)[1][0]

    def die(point: str) -> None:
        if point == at and second not in household.away:
            household.away.add(second)
            household.workers[second].kill()

    monkeypatch.setattr(recovery, "point", die)
    config = replace(CONFIG, shadow="1", save_every=2)
    disturbed = run_in(household, tmp_path / "run", config)
    assert second in household.away
    assert_nothing_is_lost(disturbed, undisturbed(num_devices), tmp_path / "run")
    assert len(disturbed.plan.ranks) == num_devices - 2
    (interruption,) = disturbed.progress.interruptions
    assert interruption.steps_lost <= (2 if at == "recover" else 1)


def test_a_device_that_dies_again_and_again_is_set_aside(
    tiny_model: Path, undisturbed: Oracle, tmp_path: Path
) -> None:
    household = household_of(tiny_model, HOUSEHOLDS[3])
    household.faults = household.later_faults = {"device1": f"kill@phase=forward,step={STRUCK}"}
    disturbed = run_in(household, tmp_path / "run", CONFIG)
    assert_nothing_is_lost(disturbed, undisturbed(3), tmp_path / "run")
    assert "device1" not in [rank.name for rank in disturbed.plan.ranks]
    assert len(disturbed.progress.interruptions) == losses.MAX_LOSSES
    (note,) = [note for note in disturbed.notes if "set aside" in note]
    assert "device1" in note
    assert f"lost {losses.MAX_LOSSES} times" in note


def test_a_run_that_does_not_fit_any_more_waits_for_its_device(
    tiny_model: Path, undisturbed: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    household = household_of(tiny_model, HOUSEHOLDS[2])
    household.faults = {"device1": f"kill@phase=backward,step={STRUCK}"}
    # With the smallest microbatches the model takes 2.9 MB on one device.
    household.devices = [replace(d, usable_memory_bytes=2_500_000) for d in household.devices]
    config = replace(CONFIG, shadow="1", microbatch_size=1)
    run_dir = tmp_path / "run"
    saved: list[int] = []

    def leave(point: str) -> None:
        if point == "recover":
            household.away.add("device1")

    def come_back(seconds: float) -> None:
        checkpoint = newest_checkpoint(run_dir, say=household.notes.append)
        saved.append(checkpoint.step if checkpoint is not None else 0)
        if len(saved) == 3:
            household.away.clear()

    monkeypatch.setattr(recovery, "point", leave)
    disturbed = run_in(household, run_dir, config, sleep=come_back)
    assert_nothing_is_lost(disturbed, undisturbed(2), run_dir)
    (interruption,) = disturbed.progress.interruptions
    assert interruption.steps_lost <= 1
    at = interruption.step
    assert saved == [at, at, at], "all is saved before the run waits"
    (note,) = [note for note in disturbed.notes if "paused" in note]
    assert f"paused after step {at}, which is saved" in note
    assert "the model needs at least 2.9 MB" in note
    assert len(disturbed.plan.ranks) == 2


def test_a_stop_within_a_long_step_keeps_the_step_before(
    tiny_model: Path, undisturbed: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "STOP_PATIENCE_S", float("-inf"))  # all steps are long ones
    mark = tmp_path / "mark"
    fault = f"hold@phase=forward,step={STRUCK},rank=1,mark={mark}"
    household = household_of(tiny_model, HOUSEHOLDS[3], fault)
    stops: list[int] = []

    def wants_stop() -> bool:
        if mark.exists():  # the step is half done
            stops.append(STRUCK)
            mark.unlink()
        return bool(stops)

    run_dir = tmp_path / "run"
    with pytest.raises(InterruptedRunError, match=f"stopped in step {STRUCK} of {STEPS}"):
        run_in(household, run_dir, CONFIG, wants_stop=wants_stop)
    saved = newest_checkpoint(run_dir, say=household.notes.append)
    assert saved is not None
    assert saved.step == STRUCK - 1
    resumed = run_in(household_of(tiny_model, HOUSEHOLDS[3]), run_dir, CONFIG, resumed=saved)
    assert split_of(resumed.plan) == split_of(undisturbed(3).plan)
    assert_nothing_is_lost(resumed, undisturbed(3), run_dir)
