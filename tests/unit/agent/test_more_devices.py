"""A computer with several GPUs: what it says of them, what others take, what `status` shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from exo_train.agent.own_device import JoinOptions, OwnDevice, facts_of, offered
from exo_train.agent.protocol import (
    MAX_DTYPES,
    MAX_MORE_DEVICES,
    MAX_TEXT_CHARS,
    Introduction,
    from_node_facts,
    to_node_facts,
)
from exo_train.agent.run_session import WorkerSettings, check_prepare
from exo_train.agent.status import member_row
from exo_train.cluster.hardware import Hardware
from exo_train.cluster.home import Home
from exo_train.errors import ProtocolError
from exo_train.peer import Address, ComputeDevice, DeviceFacts, NodeId
from exo_train.wire.pb import control_pb2 as pb

GB = 10**9
SECOND = ComputeDevice(
    device="cuda:1",
    chip="NVIDIA GeForce RTX 3060",
    memory_bytes=12 * GB,
    free_memory_bytes=11 * GB,
    usable_memory_bytes=9 * GB,
    dtypes=("bf16", "fp16", "fp32"),
)
FACTS = DeviceFacts(
    node_id=NodeId("ab" * 16),
    name="den-pc",
    backend="torch",
    device="cuda:0",
    chip="NVIDIA GeForce RTX 4090",
    memory_bytes=24 * GB,
    free_memory_bytes=22 * GB,
    usable_memory_bytes=20 * GB,
    dtypes=("bf16", "fp16", "fp32"),
    version="1",
    more_devices=(SECOND, replace(SECOND, device="cuda:2", chip="RTX 2060", dtypes=("fp32",))),
)


def introduction(facts: DeviceFacts = FACTS) -> Introduction:
    addresses = (Address("192.168.1.20", 52415),)
    return Introduction(facts=facts, incarnation=1, instance="0" * 16, addresses=addresses)


def test_all_devices_arrive_as_they_were_sent() -> None:
    sent = pb.NodeFacts.FromString(to_node_facts(introduction()).SerializeToString())
    assert from_node_facts(sent).facts == FACTS


def test_wifi_arrives_and_is_listed() -> None:
    told = replace(introduction(), wifi_hosts=("192.168.1.20",))
    arrived = from_node_facts(to_node_facts(told))
    assert arrived.wifi_hosts == ("192.168.1.20",)
    row = member_row(arrived, arrived.addresses, state="alive", age_s=1.0)
    assert row["wifi_hosts"] == ["192.168.1.20"]


Change = Callable[[pb.NodeFacts], object]
CHANGES: dict[str, Change] = {
    "control characters in a name": lambda m: setattr(m.more_devices[1], "device", "cuda:\x1b[2J"),
    "a chip that turns the text": lambda m: setattr(m.more_devices[0], "chip", "\u202e"),
    "a long chip": lambda m: setattr(m.more_devices[0], "chip", "c" * (MAX_TEXT_CHARS + 1)),
    "a dtype with a line break": lambda m: m.more_devices[0].dtypes.append("fp\n32"),
    "many dtypes": lambda m: m.more_devices[0].dtypes.extend(["fp32"] * (MAX_DTYPES - 2)),
    "more memory than there can be": lambda m: setattr(
        m.more_devices[0], "usable_memory_bytes", 48 * GB + 1
    ),
    "a device twice": lambda m: setattr(m.more_devices[0], "device", "cuda:2"),
    "the first device again": lambda m: setattr(m.more_devices[0], "device", "cuda:0"),
    "too many": lambda m: m.more_devices.extend(
        pb.ComputeDevice(device=f"cuda:{n}") for n in range(3, MAX_MORE_DEVICES + 2)
    ),
    "a host that moves the cursor": lambda m: m.wifi_hosts.append("10.0.0.1\x1b[2J"),
    "many hosts": lambda m: m.wifi_hosts.extend(["10.0.0.1"] * 33),
    "the first one's chip": lambda m: setattr(m, "chip", "a\x00"),
    "the first one's memory": lambda m: setattr(m, "usable_memory_bytes", 96 * GB + 1),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_makes_no_sense_is_refused_of_every_device(what: str) -> None:
    message = to_node_facts(introduction())
    CHANGES[what](message)
    with pytest.raises(ProtocolError, match="make no sense"):
        from_node_facts(message)


def test_as_many_as_are_allowed_are_taken() -> None:
    many = tuple(replace(SECOND, device=f"cuda:{n}") for n in range(1, MAX_MORE_DEVICES + 1))
    facts = replace(FACTS, more_devices=many)
    assert from_node_facts(to_node_facts(introduction(facts))).facts == facts


def test_status_lists_further_devices_and_keeps_the_firsts_numbers() -> None:
    row = member_row(introduction(), (), state="alive", age_s=1.0)
    assert (row["device"], row["memory_bytes"]) == ("cuda:0", 24 * GB)
    assert row["usable_memory_bytes"] == 20 * GB
    assert row["more_devices"][0] == {
        "device": "cuda:1",
        "chip": "NVIDIA GeForce RTX 3060",
        "memory_bytes": 12 * GB,
        "free_memory_bytes": 11 * GB,
        "usable_memory_bytes": 9 * GB,
        "dtypes": ["bf16", "fp16", "fp32"],
    }
    assert [device["device"] for device in row["more_devices"]] == ["cuda:1", "cuda:2"]


def test_a_computer_with_one_device_lists_no_more() -> None:
    row = member_row(introduction(replace(FACTS, more_devices=())), (), state="alive", age_s=1.0)
    assert row["more_devices"] == []


def settings(devices: dict[str, bool]) -> WorkerSettings:
    return WorkerSettings(
        node_id=FACTS.node_id,
        name="den-pc",
        cluster="c",
        listen_hosts=(),
        hosts=(),
        home=Path("home"),
        logs=Path("logs"),
        backends=("torch",),
        devices=devices,
        own_models={},
    )


def prepare(device: str) -> pb.RunMessage:
    body = pb.Prepare(backend="torch", device=device, node_id=FACTS.node_id, cluster="c")
    return pb.RunMessage(run_id="r1", rank=1, prepare=body)


def test_a_rank_takes_any_of_the_nodes_devices_and_no_other() -> None:
    two = settings({"cuda:0": True, "cuda:1": False})
    for device in ("cuda:0", "cuda:1"):
        check_prepare(two, prepare(device))
    for device in ("cuda:2", "cpu", "", "../x"):
        with pytest.raises(
            ProtocolError, match=r"den-pc has no device .*; it offers cuda:0, cuda:1"
        ):
            check_prepare(two, prepare(device))


TOWER = Hardware(
    backend="torch",
    device="cuda:0",
    chip=FACTS.chip,
    memory_bytes=24 * GB,
    free_memory_bytes=22 * GB,
    usable_memory_bytes=20 * GB,
    dtypes=FACTS.dtypes,
    more_devices=FACTS.more_devices,
)


def test_others_are_told_of_all_devices() -> None:
    told = facts_of(TOWER, node_id=FACTS.node_id, name="den-pc")
    assert replace(told, version="1") == FACTS


@pytest.mark.parametrize("is_told", [True, False])
def test_the_users_number_is_the_word_for_the_first_device_only(is_told: bool) -> None:
    expected = {"cuda:0": is_told, "cuda:1": False, "cuda:2": False}
    assert offered(TOWER, is_told=is_told) == expected


@pytest.mark.parametrize("memory_bytes", [None, 10**9])
def test_this_computer_offers_what_it_tells_others(
    tmp_path: Path, memory_bytes: int | None
) -> None:
    device = OwnDevice(Home(tmp_path), JoinOptions(memory_bytes=memory_bytes))
    facts = device.facts(NodeId("ab" * 16))
    told = [facts.device, *(further.device for further in facts.more_devices)]
    assert list(device.offered()) == told
    assert device.offered()[facts.device] is (memory_bytes is not None)
