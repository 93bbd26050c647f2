"""The agent's hold on its worker: why it ended is said, and it never outlives its agent."""

from __future__ import annotations

import queue
import secrets
import signal
import sys
import textwrap
from pathlib import Path

import grpc
import psutil
import pytest

from exo_train.agent import worker_process
from exo_train.agent.worker_process import WorkerProcess
from exo_train.backends.registry import available_backends
from exo_train.cluster.home import Home
from exo_train.peer import Address, NodeId
from exo_train.transport.channel import open_channel
from exo_train.transport.tls import MemberTls
from exo_train.wire.pb import control_pb2 as pb
from exo_train.wire.pb.control_pb2_grpc import ControlStub
from tests.agent.running_agents import RunningAgent, loopback_interface, wait_until
from tests.paired_homes import admit

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("agents")]
posix_only = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
EXIT_TIMEOUT_S = 20.0
CHILD = """
import os, sys, time
from exo_train.wire.framing import frame, read_message
out = sys.stdout.buffer
out.write(frame(b"ready")); out.flush()
while (message := read_message(sys.stdin.buffer)) is not None:
    if message == b"exit":
        sys.exit(3)
    if message == b"noise":
        print("Loading checkpoint shards: 100%", flush=True)
        time.sleep(60)
    if message == b"deaf":
        time.sleep(60)
    out.write(frame(message.upper())); out.flush()
"""


class Talk:
    """A worker process and what came from it."""

    def __init__(self, folder: Path, module: str, *arguments: str) -> None:
        self.messages: queue.Queue[bytes] = queue.Queue()
        self.exits: queue.Queue[str] = queue.Queue()
        self.worker = WorkerProcess(
            arguments,
            log_path=folder / "logs" / "worker.log",
            on_message=self.messages.put,
            on_exit=self.exits.put,
            module=module,
        )
        self.process = psutil.Process(self.worker.pid)

    def exit_reason(self) -> str:
        reason = self.exits.get(timeout=EXIT_TIMEOUT_S)
        assert not self.process.is_running()
        return reason


@pytest.fixture
def talk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A small child in place of the worker, so that no tensor framework is loaded."""
    (tmp_path / "child_for_tests.py").write_text(textwrap.dedent(CHILD))
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{';' if sys.platform == 'win32' else ':'}{root}")
    talk = Talk(tmp_path, "child_for_tests")
    assert talk.messages.get(timeout=EXIT_TIMEOUT_S) == b"ready"
    yield talk
    talk.worker.stop()


def test_messages_go_both_ways_and_a_stop_is_no_failure(talk: Talk) -> None:
    talk.worker.send(b"hello")
    assert talk.messages.get(timeout=5) == b"HELLO"
    talk.worker.stop()
    assert talk.exit_reason() == ""
    talk.worker.send(b"too late")
    talk.worker.stop()


def test_an_exit_code_is_told_with_the_log(talk: Talk) -> None:
    talk.worker.send(b"exit")
    reason = talk.exit_reason()
    assert "ended with exit code 3" in reason
    assert "worker.log" in reason


@posix_only
def test_a_kill_is_told_with_its_usual_cause(talk: Talk) -> None:
    talk.process.send_signal(signal.SIGKILL)
    reason = talk.exit_reason()
    assert "SIGKILL" in reason
    assert "memory runs out" in reason


@posix_only
def test_an_abort_of_the_framework_is_named(talk: Talk) -> None:
    talk.process.send_signal(signal.SIGABRT)
    assert "SIGABRT" in talk.exit_reason()


def test_noise_on_the_pipe_ends_the_worker_with_a_reason(talk: Talk) -> None:
    talk.worker.send(b"noise")
    assert "noise" in talk.exit_reason()


def test_a_worker_that_does_not_listen_is_killed(talk: Talk) -> None:
    talk.worker.send(b"deaf")
    talk.worker.stop()
    assert talk.exit_reason() == ""


@posix_only
def test_a_worker_that_stands_still_is_not_waited_for(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "STOP_TIMEOUT_S", 600.0)
    talk.process.send_signal(signal.SIGSTOP)
    talk.worker.stop(at_once=True)
    assert talk.exit_reason() == ""


def test_the_real_worker_ends_with_its_input(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.found()
    talk = Talk(tmp_path, "exo_train.worker", "--home", str(home.path))
    first = pb.RunMessage.FromString(talk.messages.get(timeout=30))
    assert first.progress.phase == "starting"
    talk.worker.stop()
    assert talk.exit_reason() == ""


def test_a_wrong_start_of_the_real_worker_is_in_the_log(tmp_path: Path) -> None:
    talk = Talk(tmp_path, "exo_train.worker", "--no-such-option")
    assert "exit code 2" in talk.exit_reason()
    talk.worker.stop()
    assert "--home" in (tmp_path / "logs" / "worker.log").read_text()


def prepare(agent: RunningAgent, **changed: str) -> pb.RunMessage:
    """Give the first message of a run's stream, as this agent takes it unless changed."""
    backend = available_backends()[0]
    cluster = agent.home.paired_identity().cluster
    fields = {"backend": backend, "device": "cpu", "node_id": agent.id, "cluster": cluster}
    body = pb.Prepare(**{**fields, **changed})
    return pb.RunMessage(run_id="r1", generation=1, rank=0, prepare=body)


