"""Whom a membership asks, where first, how often, and what it never asks."""

from __future__ import annotations

import itertools

from exo_train.cluster.member import MemberState
from exo_train.cluster.membership import DEAD_AFTER_S
from exo_train.cluster.whom_to_ask import (
    FORGET_SUGGESTION_AFTER_S,
    HEARTBEAT_S,
    MAX_ADDRESSES,
    MAX_LASTING,
    MAX_MEMBER_SEARCHES,
    MAX_RETRY_S,
    MAX_STRANGER_SEARCHES,
    MAX_SUGGESTIONS,
    Failure,
)
from exo_train.peer import Address, NodeId
from tests.unit.cluster.membership_bench import MAC, SELF, TICK_S, Answer, Bench, met, place

DOCKER = Address("172.17.0.1", 1)


def test_a_suggestion_is_asked_at_once_and_a_quiet_member_every_heartbeat() -> None:
    bench = met()
    assert bench.asked_at(place(1))[0] == 1000.0
    start_s = bench.now_s
    bench.run(20.0)
    assert len(bench.asked_at(place(1), start_s)) == 20.0 / HEARTBEAT_S
    assert all(ask.is_heartbeat for at_s, ask in bench.asked if at_s > start_s)


def test_when_the_way_fails_all_others_are_tried_at_once_and_the_first_to_answer_stays() -> None:
    ways = Answer(addresses=(place(1), place(2), place(3)))
    bench = met(dict.fromkeys((place(1), place(2), place(3)), ways))
    bench.places[place(1)] = Failure.NO_ROUTE
    lost_s = bench.now_s
    bench.run(HEARTBEAT_S)
    assert bench.member().proven == (place(2), place(3), place(1)), "in the order of answers"
    raced = [bench.asked_at(address, lost_s)[0] for address in (place(1), place(2), place(3))]
    assert len(set(raced)) == 1, "in the moment of the failure"
    winner = bench.member().proven[0]
    bench.places[place(1)] = ways
    bench.run(30.0)
    assert bench.member().proven[0] == winner, "a way that works is not left"
    assert not bench.asked_at(place(1), lost_s + 5.0)


def test_a_pinned_way_is_asked_first_and_again_once_it_is_back() -> None:
    ways = Answer(addresses=(place(1), place(2)))
    bench = met({place(1): ways, place(2): ways})
    bench.membership.pin(MAC, place(2))
    bench.run(2 * HEARTBEAT_S)
    assert bench.member().proven[0] == place(2)
    pinned_s = bench.now_s
    bench.run(10.0)
    assert not bench.asked_at(place(1), pinned_s)

    bench.places[place(2)] = Failure.SILENT
    bench.run(10.0)
    assert bench.member().proven[0] == place(1)
    bench.places[place(2)] = ways
    bench.run(MAX_RETRY_S + HEARTBEAT_S)
    assert bench.member().proven[0] == place(2)

    bench.membership.pin(MAC, None)
    bench.places[place(2)] = Failure.SILENT
    bench.run(10.0)
    assert bench.member().proven[0] == place(1)


def test_a_device_that_moved_is_followed() -> None:
    bench = met()
    moved = Answer(addresses=(place(22),))
    bench.places = {place(22): moved}
    bench.hear(moved)
    bench.run(5.0)
    assert bench.member().proven[0] == place(22)
    assert not any(c.after and not c.after.is_live for c in bench.changes)


def test_the_back_off_grows_to_5_s_and_a_sighting_undoes_it() -> None:
    bench = met()
    bench.places[place(1)] = Failure.REFUSED
    bench.run(60.0)
    assert bench.member().state is MemberState.DEAD
    times = bench.asked_at(place(1))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert max(gaps) == MAX_RETRY_S
    assert gaps[-3:] == [MAX_RETRY_S] * 3

    bench.places[place(1)] = Answer()
    bench.run(MAX_RETRY_S - (bench.now_s - times[-1]) - 1.0)  # the next call is 1 s away
    assert bench.member().state is MemberState.DEAD
    bench.suggest(place(1), MAC)
    assert bench.member().state is MemberState.ALIVE


def test_many_sightings_bring_no_more_calls_than_heartbeats() -> None:
    bench = Bench()
    for _ in range(120):
        bench.suggest(place(1), MAC)
        bench.run(TICK_S)
    assert len(bench.asked_at(place(1))) <= 60.0 / HEARTBEAT_S + 1


def test_an_address_that_answers_with_our_own_id_is_dropped() -> None:
    own = Answer(node_id=SELF, incarnation=3, instance="own")
    ways = Answer(addresses=(DOCKER, place(1)))
    bench = Bench(places={DOCKER: own, place(1): ways})
    bench.suggest(DOCKER)
    bench.suggest(DOCKER, SELF)
    bench.hear(ways)
    bench.run(30.0)
    assert bench.member().proven == (place(1),)
    assert bench.duplicates == []
    assert len(bench.asked_at(DOCKER)) <= 3, "once by itself, and in the race for the Mac"
    assert bench.membership.suggestions() == ()


def test_one_address_claimed_by_two_is_asked_for_each() -> None:
    """Every Docker host advertises the same bridge; behind it is whoever it is."""
    bench = Bench(places={place(5): Answer(node_id=NodeId("pc"), addresses=(place(5),))})
    bench.suggest(place(5), MAC)
    bench.suggest(place(5), NodeId("pc"))
    bench.run(5.0)
    assert bench.member(NodeId("pc")).proven == (place(5),)
    assert MAC not in bench.membership.members


