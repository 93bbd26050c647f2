"""Harm at an address: it strikes there, as often as asked, and nowhere else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exo_train.backends.base import MicrobatchInput, Stage
from exo_train.errors import ConfigError, DoesNotFitError
from exo_train.train.faults import VARIABLE, KilledError, point, with_fault

DEADLINE_S = 60.0


class QuietStage:
    """Keeps what it was asked to do."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def begin_step(self, *, step: int, loss_scale: float) -> None:
        self.done.append(f"begin {step}")

    def forward(self, microbatch: MicrobatchInput) -> None:
        self.done.append(f"F{microbatch.index}")

    def backward(self, index: int, grad_BTD: object) -> None:
        self.done.append(f"B{index}")

    def evaluate(self, microbatch: MicrobatchInput) -> float:
        self.done.append(f"E{microbatch.index}")
        return 1.0

    def apply(self, *, learning_rate: float, grad_scale: float) -> None:
        self.done.append("apply")

    def adapter(self) -> dict[str, np.ndarray]:
        return {f"model.layers.{i}.mlp.up_proj.lora_a": np.zeros(1) for i in (4, 5)}

    def optimizer_state(self) -> dict[str, np.ndarray]:
        return {}


def run(stage: Stage, *steps: int) -> None:
    """Drive a stage as a rank does: three microbatches, commit, snapshot, evaluation."""
    for step in steps:
        stage.begin_step(step=step, loss_scale=1.0)
        for index in range(3):
            stage.forward(MicrobatchInput(index=index))
        for index in range(3):
            stage.backward(index, None)
        stage.apply(learning_rate=1.0, grad_scale=1.0)
        stage.adapter()
        stage.optimizer_state()
        stage.evaluate(MicrobatchInput(index=0))


def struck(setting: str, *, rank: int | None = 1) -> tuple[Stage, list[str]]:
    inner: Any = QuietStage()
    return with_fault(inner, setting, rank=rank, in_process=True), inner.done


ALL = ["F0", "F1", "F2", "B0", "B1", "B2", "apply", "E0"]


@pytest.mark.parametrize(
    ("address", "last_done"),
    [
        ("phase=forward", "F0"),
        ("phase=forward,microbatch=2", "F2"),
        ("phase=between", "F0"),
        ("phase=between,microbatch=2", "F1"),
        ("phase=backward", "B0"),
        ("phase=backward,microbatch=1", "B1"),
        ("phase=commit", "B2"),
        ("phase=committed", "apply"),
        ("phase=snapshot", "apply"),
        ("phase=evaluate", "E0"),
    ],
)
def test_it_strikes_at_its_phase(address: str, last_done: str) -> None:
    stage, done = struck(f"kill@rank=1,step=2,{address}")
    with pytest.raises(KilledError):
        run(stage, 1, 2)
    expected = ["begin 1", *ALL, "begin 2", *ALL[: ALL.index(last_done) + 1]]
    assert done == expected


@pytest.mark.parametrize("action", ["kill", "term", "stop", "kill-agent", "stop-both", "exit"])
def test_a_thread_is_killed_in_place_of_its_process(action: str) -> None:
    stage, _ = struck(f"{action}@phase=forward")
    with pytest.raises(KilledError, match=action):
        run(stage, 1)
    assert not issubclass(KilledError, Exception), "no handler of errors may survive it"


def test_other_ranks_steps_and_microbatches_are_spared() -> None:
    for setting in (
        "kill@rank=0,phase=forward",
        "kill@step=9,phase=forward",
        "kill@phase=forward,microbatch=7",
        "kill@phase=replan",
        "kill@phase=loading",
    ):
        stage, done = struck(setting)
        run(stage, 1)
        assert done == ["begin 1", *ALL]
    stage, done = struck("kill@rank=0,phase=forward", rank=None)
    run(stage, 1)
    assert done == ["begin 1", *ALL], "a stage without a rank is nobody's"


def failures(stage: Stage, num_steps: int) -> list[int]:
    failed = []
    for step in range(1, num_steps + 1):
        try:
            run(stage, step)
        except RuntimeError:
            failed.append(step)
    return failed


def test_it_strikes_as_often_as_asked() -> None:
    assert failures(struck("error@phase=backward")[0], 4) == [1]
    assert failures(struck("error@phase=backward,times=3")[0], 5) == [1, 2, 3]


def test_a_restarted_process_does_not_strike_again(tmp_path: Path) -> None:
    setting = f"error@phase=backward,times=2,once={tmp_path}"
    assert [failures(struck(setting)[0], 1) for _ in range(4)] == [[1], [1], [], []]
    again = f"error@phase=forward,times=2,once={tmp_path}"
    assert failures(struck(again)[0], 3) == [1, 2], "each fault has its own count"


