"""A worker whose driver is lost: kept, adopted by another driver, refused to others, ended."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from exo_train.agent.run_session import RunSession, WorkerSettings
from exo_train.agent.sessions import Sessions
from exo_train.backends.registry import available_backends
from exo_train.cluster.home import Home
from exo_train.errors import TakenOverError
from exo_train.peer import NodeId
from exo_train.wire.pb import control_pb2 as pb
from tests.agent.running_agents import wait_until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("agents"),
    pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals"),
]
WAIT_S = 60.0
LOOPBACK = "127.0.0.1"
ANN, BOB, CAT = (NodeId(letter * 32) for letter in "abc")
NAMES = {ANN: "attic", BOB: "hall", CAT: "desk"}


class Device:
    """One member's sessions, with a short lease where the test wants it."""

    def __init__(self, home: Home, *, lease_s: float = 600.0) -> None:
        self.identity = home.found()
        self.settings = WorkerSettings(
            node_id=self.identity.node_id,
            name="den-pc",
            cluster=self.identity.cluster,
            listen_hosts=(LOOPBACK,),
            hosts=(LOOPBACK,),
            home=home.path,
            logs=home.logs,
            backends=available_backends(),
            devices={"cpu": True},
            own_models={},
        )
        self.sessions = Sessions(lambda: self.settings, name_of=NAMES.__getitem__, lease_s=lease_s)

    def prepare(self, *, generation: int, adopt: bool = False) -> pb.RunMessage:
        prepare = pb.Prepare(
            backend=available_backends()[0],
            device="cpu",
            node_id=self.identity.node_id,
            cluster=self.identity.cluster,
            adopt=adopt,
        )
        return pb.RunMessage(run_id="r1", generation=generation, rank=1, prepare=prepare)

    def lead(self, driver: NodeId, *, generation: int, adopt: bool = False) -> Driver:
        first = self.prepare(generation=generation, adopt=adopt)
        return Driver(self.sessions, self.sessions.open(first, driver), generation)


class Driver:
    """A driver's end of one stream, without a network."""

    def __init__(self, sessions: Sessions, session: RunSession, generation: int) -> None:
        self.session, self._sessions, self._generation = session, sessions, generation
        self.worker = psutil.Process(session.worker_pid)
        self._requests: queue.SimpleQueue[pb.RunMessage | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[pb.RunMessage | None] = queue.SimpleQueue()
        self._is_active = True
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def is_active(self) -> bool:  # what the session asks of gRPC's context
        return self._is_active

    def say(self, **body: Any) -> None:
        self._requests.put(pb.RunMessage(run_id="r1", generation=self._generation, rank=1, **body))

    def hear(self, kind: str) -> pb.RunMessage:
        while (answer := self._answers.get(timeout=WAIT_S)) is not None:
            if answer.WhichOneof("body") == kind:
                return answer
        raise AssertionError(f"the stream ended without '{kind}'")

    def end(self) -> None:
        """End the stream as a driver does on purpose."""
        self._requests.put(None)
        self._thread.join(WAIT_S)

    def die(self, *, as_end: bool = False) -> None:
        """Break the stream; `as_end`: gRPC gives it as an end first."""
        self._is_active = False
        self._requests.put(None if as_end else pb.RunMessage(run_id="broken"))
        self._thread.join(WAIT_S)

    def _serve(self) -> None:
        try:
            for answer in self.session.serve(self._messages(), self):  # type: ignore[arg-type]
                self._answers.put(answer)
        finally:
            self._sessions.left(self.session)
            self._answers.put(None)

    def _messages(self) -> Iterator[pb.RunMessage]:
        while (message := self._requests.get()) is not None:
            if message.run_id == "broken":
                raise grpc.RpcError
            yield message


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    device = Device(Home(tmp_path / "home"))
    yield device
    device.sessions.close()


def gone(worker: psutil.Process) -> Callable[[], bool]:
    return lambda: not worker.is_running()


@pytest.mark.parametrize("as_end", [False, True])
def test_a_lost_drivers_worker_is_kept_and_another_driver_goes_on_with_it(
    device: Device, as_end: bool
) -> None:
    first = device.lead(ANN, generation=3)
    endpoints = first.hear("prepared").prepared.data_endpoints
    first.die(as_end=as_end)
    facts = device.sessions.facts()
    assert facts is not None
    assert facts.orphaned
    assert facts.coordinator_id == ANN
    assert "its coordinator is gone; kept for" in facts.phase
    assert first.worker.is_running()

    second = device.lead(BOB, generation=1003, adopt=True)
    prepared = second.hear("prepared")
    assert prepared.prepared.data_endpoints == endpoints
    assert prepared.generation == 1003
    assert second.worker == first.worker
    second.say(rewind=pb.Rewind())
    assert second.hear("rewound").generation == 1003
    facts = device.sessions.facts()
    assert facts is not None
    assert not facts.orphaned
    assert facts.coordinator_id == BOB
    second.say(finish=pb.Finish())
    wait_until(gone(second.worker), WAIT_S, lambda: "the worker outlived `finish`")
    second.end()
    assert device.sessions.facts() is None


@pytest.mark.parametrize("how", ["ended", "finish", "failure"])
def test_a_driver_that_ends_the_run_leaves_no_worker(device: Device, how: str) -> None:
    driver = device.lead(ANN, generation=1)
    driver.hear("prepared")
    if how == "finish":
        driver.say(finish=pb.Finish())
    if how == "failure":
        driver.say(failure=pb.Failure(kind="InterruptedRunError", message="Ctrl-C"))
    driver.end() if how == "ended" else driver.die()
    wait_until(gone(driver.worker), WAIT_S, lambda: "the worker was kept")
    assert device.sessions.facts() is None


def test_nobody_takes_it_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    device = Device(Home(tmp_path / "home"), lease_s=1.0)
    driver = device.lead(ANN, generation=1)
    driver.hear("prepared")
    driver.die()
    wait_until(gone(driver.worker), WAIT_S, lambda: "the worker outlived its lease")
    wait_until(lambda: device.sessions.facts() is None, WAIT_S, lambda: "it is remembered")
    assert "exo-train train --resume DIR" in caplog.text
    new = device.lead(BOB, generation=1003, adopt=True)  # too late: it begins anew
    assert new.worker != driver.worker
    new.hear("prepared")
    device.sessions.close()


def test_a_run_that_is_led_has_no_second_driver(device: Device) -> None:
    driver = device.lead(ANN, generation=2)
    driver.hear("prepared")
    with pytest.raises(TakenOverError, match="led by attic and is at generation 2"):
        device.lead(BOB, generation=1003, adopt=True)
    assert driver.worker.is_running()


def test_the_driver_before_is_told_who_has_taken_over(device: Device) -> None:
    """Also when the run is over: it must not begin it once more."""
    old = device.lead(ANN, generation=2)
    old.hear("prepared")
    old.die()
    new = device.lead(BOB, generation=1002, adopt=True)
    new.hear("prepared")
    said = "this run was taken over by hall and is at generation 1002"
    with pytest.raises(TakenOverError, match=said):
        device.lead(ANN, generation=2000)
    new.say(finish=pb.Finish())
    new.end()
    with pytest.raises(TakenOverError, match=said):
        device.lead(ANN, generation=3)


def test_a_lost_driver_that_comes_back_itself_begins_anew(device: Device) -> None:
    old = device.lead(ANN, generation=2)
    old.hear("prepared")
    old.die()
    again = device.lead(ANN, generation=3)
    again.hear("prepared")
    assert again.worker != old.worker
    with contextlib.suppress(psutil.NoSuchProcess):
        assert not old.worker.is_running()
