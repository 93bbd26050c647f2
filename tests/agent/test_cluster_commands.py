"""`invite`, `remove` and `leave` as their users meet them, against agents in this process."""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from exo_train.agent.joining import become_member
from exo_train.cluster.home import Home, RememberedPeer
from exo_train.peer import Address, NodeId
from tests.agent.agents_here import LOOPBACK, Here, wait_all_alive, wait_states
from tests.agent.conftest import Command, Join
from tests.agent.running_agents import RunningAgent, loopback_interface, wait_until
from tests.lan.namespaces import call, why_not
from tests.paired_homes import admit, ensure_member

pytestmark = pytest.mark.xdist_group("agents-here")
CODE = re.compile(r"\d{1,2}-[a-z]+-[a-z]+")


@pytest.fixture
def no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of homes without an agent must not start one here: it would use the real network."""
    monkeypatch.setattr("exo_train.agent.local_client._start", _must_not_start)


def _must_not_start(home: Home) -> None:
    raise AssertionError(f"an agent was started for {home.path}")


def memory_of(*agents: Here) -> None:
    """Wait until each has written down whom it met."""
    for here in agents:
        num_others = len(agents) - 1
        wait_until(
            lambda here=here, n=num_others: len(here.home.remembered_peers()) >= n,
            5.0,
            lambda here=here: f"{here.name} remembers {here.home.remembered_peers()}",
        )


def test_invite_shows_a_code_that_works(join: Join, command: Command, tmp_path: Path) -> None:
    here = join("here")
    done = command(here.home, "invite")
    assert done.code == 0
    (code,) = set(CODE.findall(done.out))
    assert "to add a device, run there within 10 minutes:" in done.out
    assert f"    exo-train join --code {code}\n" in done.out
    (peer,) = re.findall(r"add --peer (\S+)\)", done.out)
    become_member(
        Home(tmp_path / "new"),
        code,
        peers=[Address.parse(peer)],
        interface="127.0.0.9",
        say=lambda text: None,
    )
    assert len(here.agent.admissions.members()) == 2


def test_invite_json_is_for_scripts_and_a_second_code_voids_the_first(
    join: Join, command: Command
) -> None:
    here = join("here")
    first, second = (json.loads(command(here.home, "invite", "--json").out) for _ in range(2))
    for made in (first, second):
        assert made.keys() == {"schema", "code", "expires_s", "addresses"}
        assert made["schema"] == 1
        assert CODE.fullmatch(made["code"])
        assert made["expires_s"] == 600
    (address, *_) = second["addresses"]
    assert Address.parse(address) == Address(LOOPBACK, here.agent.invitations._desk.port or 0)
    assert first["addresses"] != second["addresses"], "the first one's port is closed"


@pytest.mark.parametrize("arguments", [("invite",), ("invite", "--json"), ("status",)])
def test_without_an_agent_that_runs_the_way_out_is_said(
    command: Command, tmp_path: Path, no_agent: None, arguments: tuple[str, ...]
) -> None:
    done = command(Home(tmp_path), *arguments)
    assert done.code == 3
    assert done.err == ("exo-train: no agent of this home runs; start one with `exo-train join`\n")
    assert done.out == ""


def test_a_removed_device_ends_with_a_sentence_and_is_gone_for_all(
    join: Join, command: Command
) -> None:
    studio = join("studio")
    den, laptop = join("den", studio), join("laptop", studio).ends_when_asked()
    wait_all_alive(studio, den, laptop)
    done = command(den.home, "remove", "laptop")
    assert (done.code, done.out) == (0, "laptop is a member no more\n")
    told = [here.agent.admissions.is_removed(laptop.id) for here in (studio, den)]
    assert told == [True, True], "the command returns when those who are here know"
    for here in (studio, den):
        here.wait_says("laptop is a member no more", 2.0)
        assert here.states() == {"studio": "alive", "den": "alive"}
    laptop.wait_ended()
    assert laptop.agent.failure is not None
    assert laptop.agent.failure.exit_code == 3
    assert "removed" in str(laptop.agent.failure)
    assert "`exo-train invite` on a member" in str(laptop.agent.failure)
    again = command(laptop.home, "join", "--interface", loopback_interface())
    assert again.code == 2
    assert "this device was removed from its cluster; pair it anew" in again.err


def test_a_removed_device_may_come_back_by_a_code_as_another(join: Join, command: Command) -> None:
    studio = join("studio")
    laptop = join("laptop", studio).ends_when_asked()
    wait_all_alive(studio, laptop)
    before = laptop.id
    assert command(studio.home, "remove", "laptop").code == 0
    laptop.wait_ended()
    code, port = studio.agent.invite().code, studio.agent.invitations._desk.port or 0
    become_member(
        laptop.home,
        code,
        peers=[Address(LOOPBACK, port)],
        interface="127.0.0.9",
        say=lambda text: None,
    )
    again = join("laptop", studio)
    assert again.id != before
    wait_all_alive(studio, again)


def test_remove_by_the_start_of_an_id_and_those_it_had_invited_are_named(
    join: Join, command: Command, tmp_path: Path
) -> None:
    studio = join("studio")
    laptop = join("laptop", studio)
    wait_all_alive(studio, laptop)
    admit(Home(tmp_path / "guest"), laptop.home)
    guest = join("guest", studio, folder="guest")
    wait_all_alive(studio, laptop, guest)
    done = command(studio.home, "remove", laptop.id[:8])
    assert done.code == 0
    assert done.out.splitlines() == [
        "laptop is a member no more",
        "it had invited guest: remove them too if you do not know them",
    ]
    wait_states(studio, {"studio": "alive", "guest": "alive"})


def test_who_removes_its_own_inviter_is_not_told_to_remove_itself(
    join: Join, command: Command
) -> None:
    studio = join("studio")
    laptop = join("laptop", studio)
    wait_all_alive(studio, laptop)
    assert studio.agent.admissions.invited_by(studio.id) == (laptop.id,)
    done = command(laptop.home, "remove", "studio")
    assert (done.code, done.out) == (0, "studio is a member no more\n")


def test_remove_says_what_it_does_not_understand(join: Join, command: Command) -> None:
    studio = join("studio")
    first = join("mac", studio, folder="one")
    second = join("mac", studio, folder="two")
    wait_until(lambda: len(studio.agent.meeting.live()) == 2, 5, lambda: str(studio.states()))
    ids = sorted(here.id for here in (first, second))
    both = command(studio.home, "remove", "mac")
    assert both.code == 2
    assert "2 devices are called 'mac'; name one by the start of its id: " in both.err
    assert f"{ids[0][:8]}, {ids[1][:8]}" in both.err
    unknown = command(studio.home, "remove", "tower")
    assert unknown.code == 2
    assert "no member is called 'tower'; there are: " in unknown.err
    assert f"mac ({ids[0][:8]}), mac ({ids[1][:8]})" in unknown.err
    assert command(studio.home, "remove", ids[0][:7]).code == 2, "too short for an id"
    for own in ("studio", studio.id[:8]):
        itself = command(studio.home, "remove", own)
        assert itself.code == 2
        assert f"'{own}' is this device; run `exo-train leave` instead" in itself.err
    assert len(studio.agent.admissions.members()) == 3, "nobody was removed"
    assert command(studio.home, "remove", ids[0][:8]).code == 0
    assert studio.agent.admissions.is_removed(ids[0])  # type: ignore[arg-type]


def test_a_device_that_is_away_is_removed_by_name_and_hears_of_it_when_it_is_back(
    join: Join, command: Command
) -> None:
    studio = join("studio")
    laptop = join("laptop", studio)
    wait_all_alive(studio, laptop)
    memory_of(studio, laptop)
    port = studio.port
    laptop.agent.__exit__(None, None, None)
    studio.agent.__exit__(None, None, None)
    studio = join("studio", port=port)  # since its start it has not heard of the laptop
    assert command(studio.home, "remove", "laptop").out == "laptop is a member no more\n"
    back = join("laptop").ends_when_asked()
    back.wait_ended()
    assert "this device was removed from the cluster" in str(back.agent.failure)
    assert studio.states() == {"studio": "alive"}


def test_remove_in_a_home_without_a_cluster_makes_none(
    command: Command, tmp_path: Path, no_agent: None
) -> None:
    done = command(Home(tmp_path), "remove", "laptop")
    assert done.code == 2
    assert "this device belongs to no cluster; run `exo-train join`" in done.err
    assert Home(tmp_path).identity() is None


def test_leave_tells_the_others_ends_the_agent_and_deletes_the_keys(
    join: Join, command: Command, no_agent: None
) -> None:
    studio = join("studio")
    den, laptop = join("den", studio), join("laptop", studio).ends_when_asked()
    wait_all_alive(studio, den, laptop)
    memory_of(laptop)
    done = command(laptop.home, "leave")
    assert done.code == 0
    assert re.fullmatch(r"this device has left; (den, studio|studio, den) was told\n", done.out), (
        done.out
    )
    laptop.wait_ended(1.0)
    assert laptop.agent.failure is None
    for here in (studio, den):
        here.wait_says("laptop is a member no more", 2.0)
        assert here.states() == {"studio": "alive", "den": "alive"}
    assert sorted(path.name for path in laptop.home.path.iterdir()) == ["agent.lock", "node.json"]
    again = command(laptop.home, "leave")
    assert again.code == 2
    assert "this device belongs to no cluster; there is nothing to leave" in again.err


def test_leave_returns_when_the_keys_are_gone(join: Join, command: Command, no_agent: None) -> None:
    """The home is free a moment before: the agent deletes the keys last."""
    here = join("here")

    def end_slowly() -> None:
        here.agent.ended.wait()
        here.agent._stack.close()
        time.sleep(0.3)
        here.home.forget_membership()

    ending = threading.Thread(target=end_slowly)
    ending.start()
    done = command(here.home, "leave")
    assert (done.code, done.out) == (0, "this device has left; nobody was told\n")
    assert here.home.identity() is None
    ending.join()


@pytest.mark.parametrize("damaged", ["cluster.json", "roster.json", "both"])
def test_leave_clears_damaged_files_away(
    command: Command, tmp_path: Path, no_agent: None, damaged: str
) -> None:
    home = Home(tmp_path / "home")
    home.found()
    for name in ("cluster.json", "roster.json"):
        if damaged in (name, "both"):
            (home.path / name).write_text("{", "utf-8")
    done = command(home, "leave")
    assert (done.code, done.out) == (0, "this device has left; nobody was told\n")
    assert not home.has_membership_files()
    assert home.identity() is None


def test_leave_asks_the_agent_that_runs_even_when_a_file_is_damaged(
    join: Join, command: Command
) -> None:
    studio = join("studio")
    laptop = join("laptop", studio).ends_when_asked()
    wait_all_alive(studio, laptop)
    (laptop.home.path / "roster.json").write_text("{", "utf-8")
    done = command(laptop.home, "leave")
    assert (done.code, done.out) == (0, "this device has left; studio was told\n")
    studio.wait_says("laptop is a member no more", 2.0)
    assert not laptop.home.has_membership_files()


def test_a_removed_device_leaves_without_telling_anybody(
    join: Join, command: Command, no_agent: None
) -> None:
    studio = join("studio")
    laptop = join("laptop", studio).ends_when_asked()
    wait_all_alive(studio, laptop)
    assert command(studio.home, "remove", "laptop").code == 0
    laptop.wait_ended()
    done = command(laptop.home, "leave")
    assert (done.code, done.out) == (0, "this device has left; nobody was told\n")
    assert laptop.home.identity() is None


@pytest.fixture
def alone() -> Iterator[list[str]]:
    """Gives what puts a command into a network of its own that has a loopback and nothing else."""
    if reason := why_not():
        pytest.skip(reason)
    name = f"xt{os.getpid()}x{secrets.token_hex(3)}h1"
    call("ip", "netns", "add", name)
    call("ip", "-n", name, "link", "set", "lo", "up")
    yield ["ip", "netns", "exec", name]
    call("ip", "netns", "del", name)


@pytest.mark.processes
@pytest.mark.lan
@pytest.mark.xdist_group("agents")
def test_leave_starts_an_agent_when_none_runs(alone: list[str], tmp_path: Path) -> None:
    """On a machine that has no network, which is where such an agent may be started by a test."""
    studio = RunningAgent("studio", tmp_path, "tests", (), prefix=alone)
    laptop = RunningAgent("laptop", tmp_path, "tests", (), prefix=alone)
    try:
        studio.start()
        ensure_member(laptop.home, root=tmp_path, cluster="tests")
        address = Address(LOOPBACK, studio.port)
        known = RememberedPeer(node_id=NodeId(studio.id), name="studio", addresses=(address,))
        laptop.home.remember_peers([known])
        left = laptop.run("leave")
        assert (left.returncode, left.stdout) == (0, "this device has left; studio was told\n")
        assert laptop.home.identity() is None
        assert laptop.home.agent() is None
        assert "is a member no more" in studio.output
    finally:
        studio.close()
