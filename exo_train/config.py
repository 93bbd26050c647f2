"""The options of a run as a frozen value, and what is made of them. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exo_train.encoding_config import EncodingConfig
from exo_train.errors import ConfigError
from exo_train.lora_config import (
    DEFAULT_ALPHA,
    FULL_LEARNING_RATE,
    MAX_ALPHA,
    MAX_RANK,
    LoraConfig,
    alpha_of,
    check_words,
    read_pattern,
)
from exo_train.objective_config import ObjectiveConfig, check_objective
from exo_train.optimizer_config import OptimizerConfig, check_trains_matrices
from exo_train.option_rules import (
    check_devices,
    check_full,
    check_held_out,
    check_reports,
    check_scale,
)
from exo_train.options import check_ranges, check_used, options_of, read_values, used
from exo_train.run_options import RunOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(RunOptions):
    """Everything that decides the numbers of a run, and where its files go."""

    def __post_init__(self) -> None:
        check_ranges(self)
        check_used(self)
        check_trains_matrices(self.optimizer_rule, trains_weights=self.full)
        check_words(self.lora)
        check_scale(self.scale, self.lora)
        check_devices(self.devices, min_devices=self.min_devices, shadow=self.shadow)
        check_held_out(rows=self.val_rows, share=self.val_split)
        check_reports(self.report_to)
        check_full(self, OPTIONS)
        check_objective(self.learnt, packing=self.packing, init_adapter=self.init_adapter)

    @property
    def learnt(self) -> ObjectiveConfig:
        smoothing = self.label_smoothing
        return ObjectiveConfig(name=self.objective, beta=self.beta, label_smoothing=smoothing)

    @property
    def lora(self) -> LoraConfig:
        by_scale = alpha_of(self.scale, self.rank, rslora=self.rslora)
        return LoraConfig(
            rank=self.rank,
            alpha=self.alpha or by_scale or DEFAULT_ALPHA,
            dropout=self.dropout,
            targets=self.targets,
            layers=self.adapter_layers,
            rslora=self.rslora,
            dora=self.dora,
            full=self.full,
            rank_pattern=read_pattern(
                self.rank_pattern, "rank_pattern", int, above=0, most=MAX_RANK
            ),
            alpha_pattern=read_pattern(
                self.alpha_pattern, "alpha_pattern", float, above=0, most=MAX_ALPHA
            ),
        )

    @property
    def copies(self) -> str:
        """`shadow`, whose auto is off where all weights are trained: their state is too large."""
        return "off" if self.full and self.shadow == "auto" else self.shadow

    @property
    def optimizer_rule(self) -> OptimizerConfig:
        return OptimizerConfig(
            name=self.optimizer,
            beta1=self.adam_beta1,
            beta2=self.adam_beta2,
            epsilon=self.adam_epsilon,
            momentum=self.momentum,
            muon_momentum=self.muon_momentum,
            muon_rate=self.muon_rate,
            weight_decay=self.weight_decay,
            lora_plus_ratio=self.lora_plus_ratio,
        )

    @property
    def encoding(self) -> EncodingConfig:
        return EncodingConfig(
            system_role=self.system_role, train_turns=self.train_turns, on_long=self.on_long
        )

    def to_dict(self) -> dict[str, Any]:
        """Give plain values for YAML and JSON."""
        values = dataclasses.asdict(self).items()
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], *, source: str) -> TrainConfig:
        """Build from keys of a file or command line; `source` names the place in messages."""
        values = read_values(OPTIONS, mapping, source=source)
        if values.get("full"):
            values.setdefault("learning_rate", FULL_LEARNING_RATE)
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None

    @classmethod
    def from_stored(cls, mapping: Mapping[str, Any], *, source: str) -> TrainConfig:
        """Build from a run's own file; what had no use in it, as earlier versions took it, goes."""
        values = read_values(OPTIONS, mapping, source=source)
        return cls.from_mapping(used(OPTIONS, values), source=source)


OPTIONS = options_of(TrainConfig)
