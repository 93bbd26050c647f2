"""--full: what is said beside it, what it settles, and what each device makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exo_train.agent.chosen_options import choose_options
from exo_train.agent.starting_adapter import find_adapter
from exo_train.agent.what_if import read_spec
from exo_train.backends.full import is_on, shared_weights, weight_shapes
from exo_train.backends.lora import adapter_sentence
from exo_train.cluster.home import Home
from exo_train.config import TrainConfig
from exo_train.errors import ConfigError
from exo_train.lora_config import LoraConfig, in_every_layer
from exo_train.models.open import open_model, require_floats
from exo_train.plan.fields import Fields
from exo_train.plan.lora_fields import read_lora
from exo_train.plan.plan import _with_floats
from exo_train.plan.stages import StageSpec
from exo_train.plan.suggestions import Attempt, refusal, suggest
from exo_train.train.checkpoint import write_checkpoint
from exo_train.train.rundir import RunDir
from tests.tiny_models import make_tiny_gguf, make_tiny_model
from tests.unit.plan.test_plan_memory import LLAMA_8B

REQUIRED = {"model": "m", "data": "d.jsonl"}


def _from(**values: Any) -> TrainConfig:
    return TrainConfig.from_mapping(values, source="ours.yaml")


@pytest.mark.parametrize(
    "said",
    [
        {"rank": 8}, {"alpha": 16}, {"scale": 2}, {"rslora": True}, {"dora": False},
        {"dropout": 0.1}, {"targets": "q_proj"}, {"rank_pattern": "q_proj=4"},
        {"alpha_pattern": "q_proj=4"}, {"lora_plus_ratio": 2}, {"quantize": 4},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_an_adapters_is_refused_by_name(said: dict[str, Any]) -> None:
    """Even where it says what is so anyway: it would have no effect."""
    with pytest.raises(ConfigError) as refused:
        choose_options(None, REQUIRED | {"full": True} | said)
    assert f"leave out --{next(iter(said)).replace('_', '-')}, or --full" in str(refused.value)


def test_an_adapter_to_start_from_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave out --init-adapter, or --full"):
        _from(full=True, init_adapter=str(tmp_path))


def test_it_settles_rate_and_copies() -> None:
    config = _from(full=True)
    assert (config.learning_rate, config.copies, config.shadow) == (2e-5, "off", "auto")
    assert _from(full=True, learning_rate=1e-4, shadow="4").learning_rate == 1e-4
    assert _from(full=True, shadow="4").copies == "4"
    assert (_from().learning_rate, _from().copies) == (2e-4, "auto")
    assert _from(**config.to_dict()) == config


@pytest.mark.parametrize(
    "said",
    [{"fine_tune_type": "full"}, {"finetuning_type": "full"}, {"adapter": ""}, {"adapter": None}],
    ids=str,
)
def test_other_programs_words_for_it(said: dict[str, Any]) -> None:
    config = choose_options(None, REQUIRED | said).config
    assert config.full
    assert not choose_options(None, REQUIRED | {"adapter": "qlora"}).config.full


def test_devices_read_it_in_a_plan() -> None:
    lora = LoraConfig(full=True, layers=("last:2",))
    text = json.loads(json.dumps(_with_floats(lora)))
    assert read_lora(Fields(text, "lora"), "lora") == lora
    assert in_every_layer(lora, 5) == LoraConfig(full=True)


def test_which_weights_are_whose(tmp_path: Path) -> None:
    spec, _ = open_model(make_tiny_model(tmp_path / "tied"))
    first = StageSpec(start=0, end=2, embedding=True, head=False)
    last = StageSpec(start=2, end=4, embedding=False, head=True)
    whole = StageSpec(start=0, end=4, embedding=True, head=True)
    full, some = LoraConfig(full=True), LoraConfig(full=True, layers=("last:3",))
    assert weight_shapes(spec, whole, full) == spec.all_tensor_shapes()
    for stage in (first, last):
        names = weight_shapes(spec, stage, full)
        assert all(is_on(f"{name}.exp_avg", stage, tied=True) for name in names)
        assert shared_weights(spec, stage, full) == ("model.embed_tokens.weight",)
        assert shared_weights(spec, stage, some) == ()
    assert not is_on("model.norm.weight", first, tied=True)
    assert not is_on("model.embed_tokens.weight", last, tied=False)
    assert is_on("step", first, tied=True)
    assert shared_weights(spec, whole, full) == ()
    assert adapter_sentence(spec, some).startswith("all weights of layers 1-3 of 4: ")
    untied, _ = open_model(make_tiny_model(tmp_path / "untied", tied=False))
    assert shared_weights(untied, first, full) == ()


def test_a_quantised_model_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    model = make_tiny_gguf(tmp_path / "tiny.gguf", encoding="Q8_0", hidden_size=64)
    _, source = open_model(model)
    with pytest.raises(ConfigError, match=r"is quantised \(GGUF:Q8_0\): leave --full out"):
        require_floats(source.infos)
    with pytest.raises(ConfigError, match="is quantised"):
        read_spec(Home(tmp_path / "home"), _from(full=True, model=str(model), max_seq_length=8))
    _, floats = open_model(make_tiny_gguf(tmp_path / "plain.gguf", encoding="F16"))
    require_floats(floats.infos)


def test_what_would_fit_is_said_without_an_adapters_options() -> None:
    config = _from(full=True, batch_size=1)
    computers = (("den-pc", 8 * 10**9), ("old-pc", 8 * 10**9))
    attempt = Attempt(config=config, usable_bytes=computers, microbatch_size=1, value_bytes=2)
    said = [str(each) for each in suggest(attempt, LLAMA_8B)]
    assert any(each.startswith("an adapter instead of --full") for each in said)
    assert not any("--rank" in each or "--quantize" in each for each in said)


def test_where_muon_does_not_fit_an_adapter_that_adamw_moves_may() -> None:
    muon = {"optimizer": "muon", "muon_momentum": 0.9, "muon_rate": "original"}
    attempt = Attempt(
        config=_from(full=True, batch_size=1, **muon),
        usable_bytes=(("den-pc", 16 * 10**9), ("old-pc", 16 * 10**9)),
        microbatch_size=1,
        value_bytes=2,
    )
    said = refusal(attempt, LLAMA_8B)
    assert said.startswith("does not fit: needs ")
    assert "an adapter with adamw instead of --full fits on 2 devices" in said


def test_a_run_of_all_weights_is_no_adapter_to_start_from(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    run.write_config(_from(full=True, model="m").to_dict())
    arrays = {"model.norm.weight": np.ones(4, np.float32)}
    optimizer = {"step": np.array(1, np.int64)}
    write_checkpoint(run.path, step=1, adapter=arrays, optimizer=optimizer, state={})
    with pytest.raises(ConfigError, match="trained all weights and has no adapter"):
        find_adapter(run.path)


@pytest.mark.parametrize("objective", ["dpo", "orpo"])
def test_preferences_are_learnt_by_adapters_only(objective: str) -> None:
    with pytest.raises(ConfigError, match=f"does not go with 'objective' {objective} yet"):
        _from(full=True, objective=objective)


def test_what_a_run_of_all_weights_writes_down_can_be_given_again(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(choose_options(None, REQUIRED | {"full": True}).to_yaml(), "utf-8")
    assert choose_options(file, {}).config.full
    with pytest.raises(ConfigError, match="--rank"):
        choose_options(file, {"rank": 8})
