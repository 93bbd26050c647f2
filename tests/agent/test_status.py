"""`status`: what each member tells of all, and that it is the same story from each."""

from __future__ import annotations

import contextlib
import functools
import json
import queue
import re
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exo_train.agent import run_session
from exo_train.agent.actions import AgentActions
from exo_train.agent.examination import read_examination
from exo_train.agent.members import wait_candidates
from exo_train.agent.worker_process import WorkerProcess
from exo_train.backends.registry import available_backends
from exo_train.cluster.home import Home
from exo_train.cluster.member import view_hash
from exo_train.cluster.membership import SLOW_RTT_S
from exo_train.config import TrainConfig
from exo_train.errors import PeerError
from exo_train.identity import new_key, node_id_of, public_key_of
from exo_train.wire.pb import control_pb2 as pb
from tests.agent.agents_here import ByHand, Here, wait_all_alive, wait_states
from tests.agent.conftest import Command, Join
from tests.agent.running_agents import wait_until
from tests.paired_homes import ensure_member

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("agents-here")]

STATUS_KEYS = {
    "schema", "cluster", "self", "members", "links", "view_hash", "other_clusters", "run",
}  # fmt: skip
MEMBER_KEYS = {
    "id", "name", "state", "since_s", "slow", "unreachable", "waiting", "backend", "device", "chip",
    "memory_bytes", "free_memory_bytes", "usable_memory_bytes", "dtypes", "version",
    "more_devices", "clock_skew_s", "addresses", "wifi_hosts", "run",
}  # fmt: skip
LINK_KEYS = {
    "ends", "kind", "interface", "rtt_s", "jitter_s", "bytes_per_s", "trouble", "line",
}  # fmt: skip
PHASE = "step 12: waiting for activation 3 from den"
WORKER = f"""
import sys, time
from exo_train.wire.framing import frame, read_message
from exo_train.wire.pb import control_pb2 as pb
said = pb.RunMessage(progress=pb.Progress(phase={PHASE!r}, phase_limit_s=600))
sys.stdout.buffer.write(frame(said.SerializeToString())); sys.stdout.buffer.flush()
while read_message(sys.stdin.buffer) is not None:
    pass
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("status")


@pytest.fixture(scope="module")
def three(root: Path) -> Iterator[tuple[Here, Here, Here]]:
    """Three members that have met and measured all their links."""
    with contextlib.ExitStack() as stack:
        agents: list[Here] = []
        for name in ("studio", "den", "laptop"):
            home = Home(root / name)
            ensure_member(home, root=root, cluster="tests")
            here = Here(home, name, *(other.port for other in agents[:1]))
            stack.enter_context(here.agent)
            agents.append(here)
        wait_all_alive(*agents)

        def all_links() -> list[int]:
            return [len(here.agent.status()["links"]) for here in agents]

        wait_until(lambda: all_links() == [3, 3, 3], 30.0, lambda: str(all_links()))
        wait_until(lambda: len({told_links(h) for h in agents}) == 1, 10.0, lambda: "links differ")
        studio, den, laptop = agents
        yield studio, den, laptop


def told_links(here: Here) -> str:
    return json.dumps(here.agent.status()["links"])


def same_of_all(status: dict[str, Any]) -> dict[str, Any]:
    """Give what must not depend on who is asked: no ages, no clocks, no order of addresses."""
    of_viewer = {"since_s", "clock_skew_s", "slow", "waiting", "addresses", "free_memory_bytes"}
    of_viewer |= {"usable_memory_bytes", "run"}
    members = [
        {
            **{k: v for k, v in member.items() if k not in of_viewer},
            "addresses": sorted(member["addresses"]),
        }
        for member in status["members"]
    ]
    kept = ("schema", "cluster", "view_hash", "links", "other_clusters")
    return {**{key: status[key] for key in kept}, "members": members}


def test_all_fields_of_the_contract_are_there_with_values_that_make_sense(
    three: tuple[Here, Here, Here], command: Command
) -> None:
    studio, den, laptop = three
    done = command(den.home, "status", "--json")
    assert done.code == 0
    status = json.loads(done.out)
    assert status.keys() == STATUS_KEYS
    assert (status["schema"], status["self"], status["run"]) == (1, den.id, None)
    assert status["cluster"] == den.agent.admissions.identity.cluster
    assert [m["id"] for m in status["members"]] == sorted(here.id for here in three)
    for member in status["members"]:
        assert member.keys() == MEMBER_KEYS
        assert member["state"] == "alive"
        assert 0 < member["usable_memory_bytes"] <= member["memory_bytes"]
        assert 0 < member["free_memory_bytes"] <= member["memory_bytes"]
        assert 0 <= member["since_s"] < 120
        assert member["dtypes"][0] in ("fp32", "bf16", "fp16")
        assert member["backend"] in ("mlx", "torch")
        assert abs(member["clock_skew_s"]) < 1
        assert (member["slow"], member["unreachable"], member["waiting"]) == (False, False, "")
        assert member["run"] is None
    ports = {m["name"]: m["addresses"][0].rpartition(":")[2] for m in status["members"]}
    assert ports == {here.name: str(here.port) for here in (studio, den, laptop)}


def test_the_story_is_the_same_from_every_member(three: tuple[Here, Here, Here]) -> None:
    def stories() -> list[dict[str, Any]]:
        return [same_of_all(here.agent.status()) for here in three]

    def are_same() -> bool:
        first, *others = stories()
        return all(other == first for other in others)

    wait_until(are_same, 10.0, lambda: json.dumps(stories(), indent=1))
    expected = view_hash((here.id, here.agent.introduce().incarnation) for here in three)
    assert {story["view_hash"] for story in stories()} == {expected}


def test_each_pair_has_one_link_with_its_numbers(three: tuple[Here, Here, Here]) -> None:
    links = three[0].agent.status()["links"]
    names = {here.id: here.name for here in three}
    pairs = {tuple(sorted(end["name"] for end in link["ends"])) for link in links}
    assert pairs == {("den", "laptop"), ("den", "studio"), ("laptop", "studio")}
    for link in links:
        assert link.keys() == LINK_KEYS
        assert [names[end["id"]] for end in link["ends"]] == [end["name"] for end in link["ends"]]
        assert link["ends"][0]["id"] < link["ends"][1]["id"], "the smaller id measures, for both"
        assert {end["host"] for end in link["ends"]} <= {"127.0.0.1", "::1"}
        assert 0 < link["rtt_s"] < 0.5
        assert 0 <= link["jitter_s"] < 0.5
        assert all(speed > 1e6 for speed in link["bytes_per_s"])
        assert link["trouble"] == ""
        first, second = (end["name"] for end in link["ends"])
        assert link["line"].startswith(f"{first} ⇄ {second}  loopback  ")
        assert link["line"].endswith(" ms")


def test_the_screen_names_devices_links_and_memory(
    three: tuple[Here, Here, Here], command: Command
) -> None:
    studio, *_ = three
    done = command(studio.home, "status")
    assert done.code == 0
    status = studio.agent.status()
    assert f"view {status['view_hash']}" in done.out
    assert f"cluster {status['cluster'][:8]}" in done.out
    assert "studio (this one)" in done.out
    for here in three:
        assert here.id[:8] in done.out
    for link in status["links"]:
        assert link["line"].split("  ")[0] in done.out
    assert "GB" in done.out


@pytest.fixture
def stand_in_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that waits within a step, so that no tensor framework is loaded."""
    (tmp_path / "waiting_worker.py").write_text(textwrap.dedent(WORKER))
    repository = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{repository}")
    child = functools.partial(WorkerProcess, module="waiting_worker")
    monkeypatch.setattr(run_session, "WorkerProcess", child)


