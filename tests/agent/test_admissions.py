"""The agent's roster: who is let in, what is kept on disk, who hears of a removal."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from exo_train.agent.admissions import Admissions
from exo_train.cluster.home import Home
from exo_train.errors import ProtocolError
from exo_train.identity import (
    Identity,
    issue_certificate,
    new_key,
    node_id_of,
    public_key_of,
    read_certificate,
)
from exo_train.peer import Address, NodeId
from exo_train.transport.tls import RemovedError
from exo_train.wire.pb import pairing_pb2 as pb
from tests.paired_homes import admit


@dataclass
class Member:
    """A home, its admissions, and the removals that its agent heard of."""

    home: Home
    removed: list[NodeId] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.admissions = self.reread()

    @property
    def id(self) -> NodeId:
        return self.admissions.identity.node_id

    @property
    def identity(self) -> Identity:
        return self.admissions.identity

    def reread(self) -> Admissions:
        """Give what a restarted agent would know."""
        return Admissions(self.home, self.home.paired_identity(), on_removed=self.removed.append)


@pytest.fixture
def founder(tmp_path: Path) -> Member:
    home = Home(tmp_path / "founder")
    home.found()
    return Member(home)


@pytest.fixture
def second(founder: Member, tmp_path: Path) -> Member:
    """A member whom the founder does not know yet."""
    home = Home(tmp_path / "second")
    admit(home, founder.home)
    return Member(home)


def test_a_member_whom_another_has_invited_is_let_in_and_remembered(
    founder: Member, second: Member, tmp_path: Path
) -> None:
    assert founder.admissions.members() == (founder.id,)
    assert founder.admissions.admit(second.identity.certificate) == second.id
    assert founder.admissions.members() == tuple(sorted([founder.id, second.id]))
    assert founder.reread().members() == founder.admissions.members()
    third = Home(tmp_path / "third")
    admit(third, second.home)
    certificate = third.paired_identity().certificate
    assert founder.admissions.admit(certificate) == third.paired_identity().node_id


def test_a_stranger_and_one_whose_inviter_is_unknown_are_not(
    founder: Member, second: Member, tmp_path: Path
) -> None:
    stranger = Home(tmp_path / "stranger")
    stranger.found()
    with pytest.raises(ProtocolError):
        founder.admissions.admit(stranger.paired_identity().certificate)
    with pytest.raises(ProtocolError, match="not one of this cluster's"):
        founder.admissions.admit(b"nonsense")
    guest = Home(tmp_path / "guest")
    admit(guest, second.home)
    with pytest.raises(ProtocolError, match=f"was invited by {second.id}, which is no member"):
        founder.admissions.admit(guest.paired_identity().certificate)
    assert founder.admissions.members() == (founder.id,)


def test_a_former_member_is_told_apart_from_a_stranger_also_after_a_restart(
    founder: Member, second: Member
) -> None:
    founder.admissions.admit(second.identity.certificate)
    founder.admissions.remove(second.id)
    assert founder.removed == [second.id]
    for admissions in (founder.admissions, founder.reread()):
        with pytest.raises(RemovedError, match=f"{second.id} was removed"):
            admissions.admit(second.identity.certificate)
        assert admissions.certificate(second.id) is None
        assert admissions.is_removed(second.id)
        assert admissions.members() == (founder.id,)


def test_an_invited_key_becomes_a_member_with_all_it_needs(founder: Member) -> None:
    key = public_key_of(new_key())
    made = founder.admissions.invite(key, (Address("10.0.0.5", 7),))
    authority = founder.identity.authority_certificate
    certificate = read_certificate(made.certificate, authority_certificate=authority)
    assert (certificate.node_id, certificate.invited_by) == (node_id_of(key), founder.id)
    assert made.cluster == founder.identity.cluster
    assert made.authority_key == founder.identity.authority_key
    assert made.certificate in made.roster.certificates
    assert [(e.host, e.port) for e in made.endpoints] == [("10.0.0.5", 7)]
    assert founder.reread().certificate(node_id_of(key)) == certificate
    assert founder.admissions.invited_by(founder.id) == (node_id_of(key),)


def test_what_another_member_knows_is_taken_in_and_removals_are_told_once(
    founder: Member, second: Member
) -> None:
    digest = founder.admissions.digest()
    founder.admissions.merge(second.admissions.message())
    assert second.id in founder.admissions.members()
    assert founder.admissions.digest() == second.admissions.digest() != digest
    assert founder.removed == []
    second.admissions.note_own_removal(second.id)
    assert second.removed == [], "it knows itself"
    for _ in range(2):
        founder.admissions.merge(second.admissions.message())
    assert founder.removed == [second.id]
    assert founder.reread().digest() == second.admissions.digest()


def test_a_roster_that_makes_no_sense_is_refused_whole(founder: Member) -> None:
    digest = founder.admissions.digest()
    nonsense = pb.RosterState(removals=[pb.Removal(node_id=founder.id, removed_by="x")])
    with pytest.raises(ProtocolError, match="entries that make no sense"):
        founder.admissions.merge(nonsense)
    assert founder.admissions.digest() == digest
    assert founder.removed == []


def test_a_disk_that_cannot_be_written_keeps_no_member_out(
    founder: Member, second: Member, caplog: pytest.LogCaptureFixture
) -> None:
    (founder.home.path / "roster.json").unlink()
    (founder.home.path / "roster.json").mkdir()
    assert founder.admissions.admit(second.identity.certificate) == second.id
    assert second.id in founder.admissions.members()
    assert "cannot write" in caplog.text


def test_two_certificates_of_one_key_are_one_member(founder: Member, second: Member) -> None:
    founder.admissions.admit(second.identity.certificate)
    again = issue_certificate(founder.identity, public_key_of(second.identity.key_pem))
    assert founder.admissions.admit(again) == second.id
    assert len(founder.admissions.members()) == 2