def test_a_suggestion_is_forgotten_after_two_minutes_and_a_lasting_one_never() -> None:
    bench = Bench()
    bench.suggest(place(1))
    bench.suggest(place(2), lasting=True)
    bench.suggest(place(2))
    bench.run(FORGET_SUGGESTION_AFTER_S + 1.0)
    assert [t.address for t in bench.membership.suggestions()] == [place(2)]
    bench.run(600.0)
    last_s = bench.now_s
    bench.run(2 * MAX_RETRY_S)
    assert bench.asked_at(place(2), last_s)
    assert not bench.asked_at(place(1), last_s)


def test_a_lasting_address_of_a_live_member_is_not_asked_twice() -> None:
    bench = Bench(places={place(1): Answer()})
    bench.suggest(place(1), lasting=True)
    bench.run(10.0)
    start_s = bench.now_s
    bench.run(20.0)
    assert len(bench.asked_at(place(1), start_s)) == 20.0 / HEARTBEAT_S


def test_who_left_is_asked_again_when_it_is_seen_again() -> None:
    bench = met()
    bench.take(bench.membership.left(MAC, incarnation=1, now_s=bench.now_s))
    bench.places[place(1)] = Answer(incarnation=2, instance="second")
    bench.run(10.0)
    assert bench.member().state is MemberState.LEFT
    bench.suggest(place(1), MAC)
    bench.run(TICK_S)
    assert bench.member().incarnation == 2
    assert bench.member().state is MemberState.ALIVE


def test_a_flood_of_false_suggestions_neither_grows_nor_starves_the_real_ones() -> None:
    bench = met()
    bench.suggest(place(9), lasting=True)
    for number in range(3 * MAX_SUGGESTIONS):
        bench.take(
            bench.membership.suggested(
                Address(f"10.1.{number // 250}.{number % 250}", 1),
                NodeId(f"fake{number}"),
                now_s=bench.now_s,
            )
        )
    assert len(bench.membership.suggestions()) == MAX_SUGGESTIONS
    under_way = [ask for _, ask in bench.pending if not ask.is_heartbeat]
    assert len(under_way) <= MAX_STRANGER_SEARCHES + MAX_MEMBER_SEARCHES

    start_s = bench.now_s
    bench.run(20.0)
    assert len(bench.asked_at(place(1), start_s)) == 20.0 / HEARTBEAT_S, "heartbeats go on"
    assert len(bench.asked_at(place(9), start_s)) >= 3
    bench.places[place(2)] = Answer(node_id=NodeId("pc"), addresses=(place(2),))
    bench.suggest(place(2), NodeId("pc"))
    known = bench.membership._whom
    assert len(known._tries) <= MAX_SUGGESTIONS + MAX_ADDRESSES
    bench.run(1.5 * FORGET_SUGGESTION_AFTER_S)
    assert bench.member(NodeId("pc")).state is MemberState.ALIVE
    assert len(known._tries) <= 8, "what nobody suggests any more leaves nothing behind"


def test_dead_addresses_of_members_share_a_few_places() -> None:
    bench = met()
    for number in range(4):
        ways = tuple(Address(f"10.2.{number}.{i}", 1) for i in range(MAX_ADDRESSES))
        bench.hear(Answer(node_id=NodeId(f"m{number}"), addresses=ways))
    start_s = bench.now_s
    for _ in range(20):
        bench.run(TICK_S)
        searches = [ask for _, ask in bench.pending if not ask.is_heartbeat]
        assert len(searches) <= MAX_MEMBER_SEARCHES
    asked = {ask.address for at_s, ask in bench.asked if at_s > start_s}
    assert len(asked) >= 48, "each had its turn before any had its second"


def test_a_stranger_seen_again_is_asked_soon() -> None:
    bench = Bench(places={place(1): Failure.REFUSED})
    bench.suggest(place(1))
    bench.run(60.0)
    last_s = bench.asked_at(place(1))[-1]
    while bench.asked_at(place(1))[-1] == last_s:
        bench.run(TICK_S)
    bench.run(HEARTBEAT_S)
    bench.places[place(1)] = Answer()
    bench.suggest(place(1))
    assert bench.member().is_live


def test_one_device_has_at_most_16_suggestions_and_the_failed_give_way() -> None:
    bench = Bench()
    for number in range(MAX_ADDRESSES + 4):
        bench.take(bench.membership.suggested(place(number), MAC, now_s=bench.now_s))
    assert len(bench.membership.suggestions()) == MAX_ADDRESSES
    bench.run(5.0)
    bench.places[place(100)] = Answer(addresses=(place(100),))
    bench.suggest(place(100), MAC)
    bench.run(5.0)
    assert bench.member().proven == (place(100),)


def test_lasting_suggestions_leave_room_for_others() -> None:
    bench = Bench()
    for number in range(2 * MAX_SUGGESTIONS):
        address = Address(f"10.1.{number // 250}.{number % 250}", 1)
        bench.take(bench.membership.suggested(address, None, now_s=bench.now_s, lasting=True))
    bench.run(FORGET_SUGGESTION_AFTER_S + 1.0)
    assert len(bench.membership.suggestions()) == MAX_LASTING


def test_dead_virtual_interfaces_cost_no_time() -> None:
    """Tunnel and AirDrop-like addresses swallow packets; the real one is last."""
    dead = tuple(Address(f"fe80::{number:x}%utun{number}", 1) for number in range(9))
    bench = Bench(places={place(1): Answer(addresses=(*dead, place(1)))})
    bench.hear(Answer(addresses=(*dead, place(1))))
    bench.settle()
    assert bench.member().proven == (place(1),)


def test_a_call_of_which_nobody_told_the_end_does_not_block_its_address() -> None:
    bench = met()
    bench.places[place(1)] = Failure.SILENT
    bench.run(2.0)
    bench.pending.clear()  # the caller lost it
    bench.places[place(1)] = Answer()
    bench.run(DEAD_AFTER_S)
    assert bench.member().is_live
