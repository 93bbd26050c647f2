"""`exo-train plan --devices FILE`: who would get which layers, for devices in a file.

Owns the way from a model's config and the file to a decision. Nothing is loaded or trained and
no device is asked: the file says how fast devices are, by preset or by measured times.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exo_train.agent.deciding import decide
from exo_train.agent.plan_report import decision_fields
from exo_train.agent.planning import DTYPE_BYTES, model_shape
from exo_train.agent.what_if_devices import Processors, read_household
from exo_train.agent.what_if_epoch import read_epoch
from exo_train.cluster.home import Home
from exo_train.config import TrainConfig
from exo_train.errors import ConfigError
from exo_train.models.hub import resolve_config
from exo_train.models.open import open_model, require_floats
from exo_train.models.spec import ModelSpec
from exo_train.plan.device_memory import Processor
from exo_train.plan.memory import ModelShape
from exo_train.plan.profiles import Household, StageCosts, Workload
from exo_train.plan.suggestions import Attempt, refusal
from exo_train.plan.workloads import run_stage_costs, run_workload

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
    processors: Processors
    value_bytes: int

    def sized(self, microbatch_size: int) -> tuple[Household, Workload]:
        workload = run_workload(
            self.shape,
            self.config,
            microbatch_size=microbatch_size,
            value_bytes=self.value_bytes,
        )
        learnt = self.config.learnt
        household = self.one_sequence.with_times(
            learnt.time_factor * learnt.answers_per_row * microbatch_size
        )
        devices = tuple(
            dataclasses.replace(device, costs=self._costs(processor, microbatch_size))
            for device, processor in zip(household.devices, self.processors, strict=True)
        )
        return dataclasses.replace(household, devices=devices), workload

    def _costs(self, processor: Processor | None, microbatch_size: int) -> StageCosts | None:
        """Give a preset's memory by its backend; of a device given by times nothing is known."""
        if processor is None:
            return None
        return run_stage_costs(
            self.shape,
            self.config,
            processor,
            microbatch_size=microbatch_size,
            sequence=self.config.max_seq_length,
            value_bytes=self.value_bytes,
            wire_bytes=self.value_bytes,
        )

    def refusal(self, said: str) -> str:
        """Say what is missing with the microbatches that need least memory, and what would fit."""
        given = self.config.microbatch_size or 1
        known = tuple(processor for processor in self.processors if processor is not None)
        attempt = Attempt(
            config=self.config,
            usable_bytes=tuple((d.name, d.usable_bytes) for d in self.one_sequence.devices),
            microbatch_size=min(given, self.config.batch_size),
            value_bytes=self.value_bytes,
            processors=known if len(known) == len(self.processors) else (),
        )
        return refusal(attempt, self.shape, said=said)


def what_if_report(home: Home, config: TrainConfig, devices_file: Path) -> dict[str, Any]:
    """Give what `plan --devices --json` prints; raises DoesNotFitError with what would fit."""
    spec = read_spec(home, config)
    dtype = "bf16" if config.dtype == "auto" else config.dtype
    shape = model_shape(spec)
    household, processors = read_household(devices_file, shape, config)
    problem = WhatIf(
        shape=shape,
        config=config,
        one_sequence=household,
        processors=processors,
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
            found,
            step_positions=config.learnt.answers_per_row
            * config.batch_size
            * config.max_seq_length,
            epoch=epoch,
        ),
    }


def read_spec(home: Home, config: TrainConfig) -> ModelSpec:
    """Read the config of the model that `plan` is asked about; no weights are needed."""
    spec = ModelSpec.from_config(
        resolve_config(config.model, cache_dir=home.cache), place=config.model
    )
    spec.validate_max_seq_length(config.max_seq_length)
    spec.validate_quantize(config.quantize)
    if config.full:
        _require_floats(Path(config.model), spec)
    return spec


def _require_floats(model: Path, spec: ModelSpec) -> None:
    """Refuse what `train` will; a GGUF says of each tensor by itself how it lies."""
    if model.is_file():
        _, source = open_model(model)
        require_floats(source.infos)
    if spec.quantisation is not None:
        raise ConfigError(
            "'full' trains the weights themselves, and this model's are quantised: leave --full "
            "out, or give the model in F32, F16 or BF16"
        )


def report_head(spec: ModelSpec, config: TrainConfig, *, dtype: str) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "model": config.model,
        "architecture": json.loads(spec.config_json).get("model_type"),
        "dtype": dtype,
    }
