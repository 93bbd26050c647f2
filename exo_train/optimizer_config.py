"""Which optimizer moves the adapter, with which numbers, and what it keeps of each array.

Pure: knows no framework.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from exo_train.errors import ConfigError

OPTIMIZERS = ("adamw", "adafactor", "sgd", "muon")
WITH_ADAMW = ("adamw", "muon")  # Muon leaves to AdamW what it is not for
MUON_RATES = ("match_rms_adamw", "original")  # as torch.optim.Muon calls them

# Muon's: not embedding and head, whose rows are tokens, nor norms and biases, nor adapters.
_HIDDEN_MATRIX = re.compile(r"model\.layers\.\d+\.\w+\.\w+\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Which rule moves what is trained; each uses its own of these numbers.

    `beta1`, `beta2` and `epsilon` are AdamW's, `momentum` is SGD's.
    """

    name: str = "adamw"
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    momentum: float = 0.9
    muon_momentum: float = 0.95
    muon_rate: str = MUON_RATES[0]
    weight_decay: float = 0.0
    lora_plus_ratio: float = 1.0

    def rule_of(self, name: str, shape: tuple[int, ...]) -> str:
        """Give the rule that moves one array."""
        if self.name == "muon" and not (len(shape) == 2 and _HIDDEN_MATRIX.fullmatch(name)):
            return "adamw"
        return self.name

    def slots(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Name what the optimizer keeps of the array `name` of `shape`, with the shapes."""
        rule = self.rule_of(name, shape)
        if rule == "muon":
            return {"momentum": shape}
        if rule == "sgd":
            return {"momentum": shape} if self.momentum else {}
        if rule == "adafactor" and len(shape) == 2:
            return {"exp_avg_sq_row": shape[:1], "exp_avg_sq_col": shape[1:]}
        if rule == "adafactor":
            return {"exp_avg_sq": shape}
        return {"exp_avg": shape, "exp_avg_sq": shape}


def check_trains_matrices(rule: OptimizerConfig, *, trains_weights: bool) -> None:
    """Refuse Muon for adapters: it makes all directions of an update equally strong.

    The two thin factors of a product are no layer of their own, and the paper has no rule for them.
    """
    if rule.name == "muon" and not trains_weights:
        raise ConfigError(
            "'optimizer' muon moves the model's own matrices, and a LoRA adapter has none of them; "
            "use adamw"
        )
