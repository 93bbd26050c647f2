"""The next generation of a run: what stays, who takes part, and what a device has room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from exo_train.agent.deciding import decide
from exo_train.agent.live_plan import LiveProblem
from exo_train.agent.planning import Candidate
from exo_train.agent.replanning import replan_run, with_freed
from exo_train.agent.run_plan import Run, RunPlan, by_memory, written
from exo_train.errors import DoesNotFitError, InterruptedRunError, PeerError
from exo_train.plan.plan import Plan
from tests.unit.agent.households_here import Household, Member, serving
from tests.unit.agent.test_live_plan import (
    CONFIG,
    NUM_LAYERS,
    candidate,
    plan_before,
    problem,
    run,
    times,
)

GB = 10**9
MEASURED_IN = replace(CONFIG, microbatch_size=2)


def layers(plan: Plan) -> dict[str, int]:
    return {rank.name: rank.stage.num_layers for rank in plan.ranks}


def begun(asked: Run, live: LiveProblem, home: Household) -> RunPlan:
    """Give the plan of a run that has begun, as `choose_plan` does."""
    decision = decide(live, at_least=asked.at_least)
    plan = written(asked, live, decision.microbatch_size, decision.verdict.plan, home.asking())
    home.notes.clear()
    return replace(plan, candidates=live.candidates)


def three(**changes: Any) -> tuple[Run, RunPlan, Household]:
    """Three devices of speeds 1:2:4 that were asked for: 8, 4 and 2 layers of 14."""
    live = problem(0.01, 0.02, 0.04, **changes)
    home = Household(*live.candidates)
    asked = run(config=replace(live.config, min_devices=3), steps=live.steps)
    return asked, begun(asked, live, home), home


def here(home: Household) -> list[Candidate]:
    return list(home.here.values())


def test_with_the_same_devices_the_split_stays_and_the_run_is_the_same_run() -> None:
    asked, before, home = three()
    again = replan_run(asked, before, here(home), home.asking(), generation=2)
    assert again.plan == replace(before.plan, generation=2)
    assert again.plan.hash != before.plan.hash, "messages of the generation before are foreign"
    assert again.prediction == before.prediction
    assert home.notes == []


def test_a_split_that_the_planner_would_not_choose_stays_too() -> None:
    """Losses are those of before to the last digit only with the same layers on each device."""
    live = problem(0.01, 0.04)
    before = RunPlan(
        plan=plan_before(("berta", 9), ("anna", 5)), candidates=live.candidates, problem=live
    )
    home = Household(*live.candidates)
    again = replan_run(run(), before, here(home), home.asking(), generation=2)
    assert list(layers(again.plan).items()) == [("berta", 9), ("anna", 5)]
    assert again.plan.microbatch_size == 3


def test_addresses_are_not_kept_because_workers_may_listen_elsewhere() -> None:
    asked, before, home = three()
    ranks = tuple(
        replace(rank, addresses=home.here["anna"].addresses) for rank in before.plan.ranks
    )
    before = replace(before, plan=replace(before.plan, ranks=ranks))
    again = replan_run(asked, before, here(home), home.asking(), generation=2)
    assert [rank.addresses for rank in again.plan.ranks] == [(), (), ()]


def test_two_of_three_go_on_by_their_speed_though_three_were_asked_for() -> None:
    asked, before, home = three()
    home.go("anna")
    again = replan_run(asked, before, here(home), home.asking(), generation=2)
    assert layers(again.plan) == {"berta": 10, "clara": 4}, "14 layers by speeds 2:1"
    assert (again.plan.run_id, again.plan.generation) == (before.plan.run_id, 2)
    same = ("seed", "lora", "optimizer", "microbatch_size", "wire_dtype", "model_hash")
    assert [getattr(again.plan, name) for name in same] == [
        getattr(before.plan, name) for name in same
    ]
    again.plan.validate()
    assert again.prediction is not None
    assert [rank.name for rank in again.prediction.ranks] == list(layers(again.plan))
    assert any("anna is not here" in note for note in home.notes), home.notes


def test_the_last_device_goes_on_alone() -> None:
    asked, before, home = three()
    home.go("anna")
    home.go("clara")
    again = replan_run(asked, before, here(home), home.asking(), generation=2)
    assert layers(again.plan) == {"berta": NUM_LAYERS}


def test_a_device_that_comes_back_gets_its_layers_back() -> None:
    asked, before, home = three()
    lost = home.here["anna"]
    home.go("anna")
    without = replan_run(asked, before, here(home), home.asking(), generation=2)
    member = Member(times(0.01))
    with serving(member) as addresses:
        home.come(replace(lost, addresses=addresses))
        again = replan_run(asked, without, here(home), home.asking(fresh=True), generation=3)
    assert layers(again.plan) == layers(before.plan) == {"anna": 8, "berta": 4, "clara": 2}
    assert (member.num_asked, member.was_asked_fresh) == (1, False), "its cache is good enough"


def test_known_devices_are_not_timed_again() -> None:
    """None of them has an address: a question to one would be a note that it is left out."""
    asked, before, home = three()
    home.go("berta")
    again = replan_run(asked, before, here(home), home.asking(), generation=2)
    assert set(layers(again.plan)) == {"anna", "clara"}
    assert not any("left out" in note for note in home.notes), home.notes


def test_a_new_device_that_cannot_be_timed_is_left_out_with_its_reason_and_asked_later() -> None:
    asked, before, home = three()
    home.go("anna")
    busy = Member(None, "dora: it is training now (run 5)")
    with serving(busy) as addresses:
        home.come(candidate("dora", addresses=addresses))
        again = replan_run(asked, before, here(home), home.asking(), generation=2)
        assert set(layers(again.plan)) == {"berta", "clara"}
        assert any(note.startswith("dora is left out:") and "run 5" in note for note in home.notes)
        busy.times = times(0.001)
        later = replan_run(asked, again, here(home), home.asking(), generation=3)
    assert layers(later.plan)["dora"] > 7


def test_a_stop_while_a_new_device_is_timed_ends_the_planning() -> None:
    asked, before, home = three()
    home.come(candidate("dora"))
    asking = home.asking(wants_stop=lambda: True)
    with pytest.raises(InterruptedRunError):
        replan_run(asked, before, here(home), asking, generation=2)


def test_a_device_that_cannot_compute_in_the_runs_format_ends_nothing() -> None:
    asked, before, home = three(config=replace(CONFIG, dtype="fp32"))
    home.go("anna")
    home.come(candidate("dora", dtypes=("bf16",)))
    again = replan_run(asked, before, here(home), home.asking(), generation=2)
    assert set(layers(again.plan)) == {"berta", "clara"}
    assert any(note.startswith("dora is left out: dora") for note in home.notes), home.notes


def with_memory(names: Sequence[str], usable_bytes: int) -> tuple[Candidate, ...]:
    return tuple(candidate(name, usable_memory_bytes=usable_bytes) for name in names)


def test_a_survivor_has_room_for_the_layers_that_it_holds_already() -> None:
    """Of 140 MB its stage takes 127 or more: what it says that it has left holds no layer."""
    asked, before, home = three(candidates=with_memory(("anna", "berta", "clara"), 140_000_000))
    taken = {rank.name: rank.memory_bytes for rank in before.plan.ranks}
    assert all(127_000_000 < held < 140_000_000 for held in taken.values()), taken
    for name, one in home.here.items():
        left_bytes = one.usable_memory_bytes - taken[name]
        home.here[name] = replace(one, usable_memory_bytes=left_bytes)
    again = replan_run(asked, before, here(home), home.asking(), generation=2)
    assert layers(again.plan) == layers(before.plan)
    home.go("clara")
    fewer = replan_run(asked, again, here(home), home.asking(), generation=3)
    assert sum(layers(fewer.plan).values()) == NUM_LAYERS
    assert set(layers(fewer.plan)) == {"anna", "berta"}


def room_of(before: RunPlan, *now: Candidate) -> list[int]:
    return [c.usable_memory_bytes for c in with_freed(now, before)]


def test_what_a_stage_frees_is_counted_once_and_never_beyond_what_there_was() -> None:
    """Its stage takes 2 GB of 4. Other programs may have come; some devices lend a fixed amount."""
    before = RunPlan(
        plan=plan_before(("berta", 9), ("anna", 5)),
        candidates=with_memory(("anna", "berta", "clara"), 4 * GB),
    )
    now = with_memory(("anna", "berta", "clara", "dora"), 2 * GB)
    assert room_of(before, *now) == [4 * GB, 4 * GB, 2 * GB, 2 * GB]
    assert room_of(before, *with_memory(("anna",), GB)) == [3 * GB], "a program took 1 GB"
    assert room_of(before, *with_memory(("anna",), 4 * GB)) == [4 * GB], "--memory 4GB, or gone"
    assert room_of(before, *with_memory(("anna",), 5 * GB)) == [5 * GB], "a program ended"
    unknown = tuple(replace(rank, memory_bytes=0) for rank in before.plan.ranks)
    unplanned = replace(before, plan=replace(before.plan, ranks=unknown))
    assert room_of(unplanned, *now[:2]) == [4 * GB, 4 * GB], "a split laid down by hand"
    unstarted = replace(before, candidates=())
    assert room_of(unstarted, *now[:1]) == [2 * GB], "nothing of it is known to run"


def test_what_a_device_had_before_is_remembered_while_a_program_is_there_for_a_time() -> None:
    asked, before, home = three()
    one = home.here["berta"]
    home.here["berta"] = replace(one, usable_memory_bytes=GB)
    again = replan_run(asked, before, here(home), home.asking(), generation=2)
    assert {c.name: c.usable_memory_bytes for c in again.candidates}["berta"] == 4 * GB


def test_after_running_out_of_memory_a_device_gets_less_than_it_had() -> None:
    """Whatever it says that it has: it had said so before."""
    asked, before, home = three()
    rank = next(rank for rank in before.plan.ranks if rank.name == "anna")
    reserve = {home.here["anna"].key: 9_000_000}
    again = replan_run(asked, before, here(home), home.asking(), generation=2, reserve=reserve)
    assert layers(again.plan)["anna"] < layers(before.plan)["anna"] == 8
    assert sum(layers(again.plan).values()) == NUM_LAYERS
    taken = next(rank for rank in again.plan.ranks if rank.name == "anna")
    assert taken.memory_bytes <= rank.memory_bytes - 9_000_000
    same = replan_run(asked, again, here(home), home.asking(), generation=3, reserve=reserve)
    assert layers(same.plan) == layers(again.plan), "once is what it lost, not at each plan"
    home.go("clara")
    fewer = replan_run(asked, same, here(home), home.asking(), generation=4)
    (anna,) = (rank for rank in fewer.plan.ranks if rank.name == "anna")
    assert anna.memory_bytes <= rank.memory_bytes - 9_000_000, "and it stays so"


def test_smaller_microbatches_are_taken_only_where_the_old_ones_do_not_fit() -> None:
    live = problem(0.01, 0.01, config=replace(CONFIG, microbatch_size=8))
    home = Household(*live.candidates)
    asked = run(config=replace(live.config, microbatch_size=0), steps=live.steps)
    decision = decide(live, at_least=2)
    before = written(asked, live, 8, decision.verdict.plan, home.asking())
    before = replace(before, candidates=live.candidates)
    home.go("berta")
    large = replan_run(asked, before, here(home), home.asking(), generation=2)
    assert large.plan.microbatch_size == 8
    full_bytes = large.plan.ranks[0].memory_bytes
    little = candidate("anna", usable_memory_bytes=full_bytes - 1)
    before = replace(before, candidates=(little, live.candidates[1]))
    tight = replan_run(asked, before, [little], home.asking(), generation=2)
    assert tight.plan.microbatch_size == 4
    assert any("microbatches of 4 in place of 8" in note for note in home.notes), home.notes


def test_what_does_not_fit_any_more_says_who_is_gone_and_how_much_is_missing() -> None:
    asked, before, home = three(candidates=with_memory(("anna", "berta", "clara"), 132_000_000))
    assert len(before.plan.ranks) == 3
    home.go("anna")
    with pytest.raises(DoesNotFitError) as caught:
        replan_run(asked, before, here(home), home.asking(), generation=2)
    said = str(caught.value)
    assert said.startswith("without anna the run cannot go on: does not fit: needs "), said
    assert "usable: berta 0.1 GB, clara 0.1 GB" in said
    assert "\n" not in said
    assert home.notes == [], "whoever waits for a device tries this again and again"


def test_where_no_device_is_left_that_may_go_on_that_is_said() -> None:
    asked, before, home = three()
    with pytest.raises(PeerError, match="no device is here"):
        replan_run(asked, before, [], home.asking(), generation=2)


def unmeasured(asked: Run, home: Household) -> RunPlan:
    before = by_memory(asked, here(home), None, home.notes.append)
    home.notes.clear()
    return replace(before, candidates=tuple(here(home)))


def test_a_run_that_was_split_by_memory_goes_on_by_memory_and_asks_nobody() -> None:
    home = Household(*with_memory(("anna", "berta", "clara"), 4 * GB))
    asked = run(config=replace(CONFIG, profile_s=0.0, microbatch_size=0))
    before = unmeasured(asked, home)
    assert len(before.plan.ranks) == 3
    home.go("clara")
    again = replan_run(asked, before, here(home), home.asking(), generation=2)
    assert set(layers(again.plan)) == {"anna", "berta"}
    assert again.plan.microbatch_size == before.plan.microbatch_size
    assert (again.plan.run_id, again.plan.generation) == (before.plan.run_id, 2)
    home.come(candidate("clara"))
    whole = replan_run(asked, again, here(home), home.asking(), generation=3)
    assert layers(whole.plan) == layers(before.plan)


@pytest.mark.parametrize("profile_s", [0.0, 3.0])
def test_a_split_that_was_laid_down_holds_while_its_devices_are_here(profile_s: float) -> None:
    split = ("anna:3", "berta:4", "clara:7")
    config = replace(CONFIG, layers=split, profile_s=profile_s)
    live = problem(0.01, 0.02, 0.04, config=config)
    home = Household(*live.candidates)
    asked = run(config=config)
    names_and_counts = (("anna", 3), ("berta", 4), ("clara", 7))
    before = RunPlan(
        plan=plan_before(*names_and_counts),
        candidates=live.candidates,
        problem=live if profile_s else None,
    )
    same = replan_run(asked, before, here(home), home.asking(), generation=2)
    assert layers(same.plan) == dict(names_and_counts)
    home.go("berta")
    without = replan_run(asked, same, here(home), home.asking(), generation=3)
    assert set(layers(without.plan)) <= {"anna", "clara"}
    assert any("--layers lays down cannot be had" in note for note in home.notes), home.notes
    with serving(Member(times(0.02))) as addresses:
        home.come(candidate("berta", addresses=addresses))
        again = replan_run(asked, without, here(home), home.asking(), generation=4)
    assert layers(again.plan) == dict(names_and_counts)
    assert again.plan.microbatch_size == 3, "as it was"
