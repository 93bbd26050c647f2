"""`exo-train doctor`: from an agent's JSON and this device's facts to findings."""

from __future__ import annotations

import dataclasses
import json
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest

import exo_train
from exo_train.agent.diagnosis import Facts, ask_agent, run_checks
from exo_train.agent.examination import EXAMINATION_SCHEMA, Examination, read_examination
from exo_train.agent.examining import examine
from exo_train.cluster.checks.finding import Finding, exit_code
from exo_train.cluster.checks.machine import DiskFacts, MemoryFacts, OpenFilesFacts
from exo_train.cluster.checks.network import InterfaceFacts, MulticastFacts
from exo_train.cluster.checks.software import BackendFacts, LibraryFacts
from exo_train.cluster.checks.tools import ToolAnswer
from exo_train.cluster.home import Home
from exo_train.peer import Address
from exo_train.transport.channel import bind, new_server
from exo_train.transport.reach import Reach
from exo_train.wire.pb import control_pb2 as pb
from exo_train.wire.pb.control_pb2_grpc import LocalServicer, add_LocalServicer_to_server
from tests.agent.agents_here import ByHand
from tests.agent.conftest import Join
from tests.agent.running_agents import wait_until

GB = 10**9
STUDIO, DEN, LAPTOP = "a" * 32, "b" * 32, "c" * 32
PORT = 52415
WIFI = InterfaceFacts(
    interface="wlan0",
    host="192.168.1.5",
    kind="Wi-Fi",
    is_used=True,
    network="192.168.1.0/24",
    mtu_bytes=1500,
)
MISSING = {name: ToolAnswer("missing") for name in ("ufw", "ufw.conf", "firewalld")}
NO_FIREWALL = {
    **MISSING,
    "firewalld rules": ToolAnswer("missing"),
    "nft": ToolAnswer("missing"),
    "iptables": ToolAnswer("missing"),
}
UFW = {**NO_FIREWALL, "ufw.conf": ToolAnswer("answered", "ENABLED=yes\n")}


def row(node_id: str, name: str, **given: Any) -> dict[str, Any]:
    number = "abc".index(node_id[0]) + 5
    return {
        "id": node_id,
        "name": name,
        "state": "alive",
        "version": exo_train.__version__,
        "addresses": [f"192.168.1.{number}:{PORT}", f"[fe80::{number}]:{PORT}"],
        **given,
    }


def examination(**given: Any) -> Examination:
    """What the agent of a healthy pair says."""
    well: dict[str, Any] = {
        "schema": EXAMINATION_SCHEMA,
        "status": {"self": STUDIO, "members": [row(STUDIO, "studio"), row(DEN, "den-pc")]},
        "interfaces": [
            {
                "interface": "wlan0",
                "host": "192.168.1.5",
                "kind": "Wi-Fi",
                "is_used": True,
                "reason": "",
            }
        ],
        "multicast": {
            "wlan0": {"sent": 9, "heard": 8, "exo_train_heard": 4, "echoed": 1, "malformed": 0}
        },
        "multicast_left_out": {},
        "other_clusters": 0,
        "seen_but_not_met": [],
        "not_announced": [],
        "dial_back": [
            {"member": "den-pc", "address": f"192.168.1.5:{PORT}", "outcome": "connected"}
        ],
        "clock_skew_s": {"den-pc": 0.2},
        "duplicates": [],
        "links": [{"line": "studio ⇄ den-pc  Wi-Fi  40 MB/s  3 ms", "trouble": ""}],
        "refused_calls": {},
        "limits": {"open_files": 40, "open_files_limit": 4096},
    }
    return {**well, **given}  # type: ignore[typeddict-item]


def facts(agent: Examination | None = None, **given: Any) -> Facts:
    """What this device's own questions give when all is well."""
    told = read_examination(agent) if agent is not None else None
    well: dict[str, Any] = {
        "platform": "linux",
        "version": exo_train.__version__,
        "port": PORT if told else 0,
        "python": "/usr/bin/python3",
        "agent": told,
        "interfaces": (WIFI,),
        "multicast": told.multicast if told else {"wlan0": MulticastFacts(sent=2, heard=3)},
        "outward_interface": "wlan0",
        "routes": "",
        "terminal": "Terminal",
        "dialled": {},
        "firewall_answers": NO_FIREWALL,
        "disk": DiskFacts(home="/home/x", free_bytes=90 * GB),
        "memory": MemoryFacts(total_bytes=16 * GB, available_bytes=9 * GB),
        "open_files": OpenFilesFacts(limit=4096, open_by_agent=40),
        "libraries": (LibraryFacts(name="grpcio", wanted=">=1.78", installed="1.80.0"),),
        "python_version": "3.12.4",
        "wanted_python": ">=3.10",
        "backend": BackendFacts(
            platform="linux", machine="x86_64", installed=("torch",), blas=None
        ),
        "environment": {},
    }
    return Facts(**{**well, **given})


def wrong(found: list[Finding]) -> list[str]:
    return [finding.check for finding in found if finding.verdict == "wrong"]


