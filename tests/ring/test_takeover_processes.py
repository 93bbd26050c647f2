"""The coordinator dies or falls asleep, and another member goes on with its run; real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from exo_train.agent.run_session import LEASE_VARIABLE
from exo_train.config import TrainConfig
from tests.agent.running_agents import wait_until
from tests.ring.household import Household
from tests.ring.household_runs import assert_same_training, metrics, run_training

pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("takeover"),
    pytest.mark.timeout(400),
    pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals"),
]

NAMES = ("attic", "desk", "hall")
STEPS, SAVE_EVERY, HELD_STEP = 8, 3, 6
WAIT_S = 150.0
LEASE_S, SHORT_LEASE_S = 100.0, 5.0


class Successors(Household):
    """Three members; the workers of desk stop before HELD_STEP while `mark` is there, once."""

    lease_s = LEASE_S

    def begin(self) -> None:
        self.mark, self.once = self.root / "held", self.root / "once"
        self.once.mkdir(parents=True)
        hold = f"hold@phase=forward,step={HELD_STEP},mark={self.mark},once={self.once}"
        for name in NAMES:
            self.add(name, "torch", fault=hold if name == "desk" else "")
        self.wait_met(NAMES)

    def environment(self, name: str) -> dict[str, str]:
        return super().environment(name) | {LEASE_VARIABLE: str(self.lease_s)}

    def start_driver(self, config: TrainConfig, run_dir: Path, *more: str) -> subprocess.Popen[str]:
        """Type `train` on attic, and wait until the ring is held before HELD_STEP."""
        log = self.root / "driver.log"
        command = [
            sys.executable, "-m", "exo_train", "train", config.model, "--data", config.data,
            "--steps", str(config.steps), "--batch-size", str(config.batch_size),
            "--microbatch-size", "2", "--max-seq-length", "96", "--learning-rate", "1e-3",
            "--save-every", str(config.save_every), "--profile-s", "0", "--min-devices", "3",
            "--run-dir", str(run_dir), *more,
        ]  # fmt: skip
        with log.open("w") as out:
            driver = subprocess.Popen(
                command,
                env=self.environment("attic"),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        wait_until(self.mark.exists, WAIT_S, lambda: log.read_text("utf-8"))
        return driver

    def let_go_on(self) -> None:
        self.mark.unlink(missing_ok=True)

    def replica(self) -> Path:
        (found,) = [
            folder
            for home in self.homes.values()
            if home.replicas.is_dir()
            for folder in home.replicas.iterdir()
        ]
        return found

    def wait_done(self, folder: Path) -> None:
        def is_done() -> bool:
            path = folder / "summary.json"
            return path.is_file() and json.loads(path.read_text("utf-8"))["status"] == "done"

        wait_until(is_done, WAIT_S, self.logs)

    def wait_quiet(self) -> None:
        """No worker and no driver of an agent's is left."""
        wait_until(lambda: not self.workers(), WAIT_S, lambda: f"{self.workers()}\n{self.logs()}")

    def logs(self) -> str:
        paths = [*self.root.glob("*/logs/agent.log"), *self.root.glob("*/logs/takeover-*.log")]
        paths += [self.root / "driver.log"]
        return "\n".join(f"{p}:\n{p.read_text('utf-8', 'replace')[-3000:]}" for p in paths)


@pytest.fixture
def members(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Successors]:
    """Three members; a parameter is their lease."""
    members = Successors(tmp_path / "household")
    members.lease_s = getattr(request, "param", LEASE_S)
    try:
        members.begin()
        yield members
    finally:
        members.let_go_on()
        members.close()


@pytest.fixture
def options(config: TrainConfig) -> TrainConfig:
    return replace(config, steps=STEPS, save_every=SAVE_EVERY)


@pytest.fixture(scope="module")
def undisturbed(
    household: Household, config: TrainConfig, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    run_training(
        household.homes["attic"],
        replace(config, steps=STEPS, save_every=SAVE_EVERY),
        run_dir,
        devices=("attic",),
    )
    return run_dir


def check_whole(folder: Path, undisturbed: Path) -> None:
    assert [row["step"] for row in metrics(folder)] == list(range(1, STEPS + 1))
    assert_same_training(folder, undisturbed)
    ours, theirs = (
        json.loads((path / "summary.json").read_text("utf-8")) for path in (folder, undisturbed)
    )
    for key in ("steps", "saved_step", "tokens"):
        assert ours[key] == theirs[key], key
    for key in ("loss_first", "loss_last", "eval_loss_before", "eval_loss_after"):
        assert ours[key] == pytest.approx(theirs[key], rel=1e-4), key


@pytest.mark.extended  # the next one is the same with more harm
def test_a_member_goes_on_when_the_driver_is_killed(
    members: Successors, options: TrainConfig, undisturbed: Path, tmp_path: Path
) -> None:
    driver = members.start_driver(options, tmp_path / "run")
    driver.kill()
    driver.wait()
    members.let_go_on()
    folder = members.replica()
    members.wait_done(folder)
    check_whole(folder, undisturbed)
    log = next(members.root.glob("*/logs/takeover-*.log")).read_text("utf-8")
    assert f"step {HELD_STEP - 1} was still in memory" in log, "the newest checkpoint is older"
    members.wait_quiet()


def test_a_member_goes_on_when_driver_and_agent_are_killed(
    members: Successors, options: TrainConfig, undisturbed: Path, tmp_path: Path
) -> None:
    """A copy of the coordinator's own layers was on its neighbour."""
    driver = members.start_driver(options, tmp_path / "run")
    members.processes["attic"].kill()
    driver.kill()
    driver.wait()
    members.let_go_on()
    folder = members.replica()
    members.wait_done(folder)
    check_whole(folder, undisturbed)
    log = next(members.root.glob("*/logs/takeover-*.log")).read_text("utf-8")
    assert f"step {HELD_STEP - 1} was still in memory" in log
    members.wait_quiet()


@pytest.mark.parametrize("members", [SHORT_LEASE_S], indirect=True)
def test_without_takeover_nobody_goes_on_until_it_is_asked_for(
    members: Successors, options: TrainConfig, undisturbed: Path, tmp_path: Path
) -> None:
    driver = members.start_driver(options, tmp_path / "run", "--no-takeover")
    driver.kill()
    driver.wait()
    members.let_go_on()
    members.wait_quiet()
    assert "nobody took it over" in members.logs()
    assert not list(members.root.glob("*/logs/takeover-*.log"))
    folder = members.replica()
    holder = folder.parents[1].name
    done = members.run(holder, "train", "--resume", str(folder), timeout_s=WAIT_S)
    assert done.returncode == 0, done.stderr
    check_whole(folder, undisturbed)
    members.wait_quiet()


def test_a_driver_that_was_asleep_is_told_and_disturbs_nothing(
    members: Successors, options: TrainConfig, undisturbed: Path, tmp_path: Path
) -> None:
    driver = members.start_driver(options, tmp_path / "run")
    driver.send_signal(signal.SIGSTOP)
    try:
        members.let_go_on()
        folder = members.replica()
        members.wait_done(folder)
        metrics_before = (folder / "metrics.jsonl").read_bytes()
    finally:
        driver.send_signal(signal.SIGCONT)
    code = driver.wait(WAIT_S)
    said = (members.root / "driver.log").read_text("utf-8")
    assert code == 3, said
    holder = folder.parents[1].name
    assert f"this run was taken over by {holder} and is at generation" in said
    assert (folder / "metrics.jsonl").read_bytes() == metrics_before
    check_whole(folder, undisturbed)
    members.wait_quiet()
