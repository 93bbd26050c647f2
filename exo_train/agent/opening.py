"""Opening a model for a run, and a ring of workers for a plan.

Owns the order in which workers start, links are proven and tensors are loaded, and that all of it
ends again. Must not choose the plan.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exo_train.agent.local_client import LocalClient
from exo_train.agent.remote_rank import RemoteRank
from exo_train.cluster.home import Home
from exo_train.errors import ConfigError
from exo_train.models.hub import resolve_model
from exo_train.models.manifest import ModelManifest, build_manifest
from exo_train.models.open import open_model
from exo_train.peer import Address, NodeId
from exo_train.plan.plan import Plan
from exo_train.train.beginning import Beginning
from exo_train.train.ring import Ring, WeightsAccess
from exo_train.transport.tls import MemberTls
from exo_train.wire.pb import control_pb2 as pb


@dataclass(frozen=True, slots=True)
class Narrator:
    """What a run tells while it is prepared."""

    on_note: Callable[[str], None] = lambda note: None
    on_begin: Callable[[Beginning], None] = lambda begin: None
    on_plan: Callable[[Plan], None] = lambda plan: None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    path: Path
    manifest: ModelManifest


def open_for_run(home: Home, name: str) -> OpenedModel:
    """Find a model, check its files, hash its tensors."""
    if not name:
        raise ConfigError("no model is named; give a directory, a .gguf file or a hub id")
    path = resolve_model(name, cache_dir=home.cache)
    spec, source = open_model(path)
    return OpenedModel(path=path, manifest=build_manifest(source, spec, cache_dir=home.cache))


def own_tls(home: Home) -> MemberTls:
    """Give what this home's processes dial other members with."""
    identity = home.paired_identity()
    return MemberTls(identity, home.roster(identity).certificate)


def best_host_of(links: list[dict[str, Any]], dialler: NodeId, target: NodeId) -> str:
    """Give the host of `target` on the best measured link; empty when there is none."""
    for link in links:
        hosts = {end["id"]: end["host"] for end in link["ends"]}
        if {dialler, target} == hosts.keys():
            return str(hosts[target])
    return ""


def channels_to(plan: Plan, status: dict[str, Any], tls: MemberTls) -> list[RemoteRank]:
    """Give a way to each rank's agent, by rank; none is opened yet."""
    addresses = {
        member["id"]: [Address.parse(text) for text in member["addresses"]]
        for member in status["members"]
    }
    return [
        RemoteRank(rank.name, addresses.get(rank.node_id, []), tls.to(rank.node_id))
        for rank in plan.ranks
    ]


def weights_access(
    model: OpenedModel, status: dict[str, Any], endpoints: tuple[Address, ...], token: str
) -> WeightsAccess:
    """Say where ranks fetch the tensors that this device's agent serves."""
    own = next(m for m in status["members"] if m["id"] == status["self"])
    return WeightsAccess(
        manifest=model.manifest,
        endpoints=endpoints,
        token=token,
        coordinator_name=own["name"],
        coordinator_id=NodeId(own["id"]),
    )


def tell_fetched(plan: Plan, loaded: Sequence[pb.Loaded], on_note: Callable[[str], None]) -> None:
    for rank, answer in zip(plan.ranks, loaded, strict=True):
        if answer.fetched_bytes:
            on_note(f"{rank.name} fetched {answer.fetched_bytes / 1e6:.1f} MB of the model")


@contextlib.contextmanager
def open_ring(
    client: LocalClient,
    tls: MemberTls,
    plan: Plan,
    model: OpenedModel,
    status: dict[str, Any],
    narrator: Narrator,
    *,
    step_timeout_s: float,
    capture_boundaries: bool = False,
) -> Iterator[Ring]:
    """Start the workers, prove the links, load the tensors; all of it ends with the context."""
    token = secrets.token_hex(16)
    endpoints = client.serve_model(run_id=plan.run_id, token=token, path=str(model.path))
    try:
        best_host = functools.partial(best_host_of, status["links"])
        with Ring(plan, channels_to(plan, status, tls), best_host=best_host) as ring:
            narrator.on_plan(ring.prepare())
            loaded = ring.load(
                weights_access(model, status, endpoints, token),
                step_timeout_s=step_timeout_s,
                capture_boundaries=capture_boundaries,
            )
            tell_fetched(plan, loaded, narrator.on_note)
            yield ring
    finally:
        client.stop_serving(plan.run_id)
