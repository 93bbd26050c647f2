"""What a run learns: to give the answers of its rows, or to prefer one answer to another. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from exo_train.errors import ConfigError

OBJECTIVES = ("sft", "dpo", "orpo")
MAX_BETA = 1e6
# With half of the pairs the wrong way round there is nothing to learn from them.
DPO_SMOOTHING_BELOW = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig:
    """The loss that is made smaller; `beta` is that of dpo, and orpo's weight.

    `label_smoothing` is the share of an sft target spread over the vocabulary, or with dpo the
    share of pairs that are taken to be the wrong way round.
    """

    name: str = OBJECTIVES[0]
    beta: float = 0.1
    label_smoothing: float = 0.0

    @property
    def has_pairs(self) -> bool:
        """Tell whether a row is two answers to one prompt."""
        return self.name != "sft"

    @property
    def has_reference(self) -> bool:
        """Tell whether the base, with its adapter off, is asked for its opinion, too."""
        return self.name == "dpo"

    @property
    def answers_per_row(self) -> int:
        """Give how many sequences a row of the data makes in a microbatch."""
        return 2 if self.has_pairs else 1

    @property
    def num_forwards(self) -> int:
        """Give how often a microbatch goes up the ring."""
        return 2 if self.has_reference else 1

    @property
    def time_factor(self) -> float:
        """Give a microbatch's time over that of a forward and a backward, which cost alike."""
        return (self.num_forwards + 1) / 2


def check_objective(objective: ObjectiveConfig, *, packing: bool, init_adapter: str) -> None:
    """Refuse what two options may not say together; raises ConfigError."""
    name = objective.name
    if objective.has_pairs and packing:
        raise ConfigError(
            f"'packing' does not go with 'objective' {name}: each answer of a pair is a sequence "
            "of its own; leave it out, 'group_by_length' makes less padding"
        )
    if objective.has_reference and init_adapter:
        raise ConfigError(
            f"'init_adapter' does not go with 'objective' {name}: the reference is the base with "
            "its adapter off, and would not be what the run starts from; merge the adapter into "
            "the model first (PEFT's `merge_and_unload`), and train on that"
        )
    if name == "orpo" and objective.label_smoothing:
        raise ConfigError(
            "'label_smoothing' has no meaning with 'objective' orpo; leave it out, or use dpo"
        )
    if name == "dpo" and objective.label_smoothing >= DPO_SMOOTHING_BELOW:
        raise ConfigError(
            "'label_smoothing' is with 'objective' dpo the share of pairs that are the wrong way "
            f"round, and must be below {DPO_SMOOTHING_BELOW:g}, got {objective.label_smoothing:g}"
        )