def channel_of_another_member(agent: RunningAgent) -> grpc.Channel:
    """Open what a run's driver on another device would."""
    home = Home(agent.root / "driver")
    identity = admit(home, agent.home)
    tls = MemberTls(identity, home.roster(identity).certificate).to(NodeId(agent.id))
    address = Address("127.0.0.1", agent.port)
    return open_channel(address, credentials=tls.credentials, tls_name=tls.name)


@posix_only
def test_a_killed_agent_takes_its_worker_along(tmp_path: Path) -> None:
    options = ["--interface", loopback_interface()]
    agent = RunningAgent("keeper", tmp_path, f"test-{secrets.token_hex(4)}", options)
    agent.start()
    channel = channel_of_another_member(agent)
    try:
        requests: queue.SimpleQueue[pb.RunMessage | None] = queue.SimpleQueue()
        requests.put(prepare(agent))
        replies = ControlStub(channel).Run(iter(requests.get, None))
        first = next(replies)
        while first.WhichOneof("body") == "progress":
            first = next(replies)
        assert first.WhichOneof("body") == "prepared"
        run = agent.status()["run"]
        assert (run["id"], run["generation"]) == ("r1", 1)
        assert [(rank["name"], rank["rank"]) for rank in run["ranks"]] == [("keeper", 0)]
        worker = psutil.Process(run["worker_pid"])
        assert worker.is_running()
        agent.end(signal.SIGKILL)
        worker.wait(5)
        requests.put(None)
    finally:
        channel.close()
        agent.close()


@posix_only
def test_only_the_right_driver_gets_a_worker_and_takes_it_along(tmp_path: Path) -> None:
    options = ["--interface", loopback_interface()]
    agent = RunningAgent("keeper", tmp_path, f"test-{secrets.token_hex(4)}", options)
    agent.start()
    channel = channel_of_another_member(agent)
    try:
        requests: queue.SimpleQueue[pb.RunMessage | None] = queue.SimpleQueue()
        for changed in ({"cluster": "next-door"}, {"node_id": "0" * 32}, {"backend": "jax"}):
            with pytest.raises(grpc.RpcError) as refused:
                next(ControlStub(channel).Run(iter([prepare(agent, **changed)])))
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION  # type: ignore[attr-defined]
            assert "keeper" in refused.value.details()  # type: ignore[attr-defined]
        requests.put(prepare(agent))
        replies = ControlStub(channel).Run(iter(requests.get, None))
        next(replies)
        worker = psutil.Process(agent.status()["run"]["worker_pid"])
        first = prepare(agent)
        end = pb.RunMessage(run_id=first.run_id, generation=first.generation, finish=pb.Finish())
        requests.put(end)  # one that just goes leaves its worker for another: see sessions
        worker.wait(10)
        wait_until(lambda: agent.status()["run"] is None, 5, lambda: str(agent.status()["run"]))
        requests.put(None)
    finally:
        channel.close()
        assert agent.end(signal.SIGINT) == 0
