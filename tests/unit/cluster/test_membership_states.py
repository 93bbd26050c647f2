"""Alive, suspect, suspended, dead, left, slow, asleep, twice: which when, to the tick."""

from __future__ import annotations

import pytest

from exo_train.cluster.member import (
    DEAD_AFTER_S,
    LEFT_ECHO_S,
    RESTART_ECHO_S,
    MemberState,
    view_hash,
)
from exo_train.cluster.membership import FORGET_AFTER_S, MAX_MEMBERS, SLOW_RTT_S, Membership
from exo_train.cluster.whom_to_ask import Failure
from exo_train.peer import NodeId
from tests.unit.cluster.membership_bench import (
    MAC,
    SELF,
    TICK_S,
    Answer,
    Bench,
    device_facts,
    met,
    place,
)


def time_of(bench: Bench, state: MemberState, *, limit_s: float = 60.0) -> float:
    """Let time pass until the Mac is in the state; gives the seconds since it was heard."""
    heard_s = bench.member().last_heard_s
    while bench.member().state is not state:
        assert bench.now_s - heard_s < limit_s, bench.member()
        bench.run(TICK_S)
    return bench.now_s - heard_s


def test_a_power_cut_is_suspect_after_6_s_and_dead_after_15() -> None:
    bench = met()
    del bench.places[place(1)]
    assert time_of(bench, MemberState.SUSPECT) == 6.0
    assert [m.facts.node_id for m in bench.membership.live()] == [MAC], "a suspect still counts"
    assert 15.0 <= time_of(bench, MemberState.DEAD) <= 15.0 + TICK_S
    assert bench.membership.live() == []
    assert bench.membership.view() == [(SELF, 3)]


def test_a_crash_whose_port_refuses_is_dead_within_5_s() -> None:
    bench = met()
    bench.places[place(1)] = Failure.REFUSED
    assert 3.0 <= time_of(bench, MemberState.DEAD) <= 5.0


def test_one_refusal_or_one_dead_address_kills_nobody() -> None:
    second = Answer(addresses=(place(1), place(2)))
    bench = met({place(1): second, place(2): second})
    bench.places[place(1)] = Failure.REFUSED
    bench.run(60.0)
    assert bench.member().state is MemberState.ALIVE
    assert bench.member().proven[0] == place(2)
    assert not any(c.after and not c.after.is_live for c in bench.changes)


def test_refusals_say_nothing_while_another_way_was_not_tried() -> None:
    both = Answer(addresses=(place(1), place(2)))
    bench = met({place(1): both, place(2): both})
    bench.places[place(1)] = Failure.SILENT
    bench.run(5.0)
    bench.places[place(1)] = both
    bench.membership.pin(MAC, place(1))
    bench.run(6.0)
    assert bench.member().proven == (place(1), place(2))
    bench.places[place(1)] = Failure.REFUSED
    bench.places[place(2)] = Failure.SILENT  # it takes its time to fail
    assert 4.0 <= time_of(bench, MemberState.DEAD) <= 6.0


def test_a_firewall_that_rejects_us_is_no_death() -> None:
    """Only its own hellos come; when one is late, our refusals prove nothing."""
    bench = Bench(places={place(1): Failure.REFUSED})
    for _ in range(10):
        bench.hear(Answer())
        bench.run(5.0)
        assert bench.member().state is MemberState.ALIVE
        assert not bench.member().answers


def test_a_stopped_agent_is_suspended_until_its_machine_is_silent_too() -> None:
    bench = met()
    bench.places[place(1)] = Failure.ACCEPTED
    assert DEAD_AFTER_S <= time_of(bench, MemberState.SUSPENDED) <= DEAD_AFTER_S + TICK_S
    assert bench.membership.live() == [], "it can do no work"
    since_s = bench.member().since_s
    bench.run(FORGET_AFTER_S + 60.0)
    assert bench.member().state is MemberState.SUSPENDED
    assert bench.member().since_s == since_s
    del bench.places[place(1)]
    bench.run(DEAD_AFTER_S + 7.0)
    assert bench.membership.members.get(MAC) is None or bench.member().state is MemberState.DEAD
    bench.places[place(1)] = Answer()
    bench.hear(Answer())
    assert bench.member().state is MemberState.ALIVE


def test_a_port_that_takes_connections_does_not_raise_the_dead() -> None:
    bench = met()
    del bench.places[place(1)]
    bench.run(DEAD_AFTER_S + 5.0)
    bench.places[place(1)] = Failure.ACCEPTED
    bench.run(30.0)
    assert bench.member().state is MemberState.DEAD, "anybody may listen there by now"


def test_slow_answers_are_slow_and_never_dead() -> None:
    bench = met()
    bench.places[place(1)] = Answer(rtt_s=SLOW_RTT_S + 0.5)
    bench.run(120.0)
    bench.hear(Answer())
    assert bench.member().slow, "a hello of its own says nothing of its answers"
    assert bench.member().state is MemberState.ALIVE
    bench.places[place(1)] = Answer()
    bench.run(3.0)
    assert not bench.member().slow


