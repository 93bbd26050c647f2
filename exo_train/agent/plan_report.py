"""What `plan --json` prints, from a decision. Owns the shape of that JSON. Must not decide."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from exo_train.agent.deciding import Decision
from exo_train.agent.what_if_epoch import EpochFacts
from exo_train.plan.chains import serial_s
from exo_train.plan.exact import PlannedStage
from exo_train.plan.memory_kinds import memory_by_kind
from exo_train.plan.profiles import Household, Workload
from exo_train.plan.strategy import StrategyCandidate


def decision_fields(
    found: Decision, *, step_positions: int, epoch: EpochFacts | None, token_share: float = 1.0
) -> dict[str, Any]:
    """Give verdict, stages, times and everything that went in.

    The predicted step computes `step_positions`, of which `token_share` are tokens, no padding.
    """
    return {
        **_verdict_fields(found),
        **_time_fields(found, step_positions, epoch, token_share),
        **_microbatch_fields(found),
        "inputs": _inputs(found.household, found.workload),
    }


def _verdict_fields(found: Decision) -> dict[str, Any]:
    verdict, household = found.verdict, found.household
    runner_up = verdict.runner_up
    return {
        "strategy": verdict.strategy,
        "verdict": verdict.reason,
        "runner_up": _candidate(runner_up, household) if runner_up else None,
        "candidates": [_candidate(c, household) for c in verdict.candidates],
        "stages": [_stage(stage, found) for stage in verdict.plan.stages],
        "links": _links(found),
        "all_orders_tried": verdict.plan.exact,
    }


def _stage(stage: PlannedStage, found: Decision) -> dict[str, Any]:
    costs = found.workload.costs_of(found.household.devices[stage.device])
    kinds = memory_by_kind(costs, stage.stage, in_flight=stage.in_flight)
    return {
        "device": found.household.devices[stage.device].name,
        "layers": [stage.stage.start, stage.stage.end],
        "embedding": stage.stage.embedding,
        "head": stage.stage.head,
        "time_s": stage.time_s,
        "busy_share": stage.busy_share,
        "memory_bytes": stage.memory_bytes,
        "usable_memory_bytes": stage.usable_bytes,
        "memory_by_kind": dataclasses.asdict(kinds),
        "microbatches_in_flight": stage.in_flight,
    }


def _links(found: Decision) -> list[dict[str, Any]]:
    """Give both directions of each hop; `time_s` is of one message: latency and bytes."""
    devices = found.verdict.plan.devices
    message_bytes, num_forwards = found.workload.boundary_bytes, found.workload.num_forwards
    hops = [
        hop
        for low, high in itertools.pairwise(devices)
        for hop in ((low, high, num_forwards), (high, low, 1))
    ]
    return [
        {
            "from": found.household.devices[source].name,
            "to": found.household.devices[target].name,
            "bytes_per_step": times * message_bytes * found.workload.num_microbatches,
            "time_s": link.latency_s + serial_s(link, message_bytes),
        }
        for source, target, times in hops
        for link in [found.household.links[source, target]]
    ]


def _time_fields(
    found: Decision, step_positions: int, epoch: EpochFacts | None, token_share: float
) -> dict[str, Any]:
    plan = found.verdict.plan
    step_s = plan.step_s
    return {
        "period_s": plan.period_s,
        "pace_s": plan.pace_s,
        "update_s": plan.update_s,
        "step_s": step_s,
        "step_positions": step_positions,
        "tokens_per_s": token_share * step_positions / step_s,
        "epoch_s": epoch.epoch_s(step_s, step_positions=step_positions) if epoch else None,
        "data": dataclasses.asdict(epoch) if epoch else None,
    }


def _microbatch_fields(found: Decision) -> dict[str, Any]:
    return {
        "microbatch_size": found.microbatch_size,
        "num_microbatches": found.workload.num_microbatches,
        "microbatch_size_chosen": bool(found.sizes),
        "microbatch_candidates": [dataclasses.asdict(size) for size in found.sizes],
    }


def _inputs(household: Household, workload: Workload) -> dict[str, Any]:
    """Give all numbers that went in, so that a script can check the plan."""
    return {
        "layer_costs": [dataclasses.asdict(cost) for cost in workload.costs],
        "per_stage_bytes": workload.per_stage.static_bytes,
        "per_stage_bytes_per_microbatch": workload.per_stage.per_microbatch_bytes,
        "boundary_bytes": workload.boundary_bytes,
        "schedule": workload.schedule,
        "devices": [
            {
                "name": device.name,
                "usable_memory_bytes": device.usable_bytes,
                "layer_s": device.layer_s,
                "embedding_s": device.embedding_s,
                "head_s": device.head_s,
                "head_layer_s": device.head_layer_s,
                "overhead_s": device.overhead_s,
                "layer_update_s": device.layer_update_s,
                # Where the device stores or computes otherwise than `layer_costs` say.
                "costs": dataclasses.asdict(device.costs) if device.costs else None,
            }
            for device in household.devices
        ],
        "links": [
            {
                "from": household.devices[a].name,
                "to": household.devices[b].name,
                "latency_s": link.latency_s,
                "bytes_per_s": link.bytes_per_s,
                "medium": link.medium,
            }
            for (a, b), link in sorted(household.links.items())
        ],
    }


def _candidate(candidate: StrategyCandidate, household: Household) -> dict[str, Any]:
    return {
        "strategy": candidate.strategy,
        "devices": [household.devices[index].name for index in candidate.devices],
        "step_s": candidate.step_s,
        "available": candidate.available,
        "note": candidate.note,
    }
