"""Devices that are here and do not train: which of them is worth forming the ring anew for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from exo_train.agent.replanning import replan_run
from exo_train.agent.run_plan import Run, RunPlan
from exo_train.agent.standby import ASK_AGAIN_S, StandBys
from exo_train.config import TrainConfig
from exo_train.plan.plan import Key
from tests.unit.agent.households_here import Household, Member, serving
from tests.unit.agent.test_live_plan import CONFIG, candidate, problem, run, times
from tests.unit.agent.test_replanning import begun, here, unmeasured

NEVER_S = 1e6


class Driver:
    """The one who trains: says what the plan is now and what is left; looks when it is told to."""

    def __init__(self, asked: Run, before: RunPlan, home: Household, **changes: Any) -> None:
        self.asked, self.plan, self.home = asked, before, home
        self.steps_left, self.step_s, self.recovery_s = 1000, 0.0, 10.0
        self.set_aside: set[Key] = set()
        self.now_s = 0.0
        values: dict[str, Any] = {"look_s": NEVER_S, "clock": lambda: self.now_s}
        self.stand_bys = StandBys(
            asked,
            lambda: self.plan,
            home.asking(),
            recovery_s=lambda: self.recovery_s,
            set_aside=lambda: self.set_aside,
            **{**values, **changes},
        )

    @property
    def predicted_s(self) -> float:
        assert self.plan.prediction is not None
        return self.plan.prediction.step_s

    def look(self) -> str:
        self.stand_bys.look()
        return self.wanted()

    def wanted(self) -> str:
        return self.stand_bys.wanted(steps_left=self.steps_left, step_s=self.step_s)

    def form_anew(self) -> None:
        """Take in who is wanted, as the driver does at a step's boundary."""
        generation = self.plan.plan.generation + 1
        candidates = here(self.home)
        self.plan = replan_run(
            self.asked, self.plan, candidates, self.home.asking(), generation=generation
        )
        self.stand_bys.taken()


class Trains(list[Driver]):
    def begin(
        self, *names: str, layer_s: float = 0.02, config: TrainConfig = CONFIG, **changes: Any
    ) -> Driver:
        live = problem(*[layer_s] * len(names), config=config)
        home = Household(*live.candidates)
        asked = run(config=config, steps=live.steps)
        before = begun(replace(asked, config=replace(config, min_devices=len(names))), live, home)
        self.append(Driver(asked, before, home, **changes))
        return self[-1]


@pytest.fixture
def trains() -> Iterator[Trains]:
    begun_here = Trains()
    yield begun_here
    for driver in begun_here:
        driver.stand_bys.close()


@pytest.fixture
def fast() -> Iterator[Member]:
    """A device that is as fast as the others; dora's name and address are `dora`'s."""
    member = Member(times(0.02))
    with serving(member) as addresses:
        member.candidate = candidate("dora", addresses=addresses)  # type: ignore[attr-defined]
        yield member


def dora(member: Member, **changes: Any) -> Any:
    return replace(member.candidate, **changes)  # type: ignore[attr-defined]


def test_a_device_that_makes_steps_shorter_is_wanted_until_it_is_taken(
    trains: Trains, fast: Member
) -> None:
    """Two of three equal devices train; with the third a step takes about two thirds."""
    driver = trains.begin("anna", "berta")
    assert driver.look() == ""
    driver.home.come(dora(fast))
    wanted = driver.look()
    assert wanted.startswith("dora can take part: a step would take "), wanted
    before_s = driver.predicted_s
    assert f"instead of {before_s:.3g} s" in wanted
    assert driver.look() == wanted, "until the step ends"
    driver.form_anew()
    assert driver.wanted() == ""
    assert {rank.name for rank in driver.plan.plan.ranks} == {"anna", "berta", "dora"}
    assert driver.predicted_s < before_s / 1.3
    assert driver.look() == "", "it trains now"
    assert driver.home.notes.count("measuring dora") == 0


def test_only_the_newcomer_measures_and_only_once(trains: Trains, fast: Member) -> None:
    """The others have no address here: a question to one of them would be an error."""
    fast.times = times(5.0)
    driver = trains.begin("anna", "berta")
    driver.home.come(dora(fast))
    for _ in range(5):
        assert driver.look() == ""
    assert fast.num_asked == 1
    (note,) = driver.home.notes
    assert note.startswith("dora waits: it has no room for a layer, or no step gets shorter")


def test_a_device_must_be_there_for_a_while(trains: Trains, fast: Member) -> None:
    driver = trains.begin("anna", "berta", settle_s=8.0)
    driver.home.come(dora(fast), since_s=7.9)
    assert (driver.look(), fast.num_asked) == ("", 0)
    driver.home.come(dora(fast), since_s=8.0)
    assert driver.look() != ""


