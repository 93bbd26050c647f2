"""Rosters: one view whatever the order, removal wins, and nobody enters uninvited."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exo_train.cluster.roster import (
    MAX_CERTIFICATES,
    MAX_LISTED_REMOVALS,
    MAX_MEMBERS,
    MAX_REMOVALS,
    Removal,
    Roster,
    RosterState,
)
from exo_train.errors import ConfigError, ProtocolError
from exo_train.identity import (
    Identity,
    found_cluster,
    issue_certificate,
    new_key,
    node_id_of,
    public_key_of,
)
from exo_train.peer import NodeId
from exo_train.wire.pb import pairing_pb2 as pb

STRANGER = NodeId("f" * 32)


def invited(inviter: Identity) -> Identity:
    key_pem = new_key()
    public_key = public_key_of(key_pem)
    return replace(
        inviter,
        node_id=node_id_of(public_key),
        key_pem=key_pem,
        certificate=issue_certificate(inviter, public_key),
    )


def family() -> tuple[Identity, ...]:
    """Make a founder, three that it invited, and two each that two of those invited."""
    founder = found_cluster()
    children = [invited(founder) for _ in range(3)]
    return founder, *children, *(invited(child) for child in children[:2] for _ in range(2))


FAMILY = family()
FOUNDER, CHILD = FAMILY[0], FAMILY[1]
GRANDCHILD = FAMILY[4]
# The same key, let in by two: each certificate is true.
TWICE = issue_certificate(FAMILY[2], public_key_of(FAMILY[6].key_pem))


def roster_of(*identities: Identity) -> Roster:
    roster = Roster.of(FOUNDER)
    for identity in identities:
        roster.admit(identity.certificate)
    return roster


def removals(*node_ids: str) -> RosterState:
    return RosterState(
        removals=tuple(Removal(node_id=NodeId(n), removed_by=STRANGER) for n in node_ids)
    )


@st.composite
def states(draw: st.DrawFn) -> RosterState:
    """What a member may have come to know: some, with those who invited them; some removed."""
    chosen = draw(st.sets(st.sampled_from(range(len(FAMILY)))))
    if chosen & {4, 5}:
        chosen |= {1}
    if chosen & {6, 7}:
        chosen |= {2}
    certificates = [FAMILY[n].certificate for n in sorted(chosen | {0})]
    if 2 in chosen and draw(st.booleans()):
        certificates.append(TWICE)
    ids = st.sampled_from([*(member.node_id for member in FAMILY), STRANGER])
    gone = draw(st.dictionaries(ids, ids, max_size=3))
    roster = Roster.of(FOUNDER, RosterState(certificates=tuple(certificates)))
    for node_id, by in gone.items():
        roster.remove(node_id, by)
    return roster.state()


def merged(*parts: RosterState) -> RosterState:
    roster = Roster(FOUNDER.cluster, FOUNDER.authority_certificate)
    for part in parts:
        roster.merge(part)
    return roster.state()


@settings(max_examples=60, deadline=None)
@given(states(), states(), states())
def test_the_order_of_merges_does_not_matter(
    one: RosterState, two: RosterState, three: RosterState
) -> None:
    assert merged(one, two) == merged(two, one)
    assert merged(merged(one, two), three) == merged(one, merged(two, three))
    assert merged(one, one) == merged(one) == one


@settings(max_examples=60, deadline=None)
@given(states(), st.randoms(use_true_random=False))
def test_the_order_within_a_message_does_not_matter(state: RosterState, random) -> None:
    certificates, gone = list(state.certificates), list(state.removals)
    random.shuffle(certificates)
    random.shuffle(gone)
    shuffled = RosterState(certificates=tuple(certificates), removals=tuple(gone))
    mixed, sorted_ = Roster.of(FOUNDER, shuffled), Roster.of(FOUNDER, state)
    assert mixed.digest() == sorted_.digest()
    assert mixed.members() == sorted_.members()


@settings(max_examples=60, deadline=None)
@given(states(), states())
def test_digests_are_equal_exactly_when_contents_are(one: RosterState, two: RosterState) -> None:
    first, second = Roster.of(FOUNDER, one), Roster.of(FOUNDER, two)
    assert (first.digest() == second.digest()) == (first.state() == second.state())
    first.merge(two)
    second.merge(one)
    assert first.digest() == second.digest()
    assert not first.merge(second.state()), "nothing is new any more"


@settings(max_examples=40, deadline=None)
@given(st.lists(states(), min_size=1, max_size=4), st.sampled_from(FAMILY), st.integers(0, 4))
def test_a_removal_wins_whenever_it_comes(
    parts: list[RosterState], gone: Identity, place: int
) -> None:
    roster = Roster.of(FOUNDER)
    for part in [*parts[:place], removals(gone.node_id), *parts[place:]]:
        roster.merge(part)
    assert gone.node_id not in roster.members()
    assert roster.certificate(gone.node_id) is None
    assert roster.is_removed(gone.node_id)
    with pytest.raises(ProtocolError, match=f"{gone.node_id} was removed.*exo-train invite"):
        roster.admit(gone.certificate)


@settings(max_examples=40, deadline=None)
@given(states())
def test_a_roster_travels_and_lies_on_disk_unchanged(state: RosterState) -> None:
    message = pb.RosterState.FromString(state.to_message().SerializeToString())
    assert RosterState.from_message(message) == state
    assert RosterState.from_json(json.loads(json.dumps(state.to_json()))) == state


def test_a_caller_is_admitted_by_its_inviter() -> None:
    roster = roster_of(CHILD)
    assert roster.admit(GRANDCHILD.certificate).invited_by == CHILD.node_id
    assert set(roster.members()) == {FOUNDER.node_id, CHILD.node_id, GRANDCHILD.node_id}
    certificate = roster.certificate(GRANDCHILD.node_id)
    assert certificate is not None
    assert certificate.der == GRANDCHILD.certificate
    assert roster.invited_by(CHILD.node_id) == (GRANDCHILD.node_id,)
    assert roster.invited_by(FOUNDER.node_id) == (CHILD.node_id,)


def test_a_caller_whose_inviter_nobody_knows_is_refused() -> None:
    with pytest.raises(ProtocolError, match=f"invited by {CHILD.node_id}, which is no member"):
        roster_of().admit(GRANDCHILD.certificate)


def minted() -> dict[str, bytes]:
    """What CHILD, once removed, can still make: it has kept the authority's key and its own."""
    key_pem = new_key()
    public_key = public_key_of(key_pem)
    own_id = node_id_of(public_key)
    return {
        "in its own name": issue_certificate(CHILD, public_key),
        "in the founder's name": issue_certificate(
            replace(CHILD, node_id=FOUNDER.node_id), public_key
        ),
        "in a member's name": issue_certificate(
            replace(CHILD, node_id=FAMILY[2].node_id), public_key
        ),
        "invited by itself": issue_certificate(
            replace(CHILD, node_id=own_id, key_pem=key_pem), public_key
        ),
        "with another founder": found_cluster().certificate,
        "for its old key, in the founder's name": issue_certificate(
            replace(CHILD, node_id=FOUNDER.node_id), public_key_of(CHILD.key_pem)
        ),
    }


