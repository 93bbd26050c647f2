"""The ways between members: measured by one end, pinned on both, and whether they lead back."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from exo_train.agent.members import wait_candidates
from exo_train.agent.opening import best_host_of
from exo_train.cluster.home import Home
from exo_train.cluster.link_facts import LinkFacts, to_message
from exo_train.config import TrainConfig
from exo_train.errors import PeerError
from exo_train.peer import Address
from exo_train.train.messages import to_endpoints
from exo_train.wire.pb import control_pb2 as pb
from tests.agent.agents_here import LOOPBACK, ByHand, Here, wait_all_alive
from tests.agent.conftest import Join
from tests.agent.running_agents import wait_until
from tests.paired_homes import ensure_member

pytestmark = pytest.mark.xdist_group("agents-here")
LINKED_WITHIN_S = 20.0


def only_link(here: Here) -> LinkFacts | None:
    pairs = here.agent.survey.listing()
    return pairs[0].link if len(pairs) == 1 else None


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Here, Here]]:
    """Two members, the one that measures first, when both know their link; they met over IPv6."""
    root = tmp_path_factory.mktemp("survey")
    with contextlib.ExitStack() as stack:
        agents: list[Here] = []
        for name in ("one", "two"):
            home = Home(root / name)
            ensure_member(home, root=root, cluster="tests")
            agents.append(Here(home, name, *(Address("::1", other.port) for other in agents)))
            stack.enter_context(agents[-1].agent)
        wait_all_alive(*agents)
        wait_until(
            lambda: all(only_link(here) is not None for here in agents),
            LINKED_WITHIN_S,
            lambda: str([here.agent.survey.listing() for here in agents]),
        )
        measurer, other = sorted(agents, key=lambda here: here.id)
        yield measurer, other


def test_one_end_measures_and_both_tell_the_same(pair: tuple[Here, Here]) -> None:
    measurer, other = pair

    def told() -> list[tuple[LinkFacts, ...]]:
        listed = tuple(pair.link for pair in other.agent.survey.listing())
        return [listed, measurer.agent.survey.own_links()]

    wait_until(lambda: told()[0] == told()[1] != (), 10.0, lambda: str(told()))
    link = only_link(measurer)
    assert link is not None
    assert link.peer_id == other.id
    assert other.agent.survey.own_links() == (), "it tells what it was told, not what it measured"


def ends_of_link(measurer: Here, other: Here) -> dict[str, str]:
    """Give the host at which each end is to dial the other one; another look may give others."""
    link = only_link(measurer)
    assert link is not None
    return {measurer.name: link.remote_host, other.name: link.local_host}


def test_both_ends_ask_each_other_on_the_pinned_way_first(pair: tuple[Here, Here]) -> None:
    measurer, other = pair

    def asked() -> dict[str, str]:
        both = (measurer, other)
        return {here.name: here.agent.meeting.live()[0].proven[0].host for here in both}

    def listed() -> dict[str, str]:
        rows = {measurer.name: measurer.row(other.name), other.name: other.row(measurer.name)}
        return {name: Address.parse(row["addresses"][0]).host for name, row in rows.items()}

    wait_until(
        lambda: asked() == listed() == ends_of_link(measurer, other),
        15.0,
        lambda: f"{asked()} and {listed()} are not {ends_of_link(measurer, other)}",
    )


def test_train_finds_the_pinned_host_in_the_status_of_each(pair: tuple[Here, Here]) -> None:
    measurer, other = pair

    def best() -> list[dict[str, str]]:
        """The host at which each end would dial the other, as each member's status has it."""
        statuses = [here.agent.status()["links"] for here in pair]
        return [
            {
                measurer.name: best_host_of(links, measurer.id, other.id),
                other.name: best_host_of(links, other.id, measurer.id),
            }
            for links in statuses
        ]

    wait_until(lambda: best() == [ends_of_link(measurer, other)] * 2, 10.0, lambda: str(best()))


def test_members_dial_back_and_say_how_that_went(pair: tuple[Here, Here]) -> None:
    for here, peer in (pair, pair[::-1]):
        wait_until(lambda here=here: bool(here.agent.survey.dial_backs()), 5.0, lambda: "no answer")
        seen = {(d.member, d.address.host, d.outcome) for d in here.agent.survey.dial_backs()}
        hosts = {address.host for address in here.agent.device.addresses()}
        assert seen == {(peer.name, host, "connected") for host in hosts}
        assert not here.agent.survey.is_unreachable
        assert not here.row(here.name)["unreachable"]