def test_a_healthy_pair_has_nothing_to_mend() -> None:
    found = run_checks(facts(examination()))
    assert {finding.verdict for finding in found} == {"ok"}
    assert exit_code(found) == 0
    said = "\n".join(finding.said for finding in found)
    for part in (
        "wlan0",
        "den-pc can connect",
        "met: den-pc",
        "40 MB/s",
        "name this device",
        "agree within 0.2 s",
    ):
        assert part in said


def test_without_an_agent_what_needs_one_is_named_and_nothing_is_wrong() -> None:
    found = run_checks(facts())
    assert exit_code(found) == 0
    [agent] = [finding for finding in found if finding.check == "agent"]
    assert agent.verdict == "unknown"
    assert agent.fix == "exo-train join"


def test_each_check_reaches_the_report() -> None:
    ill = examination(
        status={
            "self": STUDIO,
            "members": [
                row(STUDIO, "studio"),
                row(DEN, "den-pc", version="0.0.1", unreachable=True),
            ],
        },
        seen_but_not_met=[
            {"node_id": LAPTOP, "address": "192.168.1.7:1", "failure": "refused", "age_s": 3.0}
        ],
        not_announced=[{"member": "den-pc", "address": "192.168.1.6:1"}],
        dial_back=[{"member": "den-pc", "address": "192.168.1.5:1", "outcome": "timed out"}],
        clock_skew_s={"den-pc": 90.0},
        duplicates=[{"node_id": STUDIO, "addresses": ["192.168.1.8:1"], "is_self": True}],
        links=[{"line": "studio ⇄ den-pc", "trouble": "large packets vanish"}],
        refused_calls={"without a certificate": 3},
        other_clusters=1,
        multicast_left_out={"lan0 (IPv6)": "no such device"},
    )
    found = run_checks(
        facts(
            ill,
            firewall_answers=UFW,
            home_trouble="the identity is damaged",
            disk=DiskFacts(home="/", free_bytes=1),
            memory=MemoryFacts(total_bytes=16 * GB, available_bytes=1),
            open_files=OpenFilesFacts(limit=100, open_by_agent=99),
            libraries=(LibraryFacts(name="grpcio", wanted=">=1.78", installed="1.0"),),
            python_version="3.9.0",
            backend=BackendFacts(platform="linux", machine="x86_64", installed=()),
            environment={"http_proxy": "x"},
        )
    )
    assert set(wrong(found)) == {
        "backend", "disk", "firewall", "identity", "libraries", "links", "members", "memory",
        "not met", "open files", "python", "reachable", "versions",
    }  # fmt: skip
    notes = {finding.check for finding in found if finding.verdict == "note"}
    assert notes == {
        "clock",
        "multicast",
        "not announced",
        "other clusters",
        "proxy",
        "refused calls",
    }
    assert all(finding.fix for finding in found if finding.verdict == "wrong")
    assert [f.verdict for f in found] == sorted(
        (f.verdict for f in found), key=["wrong", "note", "unknown", "ok"].index
    )
    assert exit_code(found) == 3


def test_a_device_seen_by_mdns_is_named_by_the_start_of_its_id() -> None:
    seen = {"node_id": LAPTOP, "address": "192.168.1.7:1", "failure": "timed out", "age_s": 3.0}
    found = run_checks(facts(examination(seen_but_not_met=[seen])))
    assert wrong(found) == ["not met"]
    assert "cccccccc at 192.168.1.7:1" in found[0].said
    off = {**seen, "is_expected": False}
    assert wrong(run_checks(facts(examination(seen_but_not_met=[off])))) == []
    old = {**seen, "age_s": 4000.0}
    assert wrong(run_checks(facts(examination(seen_but_not_met=[old])))) == []


def alone(**given: Any) -> Examination:
    return examination(
        status={"self": STUDIO, "members": [row(STUDIO, "studio")]},
        dial_back=[],
        links=[],
        clock_skew_s={},
        **given,
    )


def test_isolation_is_seen_on_wifi_only_and_within_the_own_network() -> None:
    def judge(host: str, **given: Any) -> list[str]:
        seen = {"node_id": DEN, "address": f"{host}:1", "failure": "timed out", "age_s": 1.0}
        return wrong(run_checks(facts(alone(seen_but_not_met=[seen]), **given)))

    assert judge("192.168.1.6") == ["not met", "access point"]
    assert judge("10.1.1.6") == ["not met"]
    wired = dataclasses.replace(WIFI, kind="Ethernet")
    assert judge("192.168.1.6", interfaces=(wired,)) == ["not met"]


def test_no_route_on_macos_and_on_linux() -> None:
    seen = {"node_id": DEN, "address": "192.168.1.6:1", "failure": "no route", "age_s": 1.0}
    told = alone(seen_but_not_met=[seen], multicast={})
    macos_tools = dict.fromkeys(("state", "block all", "stealth"), ToolAnswer("missing"))
    wired = (dataclasses.replace(WIFI, kind="Ethernet"),)
    macos = run_checks(
        facts(told, platform="darwin", firewall_answers=macos_tools, interfaces=wired)
    )
    assert wrong(macos) == ["local network"]
    assert "Local Network: switch Terminal on" in macos[0].fix
    linux = run_checks(facts(told, routes="unreachable 192.168.1.6", interfaces=wired))
    assert wrong(linux) == ["routes"]
    assert "unreachable 192.168.1.6" in linux[0].said