@pytest.mark.parametrize(
    ("steps_left", "step_s", "recovery_s", "is_worth"),
    [(1000, 0.0, 10.0, True), (3, 0.0, 10.0, False), (3, 0.0, 2.0, True), (3, 40.0, 10.0, True)],
)
def test_what_taking_in_costs_must_come_back_in_the_steps_that_are_left(
    trains: Trains, fast: Member, steps_left: int, step_s: float, recovery_s: float, is_worth: bool
) -> None:
    """A step takes 4.6 s with two devices and some 1.3 s less with three."""
    driver = trains.begin("anna", "berta")
    driver.steps_left, driver.step_s, driver.recovery_s = steps_left, step_s, recovery_s
    driver.home.come(dora(fast))
    assert bool(driver.look()) is is_worth
    if not is_worth:
        (note,) = driver.home.notes
        assert f"but in the {steps_left} left that saves " in note
        assert f"taking it in takes {recovery_s:.0f} s" in note


def test_little_is_not_worth_it_and_that_is_said_once(trains: Trains, fast: Member) -> None:
    """With two of 14 layers on a slow device the others have 6 in place of 7: 3 % less a step."""
    fast.times = times(0.065)
    driver = trains.begin("anna", "berta")
    driver.home.come(dora(fast))
    assert driver.look() == driver.look() == ""
    (note,) = driver.home.notes
    assert note.startswith("dora waits: a step would take ")
    assert note.endswith("hardly faster")


def test_one_that_goes_is_not_wanted_any_more_and_is_judged_again_when_it_returns(
    trains: Trains, fast: Member
) -> None:
    driver = trains.begin("anna", "berta")
    driver.home.come(dora(fast))
    assert driver.look() != ""
    driver.home.go("dora")
    assert driver.look() == ""
    driver.home.come(dora(fast))
    assert driver.look() != ""


def test_one_that_the_driver_has_set_aside_is_not_looked_at(trains: Trains, fast: Member) -> None:
    driver = trains.begin("anna", "berta")
    driver.set_aside = {dora(fast).key}
    driver.home.come(dora(fast))
    assert (driver.look(), fast.num_asked) == ("", 0)


def test_only_devices_that_were_named_are_looked_at(trains: Trains, fast: Member) -> None:
    config = replace(CONFIG, devices=("anna", "berta"))
    driver = trains.begin("anna", "berta", config=config)
    driver.home.come(dora(fast))
    assert (driver.look(), fast.num_asked) == ("", 0)


def test_who_was_asked_for_is_taken_back_whatever_the_speed(trains: Trains, fast: Member) -> None:
    """Three were asked for and one is gone: the third is wanted though it is slow."""
    fast.times = times(0.15)
    driver = trains.begin("anna", "berta", config=replace(CONFIG, min_devices=3))
    driver.home.come(dora(fast))
    assert driver.look() == "dora can take part: the run was asked to have it"
    driver.steps_left = 0
    assert driver.wanted() == "", "the run is at its end"


def test_one_that_cannot_be_timed_now_is_asked_again_later(trains: Trains, fast: Member) -> None:
    fast.times, fast.reason = None, "dora: it is training now (run 5)"
    driver = trains.begin("anna", "berta")
    driver.home.come(dora(fast))
    assert driver.look() == driver.look() == ""
    assert fast.num_asked == 1
    (note,) = driver.home.notes
    assert note.startswith("dora is left out:")
    assert "run 5" in note
    fast.times = times(0.02)
    driver.now_s = ASK_AGAIN_S
    assert driver.look() != ""


def test_without_times_a_device_that_memory_would_use_is_wanted(trains: Trains) -> None:
    home = Household(candidate("anna"), candidate("berta"))
    asked = run(config=replace(CONFIG, profile_s=0.0))
    driver = Driver(asked, unmeasured(asked, home), home)
    trains.append(driver)
    home.come(candidate("clara", usable_memory_bytes=1000))
    assert driver.look() == "", "no layer fits there"
    assert home.notes[-1].startswith("clara waits: it has no room")
    home.come(candidate("dora"))
    assert driver.look().startswith("dora can take part")


def test_nobody_is_judged_while_a_device_of_the_run_is_gone(trains: Trains, fast: Member) -> None:
    """The driver plans anew then, with all who are here."""
    driver = trains.begin("anna", "berta")
    driver.home.come(dora(fast))
    driver.home.states["berta"] = "suspect"
    assert (driver.look(), fast.num_asked) == ("", 0)
    driver.home.states["berta"] = "alive"
    assert driver.look() != ""


def test_a_new_plan_makes_what_was_wanted_before_void(trains: Trains, fast: Member) -> None:
    driver = trains.begin("anna", "berta")
    driver.home.come(dora(fast))
    assert driver.look() != ""
    driver.plan = replace(driver.plan, plan=replace(driver.plan.plan, generation=2))
    fast.times = times(5.0)
    assert driver.look() == "", "judged anew, it would be of no use"
    assert fast.num_asked == 2


def test_an_agent_that_starts_again_ends_nothing(trains: Trains, fast: Member) -> None:
    """The thread itself: it looks on through errors, finds the device, and ends when told."""
    driver = trains.begin("anna", "berta", look_s=0.01)
    driver.home.is_away = True
    threading.Event().wait(0.1)
    driver.home.come(dora(fast))
    driver.home.is_away = False
    for _ in range(2000):
        if driver.wanted():
            break
        threading.Event().wait(0.01)
    assert driver.wanted().startswith("dora can take part")
    driver.stand_bys.close()
    assert not any(thread.name == "stand-bys" for thread in threading.enumerate())