@pytest.mark.parametrize("how", minted())
def test_a_removed_device_cannot_come_back_under_another_name(how: str) -> None:
    roster = roster_of(*FAMILY[1:])
    roster.remove(CHILD.node_id, FOUNDER.node_id)
    before = roster.state()
    with pytest.raises(ProtocolError):
        roster.admit(minted()[how])
    assert roster.state() == before


@settings(max_examples=25, deadline=None)
@given(st.permutations(sorted(minted().items())), states())
def test_gossip_of_forged_invitations_is_left_out(
    forged: list[tuple[str, bytes]], state: RosterState
) -> None:
    """What a removed device makes in its own name is for the members that it calls to refuse."""
    forged = [pair for pair in forged if pair[0] != "in its own name"]
    roster = Roster.of(FOUNDER, state)
    dishonest = RosterState(certificates=tuple(der for _, der in forged))
    assert not roster.merge(dishonest)
    assert roster.state() == Roster.of(FOUNDER, state).state()


def test_those_whom_a_removed_device_had_invited_stay_and_are_believed_in_gossip() -> None:
    known = roster_of(CHILD)
    known.remove(CHILD.node_id, FOUNDER.node_id)
    everyone = roster_of(*FAMILY[1:])
    known.merge(everyone.state())
    assert set(known.members()) == {m.node_id for m in FAMILY} - {CHILD.node_id}
    assert known.admit(GRANDCHILD.certificate).node_id == GRANDCHILD.node_id


