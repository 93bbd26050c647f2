"""A generation that has ended stays so, and no later one is touched."""

from __future__ import annotations

import threading

import pytest

from exo_train.errors import ExoTrainError, NumericsError, PeerLostError
from exo_train.transport.stopping import EVERY_GENERATION, Generations, Stopper

REASON = PeerLostError("the ring is formed anew")


def test_who_waits_is_woken_with_an_error_of_its_own() -> None:
    stopper = Stopper()
    threading.Timer(0.1, stopper.stop, [REASON]).start()
    with pytest.raises(PeerLostError, match="the ring is formed anew") as caught:
        stopper.wait(30)
    assert caught.value is not REASON
    with pytest.raises(PeerLostError):
        stopper.check()


def test_the_first_reason_stays() -> None:
    stopper = Stopper()
    stopper.stop(NumericsError("layer 3 overflowed"))
    stopper.stop(REASON)
    with pytest.raises(NumericsError, match="layer 3"):
        stopper.check()


def test_callbacks_are_called_once_also_when_they_come_late() -> None:
    stopper, told = Stopper(), []
    stopper.on_stop(told.append)
    with stopper.calling(told.append):
        pass
    stopper.stop(REASON)
    stopper.stop(REASON)
    assert told == [REASON], "the block had ended"
    stopper.on_stop(told.append)
    with stopper.calling(told.append):
        pass
    assert told == [REASON] * 3


def test_the_end_of_a_generation_is_the_end_of_those_before_only() -> None:
    generations = Generations()
    first, second, third = (generations.stopper(number) for number in (1, 2, 3))
    generations.end_before(3, REASON)
    for stopper in (first, second, generations.stopper(2)):
        with pytest.raises(PeerLostError):
            stopper.check()
    third.check()
    assert generations.stopper(3) is third


def test_a_late_end_of_an_earlier_generation_changes_nothing() -> None:
    generations = Generations()
    generations.end_before(5, REASON)
    generations.end_before(2, NumericsError("too late"))
    with pytest.raises(PeerLostError):
        generations.stopper(4).check()
    generations.stopper(5).check()


def test_the_end_of_the_run_ends_every_generation() -> None:
    generations = Generations()
    generations.end_before(EVERY_GENERATION, REASON)
    with pytest.raises(ExoTrainError):
        generations.stopper(2**32 - 1).check()
