"""The profiler's process: it answers, says why it does not, and never outlives who asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from exo_train.agent.profiler_process import NotWantedError, run_profiler
from exo_train.errors import ConfigError, DoesNotFitError, ExoTrainError, ModelError, ProtocolError
from exo_train.plan.block_times import BlockTimes, ProfileRequest
from exo_train.wire.framing import frame
from tests.agent import profile_requests

pytestmark = pytest.mark.processes
posix_only = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 120.0
CHILD = """
import json, os, sys, time
from exo_train.wire.framing import frame, read_message
request = json.loads(read_message(sys.stdin.buffer))
def answer(data):
    sys.stdout.buffer.write(frame(data)); sys.stdout.buffer.flush()
match request["device"]:
    case "silent":
        sys.exit(0)
    case "crash":
        sys.exit(3)
    case "abort":
        os.abort()
    case "noise":
        print("Loading checkpoint shards: 100%", flush=True)
    case "nonsense":
        answer(b"\\xff")
    case "list":
        answer(b"[]")
    case "empty":
        answer(b"{}")
    case "negative":
        answer(json.dumps({"times": {"ends": [], "memory": [], "layer_forward_s": -1}}).encode())
    case "full":
        answer(json.dumps({"failure": {"kind": "DoesNotFitError", "message": "no room"}}).encode())
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Other tests' agents may be children of this process too."""
    before = {process.pid for process in psutil.Process().children()}
    yield
    assert [p for p in psutil.Process().children() if p.pid not in before] == []


def request(**changed: Any) -> ProfileRequest:
    return profile_requests.request(**{"with_ends": True, **changed})


def ask(folder: Path, **changed: Any) -> BlockTimes:
    return run_profiler(
        request(**changed), timeout_s=START_TIMEOUT_S, log_path=folder / "profiler.log"
    )


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_a_device_says_how_fast_it_is(tmp_path: Path, backend: str) -> None:
    times = ask(tmp_path, backend=backend)
    assert 0 < times.layer_forward_s < 5
    assert 0 < times.layer_backward_s < 10
    assert times.ends is not None
    assert 0 <= times.ends.head_s < 10


def test_a_device_made_slow_for_a_test_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a plan would not know what its workers are going to take."""
    monkeypatch.setenv("EXO_TRAIN_TEST_FAULT", "sleep_ms:200")
    times = ask(tmp_path)
    assert times.layer_forward_s > 0.15
    assert times.layer_backward_s > 0.15


def test_refusals_come_back_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"torch cpu: 'max_seq_length' 513 .* 512 positions"):
        ask(tmp_path, sequence=513)
    with pytest.raises(ConfigError, match="no backend is called 'jax'"):
        ask(tmp_path, backend="jax")
    with pytest.raises(ModelError, match="'hidden_size'"):
        ask(tmp_path, config_json=json.dumps({"model_type": "llama", "num_attention_heads": 2}))


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A small process in the profiler's place; the device names what it does."""
    (tmp_path / "profiler_for_tests.py").write_text(textwrap.dedent(CHILD))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    return "profiler_for_tests"


@pytest.mark.parametrize(
    ("device", "kind", "message"),
    [
        ("silent", ExoTrainError, "gave no answer: it ended"),
        ("crash", ExoTrainError, "exit code 3"),
        pytest.param("abort", ExoTrainError, "SIGABRT", marks=posix_only),
        ("noise", ExoTrainError, "noise"),
        ("nonsense", ProtocolError, "not UTF-8"),
        ("list", ProtocolError, "must be an object"),
        ("empty", ProtocolError, "must be an object"),
        ("negative", ProtocolError, "layer_forward_s"),
        ("full", DoesNotFitError, "timing a layer on torch full: no room"),
    ],
)
def test_every_bad_end_is_one_sentence(
    tmp_path: Path, child: str, device: str, kind: type[ExoTrainError], message: str
) -> None:
    log_path = tmp_path / "logs" / "profiler.log"
    with pytest.raises(ExoTrainError, match=message) as caught:
        run_profiler(request(device=device), timeout_s=30.0, log_path=log_path, module=child)
    assert type(caught.value) is kind


def test_the_wait_has_an_end(tmp_path: Path, child: str) -> None:
    started_s = time.monotonic()
    with pytest.raises(ExoTrainError, match=r"torch sleeper took longer than its limit of 0.5 s"):
        run_profiler(
            request(device="sleeper"),
            timeout_s=0.5,
            log_path=tmp_path / "profiler.log",
            module=child,
        )
    assert time.monotonic() - started_s < 0.5 + 2.5 + 5


def test_nobody_waiting_ends_it_at_once(tmp_path: Path, child: str) -> None:
    asked_s = time.monotonic()
    with pytest.raises(NotWantedError, match=r"torch sleeper was ended: nobody waits"):
        run_profiler(
            request(device="sleeper"),
            timeout_s=60.0,
            log_path=tmp_path / "profiler.log",
            module=child,
            is_wanted=lambda: time.monotonic() < asked_s + 0.3,
        )
    assert 0.3 < time.monotonic() - asked_s < 0.3 + 2.5 + 5


def test_the_process_ends_with_its_input_in_the_middle_of_its_work() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "exo_train.profiler"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(frame(request(budget_s=60.0).to_json().encode()))
        process.stdin.flush()
        _wait_busy(process.pid)
        process.stdin.close()
        assert process.wait(5) == 0
        assert process.stdout.read() == b""
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@posix_only
def test_a_killed_agent_takes_its_profiler_along(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from exo_train.agent.profiler_process import run_profiler
from exo_train.plan.block_times import ProfileRequest
request = ProfileRequest.from_json({request(budget_s=60.0).to_json()!r}, place="here")
run_profiler(request, timeout_s=100, log_path=Path({str(tmp_path / "log")!r}))
"""
    agent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        until_s = time.monotonic() + START_TIMEOUT_S
        while not (children := psutil.Process(agent.pid).children()):
            assert time.monotonic() < until_s
            time.sleep(0.05)
        _wait_busy(children[0].pid)
        agent.send_signal(signal.SIGKILL)
        children[0].wait(5)
    finally:
        agent.kill()
        agent.wait()


def _wait_busy(pid: int) -> None:
    """Wait until the framework is loaded, so that the end comes while it computes."""
    until_s = time.monotonic() + START_TIMEOUT_S
    while psutil.Process(pid).memory_info().rss < 250 << 20:
        assert time.monotonic() < until_s
        time.sleep(0.05)
