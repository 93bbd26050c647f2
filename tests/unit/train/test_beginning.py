"""What a run says before its first step, and that the numbers are those of the run."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from exo_train.backends.lora import count_trainable, initial_adapter
from exo_train.config import TrainConfig
from exo_train.models.open import open_model
from exo_train.models.spec import ModelSpec
from exo_train.plan.stages import StageSpec
from exo_train.train.batches import BatchPlan
from exo_train.train.beginning import Beginning, beginning_of
from exo_train.train.examples import Example
from exo_train.train.loop import Data
from exo_train.ui.run_screen import JsonScreen, LiveScreen, PlainScreen
from tests.tiny_models import make_tiny_model, tiny_config

CONFIG = TrainConfig(model="tiny", data="rows.jsonl", batch_size=2, rank=4)
ROW = Example(tokens=(1, 2, 3, 4), supervised=(False, False, False, True), where="")


def begin(spec: ModelSpec, config: TrainConfig = CONFIG, *, steps_done: int = 0) -> Beginning:
    batches = BatchPlan(examples=(ROW,) * 5, batch_size=config.batch_size, seed=0)
    return beginning_of(
        config,
        spec,
        Data(batches=batches, held_out=(ROW,)),
        rates=[1e-4, 2e-4, 3e-4, 3e-4, 2e-4, 0.0],
        run_dir="runs/one",
        steps_done=steps_done,
    )


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return ModelSpec.from_config(tiny_config(), place="tiny")


@pytest.mark.parametrize("targets", [("q_proj",), ("k_proj", "down_proj")])
def test_trainable_parameters_are_those_that_stages_make(
    spec: ModelSpec, targets: tuple[str, ...]
) -> None:
    config = replace(CONFIG, targets=targets)
    whole = StageSpec(start=0, end=spec.num_layers, embedding=True, head=True)
    arrays = initial_adapter(spec, whole, config.lora, seed=0, init="zero")
    found = count_trainable(spec, config.lora)
    assert found.num_values == sum(np.size(a) for a in arrays.values())


def test_parameters_are_those_of_the_files(tmp_path: Path) -> None:
    spec, source = open_model(make_tiny_model(tmp_path / "m", tied=False))
    in_files = sum(int(np.prod(info.shape)) for info in source.infos.values())
    assert begin(spec).parameters == in_files


def test_facts_of_a_run(spec: ModelSpec) -> None:
    plain = begin(spec).to_dict()
    assert (plain["rows"], plain["held_out_rows"], plain["tokens"]) == (5, 1, 20)
    assert (plain["supervised_tokens"], plain["supervised_share"]) == (5, 0.25)
    assert (plain["steps"], plain["steps_per_epoch"], plain["epochs"]) == (6, 3, 2.0)
    assert plain["learning_rate"] == {
        "first": 1e-4, "peak": 3e-4, "peak_update": 3, "last": 0.0,
    }  # fmt: skip
    assert plain["trainable_share"] == plain["trainable_parameters"] / plain["parameters"]


@pytest.mark.parametrize("kind", [LiveScreen, PlainScreen])
def test_header_says_them(spec: ModelSpec, kind: type[LiveScreen] | type[PlainScreen]) -> None:
    out = io.StringIO()
    screen = kind(Console(file=out, width=60))
    screen.begin(begin(spec, steps_done=2))
    screen.close()
    text = out.getvalue()
    assert "tiny (llama, 4 layers, " in text
    assert "rows.jsonl: 5 rows to train on, 1 held out; 20 tokens an epoch, 25% of them" in text
    assert "trained: LoRA of rank 4 on q_proj, k_proj" in text
    assert "updates: 6, 2 of them done, of 2 rows; 2 epochs of 3; " in text
    assert "learning rate 0.0001 rising to 0.0003 at update 3, cosine to 0 at the last" in text


def test_begin_is_one_line_of_json(spec: ModelSpec) -> None:
    lines: list[str] = []
    JsonScreen(lines.append).begin(begin(spec))
    (line,) = lines
    event = json.loads(line)
    assert (event["schema"], event["event"], event["model"]) == (1, "begin", "tiny")
    assert event["targets"] == list(CONFIG.targets)
