"""One membership whose calls are answered from a table of places, on a clock moved by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from exo_train.cluster.membership import Changed, Duplicate, Effect, Member, Membership
from exo_train.cluster.whom_to_ask import Ask, Failure
from exo_train.peer import Address, DeviceFacts, NodeId

SELF = NodeId("self")
MAC = NodeId("mac")
START_S = 1000.0
TICK_S = 0.5
SILENCE_COSTS_S = 2.0


def place(number: int, port: int = 1) -> Address:
    return Address(f"10.0.0.{number}", port)


def device_facts(node_id: NodeId) -> DeviceFacts:
    return DeviceFacts(
        node_id=node_id,
        name=f"{node_id}'s name",
        backend="mlx",
        device="gpu",
        chip="chip",
        memory_bytes=8,
        usable_memory_bytes=6,
        dtypes=("fp32",),
        version="1",
    )


@dataclass(frozen=True)
class Answer:
    node_id: NodeId = MAC
    incarnation: int = 1
    instance: str = "first"
    addresses: tuple[Address, ...] = (place(1),)
    rtt_s: float = 0.001


@dataclass
class Bench:
    """`places` says what happens at each address; one that is not in it swallows packets."""

    places: dict[Address, Answer | Failure] = field(default_factory=dict)
    now_s: float = START_S
    asked: list[tuple[float, Ask]] = field(default_factory=list)
    changes: list[Changed] = field(default_factory=list)
    duplicates: list[Duplicate] = field(default_factory=list)
    pending: list[tuple[float, Ask]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.membership = Membership(SELF, incarnation=3, instance="own", now_s=self.now_s)

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Changed):
                self.changes.append(effect)
            elif isinstance(effect, Duplicate):
                self.duplicates.append(effect)
            else:
                self.asked.append((self.now_s, effect))
                is_silent = self.places.get(effect.address) in (None, *SLOW_FAILURES)
                takes_s = SILENCE_COSTS_S if is_silent else 0.0
                self.pending.append((self.now_s + takes_s, effect))

    def settle(self) -> None:
        """Tell the ends of calls that are over by now; what they cause is asked and told, too."""
        while any(end_s <= self.now_s for end_s, _ in self.pending):
            done = [p for p in self.pending if p[0] <= self.now_s]
            self.pending = [p for p in self.pending if p[0] > self.now_s]
            for _, ask in done:
                self._end(ask)

    def _end(self, ask: Ask) -> None:
        what = self.places.get(ask.address, Failure.SILENT)
        if isinstance(what, Answer) and ask.node_id in (None, what.node_id):
            self.hear(what, proven=ask.address)
            return
        how = Failure.FOREIGN if isinstance(what, Answer) else what
        self.take(self.membership.failed(ask.address, ask.node_id, how, now_s=self.now_s))

    def hear(self, answer: Answer, proven: Address | None = None) -> None:
        effects = self.membership.heard(
            device_facts(answer.node_id),
            incarnation=answer.incarnation,
            instance=answer.instance,
            addresses=answer.addresses,
            now_s=self.now_s,
            proven=proven,
            rtt_s=answer.rtt_s if proven else None,
        )
        self.take(effects)

    def suggest(
        self, address: Address, node_id: NodeId | None = None, *, lasting: bool = False
    ) -> None:
        self.take(self.membership.suggested(address, node_id, now_s=self.now_s, lasting=lasting))
        self.settle()

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s - 1e-9:
            self.now_s += TICK_S
            self.settle()
            self.take(self.membership.tick(now_s=self.now_s))
            self.settle()

    def member(self, node_id: NodeId = MAC) -> Member:
        return self.membership.members[node_id]

    def asked_at(self, address: Address, since_s: float = 0.0) -> list[float]:
        return [at_s for at_s, ask in self.asked if ask.address == address and at_s > since_s]


SLOW_FAILURES = (Failure.SILENT, Failure.ACCEPTED)


def met(places: Mapping[Address, Answer | Failure] | None = None) -> Bench:
    """A bench on which the Mac is met at its first place and beats quietly."""
    bench = Bench(places={place(1): Answer(), **(places or {})})
    bench.suggest(place(1))
    bench.run(10.0)
    assert bench.member().answers
    return bench