def test_the_founder_may_leave_and_the_rest_go_on() -> None:
    roster = roster_of(CHILD)
    roster.remove(FOUNDER.node_id, FOUNDER.node_id)
    later = Roster.of(GRANDCHILD, roster.state())
    assert later.admit(GRANDCHILD.certificate).invited_by == CHILD.node_id
    assert set(later.members()) == {CHILD.node_id, GRANDCHILD.node_id}


def test_a_known_member_is_not_checked_again_and_again() -> None:
    roster = roster_of(CHILD)
    assert roster.admit(CHILD.certificate) is roster.admit(CHILD.certificate)


def test_a_full_cluster_says_so_and_has_room_again_after_a_removal() -> None:
    roster = roster_of()
    devices = [invited(FOUNDER) for _ in range(MAX_MEMBERS)]
    for device in devices[:-1]:
        roster.admit(device.certificate)
    with pytest.raises(ProtocolError, match="has 64 devices, the limit is 64; remove one"):
        roster.admit(devices[-1].certificate)
    assert not roster.merge(RosterState(certificates=(devices[-1].certificate,)))
    assert len(roster.members()) == MAX_MEMBERS
    roster.admit(devices[0].certificate)
    roster.remove(devices[0].node_id, FOUNDER.node_id)
    roster.admit(devices[-1].certificate)
    assert len(roster.members()) == MAX_MEMBERS
    # Another member that knew all of it from the start has the same view.
    assert Roster.of(FOUNDER, roster.state()).digest() == roster.digest()


def test_invented_removals_do_not_keep_a_real_one_out() -> None:
    roster = roster_of(CHILD)
    inventions = [f"{n:032x}" for n in range(MAX_REMOVALS + 5)]
    roster.merge(removals(*inventions))
    assert len(roster.state().removals) == MAX_REMOVALS
    with pytest.raises(ConfigError, match=f"{MAX_REMOVALS} removals, the limit is {MAX_REMOVALS}"):
        roster.remove(STRANGER, FOUNDER.node_id)
    roster.remove(CHILD.node_id, FOUNDER.node_id)
    assert roster.members() == (FOUNDER.node_id,)
    assert Roster.of(FOUNDER, roster.state()).members() == (FOUNDER.node_id,)


@pytest.mark.parametrize(
    "content",
    [
        {"certificates": (b"",) * (MAX_CERTIFICATES + 1)},
        {"certificates": (bytes(5000),)},
        {"removals": (Removal(node_id=STRANGER, removed_by=STRANGER),) * (MAX_LISTED_REMOVALS + 1)},
        {"removals": (Removal(node_id=NodeId("x" * 32), removed_by=STRANGER),)},
        {"removals": (Removal(node_id=STRANGER, removed_by=NodeId("../" * 9)),)},
    ],
    ids=["many", "large", "many removals", "no id", "by no id"],
)
def test_a_roster_that_makes_no_sense_is_refused_unread(content: dict) -> None:
    with pytest.raises(ProtocolError):
        RosterState(**content)


@pytest.mark.parametrize(
    "stored",
    [
        {},
        {"certificates": 5, "removals": {}},
        {"certificates": [5], "removals": {}},
        {"certificates": ["%"], "removals": {}},
        {"certificates": [], "removals": []},
        {"certificates": [], "removals": {"a": "b"}},
    ],
)
def test_a_stored_roster_that_is_damaged_is_refused(stored: dict) -> None:
    with pytest.raises(ProtocolError):
        RosterState.from_json(stored)


def test_every_member_comes_to_the_same_roster_by_gossip() -> None:
    """Each starts with what it was told at pairing; one was removed by one member alone."""
    views = [Roster.of(FAMILY[n], roster_of(*FAMILY[1:n]).state()) for n in range(1, len(FAMILY))]
    views[2].remove(CHILD.node_id, FAMILY[3].node_id)
    for _ in range(2):
        for one, two in itertools.pairwise([*views, views[0]]):
            two.merge(one.state())
    assert len({view.digest() for view in views}) == 1
    assert set(views[0].members()) == {m.node_id for m in FAMILY} - {CHILD.node_id}