def test_multicast_that_is_dropped_comes_with_the_firewalls_command() -> None:
    silent = {"wlan0": {"sent": 9, "heard": 0, "exo_train_heard": 0, "malformed": 0}}
    found = run_checks(facts(examination(multicast=silent), firewall_answers=UFW))
    assert wrong(found) == ["multicast"]
    assert "den-pc" in found[0].said
    assert found[0].fix.splitlines()[0] == "sudo ufw allow from 192.168.1.0/24"
    assert wrong(run_checks(facts(alone(multicast=silent)))) == [], "nobody is there to be heard"


def test_a_device_that_came_back_under_a_new_id_is_met_by_the_name_of_the_old() -> None:
    silent = {"wlan0": {"sent": 9, "heard": 0, "exo_train_heard": 0, "malformed": 0}}
    rows = [
        row(STUDIO, "studio"),
        row(DEN, "den-pc"),
        row(LAPTOP, "den-pc", state="away", addresses=[]),
    ]
    status = {"self": STUDIO, "members": rows}
    found = run_checks(facts(examination(status=status, multicast=silent)))
    assert wrong(found) == ["multicast"]
    assert "den-pc can be reached by address" in found[0].said
    assert "met: den-pc" in {finding.said for finding in found}


def test_a_member_that_was_never_met_is_no_trouble() -> None:
    unknown = row(LAPTOP, "cccccccc", state="away", version="", addresses=[], unreachable=False)
    rows = [row(STUDIO, "studio"), row(DEN, "den-pc"), unknown]
    found = run_checks(facts(examination(status={"self": STUDIO, "members": rows})))
    assert {finding.verdict for finding in found} == {"ok"}
    assert not [finding for finding in found if "cccccccc" in finding.said]


@pytest.mark.xdist_group("agents-here")
def test_who_was_removed_is_not_missed(join: Join, tmp_path: Path) -> None:
    here = join("here")
    guest = ByHand.invited_by(here, tmp_path / "guest").identity.node_id
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]

    def missed() -> list[str]:
        told = examine(here.agent)["seen_but_not_met"]
        return [one["address"] for one in told if one["node_id"] == guest]

    here.agent.meeting.suggest(Address("127.0.0.1", port), guest, is_lasting=True)
    wait_until(lambda: missed() == [f"127.0.0.1:{port}"], 10.0, lambda: str(missed()))
    here.agent.admissions.remove(guest)
    assert missed() == []


def test_remembered_devices_are_dialled_while_no_agent_runs() -> None:
    address = Address("192.168.1.6", 1)
    dialled = {
        "den-pc": ((address, Reach.REFUSED),),
        "laptop": ((address, Reach.TIMED_OUT), (address, Reach.CONNECTED)),
        "studio": ((address, Reach.TIMED_OUT), (address, Reach.NO_ROUTE)),
    }
    found = run_checks(facts(dialled=dialled))
    [not_met] = [finding for finding in found if finding.check == "not met"]
    assert "den-pc refuses" in not_met.said
    assert not_met.verdict == "note"
    assert wrong(found) == ["routes"], "no route is this device's own fault"


def test_an_agent_that_does_not_answer_is_wrong() -> None:
    found = run_checks(facts(agent_trouble="this home's agent does not answer"))
    assert wrong(found) == ["agent"]
    assert exit_code(found) == 3


def test_an_older_agents_examination_may_lack_keys() -> None:
    told = read_examination({"status": {"self": STUDIO, "members": [row(STUDIO, "studio")]}})
    assert [member.name for member in told.members] == ["studio"]
    assert told.dial_back == ()


class Told(LocalServicer):
    """Stands for a running agent; `answer` is its JSON, empty for one that knows no Examine."""

    def __init__(self, answer: str) -> None:
        self._answer = answer

    def Examine(  # noqa: N802, gRPC's name
        self, request: pb.ExamineRequest, context: grpc.ServicerContext
    ) -> pb.ExamineReply:
        if not self._answer:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "unknown method")
        return pb.ExamineReply(json=self._answer)


@pytest.mark.parametrize(
    ("answer", "met", "trouble"),
    [
        (json.dumps(examination()), ["studio", "den-pc"], ""),
        ("", None, "UNIMPLEMENTED"),
        (json.dumps({"status": {"members": ["studio"]}}), None, "does not know"),
    ],
)
def test_a_running_agent_is_asked(
    tmp_path: Path, answer: str, met: list[str] | None, trouble: str
) -> None:
    home = Home(tmp_path)
    server = new_server(max_workers=1, name="told")
    add_LocalServicer_to_server(Told(answer), server)
    port = bind(server, "127.0.0.1")
    server.start()
    try:
        home.claim(local_port=port, control_port=PORT, token="t")
        told, said = ask_agent(home)
    finally:
        home.release()
        server.stop(0).wait()
    assert trouble in said
    assert bool(said) == bool(trouble)
    assert (told and [member.name for member in told.members]) == met
