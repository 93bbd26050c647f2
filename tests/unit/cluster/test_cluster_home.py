"""Membership and the claim on a home: what survives crashes, torn files and a second start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from exo_train.cluster.home import (
    MAX_NAME_CHARS,
    MAX_REMEMBERED_ADDRESSES,
    MAX_REMEMBERED_PEERS,
    Home,
    RememberedPeer,
    clean_name,
    default_device_name,
    open_home,
    start_mark,
)
from exo_train.cluster.roster import MAX_CERTIFICATES, Roster
from exo_train.errors import ConfigError
from exo_train.identity import (
    Identity,
    found_cluster,
    issue_certificate,
    new_key,
    node_id_of,
    public_key_of,
)
from exo_train.peer import Address, NodeId


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


def join(inviter: Identity, roster: Roster) -> Identity:
    """Make a device that is let in by `inviter`, as pairing does."""
    key_pem = new_key()
    public_key = public_key_of(key_pem)
    certificate = issue_certificate(inviter, public_key)
    roster.admit(certificate)
    return replace(
        inviter, node_id=node_id_of(public_key), key_pem=key_pem, certificate=certificate
    )


def peer(number: int, name: str = "den-pc", *hosts: str) -> RememberedPeer:
    addresses = tuple(Address(host, 52415) for host in hosts or (f"10.0.0.{number}",))
    return RememberedPeer(node_id=NodeId(f"{number:032x}"), name=name, addresses=addresses)


def test_a_new_home_belongs_to_no_cluster(home: Home) -> None:
    assert home.identity() is None
    assert not home.path.exists(), "asking leaves no trace"


def test_a_founder_stays_itself(home: Home) -> None:
    founder = home.found()
    again = Home(home.path)
    assert again.identity() == again.found() == founder
    assert again.roster(founder).members() == (founder.node_id,)


def test_a_joiner_remembers_its_cluster(home: Home) -> None:
    founder = found_cluster()
    roster = Roster.of(founder)
    joiner = join(founder, roster)
    home.store_membership(joiner, roster.state())
    assert home.found() == joiner, "whoever is a member founds nothing"
    assert set(home.roster(joiner).members()) == {founder.node_id, joiner.node_id}


def test_a_removal_is_remembered(home: Home) -> None:
    founder = home.found()
    roster = home.roster(founder)
    gone = join(founder, roster)
    roster.remove(gone.node_id, founder.node_id)
    home.save_roster(roster)
    assert home.roster(founder).is_removed(gone.node_id)
    assert home.roster(founder).digest() == roster.digest()


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_keys_are_for_this_user_alone(home: Home) -> None:
    home.found()
    for name in ("cluster.json", "roster.json"):
        assert (home.path / name).stat().st_mode & 0o077 == 0


def test_who_leaves_comes_back_as_another(home: Home) -> None:
    first = home.found()
    home.remember_peers([peer(1)])
    assert home.next_incarnation() == 1
    (home.path / ".cluster.json.123.456").write_bytes(first.key_pem)  # a crash while writing
    home.forget_membership()
    assert home.identity() is None
    assert home.remembered_peers() == ()
    assert b"PRIVATE" not in b"".join(f.read_bytes() for f in home.path.iterdir())
    second = home.found()
    assert second.node_id != first.node_id
    assert second.cluster != first.cluster
    assert home.next_incarnation() == 2, "starts are counted on"
    home.forget_membership()
    home.forget_membership()


@pytest.mark.parametrize("torn", ["", "{", "[1]", "null", "{}", '{"node_id": 5}', None])
def test_a_torn_identity_is_said_and_not_replaced(home: Home, torn: str | None) -> None:
    home.found()
    path = home.path / "cluster.json"
    if torn is None:
        path.unlink()
    else:
        path.write_text(torn)
    for ask in (home.identity, home.found):
        with pytest.raises(ConfigError, match=r"cluster\.json is damaged.*exo-train leave"):
            ask()
    assert not path.exists() if torn is None else path.read_text() == torn
    home.forget_membership()
    assert home.identity() is None


@pytest.mark.parametrize(
    "field", ["node_id", "cluster", "key", "certificate", "authority_certificate", "authority_key"]
)
def test_an_identity_with_a_foreign_part_is_said(home: Home, field: str, tmp_path: Path) -> None:
    home.found()
    Home(tmp_path / "other").found()
    foreign = json.loads((tmp_path / "other" / "cluster.json").read_text())
    path = home.path / "cluster.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: foreign[field]}))
    with pytest.raises(ConfigError, match=r"cluster\.json is damaged"):
        home.identity()


@pytest.mark.parametrize("torn", ["", "{", '{"cluster": "0123456789abcdef"}', None, "half"])
def test_a_torn_roster_is_said_since_removals_were_in_it(home: Home, torn: str | None) -> None:
    founder = home.found()
    path = home.path / "roster.json"
    if torn is None:
        path.unlink()
    elif torn == "half":
        path.write_text(json.dumps({**json.loads(path.read_text()), "removals": None}))
    else:
        path.write_text(torn)
    with pytest.raises(ConfigError, match=r"roster\.json is damaged.*exo-train leave"):
        home.roster(founder)


def test_a_full_roster_can_be_read_back(home: Home) -> None:
    founder = home.found()
    roster = home.roster(founder)
    for _ in range(MAX_CERTIFICATES - 1):
        roster.remove(join(founder, roster).node_id, founder.node_id)
    home.save_roster(roster)
    assert home.roster(founder).digest() == roster.digest()


def test_starts_are_counted(home: Home) -> None:
    assert [home.next_incarnation() for _ in range(3)] == [1, 2, 3]
    assert Home(home.path).next_incarnation() == 4


@pytest.mark.parametrize("torn", ["", "{", '{"incarnation": "x"}', '{"incarnation": -3}', "[1]"])
def test_a_torn_count_begins_anew_and_keeps_the_identity(home: Home, torn: str) -> None:
    founder = home.found()
    (home.path / "node.json").write_text(torn)
    assert home.next_incarnation() == 1
    assert home.identity() == founder


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
    write_claim(home, pid=sleeper.pid, started_s=start_mark(sleeper))
    with pytest.raises(ConfigError, match=f"already runs .pid {sleeper.pid}, port 4711.*another"):
        home.claim(local_port=5, control_port=6, token="t")
    home.release()
    assert home.agent() is not None, "another agent's claim must stay"


def test_a_claim_whose_process_is_gone_or_another_is_ignored(
    home: Home, sleeper: psutil.Process
) -> None:
    write_claim(home, pid=sleeper.pid, started_s=start_mark(sleeper) - 60)
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


def test_peers_are_remembered_newest_first_and_once_each(home: Home) -> None:
    home.remember_peers([peer(1, "studio"), peer(2, "laptop")])
    moved = peer(2, "laptop", "10.0.0.9", "fe80::1%eth0", "10.0.0.9")
    home.remember_peers([moved, peer(3)])
    home.remember_peers([])
    assert [p.name for p in home.remembered_peers()] == ["laptop", "den-pc", "studio"]
    assert [a.host for a in home.remembered_peers()[0].addresses] == ["10.0.0.9", "fe80::1%eth0"]
    assert Home(home.path).remembered_peers() == home.remembered_peers()


def test_what_is_remembered_of_peers_is_bounded_and_clean(home: Home) -> None:
    home.remember_peers([peer(1)])
    rude = peer(99, "\x1b[31mred", *(f"10.1.0.{n}" for n in range(40)))
    home.remember_peers([rude, *(peer(n, "x" * 100) for n in range(2, 2 + MAX_REMEMBERED_PEERS))])
    kept = home.remembered_peers()
    assert len(kept) == MAX_REMEMBERED_PEERS
    assert peer(1) not in kept
    assert kept[0].name == rude.node_id[:8]
    assert len(kept[0].addresses) == MAX_REMEMBERED_ADDRESSES
    assert kept[1].name == "x" * MAX_NAME_CHARS


@pytest.mark.parametrize(
    "torn",
    [
        {"peers": 5},
        {"peers": [1, None, "10.0.0.1:1", {}]},
        {"peers": [{"node_id": "x", "name": "n", "addresses": []}]},
        {"peers": [{"node_id": 5, "name": "n", "addresses": []}]},
        {"peers": [{"node_id": "a" * 32, "name": "n", "addresses": ["host:1", 5]}]},
        {"peers": [{"node_id": "a" * 32, "name": "n", "addresses": None}]},
    ],
)
def test_torn_peers_do_no_harm(home: Home, torn: dict) -> None:
    good = {"node_id": f"{1:032x}", "name": "den-pc", "addresses": ["10.0.0.1:52415"]}
    if isinstance(torn["peers"], list):
        torn["peers"].append(good)
    home.path.mkdir(parents=True)
    (home.path / "peers.json").write_text(json.dumps(torn))
    assert home.remembered_peers() in ((), (peer(1),))
    assert (home.remembered_peers() == ()) == (torn["peers"] == 5)


def test_a_home_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write .*node.json.*EXO_TRAIN_HOME"):
        Home(tmp_path / "file").next_incarnation()
    with pytest.raises(ConfigError, match=r"cannot write .*EXO_TRAIN_HOME"):
        Home(tmp_path / "file").found()
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


def test_the_environment_names_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXO_TRAIN_HOME", str(tmp_path / "h"))
    assert open_home().path == tmp_path / "h"
    monkeypatch.delenv("EXO_TRAIN_HOME")
    assert open_home().path.name == "exo-train"


def test_a_name_once_given_is_kept_for_agents_that_commands_start(home: Home) -> None:
    assert home.device_name() == default_device_name()
    assert home.device_name(" studio ") == "studio"
    home.next_incarnation()
    assert home.device_name() == "studio"
    assert home.device_name("den") == "den"
    with pytest.raises(ConfigError, match="control characters"):
        home.device_name("a\x1b[2J")
    assert home.device_name() == "den", "what cannot be shown is not kept"


def test_a_corrected_clock_does_not_hide_a_running_agent(
    home: Home, sleeper: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_claim(home, pid=sleeper.pid, started_s=start_mark(sleeper))
    started_s, booted_s = sleeper.create_time(), psutil.boot_time()
    if sys.platform == "linux":  # as after the time was set an hour ahead
        monkeypatch.setattr(psutil.Process, "create_time", lambda self: started_s + 3600)
        monkeypatch.setattr(psutil, "boot_time", lambda: booted_s + 3600)
    with pytest.raises(ConfigError, match="already runs"):
        home.check_free()
