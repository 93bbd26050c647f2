"""A computer with two devices takes two ranks of one run: on real agents, all on their CPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exo_train.agent.local_client import own_agent
from exo_train.agent.opening import Narrator, open_for_run, open_ring, own_tls
from exo_train.backends.registry import load_backend
from exo_train.errors import PeerLostError
from exo_train.plan.plan import Plan
from exo_train.train.batches import BatchPlan, split_microbatches
from exo_train.train.learning_rate import clip_scale
from exo_train.train.ring import Ring
from tests.ring.hand_plans import plan_by_hand
from tests.ring.household import Household
from tests.ring.rings import CONFIG, TIMEOUT_S, random_examples, train_ring

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("two-ranks"), pytest.mark.timeout(180)]

STEPS = 3
FAR_TOO_MUCH_BYTES = 10**15
LAYERS = ((0, 2), (2, 3), (3, 5))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Household]:
    with Household(tmp_path_factory.mktemp("pair")) as household:
        household.add("tower", "torch")
        household.add("laptop", "torch")
        household.wait_met()
        yield household


@pytest.fixture(scope="module")
def one_device_losses(tiny_model: Path) -> list[float]:
    load_backend("torch")  # a ring in this process sends no sign of life while it imports
    return train_ring(tiny_model, ["torch"], num_steps=STEPS).losses


def losses_on(ring: Ring, vocab_size: int) -> list[float]:
    """Train like `rings.train_ring` does, on a ring that is open already."""
    batches = BatchPlan(examples=random_examples(vocab_size), batch_size=CONFIG.batch_size, seed=3)
    losses = []
    for step in range(1, STEPS + 1):
        batch = batches.batch_for_step(step - 1)
        microbatches = split_microbatches(
            batch, microbatch_size=ring.plan.microbatch_size, max_seq_length=CONFIG.max_seq_length
        )
        reports = ring.run_step(
            step, microbatches, loss_scale=1 / batch.num_supervised_tokens, timeout_s=TIMEOUT_S
        )
        losses.append(reports[-1].loss_sum / batch.num_supervised_tokens)
        norm = math.sqrt(sum(report.grad_square_sum for report in reports))
        ring.commit(
            step,
            apply=True,
            learning_rate=CONFIG.learning_rate,
            grad_scale=clip_scale(norm, CONFIG.max_grad_norm),
            timeout_s=TIMEOUT_S,
        )
    return losses


def run_on(
    household: Household,
    driver: str,
    nodes: Sequence[str],
    model_path: Path,
    *,
    last_device: str = "cpu",
) -> tuple[Plan, dict[str, Any], list[float]]:
    """Train from `driver` with rank 0, 1, … on `nodes`; gives plan, the run's status, losses."""
    home = household.homes[driver]
    model = open_for_run(home, str(model_path))
    with own_agent(home) as client:
        status = client.status()
        ids = {member["name"]: member["id"] for member in status["members"]}
        plan = plan_by_hand(
            model.manifest,
            [(name, ids[name]) for name in nodes],
            LAYERS,
            cluster=status["cluster"],
        )
        ranks = [replace(rank, memory_bytes=FAR_TOO_MUCH_BYTES) for rank in plan.ranks]
        ranks[-1] = replace(ranks[-1], device=last_device)
        plan = replace(plan, ranks=tuple(ranks))
        with open_ring(
            client, own_tls(home), plan, model, status, Narrator(), step_timeout_s=TIMEOUT_S
        ) as ring:
            losses = losses_on(ring, model.manifest.spec.vocab_size)
            return ring.plan, client.status()["run"], losses


@pytest.mark.parametrize(
    ("driver", "nodes"),
    [
        # Two workers of one node fetch tensors of one model, into one cache.
        ("laptop", ("tower", "tower", "laptop")),
        ("tower", ("tower", "laptop", "tower")),
    ],
    ids=["neighbours that fetch", "not neighbours"],
)
def test_two_ranks_of_one_node_equal_one_device(
    pair: Household,
    tiny_model: Path,
    one_device_losses: list[float],
    driver: str,
    nodes: tuple[str, ...],
) -> None:
    """No rank has the memory that the plan says, but these agents have the user's word for it."""
    plan, run, losses = run_on(pair, driver, nodes, tiny_model)
    assert losses == pytest.approx(one_device_losses)
    logs = {f"{name}/worker-{plan.run_id}-rank{rank}.log" for rank, name in enumerate(nodes)}
    found = {f"{p.parent.parent.name}/{p.name}" for p in pair.root.glob("*/logs/worker-*.log")}
    assert logs <= found, "each rank has a log of its own"
    assert run["id"] == plan.run_id
    shown = [rank["rank"] for rank in run["ranks"] if rank["name"] == driver]
    assert [nodes[rank] for rank in shown] == [driver], "a member shows its newest part"
    assert not pair.workers(), "a worker outlived its run"


def test_a_device_that_the_node_does_not_offer_is_refused(
    pair: Household, tiny_model: Path
) -> None:
    nodes = ("tower", "tower", "laptop")
    with pytest.raises(PeerLostError, match="laptop has no device 'cuda:1'; it offers cpu"):
        run_on(pair, "tower", nodes, tiny_model, last_device="cuda:1")
    assert not pair.workers(), "a worker outlived its run"