@contextlib.contextmanager
def taking_part(
    driver: ByHand, here: Here, run_id: str, generation: int, rank: int
) -> Iterator[None]:
    """Have a member run as a rank until this ends."""
    prepare = pb.Prepare(
        backend=available_backends()[0],
        device="cpu",
        node_id=here.id,
        cluster=driver.identity.cluster,
    )
    first = pb.RunMessage(run_id=run_id, generation=generation, rank=rank, prepare=prepare)
    requests: queue.SimpleQueue[pb.RunMessage | None] = queue.SimpleQueue()
    requests.put(first)
    with driver.control_of(here) as control:
        call = control.Run(iter(requests.get, None))
        yield
        requests.put(None)
        call.cancel()


def test_a_run_is_told_by_all_with_what_it_waits_for_and_until_when(
    three: tuple[Here, Here, Here], tmp_path: Path, stand_in_worker: None, command: Command
) -> None:
    """Also by the studio, which has no part in it."""
    studio, den, laptop = three
    driver = ByHand.invited_by(studio, tmp_path / "driver")
    with contextlib.ExitStack() as stack:
        for rank, here in enumerate((den, laptop)):
            stack.enter_context(taking_part(driver, here, "r1", 3, rank))

        def ranks(here: Here) -> list[tuple[str, int, str]]:
            run = here.agent.status()["run"] or {"ranks": []}
            return [(rank["name"], rank["rank"], rank["phase"]) for rank in run["ranks"]]

        wanted = [("den", 0, PHASE), ("laptop", 1, PHASE)]
        wait_until(
            lambda: all(ranks(here) == wanted for here in three),
            10.0,
            lambda: str([ranks(here) for here in three]),
        )
        for here in three:
            run = here.agent.status()["run"]
            assert run.keys() == {"id", "generation", "ranks", "worker_pid"}
            assert (run["id"], run["generation"]) == ("r1", 3)
            assert (run["worker_pid"] is None) == (here is studio)
            for rank in run["ranks"]:
                assert 0 <= rank["phase_age_s"] < 30
                assert rank["phase_left_s"] == pytest.approx(600 - rank["phase_age_s"], abs=0.2)
            assert here.row("studio")["run"] is None
            assert here.row("laptop")["run"]["rank"] == 1
        shown = command(studio.home, "status").out
        assert "run r1:" in shown
        assert f"  den (rank 0): {PHASE} (since " in shown
        # Of 600 s: how many are gone depends on how busy this machine is.
        assert re.search(r"s,\s+for\s+(600|5\d\d)", shown), shown
    wait_until(
        lambda: all(here.agent.status()["run"] is None for here in three),
        10.0,
        lambda: str([here.agent.status()["run"] for here in three]),
    )


