"""What options of devices, held-out rows and reports may not say. Pure; owns the sentences."""

from __future__ import annotations

import re

from exo_train.errors import ConfigError
from exo_train.options import nearest

REPORT_LIBRARIES = ("tensorboard", "wandb", "trackio", "swanlab")


def check_devices(devices: tuple[str, ...], *, min_devices: int, shadow: str) -> None:
    """Raise ConfigError for more devices than are named, and for words that `shadow` has not."""
    if devices and min_devices > len(devices):
        raise ConfigError(
            f"'min_devices' {min_devices} is more than the {len(devices)} that 'devices' names"
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


def check_reports(libraries: tuple[str, ...]) -> None:
    for name in libraries:
        if name not in REPORT_LIBRARIES:
            raise ConfigError(
                f"'report_to': '{name}' is not known{nearest(name, REPORT_LIBRARIES)}; "
                f"known: {', '.join(REPORT_LIBRARIES)}; for none leave it out"
            )
