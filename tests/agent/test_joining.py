"""`join`: a new cluster, a place in one by its code, coming back without one, and refusals."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pairing_parties import Wire, impostor

from exo_train.agent.joining import become_member, check_unattached
from exo_train.agent.protocol import PROTOCOL_VERSION
from exo_train.cluster.discovery import Discovery
from exo_train.cluster.home import Home, RememberedPeer
from exo_train.cluster.interfaces import usable_addresses
from exo_train.cluster.pairing import Code
from exo_train.errors import ConfigError, PeerError
from exo_train.peer import Address, NodeId
from tests.agent.agents_here import LOOPBACK, Here, wait_all_alive
from tests.agent.conftest import Command, Join
from tests.agent.running_agents import RunningAgent, loopback_interface, wait_met, wait_until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("agents"),
    pytest.mark.skipif(sys.platform == "win32", reason="ends agents with POSIX signals"),
]

A_YEAR_AHEAD = """
import time, types
from exo_train.__main__ import main
from exo_train.agent import meeting
meeting.time = types.SimpleNamespace(**vars(time))
meeting.time.time = lambda: time.time() + 365 * 86400
main()
"""
SHOWN_CODE = re.compile(r"exo-train join --code (\d+-[a-z]+-[a-z]+)\n")
SHOWN_PEER = re.compile(r"add --peer (\S+)\)")
# 0.2 to 0.7 s, measured; a busy machine took 5.6 s once. Without a stop the search takes 30 s.
STOPPED_WITHIN_S = 15.0
Start = Callable[..., RunningAgent]


class WrongClock(RunningAgent):
    """The clock that its agent tells others is a year ahead."""

    def command(self, *arguments: str) -> list[str]:
        command = super().command(*arguments)
        return [*command[:1], "-c", A_YEAR_AHEAD, *command[3:]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `join` as a user would: with a code or without one, but never paired before."""
    started: list[RunningAgent] = []

    def start(name: str, *options: str, kind: type[RunningAgent] = RunningAgent) -> RunningAgent:
        options = ("--interface", loopback_interface(), *options)
        agent = kind(name, tmp_path, "", options, is_paired=False)
        started.append(agent)
        agent.start()
        return agent

    yield start
    for agent in started:
        agent.close()


def contents(home: Home) -> dict[str, bytes]:
    """Give what a failed command must not change."""
    names = ("cluster.json", "roster.json", "peers.json")
    return {n: (home.path / n).read_bytes() for n in names if (home.path / n).exists()}


def test_the_first_makes_a_cluster_and_the_next_finds_it_by_its_code_alone(start: Start) -> None:
    first = start("first")
    wait_until(lambda: "--peer" in first.output, 5, lambda: first.output)
    (code,) = SHOWN_CODE.findall(first.output)
    assert "to add a device, run there within 10 minutes:" in first.output
    (peer,) = SHOWN_PEER.findall(first.output)
    assert Address.parse(peer).host == LOOPBACK
    assert first.states() == {"first": "alive"}

    second = start("second", "--code", code)
    wait_met([first, second], 5)
    assert f"looking for the device that shows {code} …" in second.output
    assert "paired: this device is a member now, with 1 other(s)" in second.output
    assert "to add a device" not in second.output, "it is not alone"
    wait_until(lambda: "the code was used" in first.output, 5, lambda: first.output)
    assert first.home.paired_identity().cluster == second.home.paired_identity().cluster

    before = second.id
    assert second.end(signal.SIGTERM) == 0
    second.options = second.options[:2]
    second.start()
    wait_met([first, second], 5)
    assert second.id == before, "it needs no code again"
    assert second.end() == 0
    assert first.end() == 0


def test_a_device_whose_clock_is_a_year_ahead_is_paired_and_met_like_any_other(
    start: Start, join: Join
) -> None:
    here = join("here")
    made = here.agent.invite()
    peers = [f"--peer={address}" for address in made.addresses]
    ahead = start("ahead", "--code", made.code, *peers, kind=WrongClock)
    assert "paired: this device is a member now" in ahead.output
    wait_until(
        lambda: here.states() == ahead.states() == {"here": "alive", "ahead": "alive"},
        10,
        lambda: f"{here.states()} {ahead.output}",
    )
    assert "the clock of ahead is 31536000 s ahead of this device's" in here.wait_says("the clock")
    wait_until(lambda: "the clock of here is" in ahead.output, 5, lambda: ahead.output)
    assert "the clock of here is 31536000 s behind this device's" in ahead.output
    hashes = {here.agent.status()["view_hash"], ahead.status()["view_hash"]}
    assert len(hashes) == 1
    assert here.row("ahead")["since_s"] < 60
    assert ahead.end() == 0


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("7-maple-tigre", "'tigre' is not a word of pairing codes; the nearest one is 'tiger'"),
        ("maple tiger", "a code is a number and 2 words, like 7-maple-tiger, got 'maple tiger'"),
        ("100-maple-tiger", "a code's number is between 1 and 99, got 100"),
    ],
)
def test_what_is_no_code_is_refused_before_anything_is_asked(
    command: Command, tmp_path: Path, typed: str, said: str
) -> None:
    done = command(Home(tmp_path / "new"), "join", "--code", typed)
    assert done.code == 2
    assert said in done.err
    assert "looking for" not in done.out
    assert not (tmp_path / "new").exists()


