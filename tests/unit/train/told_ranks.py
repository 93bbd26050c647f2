"""Ranks that answer as they are told to, at once, for a real driver. For tests only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from exo_train.plan.history import StepId
from exo_train.plan.plan import Plan
from exo_train.train.conversation import Event
from exo_train.wire.pb import control_pb2 as pb

Body = dict[str, Any]
Answer = Callable[[pb.RunMessage], Iterable[Body]]


class ToldRank:
    """Implements RankChannel; `answers` has what is said to each kind of message."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan, self._rank = plan, rank
        self.generation = plan.generation
        self.answers: dict[str, Answer] = {
            "prepare": lambda message: [{"prepared": pb.Prepared()}],
            "rewind": lambda message: [{"rewound": pb.Rewound()}],
        }
        self.is_closed = False

    def start(self, on_event: Callable[[Event], None]) -> None:
        self.event = on_event

    def send(self, message: pb.RunMessage) -> None:
        self.generation = message.generation
        answer = self.answers.get(message.WhichOneof("body") or "")
        for body in answer(message) if answer else ():
            self.say(**body)

    def say(self, **body: Any) -> None:
        self.event(pb.RunMessage(generation=self.generation, rank=self._rank, **body))

    def close(self) -> None:
        self.is_closed = True


def to_id(at: StepId) -> pb.StepId:
    return pb.StepId(generation=at.generation, step=at.step)
