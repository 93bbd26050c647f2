"""The driver's side of the conversation: silence, pauses, causes, stops, sizes. No workers."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from exo_train.agent.planning import make_plan
from exo_train.errors import InterruptedRunError, NumericsError, PeerLostError, ProtocolError
from exo_train.plan.plan import Plan
from exo_train.train import conversation as conversation_module
from exo_train.train import ring as ring_module
from exo_train.train.batches import Microbatch
from exo_train.train.ring import Event, LostRankError, Ring
from exo_train.wire.pb import control_pb2 as pb
from tests.ring.rings import CONFIG, candidates, manifest_of, train_ring
from tests.tiny_models import make_tiny_model

BEAT_S = 0.02


class ScriptedRank:
    """A rank that beats, and answers a message of some kind with given events."""

    def __init__(self, rank: int, answers: dict[str, list[Event]], *, beats: bool = True) -> None:
        self.rank = rank
        self.sent: list[pb.RunMessage] = []
        self._answers = answers
        self._beats = beats
        self._stopped = threading.Event()

    def start(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        threading.Thread(target=self._beat, daemon=True).start()

    def send(self, message: pb.RunMessage) -> None:
        self.sent.append(message)
        for event in self._answers.get(message.WhichOneof("body") or "", []):
            self._on_event(event)

    def close(self) -> None:
        self._stopped.set()

    def _beat(self) -> None:
        while self._beats and not self._stopped.wait(BEAT_S):
            self._on_event(
                pb.RunMessage(generation=1, rank=self.rank, progress=pb.Progress(phase="computing"))
            )


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    model = make_tiny_model(tmp_path_factory.mktemp("talk") / "m", num_layers=2)
    return make_plan(candidates(["torch", "torch"]), CONFIG, manifest_of(model), cluster="test")


def report(rank: int, step: int = 1) -> pb.RunMessage:
    return pb.RunMessage(generation=1, rank=rank, step_report=pb.StepReport(step=step))


def microbatch(num_positions: int = 8, num_sequences: int = 1) -> Microbatch:
    shape = (num_sequences, num_positions)
    return Microbatch(
        index=0,
        tokens_BT=np.zeros(shape, np.int32),
        targets_BT=np.zeros(shape, np.int32),
        mask_BT=np.ones(shape, np.bool_),
        row_keys=tuple(range(num_sequences)),
    )


def started(ring: Ring) -> None:
    for rank in ring._talk.ranks:
        ring._talk.admit(rank)


def step(ring: Ring, *, timeout_s: float = 5.0) -> list[pb.StepReport]:
    return ring.run_step(1, [microbatch()], loss_scale=1.0, timeout_s=timeout_s)


def test_a_silent_rank_is_named(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation_module, "SILENCE_TIMEOUT_S", 0.3)
    ranks = [ScriptedRank(0, {"step_input": [report(0)]}), ScriptedRank(1, {}, beats=False)]
    with Ring(plan, ranks) as ring:
        started(ring)
        with pytest.raises(LostRankError, match=r"device1 \(rank 1\) has not been heard"):
            step(ring)


def test_a_driver_that_was_away_does_not_blame_the_ranks(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asleep, swapping, or writing a checkpoint: the backlog is read before anyone is judged."""
    monkeypatch.setattr(conversation_module, "SILENCE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(conversation_module, "OWN_PAUSE_S", 0.6)
    ranks = [ScriptedRank(n, {"step_input": [report(n)]}) for n in (0, 1)]
    with Ring(plan, ranks) as ring:
        started(ring)
        time.sleep(0.8)
        assert len(step(ring)) == 2


def test_a_deadline_does_not_run_while_the_driver_is_away(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-Z and fg: the step was finished meanwhile, its report waits in the queue."""
    monkeypatch.setattr(conversation_module, "OWN_PAUSE_S", 0.4)
    ranks = [ScriptedRank(0, {"step_input": [report(0)]}), ScriptedRank(1, {})]
    with Ring(plan, ranks) as ring:
        started(ring)
        get, paused = ring._talk._events.get, threading.Event()

        class AwayOnce:
            def get(self, timeout: float) -> object:
                if not paused.is_set():
                    paused.set()
                    time.sleep(1.0)
                    ranks[1]._on_event(report(1))
                return get(timeout=timeout)

            put = staticmethod(ring._talk._events.put)

        ring._talk._events = AwayOnce()  # type: ignore[assignment]
        assert len(step(ring, timeout_s=0.8)) == 2


def test_the_cause_is_told_and_not_its_consequence(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation_module, "CAUSE_WINDOW_S", 0.1)
    complaint = pb.RunMessage(
        generation=1,
        rank=0,
        failure=pb.Failure(kind="PeerLostError", message="device0: the link broke"),
    )
    cause = pb.RunMessage(
        generation=1, rank=1, failure=pb.Failure(kind="NumericsError", message="layer 3 overflowed")
    )
    ranks = [ScriptedRank(0, {"step_input": [complaint]}), ScriptedRank(1, {"step_input": [cause]})]
    with Ring(plan, ranks) as ring:
        started(ring)
        with pytest.raises(NumericsError, match="device1: layer 3 overflowed"):
            step(ring)
    assert ranks[0].sent[-1].WhichOneof("body") != "step_input", "the others are told to end"


def test_a_slow_step_names_who_is_waited_for(plan: Plan) -> None:
    ranks = [ScriptedRank(0, {"step_input": [report(0)]}), ScriptedRank(1, {})]
    with Ring(plan, ranks) as ring:
        started(ring)
        with pytest.raises(PeerLostError, match=r"step 1 took too long.*device1.*computing"):
            step(ring, timeout_s=0.6)


def test_who_all_wait_for_is_said_long_before_the_deadline(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow is not dead: the straggler is named, and the step goes on."""
    monkeypatch.setattr(conversation_module, "PATIENCE_S", 0.1)
    ranks = [ScriptedRank(0, {"step_input": [report(0)]}), ScriptedRank(1, {})]
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        ranks[1]._on_event(report(1))

    with Ring(plan, ranks, on_note=note) as ring:
        started(ring)
        assert len(step(ring)) == 2
    assert len(notes) == 1
    assert re.match(r"step 1 takes long .*waiting for device1 \(rank 1\): computing", notes[0])


@pytest.mark.parametrize("field", ["busy_s", "step_s", "period_s"])
@pytest.mark.parametrize("time_s", [float("nan"), float("inf"), -1.0])
def test_a_time_that_is_none_is_refused_with_the_ranks_name(
    plan: Plan, field: str, time_s: float
) -> None:
    """What is computed from the reports, bubble and prediction, must stay numbers."""
    bad = report(1)
    setattr(bad.step_report, field, time_s)
    ranks = [ScriptedRank(0, {"step_input": [report(0)]}), ScriptedRank(1, {"step_input": [bad]})]
    with Ring(plan, ranks) as ring:
        started(ring)
        with pytest.raises(ProtocolError, match=r"device1 \(rank 1\) reported a time of"):
            step(ring)


def test_a_stop_comes_through_while_devices_start(plan: Plan) -> None:
    ranks = [ScriptedRank(n, {}) for n in (0, 1)]
    asked = time.monotonic()
    with (
        Ring(plan, ranks, wants_stop=lambda: time.monotonic() - asked > 0.2) as ring,
        pytest.raises(InterruptedRunError, match="starting a worker"),
    ):
        ring.prepare()
    assert time.monotonic() - asked < 3


def test_a_steps_size_does_not_depend_on_one_messages_limit(plan: Plan) -> None:
    ranks = [ScriptedRank(n, {}) for n in (0, 1)]
    large = [microbatch(512, 1024) for _ in range(5)]  # 2 MB of tokens each
    with Ring(plan, ranks) as ring:
        started(ring)
        with pytest.raises(PeerLostError):
            ring.run_step(1, large, loss_scale=0.5, timeout_s=0.1)
    pieces = [m.step_input for m in ranks[0].sent if m.WhichOneof("body") == "step_input"]
    assert len(pieces) > 1
    assert sum(len(piece.microbatches) for piece in pieces) == 5
    assert [piece.more for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    assert all(piece.ByteSize() < 8 << 20 for piece in pieces)
    assert all(piece.loss_scale == 0.5 for piece in pieces)


def test_a_step_in_pieces_is_the_same_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(tmp_path / "m", num_layers=2)
    config = replace(CONFIG, microbatch_size=1)
    whole = train_ring(model, ["torch", "torch"], config=config, num_steps=2)
    monkeypatch.setattr(ring_module, "STEP_PIECE_BYTES", 300)
    pieces = train_ring(model, ["torch", "torch"], config=config, num_steps=2)
    assert pieces.losses == whole.losses
