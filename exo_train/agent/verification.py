"""Compares one step on the ring with the same step on one device.

Owns the comparison, its tolerance and the finding of the wrong stage. Nothing is trained.

The whole model on this device is the oracle for loss and gradients. Where they differ, the same
split is run with every stage on this device and the tensors at the boundaries are compared: the
stage whose input is right and whose output is not is the wrong one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from exo_train.agent.local_client import LocalClient, own_agent
from exo_train.agent.members import wait_candidates
from exo_train.agent.opening import Narrator, OpenedModel, open_for_run, open_ring, own_tls
from exo_train.agent.planning import Candidate, make_plan, ring_order
from exo_train.backends.base import Arrays
from exo_train.cluster.home import Home
from exo_train.config import TrainConfig
from exo_train.errors import DoesNotFitError, NumericsError
from exo_train.peer import NodeId
from exo_train.plan.plan import Plan
from exo_train.train.batches import Microbatch
from exo_train.train.collecting import merged
from exo_train.train.metrics import finite_or_none
from exo_train.train.ring import Ring
from exo_train.transport.tls import MemberTls
from exo_train.wire.pb import control_pb2 as pb

# Relative to the largest value of the array. Between MLX and PyTorch in fp32 1.3e-5 was measured
# at the embedding of a 30-layer model; 16-bit computing and boundaries are far coarser.
TOLERANCE = {"fp32": 1e-3, "bf16": 8e-2, "fp16": 2e-2}
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 5e-3}
NUM_MICROBATCHES = 2
NUM_POSITIONS = 32
STEP_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One step somewhere: loss, gradients by name, boundary tensors by rank."""

    loss: float
    gradients: Arrays
    boundaries: list[Arrays]


def verify(home: Home, model_name: str, config: TrainConfig, narrator: Narrator) -> dict[str, Any]:
    """Give the report that `verify --json` prints; `ok` says whether all is within tolerance."""
    model = open_for_run(home, model_name)
    with own_agent(home) as client:
        candidates, status = wait_candidates(client, config, on_note=narrator.on_note)
        own_id = NodeId(status["self"])
        ordered = ring_order(candidates, own_id)
        plan = make_plan(
            ordered,
            config,
            model.manifest,
            cluster=status["cluster"],
            adapter_init="random",  # with B = 0 half of the gradients would be zero everywhere
            on_note=narrator.on_note,
        )
        own = Candidate.from_status(next(m for m in status["members"] if m["id"] == own_id))
        one = make_one(own, config, model, status["cluster"])
        steps = _Steps(client, own_tls(home), model, status, narrator, config.seed)
        ring = steps.run(plan)
        oracle = steps.run(one)
        if not np.isfinite(oracle.loss) or not _all_finite(oracle.gradients):
            raise NumericsError(
                f"the model itself gives numbers that are not finite on {own.name} alone (loss "
                f"{oracle.loss}): its files are damaged, or --dtype cannot hold its numbers"
            )
        errors = errors_by_rank(plan, ring.gradients, oracle.gradients)
        kind = plan.wire_dtype if plan.wire_dtype != "fp32" else _coarsest(plan)
        loss_error = abs(ring.loss - oracle.loss) / max(abs(oracle.loss), 1e-12)
        ok = loss_error <= LOSS_TOLERANCE[kind] and max(errors) <= TOLERANCE[kind]
        wrong = None
        if not ok:
            split = steps.run(_all_on(plan, own, one))
            wrong = wrong_rank(plan, ring.boundaries, split.boundaries, errors, TOLERANCE[kind])
    return _report(plan, ring, oracle, errors, loss_error, wrong, kind=kind, ok=ok)


def make_one(own: Candidate, config: TrainConfig, model: OpenedModel, cluster: str) -> Plan:
    """Plan the whole model on one device; raises DoesNotFitError when it has no room."""
    try:
        return make_plan([own], config, model.manifest, cluster=cluster, adapter_init="random")
    except DoesNotFitError as error:
        raise DoesNotFitError(
            f"{own.name} must hold the whole model to compare with, and {error}"
        ) from None


class _Steps:
    """Runs the same batch on any plan."""

    def __init__(
        self,
        client: LocalClient,
        tls: MemberTls,
        model: OpenedModel,
        status: dict[str, Any],
        narrator: Narrator,
        seed: int,
    ) -> None:
        self._client = client
        self._tls = tls
        self._model = model
        self._status = status
        self._narrator = narrator
        self._microbatches = random_batch(model.manifest.spec.vocab_size, seed=seed)

    def run(self, plan: Plan) -> Measured:
        with open_ring(
            self._client,
            self._tls,
            plan,
            self._model,
            self._status,
            self._narrator,
            step_timeout_s=STEP_TIMEOUT_S,
            capture_boundaries=True,
        ) as ring:
            return measure(ring, self._microbatches)


