"""Which devices a run gets, and what is said about those that are missing."""

from __future__ import annotations

from typing import Any

import pytest

from exo_train.agent.members import candidates_now, wait_candidates
from exo_train.config import TrainConfig
from exo_train.errors import ConfigError, InterruptedRunError, PeerError


class Cluster:
    """Answers like a home's agent; the first device is this one."""

    def __init__(self, *names: str, state: str = "alive", unreachable: str = "") -> None:
        self.members = [member(name, index, state) for index, name in enumerate(names)]
        for one in self.members:
            one["unreachable"] = one["name"] in unreachable.split()

    def status(self) -> dict[str, Any]:
        return {"self": self.members[0]["id"], "members": self.members, "cluster": "home"}


def member(name: str, index: int, state: str) -> dict[str, Any]:
    return {
        "id": f"{index}{index:031x}",
        "name": name,
        "state": "alive" if index == 0 else state,
        "since_s": 100.0,
        "backend": "torch",
        "device": "cpu",
        "usable_memory_bytes": 10**9,
        "dtypes": ["fp32"],
        "version": "1",
        "addresses": ["127.0.0.1:5000"],
    }


def choose(cluster: Cluster, **options: Any) -> tuple[list[str], list[str]]:
    """Give the names that a run gets, and what its user is told."""
    config = TrainConfig(**{"device_wait_s": 0.01, **options})
    notes: list[str] = []
    found, _ = wait_candidates(cluster, config, on_note=notes.append)
    return [candidate.name for candidate in found], notes


def names(cluster: Cluster, **options: Any) -> list[str]:
    return choose(cluster, **options)[0]


def test_all_live_members_or_just_the_named_ones() -> None:
    cluster = Cluster("attic", "desk", "hall")
    assert names(cluster) == ["attic", "desk", "hall"]
    assert names(cluster, devices=("hall", "attic")) == ["hall", "attic"]
    assert names(Cluster("attic", "desk", state="dead")) == ["attic"]


def test_min_devices_counts_those_that_the_run_may_use() -> None:
    cluster = Cluster("attic", "desk", state="suspect")
    with pytest.raises(PeerError, match=r"2 devices wanted.*only these are here: attic"):
        names(cluster, min_devices=2)
    with pytest.raises(ConfigError, match="more than the 1 that 'devices' names"):
        names(cluster, min_devices=2, devices=("attic",))


def test_who_is_missing_is_named() -> None:
    with pytest.raises(PeerError, match=r"shed wanted, but after 0 s .*attic, desk;.*--peer"):
        names(Cluster("attic", "desk"), devices=("attic", "shed"))


def test_a_name_that_two_devices_have_is_refused_and_an_id_is_not() -> None:
    cluster = Cluster("attic", "pc", "pc")
    with pytest.raises(ConfigError, match=r"2 devices are called 'pc'.*10000000, 20000000"):
        names(cluster, devices=("pc",))
    assert names(cluster, devices=("attic", "20000000")) == ["attic", "pc"]
    assert names(cluster) == ["attic", "pc (10000000)", "pc (20000000)"]


def test_a_device_that_cannot_be_connected_to_gets_no_place_and_is_named() -> None:
    cluster = Cluster("attic", "desk", "hall", unreachable="desk")
    found, notes = choose(cluster)
    assert found == ["attic", "hall"]
    assert notes == [
        "others cannot connect to desk, so this run goes without; run `exo-train doctor` there"
    ]
    with pytest.raises(PeerError, match=r"3 devices wanted.*here: attic, hall; others cannot"):
        names(cluster, min_devices=3)
    with pytest.raises(PeerError, match=r"desk wanted.*cannot connect to desk: run .* there; sta"):
        names(cluster, devices=("attic", "desk"))
    assert choose(cluster, devices=("attic", "hall")) == (["attic", "hall"], [])


def test_whoever_cannot_be_connected_to_trains_alone() -> None:
    cluster = Cluster("attic", "desk", "hall", unreachable="attic")
    found, notes = choose(cluster)
    assert found == ["attic"]
    (note,) = notes
    assert note.startswith("others cannot connect to this device, so it trains without desk and")
    with pytest.raises(PeerError, match=r"desk wanted.*others cannot connect to attic"):
        names(cluster, devices=("attic", "desk"))
    assert choose(Cluster("attic", unreachable="attic")) == (["attic"], [])


def test_waiting_can_be_stopped() -> None:
    config = TrainConfig(devices=("nowhere",), device_wait_s=60)
    with pytest.raises(InterruptedRunError, match="while waiting for devices"):
        wait_candidates(Cluster("attic"), config, wants_stop=lambda: True)


def names_now(cluster: Cluster, **options: Any) -> list[str]:
    return [c.name for c in candidates_now(cluster.status(), TrainConfig(**options))]


def test_a_run_that_goes_on_takes_who_is_here_of_those_it_may_use_and_waits_for_none() -> None:
    cluster = Cluster("attic", "desk", "hall")
    assert names_now(cluster) == ["attic", "desk", "hall"]
    assert names_now(cluster, devices=("hall", "shed")) == ["hall"]
    assert names_now(cluster, layers=("desk:3", "attic:4")) == ["attic", "desk"]
    assert names_now(cluster, min_devices=4) == ["attic", "desk", "hall"]
    cluster.members[1]["state"] = "suspect"
    assert names_now(cluster) == ["attic", "hall"]
    cluster.members[2]["unreachable"] = True
    assert names_now(cluster) == ["attic"]
    assert names_now(Cluster("attic", "desk", "hall", unreachable="attic")) == ["attic"]


def test_a_name_that_two_devices_have_ends_no_run() -> None:
    cluster = Cluster("attic", "pc", "pc")
    assert names_now(cluster, devices=("pc",)) == ["pc (10000000)", "pc (20000000)"]
