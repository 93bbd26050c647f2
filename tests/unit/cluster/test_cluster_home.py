"""Identity and the claim on a home: what survives crashes, torn files and a second start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from exo_train.cluster.home import (
    MAX_NAME_CHARS,
    MAX_REMEMBERED_PEERS,
    Home,
    clean_name,
    default_device_name,
    open_home,
)
from exo_train.errors import ConfigError


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "a home with spaces é")


@pytest.fixture
def sleeper():
    """Some other process that runs."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield psutil.Process(process.pid)
    process.kill()
    process.communicate()


def write_claim(home: Home, *, pid: int, started_s: float) -> None:
    home.path.mkdir(parents=True, exist_ok=True)
    claim = {"pid": pid, "started_s": started_s, "local_port": 1, "control_port": 4711}
    (home.path / "agent.json").write_text(json.dumps({**claim, "token": "t"}))


def test_the_id_stays_and_starts_are_counted(home: Home) -> None:
    first = home.node_id()
    assert [home.next_incarnation() for _ in range(3)] == [1, 2, 3]
    assert Home(home.path).node_id() == first
    assert len(first) == 32


@pytest.mark.parametrize("torn", ["", "{", '{"node_id": "ab', "[1]", "null", '{"node_id": 5}'])
def test_a_torn_identity_is_made_anew(home: Home, torn: str) -> None:
    home.path.mkdir(parents=True)
    (home.path / "node.json").write_text(torn)
    assert home.next_incarnation() == 1
    assert home.node_id() == home.node_id()


def test_a_damaged_count_keeps_the_id(home: Home) -> None:
    node_id = home.node_id()
    (home.path / "node.json").write_text(json.dumps({"node_id": node_id, "incarnation": "x"}))
    assert home.next_incarnation() == 1
    assert home.node_id() == node_id


def test_a_claim_is_found_and_released(home: Home) -> None:
    home.claim(local_port=5, control_port=6, token="secret")
    endpoint = home.agent()
    assert endpoint is not None
    assert (endpoint.pid, endpoint.local_port, endpoint.control_port) == (os.getpid(), 5, 6)
    assert endpoint.token == "secret"
    home.release()
    assert home.agent() is None


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_the_token_is_for_this_user_alone(home: Home) -> None:
    home.claim(local_port=5, control_port=6, token="secret")
    assert (home.path / "agent.json").stat().st_mode & 0o077 == 0


def test_a_home_with_a_running_agent_is_refused(home: Home, sleeper: psutil.Process) -> None:
    write_claim(home, pid=sleeper.pid, started_s=sleeper.create_time())
    with pytest.raises(ConfigError, match=f"already runs .pid {sleeper.pid}, port 4711.*another"):
        home.claim(local_port=5, control_port=6, token="t")
    home.release()
    assert home.agent() is not None, "another agent's claim must stay"


def test_a_claim_whose_process_is_gone_or_another_is_ignored(
    home: Home, sleeper: psutil.Process
) -> None:
    write_claim(home, pid=sleeper.pid, started_s=sleeper.create_time() - 60)
    assert home.agent() is None, "the pid was given to another process since"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    write_claim(home, pid=gone.pid, started_s=0.0)
    home.claim(local_port=5, control_port=6, token="t")
    assert home.agent() is not None


@pytest.mark.parametrize("torn", ["", "{}", '{"pid": 1}', '{"pid": "x"}', "[]"])
def test_a_torn_claim_is_no_claim(home: Home, torn: str) -> None:
    home.path.mkdir(parents=True)
    (home.path / "agent.json").write_text(torn)
    assert home.agent() is None


def test_of_agents_that_start_at_once_one_gets_the_home(home: Home) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from exo_train.cluster.home import Home\n"
        "from exo_train.errors import ConfigError\n"
        "print('ready', flush=True)\n"
        "input()\n"
        "try:\n"
        "    Home(Path(sys.argv[1])).claim(local_port=1, control_port=2, token='t')\n"
        "    print('mine', flush=True)\n"
        "except ConfigError:\n"
        "    print('refused', flush=True)\n"
        "input()\n"
    )
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(home.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    try:
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("\n")
            racer.stdin.flush()
        said = [racer.stdout.readline().strip() for racer in racers if racer.stdout]
    finally:
        for racer in racers:
            racer.communicate("\n")
    assert sorted(said) == ["mine", "refused", "refused"]


def test_peers_are_remembered_newest_first_without_doubles_and_capped(home: Home) -> None:
    home.remember_peers(["10.0.0.1:1", "10.0.0.2:1"])
    home.remember_peers(["10.0.0.2:1", "10.0.0.3:1"])
    home.remember_peers([])
    assert home.remembered_peers() == ["10.0.0.2:1", "10.0.0.3:1", "10.0.0.1:1"]
    home.remember_peers([f"10.1.0.{i}:1" for i in range(MAX_REMEMBERED_PEERS)])
    assert len(home.remembered_peers()) == MAX_REMEMBERED_PEERS
    assert "10.0.0.2:1" not in home.remembered_peers()


@pytest.mark.parametrize("torn", ['{"peers": 5}', '{"peers": [1, null, "10.0.0.1:1"]}'])
def test_torn_peers_do_no_harm(home: Home, torn: str) -> None:
    home.path.mkdir(parents=True)
    (home.path / "peers.json").write_text(torn)
    assert set(home.remembered_peers()) <= {"10.0.0.1:1"}


def test_a_home_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write .*node.json.*EXO_TRAIN_HOME"):
        Home(tmp_path / "file").node_id()
    with pytest.raises(ConfigError, match=r"cannot write .*EXO_TRAIN_HOME"):
        Home(tmp_path / "file").claim(local_port=1, control_port=2, token="t")


@pytest.mark.parametrize(
    "name", ["Josés Mac mini", "José’s Mac mini", "日本の机", "den-pc.lan", "a\u00a0b", "👨‍👩‍👧"]
)
def test_people_may_call_their_devices_as_they_like(name: str) -> None:
    assert clean_name(f" {name} ") == name


def test_long_names_are_cut() -> None:
    assert clean_name("x" * 64) == "x" * MAX_NAME_CHARS


@pytest.mark.parametrize("name", ["two\nlines", "a\x00b", "\x1b[31mred", "x\u202ey", "a\u2028b"])
def test_control_characters_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="control characters"):
        clean_name(name)


def test_an_empty_name_is_refused_and_the_default_is_not_empty() -> None:
    with pytest.raises(ConfigError, match="--name"):
        clean_name("  ")
    assert default_device_name()


@pytest.mark.parametrize("tag", ["", "a b", "x" * 33, "ünï", "../x", "a\nb"])
def test_a_wrong_cluster_tag_is_refused(
    home: Home, tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXO_TRAIN_CLUSTER", tag)
    with pytest.raises(ConfigError, match="1 to 32 letters, digits and dashes"):
        _ = home.cluster


def test_the_environment_names_home_and_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXO_TRAIN_HOME", str(tmp_path / "h"))
    monkeypatch.setenv("EXO_TRAIN_CLUSTER", "den-2")
    assert open_home().path == tmp_path / "h"
    assert open_home().cluster == "den-2"
    monkeypatch.delenv("EXO_TRAIN_HOME")
    monkeypatch.delenv("EXO_TRAIN_CLUSTER")
    assert open_home().path.name == "exo-train"
    assert open_home().cluster == "home"
