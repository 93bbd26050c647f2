"""Which optimizer moves the adapter, with which numbers, and what it keeps of each array.

Pure: knows no framework.
"""

from __future__ import annotations

from dataclasses import dataclass

OPTIMIZERS = ("adamw", "adafactor", "sgd")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Which rule moves the adapter; each uses its own of these numbers.

    `beta1`, `beta2` and `epsilon` are AdamW's, `momentum` is SGD's.
    """

    name: str = "adamw"
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    momentum: float = 0.9
    weight_decay: float = 0.0
    lora_plus_ratio: float = 1.0

    def slots(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Name what the optimizer keeps of an adapter array of `shape`, with the shapes."""
        if self.name == "sgd":
            return {"momentum": shape} if self.momentum else {}
        if self.name == "adafactor" and len(shape) == 2:
            return {"exp_avg_sq_row": shape[:1], "exp_avg_sq_col": shape[1:]}
        if self.name == "adafactor":
            return {"exp_avg_sq": shape}
        return {"exp_avg": shape, "exp_avg_sq": shape}
