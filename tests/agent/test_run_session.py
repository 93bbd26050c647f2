"""The agent's side of a rank: whose words pass through it, and a worker that is stopped or gone."""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from exo_train.agent import run_session, worker_process
from exo_train.agent.run_session import RunSession, WorkerSettings
from exo_train.backends.registry import available_backends
from exo_train.cluster.home import Home
from exo_train.wire.pb import control_pb2 as pb

pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("agents"),
    pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals"),
]
WAIT_S = 60.0
LOOPBACK = "127.0.0.1"


class Stream:
    """A driver's end of one Run stream, without a network."""

    def __init__(self, home: Home) -> None:
        identity = home.found()
        settings = WorkerSettings(
            node_id=identity.node_id,
            name="den-pc",
            cluster=identity.cluster,
            listen_hosts=(LOOPBACK,),
            hosts=(LOOPBACK,),
            home=home.path,
            logs=home.logs,
            backends=available_backends(),
            devices={"cpu": True},
            own_models={},
        )
        self.generation, self.rank = 1, 2
        prepare = pb.Prepare(
            backend=available_backends()[0],
            device="cpu",
            node_id=identity.node_id,
            cluster=identity.cluster,
        )
        self.session = RunSession(settings, self.message(prepare=prepare), identity.node_id)
        self.worker = psutil.Process(self.session.worker_pid)
        self._requests: queue.SimpleQueue[pb.RunMessage | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[pb.RunMessage | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def is_active(self) -> bool:  # what the session asks of gRPC's context
        return True

    def message(self, **body: Any) -> pb.RunMessage:
        return pb.RunMessage(run_id="r1", generation=self.generation, rank=self.rank, **body)

    def say(self, **body: Any) -> None:
        self._requests.put(self.message(**body))

    def hear(self, kind: str) -> pb.RunMessage:
        while (answer := self._answers.get(timeout=WAIT_S)) is not None:
            if answer.WhichOneof("body") == kind:
                return answer
            assert answer.WhichOneof("body") == "progress", answer
        raise AssertionError(f"the stream ended without '{kind}'")

    def progress(self, is_right: Callable[[pb.RunMessage], bool]) -> pb.RunMessage:
        """Wait for a sign of life of which this holds."""
        while not is_right(answer := self.hear("progress")):
            pass
        return answer

    def end(self) -> None:
        self._requests.put(None)
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        assert not self.worker.is_running()

    def _serve(self) -> None:
        for answer in self.session.serve(iter(self._requests.get, None), self):  # type: ignore[arg-type]
            self._answers.put(answer)
        self._answers.put(None)


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[Stream]:
    stream = Stream(Home(tmp_path / "home"))
    try:
        yield stream
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            stream.worker.kill()
        stream.end()


def test_the_session_follows_the_generations_of_the_ring(stream: Stream) -> None:
    """One worker for all: none is started anew."""
    port = stream.hear("prepared").prepared.data_endpoints[0].port
    assert (stream.session.generation, stream.session.rank) == (1, 2)
    stream.generation = 4
    stream.say(rewind=pb.Rewind())
    assert stream.hear("rewound").generation == 4
    assert (stream.session.generation, stream.session.rank) == (4, 2)
    stream.rank = 0
    stream.say(load=pb.Load(plan_json="{"))
    failure = stream.hear("failure")
    assert (failure.generation, failure.rank) == (4, 0)
    assert (stream.session.generation, stream.session.rank) == (4, 0)
    told = stream.progress(lambda m: m.generation == 4)
    assert told.rank == 0
    assert told.progress.silent_s < WAIT_S
    assert stream.worker.is_running()
    socket.create_connection((LOOPBACK, port), timeout=5).close()
    stream.say(finish=pb.Finish())
    stream.end()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOOPBACK, port), timeout=5)


def test_a_worker_that_is_killed_is_a_lost_rank_of_the_generation_that_goes_on(
    stream: Stream,
) -> None:
    stream.hear("prepared")
    stream.generation = 2
    stream.say(rewind=pb.Rewind())
    stream.hear("rewound")
    stream.worker.kill()
    failure = stream.hear("failure")
    assert failure.failure.kind == "LostRankError"
    assert "SIGKILL" in failure.failure.message
    assert failure.generation == 2, "else the driver would drop it as an old one"


def test_a_worker_that_stands_still_is_told_and_can_be_ended(stream: Stream) -> None:
    stream.hear("prepared")
    stream.worker.send_signal(signal.SIGSTOP)
    told = stream.progress(lambda m: m.progress.silent_s > 2.5)
    assert told.generation == 1
    stream.end()


def test_a_worker_that_has_stood_still_for_long_is_killed_with_its_stream(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ring waits for its end; whoever reads nothing cannot be asked."""
    monkeypatch.setattr(worker_process, "STOP_TIMEOUT_S", 600.0)
    monkeypatch.setattr(run_session, "STANDS_STILL_S", 1.5)
    stream.hear("prepared")
    stream.worker.send_signal(signal.SIGSTOP)
    stream.progress(lambda m: m.progress.silent_s > 1.5)
    stream.end()


def test_a_worker_that_stands_still_can_be_ended_with_much_unread(stream: Stream) -> None:
    """The pipe is full: whoever writes to it waits, and must not keep the worker alive."""
    stream.hear("prepared")
    stream.worker.send_signal(signal.SIGSTOP)
    array = pb.StateArray(kind=pb.ADAPTER, name="x", dtype="<f4", shape=[1], data=bytes(4 << 20))
    for _ in range(4):
        stream.say(state_array=array)
    stream.progress(lambda m: m.progress.silent_s > 1.5)
    stream.session.stop()
    stream.end()


def test_a_worker_that_goes_on_is_heard_again(stream: Stream) -> None:
    stream.hear("prepared")
    stream.worker.send_signal(signal.SIGSTOP)
    stream.progress(lambda m: m.progress.silent_s > 2.5)
    stream.worker.send_signal(signal.SIGCONT)
    stream.progress(lambda m: m.progress.silent_s < 2.0)
    stream.generation = 2
    stream.say(rewind=pb.Rewind())
    assert stream.hear("rewound").generation == 2
