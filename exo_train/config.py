"""Options of a run as frozen values. Owns defaults, ranges and the check of unknown keys.

Pure: reads no file, knows no framework.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from exo_train.errors import ConfigError

ALL_TARGETS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)
DTYPES = ("auto", "fp32", "bf16", "fp16")
LR_SCHEDULES = ("constant", "cosine")
PIPELINE_SCHEDULES = ("1f1b", "gpipe")
MAX_PROFILE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): W x + alpha/rank · B A x."""

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ALL_TARGETS

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2017, arXiv:1711.05101) with bias correction."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Everything that decides the numbers of a run, and where its files go."""

    model: str = ""
    data: str = ""
    steps: int = 0  # optimizer updates; 0: `epochs` decides
    epochs: int = 1
    batch_size: int = 8  # sequences per optimizer step, over all microbatches and devices
    microbatch_size: int = 0  # sequences per microbatch; 0: chosen
    max_seq_length: int = 512
    learning_rate: float = 2e-4
    lr_schedule: str = "cosine"
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0  # the last update's rate over the peak
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ALL_TARGETS
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # 0: no clipping
    seed: int = 0
    dtype: str = "auto"  # compute dtype of the frozen base
    wire_dtype: str = "auto"  # boundary tensors; auto: the compute dtype
    pipeline_schedule: str = "1f1b"
    checkpoint_activations: bool = False
    val_rows: int = 0  # rows held out of --data when there is no validation file
    eval_every: int = 0  # steps; 0: before and after only
    save_every: int = 20  # steps; 0: at the end only
    save_minutes: float = 0.0  # at least so often; 0: by steps only
    keep: int = 3  # newest checkpoints, beside the best one
    shadow: str = "auto"  # copies on the neighbour: auto, off, or every so many steps
    takeover: bool = True  # another member goes on when the coordinator is gone
    min_devices: int = 1
    device_wait_s: float = 30.0  # how long to wait for them
    devices: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()  # NAME:COUNT in ring order; empty: planned
    profile_s: float = 3.0  # for timing a layer on each device; 0: split by memory
    run_dir: str = ""
    step_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        _check(self)

    @property
    def lora(self) -> LoraConfig:
        return LoraConfig(
            rank=self.rank, alpha=self.alpha, dropout=self.dropout, targets=self.targets
        )

    @property
    def optimizer(self) -> OptimizerConfig:
        return OptimizerConfig(weight_decay=self.weight_decay)

    def to_dict(self) -> dict[str, Any]:
        """Give plain values for YAML and JSON."""
        plain = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in plain.items()}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], *, source: str) -> TrainConfig:
        """Build from keys of a file or command line; `source` names the place in messages."""
        fields = {f.name: f for f in dataclasses.fields(cls)}
        hints = typing.get_type_hints(cls)
        values: dict[str, Any] = {}
        for raw_key, value in mapping.items():
            key = str(raw_key).replace("-", "_")
            if key not in fields:
                raise ConfigError(f"{source}: unknown key '{raw_key}'{_nearest(key, fields)}")
            values[key] = _coerce(key, value, hints[key], source)
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None


def _nearest(key: str, names: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(key, list(names), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def _coerce(key: str, value: Any, hint: Any, source: str) -> Any:
    """Turn a YAML or command-line value into the field's type ('1e-4' is a number to us)."""

    def refuse(expected: str) -> ConfigError:
        return ConfigError(f"{source}: '{key}' must be {expected}, got {value!r}")

    if hint is bool:
        if isinstance(value, bool):
            return value
        raise refuse("true or false")
    if hint in (int, float):
        return _number(value, hint, refuse)
    if hint is str:
        if not isinstance(value, str):
            raise refuse("text")
        return value
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value):
        return tuple(value)
    raise refuse("a list of names")


def _number(value: Any, hint: Any, refuse: Callable[[str], ConfigError]) -> int | float:
    """Read a finite number; whole ones without a detour through floats, which would round."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise refuse("a number")
    if hint is int and not isinstance(value, float):
        with contextlib.suppress(ValueError):  # perhaps "8.0" or "1e3"
            return int(value)
    try:
        number = float(value)
    except ValueError:
        raise refuse("a number") from None
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise refuse("a finite number")
    if hint is float:
        return number
    if number != int(number):
        raise refuse("a whole number")
    return int(number)


def _check(config: TrainConfig) -> None:
    positive = ("batch_size", "max_seq_length", "rank", "epochs", "min_devices", "keep")
    for name in positive:
        if getattr(config, name) < 1:
            raise ConfigError(f"'{name}' must be at least 1, got {getattr(config, name)}")
    not_negative = (
        "steps",
        "microbatch_size",
        "warmup_steps",
        "weight_decay",
        "max_grad_norm",
        "val_rows",
        "eval_every",
        "save_every",
        "save_minutes",
        "seed",
        "profile_s",
    )
    for name in not_negative:
        if getattr(config, name) < 0:
            raise ConfigError(f"'{name}' must not be negative, got {getattr(config, name)}")
    for name in ("learning_rate", "alpha", "step_timeout_s", "device_wait_s"):
        value = getattr(config, name)
        if not 0 < value < float("inf"):
            raise ConfigError(f"'{name}' must be a number above 0, got {value}")
    if not 0 <= config.dropout < 1:
        raise ConfigError(f"'dropout' must be at least 0 and below 1, got {config.dropout}")
    if not 0 <= config.min_lr_ratio <= 1:
        raise ConfigError(f"'min_lr_ratio' must be from 0 to 1, got {config.min_lr_ratio}")
    choices = {
        "dtype": DTYPES,
        "wire_dtype": DTYPES,
        "lr_schedule": LR_SCHEDULES,
        "pipeline_schedule": PIPELINE_SCHEDULES,
    }
    for name, allowed in choices.items():
        if getattr(config, name) not in allowed:
            value = getattr(config, name)
            raise ConfigError(f"'{name}' must be one of {', '.join(allowed)}, got '{value}'")
    if not config.targets:
        raise ConfigError(f"'targets' is empty; choose among {', '.join(ALL_TARGETS)}")
    if len(set(config.targets)) != len(config.targets):
        raise ConfigError(f"'targets' names a projection twice: {', '.join(config.targets)}")
    if config.devices and config.min_devices > len(config.devices):
        raise ConfigError(
            f"'min_devices' {config.min_devices} is more than the {len(config.devices)} that "
            f"'devices' names"
        )
    if config.shadow not in ("auto", "off") and not _is_step_count(config.shadow):
        raise ConfigError(
            f"'shadow' must be auto, off or a number of steps of at least 1, got '{config.shadow}'"
        )
    if config.profile_s > MAX_PROFILE_S:
        raise ConfigError(f"'profile_s' must be at most {MAX_PROFILE_S:g}, got {config.profile_s}")
    for target in config.targets:
        if target not in ALL_TARGETS:
            raise ConfigError(
                f"'targets': no projection is called '{target}'{_nearest(target, ALL_TARGETS)}; "
                f"known: {', '.join(ALL_TARGETS)}"
            )


def _is_step_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and int(text) >= 1
