"""`exo-train plan --devices FILE`: who would get which layers, for devices in a file.

Owns the way from a model's config and the file to a decision. Nothing is loaded or trained and
no device is asked: the file says how fast devices are, by preset or by measured times.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exo_train.agent.deciding import decide
from exo_train.agent.plan_report import decision_fields
from exo_train.agent.planning import DTYPE_BYTES, model_shape
from exo_train.agent.what_if_devices import read_household
from exo_train.agent.what_if_epoch import read_epoch
from exo_train.cluster.home import Home
from exo_train.config import TrainConfig
from exo_train.models.hub import resolve_config
from exo_train.models.spec import ModelSpec
from exo_train.plan.memory import ModelShape
from exo_train.plan.profiles import Household, Workload
from exo_train.plan.suggestions import Attempt, refusal
from exo_train.plan.workloads import run_workload

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
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


def what_if_report(home: Home, config: TrainConfig, devices_file: Path) -> dict[str, Any]:
    """Give what `plan --devices --json` prints; raises DoesNotFitError with what would fit."""
    spec = read_spec(home, config)
    dtype = "bf16" if config.dtype == "auto" else config.dtype
    shape = model_shape(spec)
    problem = WhatIf(
        shape=shape,
        config=config,
        one_sequence=read_household(devices_file, shape, config),
        value_bytes=DTYPE_BYTES[dtype],
    )
    found = decide(problem, at_least=config.min_devices)
    epoch = None
    if config.data:
        data = read_epoch(config, spec, cache_dir=home.cache)
        epoch = data.count(microbatch_size=found.microbatch_size)
    return {
        **report_head(spec, config, dtype=dtype),
        **decision_fields(
            found, step_positions=config.batch_size * config.max_seq_length, epoch=epoch
        ),
    }


def read_spec(home: Home, config: TrainConfig) -> ModelSpec:
    """Read the config of the model that `plan` is asked about; no weights are needed."""
    spec = ModelSpec.from_config(
        resolve_config(config.model, cache_dir=home.cache), place=config.model
    )
    spec.validate_max_seq_length(config.max_seq_length)
    return spec


def report_head(spec: ModelSpec, config: TrainConfig, *, dtype: str) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "model": config.model,
        "architecture": json.loads(spec.config_json).get("model_type"),
        "dtype": dtype,
    }
