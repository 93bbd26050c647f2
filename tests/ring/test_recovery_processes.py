"""Real agents and workers come to harm at every point of a run, and nothing is lost.

Each fault has an address (device, step, phase). After each the same is asked, by
`disturbed_runs`: the run ends well, says whom it lost, has the undisturbed run's losses, and
leaves nothing behind. All phases, ranks and kinds are in test_recovery_combinations.py, in one
process; here is what only processes can show.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exo_train.agent.run_session import LEASE_VARIABLE
from exo_train.config import TrainConfig
from tests.ring.disturbed_runs import (
    COORDINATOR,
    DisturbedHousehold,
    check_history,
    check_told,
    disturbed_config,
    finished_checkpoints,
    options_of,
)

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("disturbed"), pytest.mark.timeout(300)]


def extended(*values: str) -> Any:
    """More of the same kind: run by `make test-extended`."""
    return pytest.param(*values, marks=pytest.mark.extended)


DRIVER_PHASES = (extended("checkpoint-write"), "checkpoint-publish", extended("recover"))


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DisturbedHousehold]:
    members = DisturbedHousehold(tmp_path_factory.mktemp("disturbed"))
    with pytest.MonkeyPatch.context() as patch, members:
        # So long a killed driver's workers are kept; these runs are resumed from their files.
        patch.setenv(LEASE_VARIABLE, "3")
        members.begin()
        yield members


@pytest.fixture
def household(members: DisturbedHousehold) -> Iterator[DisturbedHousehold]:
    """Whole before each test, and awake after it."""
    members.mend()
    yield members
    members.let_go_on()


@pytest.fixture(scope="module")
def short(config: TrainConfig) -> TrainConfig:
    return disturbed_config(config)


@pytest.fixture(scope="module")
def undisturbed(
    members: DisturbedHousehold, short: TrainConfig, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    told = members.train(short, run_dir)
    assert told.outcome is not None
    assert len(told.outcome.summary.devices) == 3
    return run_dir


@pytest.mark.parametrize("action", [extended("kill"), "kill-both"])
def test_device_lost_before_the_first_step_is_planned_around(
    household: DisturbedHousehold,
    short: TrainConfig,
    undisturbed: Path,
    tmp_path: Path,
    action: str,
) -> None:
    """A worker that is lost is started again; a device whose agent is gone is left out."""
    run_dir = tmp_path / "run"
    told = household.train(short, run_dir, household.harm("hall", action, "loading"))
    check_told(told, ["hall"])
    check_history(run_dir, undisturbed, same_split=action != "kill-both")
    household.check_nothing_left(run_dir)


@pytest.mark.parametrize("phase", [extended("forward"), "commit", extended("snapshot")])
def test_killed_workers_cost_one_step_and_change_no_digit(
    household: DisturbedHousehold, short: TrainConfig, undisturbed: Path, tmp_path: Path, phase: str
) -> None:
    """SIGKILL to one device's worker, later SIGTERM to another's: both are started again."""
    run_dir = tmp_path / "run"
    harms = [household.harm("hall", "kill", phase), household.harm("desk", "term", phase)]
    told = household.train(short, run_dir, *harms)
    check_told(told, ["hall", "desk"])
    assert "SIGKILL" in told.text
    assert "SIGTERM" in told.text
    check_history(run_dir, undisturbed, same_split=True)
    household.check_nothing_left(run_dir)


@pytest.mark.parametrize("phase", [extended("between"), "committed"])
def test_run_goes_on_without_devices_that_die(
    household: DisturbedHousehold, short: TrainConfig, undisturbed: Path, tmp_path: Path, phase: str
) -> None:
    """One device's agent is killed, then another's with its worker: the last one goes on alone."""
    run_dir = tmp_path / "run"
    first = household.harm("hall", "kill-agent", phase)
    second = household.harm("desk", "kill-both", phase)
    told = household.train(short, run_dir, first, second)
    check_told(told, ["hall", "desk"])
    check_history(run_dir, undisturbed, same_split=False)
    assert household.live() == [COORDINATOR]
    household.check_nothing_left(run_dir)


@pytest.mark.parametrize(("action", "phase"), [("stop", "forward"), ("stop-both", "backward")])
def test_run_goes_on_without_a_device_that_stands_still(
    household: DisturbedHousehold,
    short: TrainConfig,
    undisturbed: Path,
    tmp_path: Path,
    action: str,
    phase: str,
) -> None:
    run_dir = tmp_path / "run"
    told = household.train(short, run_dir, household.harm("hall", action, phase))
    check_told(told, ["hall"])
    check_history(run_dir, undisturbed, same_split=False)
    household.let_go_on()
    household.check_nothing_left(run_dir)


def test_agents_ended_by_their_users_are_no_accident(
    household: DisturbedHousehold, short: TrainConfig, undisturbed: Path, tmp_path: Path
) -> None:
    """Ctrl-C on one device, a shutdown's SIGTERM on another."""
    run_dir = tmp_path / "run"

    def end(step: int) -> None:
        if step == 2:
            household.send("hall", signal.SIGINT)
        elif step == 4:
            household.send("desk", signal.SIGTERM)

    told = household.train(short, run_dir, at_step=end)
    check_told(told, ["hall", "desk"])
    assert "its agent was ended" in told.text
    check_history(run_dir, undisturbed, same_split=False)
    household.check_nothing_left(run_dir)