def test_only_what_the_caller_has_told_of_itself_is_dialled(
    pair: tuple[Here, Here], tmp_path: Path
) -> None:
    here = pair[0]
    stranger = ByHand.invited_by(here, tmp_path / "stranger")
    with socket.create_server((LOOPBACK, 0)) as own, socket.create_server((LOOPBACK, 0)) as foreign:
        ports = [s.getsockname()[1] for s in (own, foreign)]
        with stranger.control_of(here) as stub:
            told = (Address(LOOPBACK, ports[0]), Address(LOOPBACK, 1))
            stub.Hello(stranger.hello(addresses=told), timeout=5)
            asked = [Address(LOOPBACK, port) for port in (ports[1], 1, ports[0])]
            request = pb.DialBackRequest(endpoints=to_endpoints(asked))
            outcomes = list(stub.DialBack(request, timeout=5).outcomes)
            stub.Goodbye(stranger.goodbye(), timeout=5)
        foreign.settimeout(0.2)
        with pytest.raises(TimeoutError):
            foreign.accept()
    assert outcomes == [pb.DIAL_OUTCOME_UNSPECIFIED, pb.REFUSED, pb.CONNECTED]


def test_a_device_that_can_call_but_not_be_called_is_told_and_gets_no_place(
    tmp_path: Path, join: Join
) -> None:
    """As behind a firewall: what it says of itself leads nowhere."""
    studio = join("studio")
    home = Home(tmp_path / "den")
    ensure_member(home, root=tmp_path, cluster="tests")
    den = Here(home, "den", studio.port)
    wrong_host = "127.0.0.9"
    den.agent.device.addresses = (  # type: ignore[method-assign]
        lambda port=None: (Address(wrong_host, port or den.agent.port),)
    )
    with den.agent:
        said = den.wait_says("others cannot reach this device")
        assert f"{wrong_host}:{den.port} refused from studio" in said
        assert "gets no place in a ring; `exo-train doctor` says what to do" in said
        wait_until(lambda: studio.row("den")["unreachable"], 5.0, lambda: str(studio.row("den")))
        assert den.row("den")["unreachable"]
        wait_all_alive(studio, den)
        notes: list[str] = []
        config = TrainConfig(min_devices=1, device_wait_s=10)
        with studio.client() as client:
            candidates, _ = wait_candidates(client, config, on_note=notes.append)
        assert [candidate.name for candidate in candidates] == ["studio"]
        assert "others cannot connect to den, so this run goes without" in notes[0]
        with studio.client() as client, pytest.raises(PeerError, match="run `exo-train doctor`"):
            wait_candidates(client, TrainConfig(devices=("den",), device_wait_s=0.1))


def test_the_link_of_a_member_that_ended_is_gone(join: Join) -> None:
    studio = join("studio")
    den = join("den", studio)
    wait_all_alive(studio, den)
    wait_until(lambda: only_link(studio) is not None, LINKED_WITHIN_S, lambda: "not measured")
    den.agent.__exit__(None, None, None)
    wait_until(lambda: not studio.agent.status()["links"], 5.0, lambda: "the link is still listed")


def test_links_that_make_no_sense_are_left_out_and_the_member_stays(
    pair: tuple[Here, Here], tmp_path: Path
) -> None:
    here = pair[1]
    # The smaller id measures, so that only such a device may tell of a link with this one.
    tellers = (ByHand.invited_by(here, tmp_path / f"{number}") for number in range(64))
    teller = next(one for one in tellers if one.identity.node_id < here.id)
    link = LinkFacts(
        peer_id=here.id,
        local_host="10.0.0.1",
        remote_host="10.0.0.2",
        interface="lan0",
        kind="Ethernet",
        rtt_s=0.001,
        jitter_s=0.0,
        to_peer_bytes_per_s=1e8,
        from_peer_bytes_per_s=2e8,
    )

    def lines() -> list[str]:
        return [told["line"] for told in here.agent.status()["links"] if "teller" in told["line"]]

    with teller.control_of(here) as stub:
        told = to_message(link)
        stub.Hello(teller.hello(name="teller", links=(told,)), timeout=5)
        wanted = [f"teller ⇄ {here.name}  Ethernet  100 MB/s  1.0 ms"]
        wait_until(lambda: lines() == wanted, 5.0, lambda: str(lines()))
        told.kind = "Ethernet\x1b[2J"
        stub.Hello(teller.hello(name="teller", links=(told,)), timeout=5)
        wait_until(lambda: lines() == [], 5.0, lambda: str(lines()))
        assert here.states()["teller"] == "alive"
        stub.Goodbye(teller.goodbye(), timeout=5)