def test_an_answer_to_the_third_call_only_is_slow() -> None:
    bench = met()
    for _ in range(4):
        bench.places[place(1)] = Failure.SILENT
        bench.run(5.0)
        bench.places[place(1)] = Answer()
        bench.run(2.0)
        assert any(c.after and c.after.slow for c in bench.changes)
        bench.changes.clear()
        assert bench.member().is_live
    bench.run(6.0)
    assert not bench.member().slow
    assert not any(c.after and not c.after.is_live for c in bench.changes)


def test_one_that_only_calls_us_is_alive_and_said_not_to_answer() -> None:
    bench = met()
    del bench.places[place(1)]
    for _ in range(30):
        bench.hear(Answer())
        bench.run(2.0)
    assert bench.member().state is MemberState.ALIVE
    assert not bench.member().answers
    bench.places[place(1)] = Answer()
    bench.run(6.0)
    assert bench.member().answers


def test_a_goodbye_counts_at_once_and_a_late_hello_does_not_undo_it() -> None:
    bench = met()
    bench.suggest(place(4), MAC)
    bench.take(bench.membership.left(MAC, incarnation=1, now_s=bench.now_s))
    left_s = bench.now_s
    assert bench.member().state is MemberState.LEFT
    assert bench.membership.view() == [(SELF, 3)]
    bench.places[place(1)] = Failure.REFUSED
    bench.run(LEFT_ECHO_S - TICK_S)
    bench.hear(Answer())
    assert bench.member().state is MemberState.LEFT
    called = bench.asked_at(place(1), left_s) + bench.asked_at(place(4), left_s)
    assert not called, "who left is not called"
    bench.hear(Answer(incarnation=2, instance="second"))
    assert bench.member().state is MemberState.ALIVE


def test_a_goodbye_of_an_earlier_start_says_nothing() -> None:
    bench = met()
    bench.hear(Answer(incarnation=2, instance="second"))
    assert bench.membership.left(MAC, incarnation=1, now_s=bench.now_s) == []
    assert bench.member().state is MemberState.ALIVE


def test_a_goodbye_that_overtakes_its_hello_counts_and_is_no_copy() -> None:
    bench = met()
    bench.take(bench.membership.left(MAC, incarnation=2, now_s=bench.now_s))
    bench.hear(Answer(incarnation=2, instance="second"))
    assert bench.member().state is MemberState.LEFT
    assert bench.duplicates == []


def test_a_restart_is_the_same_member_and_where_it_answered_is_asked_anew() -> None:
    bench = met()
    bench.run(100.0)
    bench.hear(Answer(incarnation=2, instance="second", addresses=(place(2),)))
    assert list(bench.membership.members) == [MAC]
    assert bench.member().incarnation == 2
    assert bench.member().since_s == bench.now_s
    assert bench.member().proven == ()
    bench.hear(Answer())
    assert bench.member().incarnation == 2, "an echo"
    assert bench.duplicates == []


def test_sixty_seconds_of_own_sleep_kill_nobody() -> None:
    bench = met()
    bench.places[place(1)] = Failure.SILENT
    bench.run(4.0)
    bench.now_s += 60.0
    bench.take(bench.membership.tick(now_s=bench.now_s))
    assert bench.member().is_live
    bench.run(4.0)
    assert bench.member().is_live, "it was silent for 8 s that we were there to hear"
    bench.run(DEAD_AFTER_S)
    assert bench.member().state is MemberState.DEAD


@pytest.mark.parametrize("is_counted", [True, False])
def test_after_sleep_all_are_asked_and_we_revalidate_until_one_answers(is_counted: bool) -> None:
    bench = met()
    bench.places[place(1)] = Failure.SILENT
    bench.run(3.0)
    assert bench.pending, "a call is under way when the lid closes"
    before_sleep = len(bench.asked)
    if is_counted:  # the clock went on; the gap between ticks says it
        bench.now_s += 60.0
        bench.take(bench.membership.tick(now_s=bench.now_s))
    else:
        bench.take(bench.membership.woke(now_s=bench.now_s, asleep_s=60.0))
    assert bench.membership.is_revalidating
    bench.hear(Answer())
    assert bench.membership.is_revalidating, "a hello may have lain in a buffer meanwhile"
    bench.hear(Answer(), proven=place(1))
    assert bench.membership.is_revalidating, "so may the answer to a call from before"
    bench.pending.clear()
    bench.places[place(1)] = Answer()
    bench.run(2 * TICK_S + 2.0)
    assert len(bench.asked) > before_sleep
    assert not bench.membership.is_revalidating


