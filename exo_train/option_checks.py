"""What single options may not say beyond their ranges. Pure; `config` has the options."""

from __future__ import annotations

import math
import re

from exo_train.errors import ConfigError
from exo_train.options import nearest

REPORT_LIBRARIES = ("tensorboard", "wandb", "trackio", "swanlab")


def check_scale(scale: float, *, alpha: float, rank: int, is_scale: float) -> None:
    """`is_scale` is what alpha and rank come to; a `scale` of 0 was not said."""
    if scale and not math.isclose(scale, is_scale, rel_tol=1e-6):
        raise ConfigError(
            f"'scale' {scale:g} and 'alpha' {alpha:g} disagree: with rank {rank} that alpha makes "
            f"a scale of {is_scale:g}; leave one of them out"
        )


def check_reports(libraries: tuple[str, ...]) -> None:
    for name in libraries:
        if name not in REPORT_LIBRARIES:
            raise ConfigError(
                f"'report_to': '{name}' is not known{nearest(name, REPORT_LIBRARIES)}; "
                f"known: {', '.join(REPORT_LIBRARIES)}; for none leave it out"
            )


def check_devices(devices: tuple[str, ...], min_devices: int) -> None:
    if devices and min_devices > len(devices):
        raise ConfigError(
            f"'min_devices' {min_devices} is more than the {len(devices)} that 'devices' names"
        )


def check_shadow(setting: str) -> None:
    if not re.fullmatch(r"auto|off|0*[1-9][0-9]*", setting):
        raise ConfigError(
            f"'shadow' must be auto, off or a number of steps of at least 1, got '{setting}'"
        )
