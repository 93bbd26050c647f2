"""`train` dials the ring's neighbours over the links that were measured to be the best."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from exo_train.agent.opening import best_host_of
from exo_train.lora_config import LoraConfig
from exo_train.optimizer_config import OptimizerConfig
from exo_train.peer import Address, NodeId
from exo_train.plan.plan import Plan, RankPlan
from exo_train.plan.stages import StageSpec
from exo_train.train.messages import to_endpoints
from exo_train.train.ring import Event, Ring
from exo_train.wire.pb import control_pb2 as pb

A, B, C = (NodeId(digit * 32) for digit in "abc")
WIFI, CABLE, OTHER = "192.168.1.7", "169.254.3.4", "10.0.0.7"
DATA_PORT = 7000


def link(one: NodeId, one_host: str, other: NodeId, other_host: str) -> dict[str, Any]:
    """Give what matters here of an entry of `status --json`'s links."""
    return {"ends": [{"id": one, "host": one_host}, {"id": other, "host": other_host}]}


LINKS = [link(A, "169.254.3.3", B, CABLE), link(A, "192.168.1.5", C, "192.168.1.9")]


def test_the_best_host_is_that_of_the_pairs_own_link_whoever_measured_it() -> None:
    assert best_host_of(LINKS, A, B) == CABLE
    assert best_host_of(LINKS, B, A) == "169.254.3.3"
    assert best_host_of(LINKS, C, A) == "192.168.1.5"
    assert best_host_of(LINKS, B, C) == "", "nothing was measured between them"
    assert best_host_of([], A, B) == ""


class Rank:
    """Answers that its data port is open on these hosts."""

    def __init__(self, rank: int, hosts: tuple[str, ...]) -> None:
        self._rank = rank
        self._hosts = hosts
        self._on_event: Callable[[Event], None] = lambda event: None

    def start(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event

    def send(self, message: pb.RunMessage) -> None:
        if message.WhichOneof("body") == "prepare":
            addresses = [Address(host, DATA_PORT) for host in self._hosts]
            answer = pb.Prepared(data_endpoints=to_endpoints(addresses))
            self._on_event(
                pb.RunMessage(run_id="r", generation=1, rank=self._rank, prepared=answer)
            )

    def close(self) -> None:
        pass


def plan_for(*nodes: NodeId) -> Plan:
    last = len(nodes) - 1
    ranks = tuple(
        RankPlan(
            rank=index,
            node_id=node_id,
            name=node_id[:1],
            backend="torch",
            device="cpu",
            compute_dtype="fp32",
            stage=StageSpec(start=index, end=index + 1, embedding=index == 0, head=index == last),
        )
        for index, node_id in enumerate(nodes)
    )
    return Plan(
        cluster="home",
        run_id="r",
        generation=1,
        model_hash="0" * 64,
        num_layers=len(nodes),
        hidden_size=8,
        ranks=ranks,
        pipeline_schedule="1f1b",
        microbatch_size=1,
        max_seq_length=8,
        wire_dtype="fp32",
        lora=LoraConfig(),
        optimizer=OptimizerConfig(),
        seed=0,
    )


def test_the_plan_names_the_pinned_host_of_each_neighbour_first_and_keeps_the_others() -> None:
    hosts = ((WIFI, OTHER), (WIFI, OTHER, CABLE), ("10.0.0.9", "192.168.1.9"))
    ranks = [Rank(index, given) for index, given in enumerate(hosts)]
    best_host = functools.partial(best_host_of, LINKS)
    with Ring(plan_for(A, B, C), ranks, best_host=best_host) as ring:
        plan = ring.prepare()
    told = [[address.host for address in rank.addresses] for rank in plan.ranks]
    assert told[1] == [CABLE, WIFI, OTHER], "A dials B over the cable"
    assert told[2] == ["10.0.0.9", "192.168.1.9"], "B has no link to C: as C said"
    assert told[0] == [WIFI, OTHER], "nobody dials the first"
