"""`exo-train plan`: who would get which layers, and how fast, for devices in a file.

Owns the way from a model's config to a verdict and its report. Nothing is loaded or trained and
no device is asked: the file says how fast devices are, by preset or by measured times.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exo_train.agent.planning import DTYPE_BYTES, model_shape
from exo_train.agent.what_if_devices import read_household
from exo_train.agent.what_if_epoch import EpochFacts, count_epoch
from exo_train.cluster.home import Home
from exo_train.config import TrainConfig
from exo_train.errors import DoesNotFitError
from exo_train.models.hub import resolve_config
from exo_train.models.spec import ModelSpec
from exo_train.plan.chains import serial_s
from exo_train.plan.exact import ExactPlan, PlannedStage
from exo_train.plan.memory import ModelShape, adapter_params
from exo_train.plan.memory_kinds import memory_by_kind
from exo_train.plan.microbatches import SizeCandidate, choose_size
from exo_train.plan.profiles import Household, Workload
from exo_train.plan.strategy import StrategyCandidate, Verdict, compare
from exo_train.plan.suggestions import Attempt, refusal
from exo_train.plan.workloads import run_workload

SCHEMA = 1
GRADIENT_BYTES = 4  # adapters are trained in fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """A run on devices whose times are known for one sequence.

    A microbatch of n sequences takes n times as long: what is measured or published here says
    nothing of what a device gains from larger ones.
    """

    shape: ModelShape
    config: TrainConfig
    one_sequence: Household
    value_bytes: int

    def sized(self, microbatch_size: int) -> tuple[Household, Workload]:
        workload = run_workload(
            self.shape,
            self.config,
            microbatch_size=microbatch_size,
            value_bytes=self.value_bytes,
        )
        return self.one_sequence.with_times(microbatch_size), workload

    def refusal(self) -> str:
        """Say what is missing with the microbatches that need least memory, and what would fit."""
        given = self.config.microbatch_size or 1
        attempt = Attempt(
            config=self.config,
            usable_bytes=tuple((d.name, d.usable_bytes) for d in self.one_sequence.devices),
            microbatch_size=min(given, self.config.batch_size),
            value_bytes=self.value_bytes,
            weight_bytes_per_param=self.value_bytes,
        )
        return refusal(attempt, self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What was decided, for the report. `sizes` is empty where the user gave the size."""

    verdict: Verdict
    household: Household
    workload: Workload
    microbatch_size: int
    sizes: tuple[SizeCandidate, ...]


def plan_report(home: Home, config: TrainConfig, devices_file: Path) -> dict[str, Any]:
    """Give what `plan --json` prints; raises DoesNotFitError with what would fit."""
    spec = ModelSpec.from_config(
        resolve_config(config.model, cache_dir=home.cache), place=config.model
    )
    spec.validate_max_seq_length(config.max_seq_length)
    shape = model_shape(spec)
    dtype = "bf16" if config.dtype == "auto" else config.dtype
    problem = _Problem(
        shape=shape,
        config=config,
        one_sequence=read_household(devices_file, shape, config),
        value_bytes=DTYPE_BYTES[dtype],
    )
    try:
        found = _decide(problem)
    except DoesNotFitError:
        raise DoesNotFitError(problem.refusal()) from None
    epoch = (
        count_epoch(config, spec, microbatch_size=found.microbatch_size) if config.data else None
    )
    return {
        "schema": SCHEMA,
        "model": config.model,
        "architecture": json.loads(spec.config_json).get("model_type"),
        "dtype": dtype,
        **_verdict_fields(found),
        **_time_fields(found, config, epoch),
        **_microbatch_fields(found),
        "inputs": _inputs(found.household, found.workload),
    }


def _decide(problem: _Problem) -> _Found:
    """Choose the microbatch size unless it is given, then compare strategies for it."""
    config = problem.config
    sizes: tuple[SizeCandidate, ...] = ()
    size = min(config.microbatch_size, config.batch_size)
    if not size:
        size, sizes = choose_size(config.batch_size, problem.sized)
    household, workload = problem.sized(size)
    num_values = problem.shape.num_layers * adapter_params(
        problem.shape, lora_rank=config.rank, targets=config.targets
    )
    return _Found(
        verdict=compare(household, workload, gradient_bytes=num_values * GRADIENT_BYTES),
        household=household,
        workload=workload,
        microbatch_size=size,
        sizes=sizes,
    )


def _verdict_fields(found: _Found) -> dict[str, Any]:
    verdict, household = found.verdict, found.household
    runner_up = verdict.runner_up
    return {
        "strategy": verdict.strategy,
        "verdict": verdict.reason,
        "runner_up": _candidate(runner_up, household) if runner_up else None,
        "candidates": [_candidate(c, household) for c in verdict.candidates],
        "stages": [_stage(stage, verdict.plan, found) for stage in verdict.plan.stages],
        "links": _links(found),
        "all_orders_tried": verdict.plan.exact,
    }


def _stage(stage: PlannedStage, plan: ExactPlan, found: _Found) -> dict[str, Any]:
    kinds = memory_by_kind(found.workload, stage.stage, in_flight=stage.in_flight)
    return {
        "device": found.household.devices[stage.device].name,
        "layers": [stage.stage.start, stage.stage.end],
        "embedding": stage.stage.embedding,
        "head": stage.stage.head,
        "time_s": stage.time_s,
        "busy_share": stage.time_s * found.workload.num_microbatches / plan.step_s,
        "memory_bytes": stage.memory_bytes,
        "usable_memory_bytes": stage.usable_bytes,
        "memory_by_kind": dataclasses.asdict(kinds),
        "microbatches_in_flight": stage.in_flight,
    }


def _links(found: _Found) -> list[dict[str, Any]]:
    """Give both directions of each hop; `time_s` is of one message: latency and bytes."""
    devices = found.verdict.plan.devices
    hops = [pair for a, b in itertools.pairwise(devices) for pair in ((a, b), (b, a))]
    message_bytes = found.workload.boundary_bytes
    return [
        {
            "from": found.household.devices[source].name,
            "to": found.household.devices[target].name,
            "bytes_per_step": message_bytes * found.workload.num_microbatches,
            "time_s": link.latency_s + serial_s(link, message_bytes),
        }
        for source, target in hops
        for link in [found.household.links[source, target]]
    ]


def _time_fields(found: _Found, config: TrainConfig, epoch: EpochFacts | None) -> dict[str, Any]:
    plan = found.verdict.plan
    return {
        "period_s": plan.period_s,
        "step_s": plan.step_s,
        "tokens_per_s": config.batch_size * config.max_seq_length / plan.step_s,
        "epoch_s": epoch.epoch_s(plan.step_s) if epoch else None,
        "data": dataclasses.asdict(epoch) if epoch else None,
    }


def _microbatch_fields(found: _Found) -> dict[str, Any]:
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
