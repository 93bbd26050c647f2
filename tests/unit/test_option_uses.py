"""The optimizers' options reach them; one that another option leaves without a use is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from exo_train.agent.chosen_options import choose_options
from exo_train.config import TrainConfig
from exo_train.errors import ConfigError
from exo_train.optimizer_config import OptimizerConfig


def _from(**values: Any) -> TrainConfig:
    return TrainConfig.from_mapping(values, source="ours.yaml")


def test_the_optimizers_options_reach_it() -> None:
    said = {"adam_beta1": 0.5, "adam_beta2": 0.25, "adam_epsilon": 0.125}
    assert _from(weight_decay=0.0625, lora_plus_ratio=16, **said).optimizer_rule == OptimizerConfig(
        beta1=0.5, beta2=0.25, epsilon=0.125, weight_decay=0.0625, lora_plus_ratio=16.0
    )
    sgd = _from(optimizer="sgd", momentum=0.75).optimizer_rule
    assert sgd == OptimizerConfig(name="sgd", momentum=0.75)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            {"optimizer": "sgd", "adam_beta2": 0.95},
            "'adam_beta2' does nothing with 'optimizer' sgd, only with adamw or muon",
        ),
        (
            {"momentum": 0.5},
            "'momentum' does nothing with 'optimizer' adamw, only with sgd",
        ),
        (
            {"muon_rate": "original"},
            "'muon_rate' does nothing with 'optimizer' adamw, only with muon",
        ),
        (
            {"beta": 0.2},
            "'beta' does nothing with 'objective' sft, only with dpo or orpo",
        ),
        (
            {"lr_schedule": "constant", "min_lr_ratio": 0.1},
            "'min_lr_ratio' does nothing with 'lr_schedule' constant, only with cosine or linear",
        ),
    ],
)
def test_option_without_a_use_is_refused_by_name(said: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        _from(**said)
    assert str(refused.value) == f"ours.yaml: {sentence}; leave one of them out"


def test_two_places_may_say_an_option_and_its_use(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("model: m\ndata: d.jsonl\nmomentum: 0.5\n", "utf-8")
    assert choose_options(file, {"optimizer": "sgd"}).config.momentum == 0.5
    with pytest.raises(ConfigError, match=f"^{re.escape(str(file))} and command line: 'momentum'"):
        choose_options(file, {"optimizer": "adafactor"})


def test_defaults_written_out_are_no_options_of_another_optimizer() -> None:
    assert _from(**{**TrainConfig().to_dict(), "optimizer": "sgd"}).optimizer == "sgd"


def test_muon_is_refused_for_adapters() -> None:
    with pytest.raises(ConfigError, match="'optimizer' muon moves the model's own matrices"):
        _from(optimizer="muon")


def test_a_run_of_an_earlier_version_keeps_what_it_needs() -> None:
    """There an option without a use was taken, and the user cannot change a run's file."""
    stored = {**TrainConfig().to_dict(), "momentum": 0.5, "lr_schedule": "constant"}
    config = TrainConfig.from_stored({**stored, "min_lr_ratio": 0.1}, source="config.yaml")
    assert config == _from(lr_schedule="constant")