def wrong(code: str) -> str:
    """Give the code with another last word."""
    return re.sub("[a-z]+$", "zebra" if not code.endswith("zebra") else "wolf", code)


def join_options(here: Here, code: str) -> tuple[str, ...]:
    """Give what to type in another home for a code of `here`; nothing is asked of the network."""
    port = here.agent.invitations._desk.port or 1
    return ("join", "--interface", "127.0.0.9", "--code", code, "--peer", f"{LOOPBACK}:{port}")


def test_a_wrong_code_is_said_and_changes_nothing(
    join: Join, command: Command, tmp_path: Path
) -> None:
    here = join("here")
    code = here.agent.invite().code
    own = Home(tmp_path / "other")
    own.found()
    before = contents(own)
    done = command(own, *join_options(here, wrong(code)))
    assert done.code == 3
    assert "wrong code: 127.0.0.1:" in done.err
    assert "invites with this number, but with other words" in done.err
    assert "Traceback" not in done.err
    assert contents(own) == before, "its own cluster is still there"
    assert here.agent.is_alone


def test_three_wrong_codes_void_it_and_the_inviter_hears_so(
    join: Join, command: Command, tmp_path: Path
) -> None:
    here, new = join("here"), Home(tmp_path / "new")
    code = here.agent.invite().code
    options = join_options(here, wrong(code))
    assert [command(new, *options).code for _ in range(3)] == [3, 3, 3]
    assert "three wrong codes were tried, so this one is void" in here.wait_says("three wrong")
    done = command(new, *options[:4], code, *options[5:])
    assert done.code == 3
    assert f"no device answers to a code with the number {code.split('-')[0]}" in done.err
    assert new.identity() is None


def become(home: Home, here: Here, code: str) -> list[str]:
    """Pair a home with `here` by the address alone; gives what was said."""
    said: list[str] = []
    port = here.agent.invitations._desk.port or 1
    peers = [Address(LOOPBACK, port)]
    become_member(home, code, peers=peers, interface="127.0.0.9", say=said.append)
    return said


def test_a_used_code_is_good_for_nobody_else(join: Join, command: Command, tmp_path: Path) -> None:
    here = join("here")
    made = here.agent.invite()
    options = join_options(here, made.code)
    become(Home(tmp_path / "one"), here, made.code)
    here.wait_says("the code was used")
    done = command(Home(tmp_path / "two"), *options)
    assert done.code == 3
    assert "nothing answers at" in done.err
    assert "Make a fresh code with `exo-train invite`" in done.err
    assert Home(tmp_path / "two").identity() is None
    assert len(here.agent.admissions.members()) == 2


def test_an_expired_code_is_good_for_nobody(join: Join, command: Command, tmp_path: Path) -> None:
    here = join("here")
    here.agent.invitations._desk._lifetime_s = 0.2
    code = here.agent.invite().code
    options = join_options(here, code)
    assert "`exo-train invite` makes a fresh one" in here.wait_says("the code has expired")
    assert command(Home(tmp_path / "late"), *options).code == 3
    assert here.agent.is_alone


def test_who_belongs_to_others_must_leave_first(
    join: Join, command: Command, tmp_path: Path
) -> None:
    here, other = join("here"), join("other", cluster="elsewhere")
    mine = Home(tmp_path / "mine")
    become(mine, here, here.agent.invite().code)
    before = contents(mine)
    done = command(mine, *join_options(other, other.agent.invite().code))
    assert done.code == 2
    assert f"this device belongs to a cluster already, with {here.id[:8]};" in done.err
    assert "`exo-train leave` first to join another cluster" in done.err
    assert contents(mine) == before
    assert other.agent.is_alone


def test_a_name_met_before_is_shown_instead_of_an_id(join: Join) -> None:
    here = join("here")
    laptop = join("laptop", here)
    wait_all_alive(here, laptop)
    wait_until(lambda: bool(laptop.home.remembered_peers()), 5, lambda: "not remembered")
    laptop.agent.__exit__(None, None, None)
    with pytest.raises(ConfigError, match="belongs to a cluster already, with here;"):
        check_unattached(laptop.home)


