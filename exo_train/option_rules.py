"""What options of a run may not say, beyond the range of each. Pure; raises ConfigError."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from exo_train.errors import ConfigError
from exo_train.lora_config import NOT_WITH_FULL, LoraConfig, check_no_adapter
from exo_train.options import Option, nearest

REPORT_LIBRARIES = ("tensorboard", "wandb", "trackio", "swanlab")


def check_scale(scale: float, lora: LoraConfig) -> None:
    """Compare `scale`, where it is said, with the one that alpha makes."""
    if scale and not math.isclose(scale, lora.scale, rel_tol=1e-6):
        raise ConfigError(
            f"'scale' {scale:g} and 'alpha' {lora.alpha:g} disagree: with rank {lora.rank} that "
            f"alpha makes a scale of {lora.scale:g}; leave one of them out"
        )


def check_reports(libraries: Sequence[str]) -> None:
    for name in libraries:
        if name not in REPORT_LIBRARIES:
            raise ConfigError(
                f"'report_to': '{name}' is not known{nearest(name, REPORT_LIBRARIES)}; "
                f"known: {', '.join(REPORT_LIBRARIES)}; for none leave it out"
            )


def check_devices(devices: Sequence[str], *, min_devices: int, shadow: str) -> None:
    if devices and min_devices > len(devices):
        named = len(devices)
        raise ConfigError(
            f"'min_devices' {min_devices} is more than the {named} that 'devices' names"
        )
    if not re.fullmatch(r"auto|off|0*[1-9][0-9]*", shadow):
        raise ConfigError(
            f"'shadow' must be auto, off or a number of steps of at least 1, got '{shadow}'"
        )


def check_held_out(*, rows: int, share: float) -> None:
    if rows and share:
        raise ConfigError(
            "'val_rows' and 'val_split' both say how many rows are held out; give one of them"
        )


def check_full(config: Any, options: Mapping[str, Option]) -> None:
    """Refuse what does not go with all weights, of a `TrainConfig`."""
    if not config.full:
        return
    if config.learnt.has_pairs:
        raise ConfigError(
            f"'full' does not go with 'objective' {config.objective} yet: leave out --full, and an "
            f"adapter learns the preferences"
        )
    values = {name: getattr(config, name) for name in NOT_WITH_FULL}
    check_no_adapter(values, {name: options[name].default for name in NOT_WITH_FULL})
