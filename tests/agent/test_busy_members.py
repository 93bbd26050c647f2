"""Members that are busy: heartbeats pass whatever computes and whatever is served beside them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from exo_train.agent.local_client import LocalClient
from exo_train.peer import Address
from exo_train.transport.channel import open_channel
from exo_train.transport.tls import MemberTls
from exo_train.transport.weight_server import FETCH_METHOD
from exo_train.wire.pb import data_pb2
from tests.agent.running_agents import RunningAgent, loopback_interface, wait_met
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("agents")]

BUSY_S = 7.0  # longer than it takes to be suspected
FETCHERS = 3
VOCAB_SIZE = 65_536  # an embedding of 16 MiB


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[RunningAgent]]:
    options = ["--interface", loopback_interface()]
    agents = [RunningAgent(name, tmp_path, "busy", options) for name in ("studio", "den-pc")]
    try:
        for agent in agents:
            agent.start()
        wait_met(agents)
        yield agents
    finally:
        for agent in agents:
            agent.close()


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Compute on all cores twice over, as a worker and a game do."""
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(2 * (os.cpu_count() or 2))
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


class Fetcher(threading.Thread):
    """Takes the model's largest tensor from a member, again and again."""

    def __init__(self, address: Address, tls: MemberTls, giver: RunningAgent, until_s: float):
        super().__init__(daemon=True)
        self._address, self._tls, self._giver, self._until_s = address, tls, giver, until_s
        self.fetched_bytes = 0

    def run(self) -> None:
        tls = self._tls.to(self._giver.home.paired_identity().node_id)
        channel = open_channel(self._address, credentials=tls.credentials, tls_name=tls.name)
        fetch = channel.unary_stream(
            FETCH_METHOD, request_serializer=bytes, response_deserializer=bytes
        )
        names = ["model.embed_tokens.weight"]
        request = data_pb2.FetchRequest(token="t" * 32, names=names).SerializeToString()
        with contextlib.suppress(grpc.RpcError):
            while time.monotonic() < self._until_s:
                for message in fetch(request, timeout=30):
                    self.fetched_bytes += len(message)
        channel.close()


def test_busy_cores_and_bulk_data_are_no_silence(pair: list[RunningAgent], tmp_path: Path) -> None:
    giver, taker = pair
    model = make_tiny_model(tmp_path / "model", vocab_size=VOCAB_SIZE, num_layers=1)
    endpoint = giver.home.agent()
    assert endpoint is not None
    with LocalClient(endpoint) as client:
        addresses = client.serve_model(run_id="r1", token="t" * 32, path=str(model))
    identity = taker.home.paired_identity()
    tls = MemberTls(identity, taker.home.roster(identity).certificate)
    end_s = time.monotonic() + BUSY_S
    fetchers = [Fetcher(addresses[0], tls, giver, end_s) for _ in range(FETCHERS)]
    states: set[str] = set()
    with busy_cores():
        for fetcher in fetchers:
            fetcher.start()
        while time.monotonic() < end_s:
            states |= set(giver.states().values()) | set(taker.states().values())
            time.sleep(0.3)
        for fetcher in fetchers:
            fetcher.join(timeout=30)
    assert sum(fetcher.fetched_bytes for fetcher in fetchers) > 50e6, "there was bulk data"
    assert states == {"alive"}
    for agent in pair:
        assert "has not answered" not in agent.output