def test_the_only_member_of_its_own_cluster_may_change(join: Join, tmp_path: Path) -> None:
    here, mine = join("here"), Home(tmp_path / "mine")
    before = mine.found()
    former = RememberedPeer(
        node_id=NodeId("f" * 32), name="former", addresses=(Address(LOOPBACK, 1),)
    )
    mine.remember_peers([former])
    said = become(mine, here, here.agent.invite().code)
    after = mine.paired_identity()
    assert after.cluster == here.agent.admissions.identity.cluster != before.cluster
    assert after.node_id != before.node_id
    assert mine.roster(after).members() == tuple(sorted([here.id, after.node_id]))
    assert said[-1] == "paired: this device is a member now, with 1 other(s)"
    (inviter,) = mine.remembered_peers()  # and nobody of the cluster before
    assert (inviter.node_id, inviter.addresses[0].port) == (here.id, here.port)


def test_a_damaged_home_is_not_joined_over(join: Join, command: Command, tmp_path: Path) -> None:
    here, mine = join("here"), Home(tmp_path / "mine")
    mine.found()
    (mine.path / "cluster.json").write_text("{", "utf-8")
    for arguments in (join_options(here, here.agent.invite().code), ("join",)):
        done = command(mine, *arguments)
        assert done.code == 2
        assert "cluster.json is damaged" in done.err
        assert "`exo-train leave`" in done.err
    assert (mine.path / "cluster.json").read_text("utf-8") == "{"


@pytest.mark.parametrize("where", ["the network", "a silent port", "its input"])
def test_a_stop_while_it_looks_ends_it_at_once_and_changes_nothing(
    tmp_path: Path, where: str
) -> None:
    """Whether Ctrl-C comes, or whoever started it with --tied goes."""
    agent = RunningAgent("new", tmp_path, "", ("--interface", loopback_interface()))
    agent.home.found()
    before = contents(agent.home)
    typed = ["join", *agent.options, "--code", "7-maple-tiger", "--tied"]
    with socket.create_server((LOOPBACK, 0)) as silent:
        if where == "a silent port":
            typed += ["--peer", f"{LOOPBACK}:{silent.getsockname()[1]}"]
        process = subprocess.Popen(
            agent.command(*typed),
            env=agent.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert "looking for" in process.stdout.readline()
        time.sleep(0.7)
        if where == "its input":
            process.stdin.close()
        else:
            process.send_signal(signal.SIGINT)
        code = process.wait(STOPPED_WITHIN_S)
        errors = process.stderr.read() if process.stderr else ""
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    assert code == 130
    assert errors == (
        "exo-train: stopped before this device was paired; nothing was changed here\n"
    )
    assert contents(agent.home) == before


def test_with_an_address_typed_nobody_else_gets_the_proof(join: Join, tmp_path: Path) -> None:
    """An impostor is announced on the same network, and would answer sooner."""
    here, proofs = join("here"), list[bytes]()
    code = here.agent.invite().code
    server, pretender = impostor(proofs, Code.parse(code).number)
    relay = Wire(Address(LOOPBACK, here.agent.invitations._desk.port or 1), delay_s=2.0)
    false = Discovery(
        NodeId("f" * 32),
        cluster="0" * 32,
        protocol=PROTOCOL_VERSION,
        port=pretender.port,
        addresses=usable_addresses(loopback_interface()),
        on_seen=lambda seen: None,
    )
    try:
        false.announce_pairing("e" * 32, pretender.port)
        home = Home(tmp_path / "new")
        become_member(
            home,
            code,
            peers=[relay.address],
            interface=loopback_interface(),
            say=lambda text: None,
        )
        assert home.paired_identity().cluster == here.agent.admissions.identity.cluster
        assert proofs == []
        with pytest.raises(PeerError, match="pretend to be that device"):
            become_member(
                Home(tmp_path / "victim"),
                code,
                peers=(),
                interface=loopback_interface(),
                say=lambda text: None,
            )
        assert len(proofs) == 1, "it was there to be found"
    finally:
        false.close()
        relay.close()
        server.stop(None).wait()


def test_nobody_who_invites_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    peers = [Address(LOOPBACK, 1)]
    with pytest.raises(PeerError, match=r"nothing answers at 127\.0\.0\.1:1\..*--peer HOST:PORT"):
        become_member(
            Home(tmp_path), "7-maple-tiger", peers=peers, interface="127.0.0.9", say=lambda s: None
        )
    assert Home(tmp_path).identity() is None
