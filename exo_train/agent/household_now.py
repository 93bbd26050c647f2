"""The household as a running run sees it: who is here now, and how their agents are reached.

Owns this device's own agent for the length of the run, which is started again when it is gone, and
what the model is served with. Must not choose a plan.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from typing import Any

from exo_train.agent.adopting import check_still_led
from exo_train.agent.live_plan import Asking
from exo_train.agent.local_client import LocalClient, own_agent
from exo_train.agent.members import candidates_now
from exo_train.agent.opening import (
    Narrator,
    OpenedModel,
    best_host_of,
    channels_to,
    own_tls,
    tell_fetched,
    weights_access,
)
from exo_train.agent.planning import Candidate
from exo_train.agent.replicating import Holder
from exo_train.cluster.home import Home
from exo_train.config import TrainConfig
from exo_train.errors import PeerError
from exo_train.peer import Address, NodeId
from exo_train.plan.history import StepId
from exo_train.plan.plan import Key, Plan
from exo_train.train.ring import RankChannel, Ring

MEET_S = 8.0
MEET_POLL_S = 0.3


class HouseholdNow:
    """Context manager; leaving it ends what it started. The driver's thread only."""

    def __init__(
        self,
        home: Home,
        config: TrainConfig,
        model: OpenedModel,
        narrator: Narrator,
        *,
        wants_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._home = home
        self._config = config
        self._model = model
        self._narrator = narrator
        self._wants_stop = wants_stop
        self._token = secrets.token_hex(16)
        self._run_id = ""
        self._generation = 0  # of the ring that was brought up last
        self._endpoints: tuple[Address, ...] = ()
        self._stack = contextlib.ExitStack()
        self._client: LocalClient | None = None
        self._status: dict[str, Any] = {}

    def __enter__(self) -> HouseholdNow:
        self._open()
        self._tls = own_tls(self._home)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._stack.close()

    def status(self) -> dict[str, Any]:
        """Ask this device's agent; it is started again where it is gone.

        Raises PeerError when it cannot be; the next call tries again.
        """
        try:
            self._status = self._status_as_it_is()
        except PeerError:
            self._narrator.on_note("this device's agent does not answer; starting it again")
            known = self._alive()
            self._client = None  # other threads must not ask one that is being closed
            self._stack.close()
            self._open()
            self._wait_met(known)
        return self._status

    def _status_as_it_is(self) -> dict[str, Any]:
        return self._agent().status()

    def _agent(self) -> LocalClient:
        client = self._client
        if client is None:
            raise PeerError("this device's agent is gone, and is to be started again")
        return client

    @property
    def own_id(self) -> NodeId:
        return NodeId(self._status["self"])

    @property
    def own_name(self) -> str:
        names = {m["id"]: str(m["name"]) for m in self._status["members"]}
        return names[self.own_id]

    def asking(self, *, fresh: bool = False, from_thread: bool = False) -> Asking:
        """Give the way in which members are asked; `fresh`: measure, whatever is known.

        `from_thread`: for another thread than the driver's; an agent that is gone stays so then.
        """
        return Asking(
            status=self._status_as_it_is if from_thread else self.status,
            tls_to=self._tls.to,
            on_note=self._narrator.on_note,
            wants_stop=self._wants_stop,
            best_host=lambda target: self.best_host(self.own_id, target),
            fresh=fresh,
        )

    def look(self) -> list[tuple[Candidate, float]]:
        """Give who could take part now, each with the seconds for which its agent was live.

        Raises TakenOverError where another device leads the run by now.
        """
        status = self.status()
        check_still_led(status, self._run_id, self._generation)
        live_s = {m["id"]: float(m["since_s"]) for m in status["members"]}
        return [(c, live_s[c.node_id]) for c in candidates_now(status, self._config)]

    def best_host(self, dialler: NodeId, target: NodeId) -> str:
        return best_host_of(self._status["links"], dialler, target)

    def channels(self, plan: Plan) -> dict[Key, RankChannel]:
        """Give a way to each rank's agent; none is opened yet."""
        opened = channels_to(plan, self._status, self._tls)
        return {rank.key: channel for rank, channel in zip(plan.ranks, opened, strict=True)}

    def ring_of(self, plan: Plan) -> Ring:
        """Give a ring that `bring_up` starts; its end is the caller's."""
        return Ring(
            plan,
            channels_to(plan, self._status, self._tls),
            wants_stop=self._wants_stop,
            best_host=self.best_host,
            on_note=self._narrator.on_note,
            spec=self._model.manifest.spec,
        )

    def bring_up(self, ring: Ring, *, at: StepId) -> None:
        """Start the workers that are missing, prove the links, load the tensors."""
        self._serve(ring.plan.run_id)
        self._generation = ring.plan.generation
        self._narrator.on_plan(ring.prepare())
        loaded = ring.load(
            weights_access(self._model, self._status, self._endpoints, self._token),
            step_timeout_s=self._config.step_timeout_s,
            at=at,
        )
        tell_fetched(ring.plan, loaded, self._narrator.on_note)

    def holders(self) -> list[Holder]:
        """Give the other devices that are here: they may keep copies of the run's files."""
        return [
            Holder(
                node_id=NodeId(m["id"]),
                name=m["name"],
                addresses=tuple(Address.parse(text) for text in m["addresses"]),
                tls=self._tls.to(NodeId(m["id"])),
            )
            for m in self.status()["members"]
            if m["state"] == "alive" and m["id"] != self.own_id and not m["unreachable"]
        ]

    def _alive(self) -> set[str]:
        return {m["id"] for m in self._status["members"] if m["state"] == "alive"}

    def _wait_met(self, known: set[str]) -> None:
        """Let an agent that was started again hear the others, or they would seem to be gone."""
        until_s = time.monotonic() + MEET_S
        while known - self._alive() and time.monotonic() < until_s:
            time.sleep(MEET_POLL_S)
            self._status = self._status_as_it_is()

    def _open(self) -> None:
        self._run_id = ""
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(own_agent(self._home))
            self._status = client.status()
            self._stack = stack.pop_all()
        self._client = client

    def _serve(self, run_id: str) -> None:
        """Have the agent serve the model to the run's members, once."""
        if self._run_id == run_id:
            return
        client = self._agent()
        self._endpoints = client.serve_model(
            run_id=run_id, token=self._token, path=str(self._model.path)
        )
        self._stack.callback(client.stop_serving, run_id)
        self._run_id = run_id