@pytest.mark.parametrize(
    ("first_action", "action", "phase"),
    [
        ("kill-agent", "term", "loading"),  # as it is lost, others have its layers to load
        extended("kill", "kill-agent", "forward"),
    ],
)
def test_second_device_lost_while_the_first_is_recovered_from(
    household: DisturbedHousehold,
    short: TrainConfig,
    undisturbed: Path,
    tmp_path: Path,
    first_action: str,
    action: str,
    phase: str,
) -> None:
    run_dir = tmp_path / "run"
    second = household.harm("desk", action, phase)

    def arm_second(note: str) -> None:
        if "hall" in note and "going on with who is left" in note:
            second.arm()

    first = household.harm("hall", first_action, "backward")
    told = household.train(short, run_dir, first, on_note=arm_second)
    assert second.has_struck
    assert "desk" in told.text
    assert told.steps_lost <= 1
    check_history(run_dir, undisturbed, same_split=False)
    household.check_nothing_left(run_dir)


@pytest.mark.parametrize("phase", DRIVER_PHASES)
def test_killed_driver_is_resumed_with_no_checkpoint_lost(
    household: DisturbedHousehold, short: TrainConfig, undisturbed: Path, tmp_path: Path, phase: str
) -> None:
    """Also in mid-recovery: then a worker is killed first."""
    run_dir = tmp_path / "run"
    if phase == "recover":
        household.harm("hall", "kill", "forward").arm()
    once = tmp_path / "once"
    once.mkdir()
    words = options_of(short, run_dir)
    # The second checkpoint, so that there is a first one to keep.
    times = f"kill@phase={phase},times=1,once={once}"
    done = household.drive(*words, "--no-takeover", fault=times)
    assert done.returncode == -signal.SIGKILL, done.stderr
    kept = finished_checkpoints(run_dir)
    household.wait_quiet()
    household.resume(run_dir)
    assert kept <= finished_checkpoints(run_dir)
    check_history(run_dir, undisturbed, same_split=True)
    household.check_nothing_left(run_dir)


def test_coordinators_own_agent_is_started_again_while_its_driver_lives(
    household: DisturbedHousehold,
    short: TrainConfig,
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_dir = tmp_path / "run"
    home = household.homes[COORDINATOR]
    monkeypatch.setenv("EXO_TRAIN_HOME", str(home.path))  # as in the shell of its user

    def kill(step: int) -> None:
        if step == 3:
            household.send(COORDINATOR, signal.SIGKILL)
            household.processes[COORDINATOR].wait()  # a child that was not waited for has a pid

    told = household.train(short, run_dir, at_step=kill)
    check_told(told, [COORDINATOR])
    check_history(run_dir, undisturbed, same_split=False)
    household.check_nothing_left(run_dir)


def test_run_goes_on_without_a_device_that_leaves_the_cluster(
    household: DisturbedHousehold, short: TrainConfig, undisturbed: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    household.add("shed", "torch")
    household.wait_met(["attic", "shed"])

    has_left: list[int] = []

    def leave(step: int) -> None:
        if step == 3 and not has_left:  # it may be done again
            has_left.append(step)
            done = household.run("shed", "leave")
            assert done.returncode == 0, done.stderr

    told = household.train(short, run_dir, at_step=leave)
    check_told(told, ["shed"])
    check_history(run_dir, undisturbed, same_split=False)
    household.check_nothing_left(run_dir)