def test_several_runs_are_told_in_one_order_by_all_the_largest_first(
    three: tuple[Here, Here, Here], tmp_path: Path, stand_in_worker: None, command: Command
) -> None:
    studio, den, laptop = three
    driver = ByHand.invited_by(studio, tmp_path / "driver")

    def told(here: Here) -> list[tuple[str, int, list[str]]]:
        status = here.agent.status()
        runs = status.get("runs", [])
        assert status["run"] == (runs[0] if runs else status["run"])
        return [(r["id"], r["generation"], [k["name"] for k in r["ranks"]]) for r in runs]

    def wait_told(wanted: list[tuple[str, int, list[str]]]) -> None:
        wait_until(
            lambda: all(told(here) == wanted for here in three),
            10.0,
            lambda: str([told(here) for here in three]),
        )

    with contextlib.ExitStack() as large:
        with taking_part(driver, studio, "zzz", 9, 0):
            large.enter_context(taking_part(driver, den, "aaa", 3, 1))
            large.enter_context(taking_part(driver, laptop, "aaa", 3, 0))
            wait_told([("aaa", 3, ["laptop", "den"]), ("zzz", 9, ["studio"])])
            for here in three:
                large_run, small_run = here.agent.status()["runs"]
                assert (large_run["worker_pid"] is None) == (here is studio)
                assert (small_run["worker_pid"] is None) == (here is not studio)
            shown = command(den.home, "status").out
            assert shown.index("run aaa:") < shown.index("run zzz:")
        with taking_part(driver, studio, "aaa", 4, 2):
            wait_until(
                lambda: all(generations(here) == {4: ["studio"]} for here in three),
                10.0,
                lambda: str([here.agent.status()["run"] for here in three]),
            )
    first, second = sorted((studio, den), key=lambda here: here.id)
    with taking_part(driver, first, "bbb", 1, 0), taking_part(driver, second, "aaa", 1, 0):
        wait_told([("aaa", 1, [second.name]), ("bbb", 1, [first.name])])


