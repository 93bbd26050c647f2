"""`verify` finds the wrong stage, whatever is wrong with it; here without processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from exo_train.agent.planning import make_plan
from exo_train.agent.verification import Measured, measure, random_batch, wrong_rank
from exo_train.agent.verification import errors_by_rank as errors_of
from tests.ring.rings import CONFIG, TIMEOUT_S, candidates, manifest_of, open_local_ring

TOLERANCE = 1e-3


def measured(model: Path, backends: list[str], faults: dict[int, str]) -> Measured:
    manifest = manifest_of(model)
    plan = make_plan(candidates(backends), CONFIG, manifest, cluster="test", adapter_init="random")
    ring, access = open_local_ring(model, plan, faults=faults)
    with ring:
        ring.prepare()
        ring.load(access, step_timeout_s=TIMEOUT_S, capture_boundaries=True)
        return measure(ring, random_batch(manifest.spec.vocab_size, seed=0))


# The last of three stages sends nothing up, the first nothing down.
CASES = [
    (fault, rank)
    for fault, ranks in (("forward", (0, 1)), ("backward", (1, 2)), ("adapter", (0, 1, 2)))
    for rank in ranks
]


@pytest.mark.parametrize(("fault", "rank"), CASES)
def test_the_wrong_stage_is_named(fault: str, rank: int, tiny_model: Path) -> None:
    backends = ["torch", "mlx", "torch"]
    manifest = manifest_of(tiny_model)
    plan = make_plan(candidates(backends), replace(CONFIG), manifest, cluster="test")
    right = measured(tiny_model, backends, {})
    one = measured(tiny_model, ["torch"], {})
    assert max(errors_of(plan, right.gradients, one.gradients)) < TOLERANCE

    wrong = measured(tiny_model, backends, {rank: f"{fault}:1.05"})
    errors = errors_of(plan, wrong.gradients, one.gradients)
    assert max(errors) > TOLERANCE
    found = wrong_rank(plan, wrong.boundaries, right.boundaries, errors, TOLERANCE)
    assert found == rank