def test_several_faults_stand_side_by_side() -> None:
    stage, _ = struck("sleep_ms:0; error@step=2,phase=commit; error@step=4,phase=forward")
    assert failures(stage, 5) == [2, 4]


def test_memory_runs_out_as_in_a_framework() -> None:
    stage, _ = struck("oom@phase=backward,step=1")
    with pytest.raises(DoesNotFitError, match=r"layers 4\.\.5 ran out of memory .*'backward'"):
        run(stage, 1)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("kil@phase=forward", "must begin with one of kill, term"),
        ("kill@phase=foward", "needs a phase of loading, forward"),
        ("kill@step=3", "needs a phase"),
        ("kill@phase=forward,stp=3", "'stp=3' in .* is no key"),
        ("kill@phase=forward,step=x", "'step=x' in .* is no key"),
        ("kill-agent@phase=replan", "needs a phase of loading"),
        ("hold@phase=forward", "must hold to have a mark"),
        ("kill@phase=forward,mark=/tmp/x", "must hold to have a mark"),
        ("nan-activation@step=3", "misses its layer"),
        ("nan-loss@phase=forward", "takes no phase"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(setting: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        struck(setting)


def test_points_of_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    point("replan")  # nothing is set
    monkeypatch.setenv(VARIABLE, "slow:2")
    point("replan")
    monkeypatch.setenv(VARIABLE, "error@phase=checkpoint-write,step=4;oom@phase=replan")
    point("checkpoint-write", step=3)
    with pytest.raises(RuntimeError, match="checkpoint-write"):
        point("checkpoint-write", step=4)
    point("checkpoint-write", step=4)
    with pytest.raises(MemoryError):
        point("replan")


def test_loading_in_a_thread() -> None:
    with pytest.raises(KilledError):
        point("loading", rank=1, setting="kill@rank=1,phase=loading")
    with pytest.raises(DoesNotFitError, match="loading ran out of memory"):
        point("loading", rank=1, setting="oom@phase=loading")
    point("loading", rank=0, setting="kill@rank=1,phase=loading")
    point("loading", rank=0, setting="")


def wait_until(true: Callable[[], bool]) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_holding_until_the_test_has_done_its_harm(tmp_path: Path) -> None:
    mark = tmp_path / "held"
    stage, done = struck(f"hold@step=1,phase=commit,mark={mark}")
    thread = threading.Thread(target=run, args=(stage, 1))
    thread.start()
    wait_until(mark.exists)
    assert mark.read_text(encoding="utf-8") == f"commit rank=1 step=1 pid={os.getpid()}\n"
    assert done[-1] == "B2"
    mark.unlink()
    thread.join(timeout=DEADLINE_S)
    assert done[-1] == "E0"


CHILD = """
import sys
from exo_train.train.faults import point
sys.stdin.readline()
point("loading", rank=1)
print("went on", flush=True)
sys.stdin.readline()
"""


def child(setting: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD],
        env=os.environ | {VARIABLE: setting},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("action", "code"), [("kill", -signal.SIGKILL), ("term", -signal.SIGTERM), ("exit", 9)]
)
def test_a_process_comes_to_its_end(action: str, code: int) -> None:
    process = child(f"{action}@rank=1,phase=loading")
    said, _ = process.communicate("go\n", timeout=DEADLINE_S)
    assert (process.returncode, said) == (code, "")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see it stopped")
def test_a_process_is_stopped_and_goes_on() -> None:
    process = child("stop@rank=1,phase=loading")
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    stat = Path(f"/proc/{process.pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
    process.send_signal(signal.SIGCONT)
    said, _ = process.communicate("\n", timeout=DEADLINE_S)
    assert (process.returncode, said) == (0, "went on\n")


PARENT = """
import os, subprocess, sys
inner = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE,
    env=os.environ, text=True)
print(inner.pid, flush=True)
inner.communicate("go\\n")
"""


@pytest.mark.parametrize("whom", ["agent", "both"])
def test_its_agent_is_killed(whom: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD],
        env=os.environ | {VARIABLE: f"kill-{whom}@rank=1,phase=loading"},
        stdout=subprocess.PIPE,
        text=True,
    )
    said, _ = parent.communicate(timeout=DEADLINE_S)  # ends when both have let go of the pipe
    assert parent.returncode == -signal.SIGKILL
    assert said.split()[1:] == (["went", "on"] if whom == "agent" else [])