def generations(here: Here) -> dict[int, list[str]]:
    """Give who runs in which generation; old parts of a run that goes on are no second run."""
    status = here.agent.status()
    runs = status.get("runs") or [run for run in [status["run"]] if run]
    return {run["generation"]: [rank["name"] for rank in run["ranks"]] for run in runs}


def test_a_member_that_nobody_has_met_is_listed_counts_for_nothing_and_can_be_removed(
    join: Join, command: Command
) -> None:
    """An admission that was lost on the way leaves one in the roster."""
    studio = join("studio")
    den = join("den", studio)
    wait_all_alive(studio, den)
    view = studio.agent.status()["view_hash"]
    key = public_key_of(new_key())
    studio.agent.admissions.invite(key, ())
    ghost = node_id_of(key)
    wanted = {"studio": "alive", "den": "alive", ghost[:8]: "away"}
    for here in (studio, den):
        wait_until(lambda here=here: all_states(here) == wanted, 10.0, lambda: str(wanted))
        assert here.agent.status()["view_hash"] == view
    row, own = den.row(ghost[:8]), den.row("den")
    assert row.keys() == MEMBER_KEYS
    assert {key: type(value) for key, value in row.items() if key != "clock_skew_s"} == {
        key: type(value) for key, value in own.items() if key != "clock_skew_s"
    }
    assert (row["id"], row["clock_skew_s"], row["run"]) == (ghost, None, None)
    assert not any(row[key] for key in MEMBER_KEYS if key.endswith("_bytes"))
    config = TrainConfig(min_devices=3, device_wait_s=0.1)
    with den.client() as client, pytest.raises(PeerError, match="3 devices wanted") as error:
        wait_candidates(client, config)
    assert ghost[:8] not in str(error.value)
    told = read_examination(json.loads(AgentActions(den.agent).examine_json()))
    assert {member.name for member in told.members if member.is_live} == {"studio", "den"}
    assert f"exo-train remove {ghost[:8]}" in command(den.home, "status").out
    assert command(den.home, "remove", ghost[:8]).code == 0
    del wanted[ghost[:8]]
    for here in (studio, den):
        wait_until(lambda here=here: all_states(here) == wanted, 10.0, lambda: str(wanted))


def all_states(here: Here) -> dict[str, str]:
    """Give the state of each member, met or not, by name."""
    return {m["name"]: m["state"] for m in here.agent.status()["members"]}


def test_a_member_that_is_switched_off_is_listed_by_the_name_it_had(join: Join) -> None:
    studio = join("studio")
    den = join("den", studio)
    wait_all_alive(studio, den)
    wait_until(lambda: bool(studio.home.remembered_peers()), 10.0, lambda: "not remembered")
    for here in (studio, den):
        here.agent.__exit__(None, None, None)
    again = join("studio")
    assert all_states(again) == {"studio": "alive", "den": "away"}
    assert again.row("den")["id"] == den.id


def test_who_answers_late_is_called_slow_and_stays_a_member(join: Join) -> None:
    studio, den = join("studio"), join("den")
    answer, is_quick = den.agent.meeting.hello, threading.Event()

    def late(request: pb.HelloRequest) -> pb.HelloReply:
        is_quick.wait(SLOW_RTT_S + 0.3)
        return answer(request)

    den.agent.meeting.hello = late  # type: ignore[method-assign]
    studio.agent.meeting.suggest(den.agent.introduce().addresses[0], None)
    wait_until(
        lambda: studio.states().get("den") == "alive" and studio.row("den")["slow"],
        10.0,
        lambda: str(studio.agent.status()["members"]),
    )
    is_quick.set()
    wait_until(lambda: not studio.row("den")["slow"], 10.0, lambda: "still slow")
    wait_states(studio, {"studio": "alive", "den": "alive"})