def measure(ring: Ring, microbatches: list[Microbatch]) -> Measured:
    """Run one step on a loaded ring and collect what can be compared; nothing is applied."""
    supervised = sum(int(m.mask_BT.sum()) for m in microbatches)
    reports = ring.run_step(1, microbatches, loss_scale=1.0 / supervised, timeout_s=STEP_TIMEOUT_S)
    return Measured(
        loss=reports[-1].loss_sum / supervised,
        gradients=merged(ring.collect(pb.GRADIENTS)),
        boundaries=ring.collect(pb.BOUNDARIES),
    )


def random_batch(vocab_size: int, *, seed: int) -> list[Microbatch]:
    """Make full, padded and packed rows with both supervised and unsupervised positions."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(NUM_MICROBATCHES):
        tokens_BT = rng.integers(0, vocab_size, (2, NUM_POSITIONS + 1), dtype=np.int32)
        mask_BT = rng.random((2, NUM_POSITIONS)) < 0.7
        mask_BT[1, NUM_POSITIONS // 2 :] = False  # as if padded
        mask_BT[:, 0] = True
        made.append(
            Microbatch(
                index=index,
                tokens_BT=tokens_BT[:, :-1],
                targets_BT=tokens_BT[:, 1:],
                mask_BT=mask_BT,
                row_keys=(2 * index, 2 * index + 1),
            )
        )
    first = NUM_POSITIONS // 3
    packed = replace(
        made[-1],
        row_keys=tuple(range(2 * NUM_MICROBATCHES - 2, 2 * NUM_MICROBATCHES + 1)),
        row_starts=(0, first, NUM_POSITIONS),
    )
    return [*made[:-1], packed]


def _all_on(plan: Plan, own: Candidate, one: Plan) -> Plan:
    """Give the plan's split with every stage on one device."""
    dtype = one.ranks[0].compute_dtype
    ranks = tuple(
        replace(
            rank,
            node_id=own.node_id,
            backend=own.backend,
            device=own.device,
            compute_dtype=dtype,
            addresses=(),
        )
        for rank in plan.ranks
    )
    return replace(plan, ranks=ranks, run_id=plan.run_id + "split", wire_dtype=one.wire_dtype)


def _all_finite(arrays: Arrays) -> bool:
    return all(bool(np.isfinite(array).all()) for array in arrays.values())


def relative_error(measured: np.ndarray, expected: np.ndarray) -> float:
    """Give the largest difference over the largest expected value; inf when not finite."""
    if measured.shape != expected.shape or not np.isfinite(measured).all():
        return float("inf")
    scale = float(np.abs(expected).max(initial=0.0))
    return float(np.abs(measured - expected).max(initial=0.0)) / max(scale, 1e-12)


def errors_by_rank(plan: Plan, ring: Arrays, oracle: Arrays) -> list[float]:
    errors = []
    for rank in plan.ranks:
        prefixes = tuple(f"model.layers.{layer}." for layer in rank.stage.layers)
        names = [name for name in oracle if name.startswith(prefixes)]
        missing = [name for name in names if name not in ring]
        pairs = ((ring[name], oracle[name]) for name in names if name in ring)
        worst = max((relative_error(a, b) for a, b in pairs), default=float("inf"))
        errors.append(float("inf") if missing else worst)
    return errors


def wrong_rank(
    plan: Plan,
    ring: list[Arrays],
    right: list[Arrays],
    errors: list[float],
    tolerance: float,
) -> int:
    """Follow the step: up through the activations, then down through the gradients."""

    def differs(rank: int, kind: str) -> bool:
        names = [name for name in right[rank] if name.startswith(kind)]
        return any(
            name not in ring[rank]
            or relative_error(ring[rank][name], right[rank][name]) > tolerance
            for name in names
        )

    for rank in range(len(plan.ranks)):
        if differs(rank, "activation"):
            return rank
    for rank in reversed(range(len(plan.ranks))):
        if differs(rank, "gradient"):
            return rank
    return int(np.argmax(errors))


def _coarsest(plan: Plan) -> str:
    dtypes = {rank.compute_dtype for rank in plan.ranks}
    return next(name for name in ("bf16", "fp16", "fp32") if name in dtypes)


def _report(
    plan: Plan,
    ring: Measured,
    oracle: Measured,
    errors: list[float],
    loss_error: float,
    wrong: int | None,
    *,
    kind: str,
    ok: bool,
) -> dict[str, Any]:
    return {
        "schema": 1,
        "ok": ok,
        **finite_or_none(
            {"loss_ring": ring.loss, "loss_one": oracle.loss, "loss_error": loss_error}
        ),
        "tolerance": {"loss": LOSS_TOLERANCE[kind], "gradient": TOLERANCE[kind]},
        "wrong_rank": wrong,
        "stages": [
            {
                "rank": rank.rank,
                "name": rank.name,
                "backend": rank.backend,
                "layers": [rank.stage.start, rank.stage.end],
                **finite_or_none({"gradient_error": errors[rank.rank]}),
                "wrong": rank.rank == wrong,
            }
            for rank in plan.ranks
        ],
    }