def test_revalidation_ends_when_nobody_answers_any_more() -> None:
    bench = met()
    del bench.places[place(1)]
    bench.run(1.0)
    bench.now_s += 60.0
    bench.take(bench.membership.tick(now_s=bench.now_s))
    assert bench.membership.is_revalidating
    bench.run(5.0)
    assert not bench.membership.is_revalidating
    alone = Bench()
    alone.now_s += 60.0
    alone.take(alone.membership.tick(now_s=alone.now_s))
    assert not alone.membership.is_revalidating, "there is nobody to ask"


def test_a_copied_home_is_told_once_and_takes_nobodys_place() -> None:
    bench = met()
    copy = Answer(instance="copy", addresses=(place(7),))
    for _ in range(5):
        bench.hear(copy)
        bench.run(2.0)
    (told,) = bench.duplicates
    assert (told.node_id, told.instance, told.addresses) == (MAC, "copy", (place(7),))
    assert bench.member().instance == "first"
    assert bench.membership.duplicates[MAC].instance == "copy"
    assert not bench.asked_at(place(7))


@pytest.mark.parametrize("how", ["goodbye", "silence"])
def test_who_was_taken_for_a_copy_is_taken_in_once_the_other_is_gone(how: str) -> None:
    """The copy of a home was ended, or the home restored from a backup: both count from less."""
    bench = met()
    bench.hear(Answer(incarnation=9, instance="ninth"))
    bench.places.pop(place(1))
    if how == "goodbye":
        bench.membership.left(MAC, incarnation=9, now_s=bench.now_s)
        bench.hear(Answer())
        assert not bench.member().is_live, "this may be an echo yet"
        bench.run(LEFT_ECHO_S + TICK_S)
    else:
        bench.run(DEAD_AFTER_S + LEFT_ECHO_S + 2 * TICK_S)
    bench.hear(Answer())
    assert (bench.member().state, bench.member().instance) == (MemberState.ALIVE, "first")


def test_an_old_copy_is_told_apart_from_an_echo_by_its_time() -> None:
    bench = met()
    bench.hear(Answer(incarnation=2, instance="second"))
    bench.places[place(1)] = Answer(incarnation=2, instance="second")
    bench.run(RESTART_ECHO_S - TICK_S)
    bench.hear(Answer())
    assert bench.duplicates == []
    bench.run(TICK_S)
    bench.hear(Answer())
    assert [d.node_id for d in bench.duplicates] == [MAC]
    assert bench.member().incarnation == 2


def test_our_own_id_from_another_instance_is_our_home_copied() -> None:
    bench = Bench(places={place(3): Answer(node_id=SELF, incarnation=3, instance="other")})
    bench.suggest(place(3))
    bench.run(20.0)
    assert [d.node_id for d in bench.duplicates] == [SELF]
    assert bench.membership.members == {}


def test_a_removed_device_never_comes_back() -> None:
    bench = met()
    (change,) = bench.membership.removed(MAC)
    assert change.before is not None
    assert change.after is None
    removed_s = bench.now_s
    bench.hear(Answer(incarnation=9, instance="ninth"))
    bench.suggest(place(2), MAC, lasting=True)
    bench.run(20.0)
    assert bench.membership.members == {}
    assert not bench.asked_at(place(2), removed_s)


def test_the_dead_are_forgotten_and_make_room() -> None:
    bench = met()
    del bench.places[place(1)]
    bench.run(FORGET_AFTER_S + 1.0)
    assert bench.membership.members == {}
    assert bench.changes[-1].after is None

    for number in range(MAX_MEMBERS + 10):
        bench.hear(Answer(node_id=NodeId(f"{number:02}"), addresses=()))
    assert len(bench.membership.members) == MAX_MEMBERS
    assert NodeId(f"{MAX_MEMBERS}") not in bench.membership.members, "the known stay"
    bench.take(bench.membership.left(NodeId("05"), incarnation=1, now_s=bench.now_s))
    bench.hear(Answer(node_id=NodeId("99"), addresses=()))
    assert len(bench.membership.members) == MAX_MEMBERS
    assert NodeId("05") not in bench.membership.members
    assert NodeId("99") in bench.membership.members


def test_the_view_is_the_same_from_both_sides() -> None:
    here = Membership(NodeId("a"), incarnation=2, instance="x", now_s=0.0)
    there = Membership(NodeId("b"), incarnation=5, instance="y", now_s=50.0)
    here.heard(device_facts(NodeId("b")), incarnation=5, instance="y", addresses=(), now_s=1.0)
    assert view_hash(here.view()) != view_hash(there.view())
    there.heard(device_facts(NodeId("a")), incarnation=2, instance="x", addresses=(), now_s=51.0)
    assert here.view() == there.view() == [("a", 2), ("b", 5)]
    assert view_hash(here.view()) != view_hash([("a", 2), ("b", 6)])  # type: ignore[list-item]
