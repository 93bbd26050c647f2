"""An agent that goes while its run is going on, and cannot be started again at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from exo_train.agent import household_now
from exo_train.agent.household_now import HouseholdNow
from exo_train.agent.local_client import LocalClient
from exo_train.agent.opening import Narrator, OpenedModel
from exo_train.cluster.home import AgentEndpoint, Home
from exo_train.config import TrainConfig
from exo_train.errors import PeerError

MEMBER = {"id": "a", "name": "attic", "state": "alive"}


class Agent:
    """Answers until it is gone."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_gone = self.is_closed = False

    def status(self) -> dict[str, Any]:
        if self.is_closed:
            raise AssertionError("a closed client was asked")
        if self.is_gone:
            raise PeerError("this home's agent does not answer")
        return {"self": "a", "members": [MEMBER], "links": [], "number": self.number}


class Agents:
    """Starts agents, unless `fails`."""

    def __init__(self) -> None:
        self.started: list[Agent] = []
        self.fails = False

    @contextlib.contextmanager
    def own_agent(self, home: Home) -> Iterator[Agent]:
        if self.fails:
            raise PeerError("an agent for this home could not be started")
        agent = Agent(len(self.started))
        self.started.append(agent)
        yield agent
        agent.is_closed = True


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Agents:
    agents = Agents()
    monkeypatch.setattr(household_now, "own_agent", agents.own_agent)
    monkeypatch.setattr(household_now, "own_tls", lambda home: SimpleNamespace(to=None))
    return agents


def test_an_agent_that_cannot_be_started_is_tried_again(agents: Agents, tmp_path: Path) -> None:
    notes: list[str] = []
    narrator = Narrator(on_note=notes.append)
    model = cast(OpenedModel, None)
    with HouseholdNow(Home(tmp_path), TrainConfig(model="m"), model, narrator) as household:
        from_thread = household.asking(from_thread=True).status
        agents.started[0].is_gone = agents.fails = True
        for _ in range(2):
            with pytest.raises(PeerError, match="could not be started"):
                household.status()
            with pytest.raises(PeerError, match="is to be started again"):
                from_thread()
        agents.fails = False
        assert household.status()["number"] == 1
        assert from_thread()["number"] == 1
    assert agents.started[0].is_closed
    assert len(notes) == 3


def test_a_channel_that_another_thread_closed_is_no_crash() -> None:
    client = LocalClient(AgentEndpoint(pid=1, started_s=0, local_port=1, control_port=1, token="t"))
    with client:
        pass
    with pytest.raises(PeerError, match="the connection to this home's agent was closed"):
        client.status()
