"""Runs with other adapters than LoRA everywhere: rings, recovery, resume, export, a new start."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exo_train.agent.starting_adapter import (
    check_adapter_options,
    find_adapter,
    first_checkpoint,
    with_adapter,
)
from exo_train.config import TrainConfig
from exo_train.errors import ConfigError, InterruptedRunError
from exo_train.export.adapters import read_adapter, write_adapters
from exo_train.lora_config import placements
from exo_train.train.checkpoint import newest_checkpoint, save_checkpoint
from exo_train.train.rundir import RunDir
from exo_train.train.watcher import Watcher
from tests.ring.local_household import household_of, only_memory, run_in
from tests.ring.rings import CONFIG, largest_difference, manifest_of, train_ring
from tests.ring.test_trainer import STEPS, StopAfter, adapter_of, losses_of, trained
from tests.tiny_models import make_tiny_model

NUM_LAYERS = 5
# Two of three ranks train nothing; the middle one all there is of DoRA, ranks and strengths.
ONE_LAYER = replace(
    CONFIG,
    rank=4,
    alpha=6.0,
    rslora=True,
    dora=True,
    dropout=0.1,
    targets=("q_proj", "model.layers.2.mlp.down_proj"),
    adapter_layers=("2",),
    rank_pattern=("down_proj=6",),
    alpha_pattern=("down_proj=3.5",),
)
RING = ["torch", "mlx", "torch"]


def test_a_ring_in_which_one_rank_trains_equals_one_device(tiny_model: Path) -> None:
    one = train_ring(tiny_model, ["torch"], config=ONE_LAYER, num_steps=4)
    ring = train_ring(tiny_model, RING, config=ONE_LAYER, num_steps=4)
    assert ring.losses == pytest.approx(one.losses, rel=1e-5)
    assert ring.grad_norms == pytest.approx(one.grad_norms, rel=1e-4)
    assert largest_difference(ring.adapter, one.adapter) < 1e-4
    assert {name.rpartition(".")[0] for name in ring.adapter} == {
        "model.layers.2.self_attn.q_proj",
        "model.layers.2.mlp.down_proj",
    }
    assert ring.losses[-1] < ring.losses[0]


def test_it_is_resumed_on_another_ring(tiny_model: Path, tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    trained(tiny_model, whole, config=ONE_LAYER)
    watcher = Watcher(wants_stop=StopAfter(5))
    with pytest.raises(InterruptedRunError, match="after step 3 of 6"):
        trained(tiny_model, halves, backends=RING, config=ONE_LAYER, watcher=watcher)
    checkpoint = newest_checkpoint(halves)
    assert checkpoint is not None
    backends = ["mlx", "torch"]
    trained(tiny_model, halves, backends=backends, config=ONE_LAYER, resumed=checkpoint)
    assert losses_of(halves) == pytest.approx(losses_of(whole), rel=1e-4)


@pytest.mark.parametrize("victim", [0, 1], ids=["trains nothing", "trains all"])
def test_a_device_that_is_lost_takes_nothing_along(
    tiny_model: Path, tmp_path: Path, victim: int
) -> None:
    config = only_memory(replace(ONE_LAYER, learning_rate=1e-2), steps=5, save_every=0)
    undisturbed = run_in(household_of(tiny_model, ["torch"] * 3), tmp_path / "quiet", config)
    fault = f"kill@step=3,phase=forward,once={tmp_path}"
    household = household_of(tiny_model, ["torch"] * 3, faults={f"device{victim}": fault})
    disturbed = run_in(household, tmp_path / "run", config)
    assert disturbed.losses == pytest.approx(undisturbed.losses, rel=1e-5)
    (interruption,) = disturbed.progress.interruptions
    assert interruption.steps_lost <= 1
    assert disturbed.plan.generation == 2
    assert disturbed.losses[-1] < disturbed.losses[0]


@pytest.fixture(scope="module")
def earlier(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A run with its adapters, and its last held-out loss."""
    run_dir = tmp_path_factory.mktemp("earlier") / "run"
    progress = trained(tiny_model, run_dir, config=replace(ONE_LAYER, learning_rate=0.1))
    (_, before), *_, (_, after) = progress.held_out_losses
    assert abs(after - before) > 1e-2, "the adapter must show in the loss to be missed"
    RunDir(run_dir).write_config(ONE_LAYER.to_dict())
    write_adapters(
        run_dir / "adapters",
        adapter_of(run_dir),
        lora=ONE_LAYER.lora,
        base_model="tiny",
        num_layers=NUM_LAYERS,
        steps=STEPS,
    )
    return run_dir, after


def started(folder: Path, **said: Any) -> TrainConfig:
    """Give a run's options as the command line does; what is not said is the adapter's."""
    others = {"batch_size": 6, "microbatch_size": 2, "max_seq_length": 32, "dtype": "fp32"}
    values = with_adapter({"init_adapter": str(folder), **others, **said}, source="command line")
    return TrainConfig.from_mapping(values, source="command line")


@pytest.mark.parametrize("form", ["", "adapters/peft", "adapters/mlx"])
def test_a_new_run_begins_where_the_adapter_stands(
    form: str, tiny_model: Path, earlier: tuple[Path, float], tmp_path: Path
) -> None:
    run_dir, loss = earlier
    config = started(run_dir / form)
    spec = manifest_of(tiny_model).spec
    check_adapter_options(config, spec)
    checkpoint = first_checkpoint(tmp_path / "new", config, spec, {})
    progress = trained(
        tiny_model, tmp_path / "new", backends=RING, config=config, resumed=checkpoint
    )
    assert progress.held_out_losses[0] == (0, pytest.approx(loss, rel=1e-6))
    newest = newest_checkpoint(tmp_path / "new")
    assert newest is not None
    assert int(newest.optimizer["step"]) == STEPS


def test_a_run_that_ended_early_is_begun_from_at_its_best(
    earlier: tuple[Path, float], tmp_path: Path
) -> None:
    run_dir = shutil.copytree(earlier[0], tmp_path / "run")
    newest = newest_checkpoint(run_dir)
    assert newest is not None
    best = {name: value / 2 for name, value in newest.adapter.items()}
    save_checkpoint(run_dir, step=2, adapter=best, optimizer={}, state={})
    told = {"status": "done", "saved_step": 2, "ended_early": "no better"}
    (run_dir / "summary.json").write_text(json.dumps(told), "utf-8")
    assert largest_difference(find_adapter(run_dir).arrays, best) == 0
    (run_dir / "summary.json").write_text(json.dumps(told | {"status": "interrupted"}), "utf-8")
    assert largest_difference(find_adapter(run_dir).arrays, newest.adapter) == 0


def test_the_adapter_settles_its_options(earlier: tuple[Path, float]) -> None:
    run_dir, _ = earlier
    for form in ("", "adapters/peft"):
        config = started(run_dir / form, learning_rate=1e-3)
        assert placements(config.lora, NUM_LAYERS) == placements(ONE_LAYER.lora, NUM_LAYERS)
        assert (config.dora, config.rslora, config.learning_rate) == (True, True, 1e-3)
    same = started(run_dir, rank=4, targets="layers.2.q_proj,down_proj", adapter_layers="2")
    assert placements(same.lora, NUM_LAYERS) == placements(ONE_LAYER.lora, NUM_LAYERS)


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"rank": 8}, "--rank 8 (the adapter has 4)"),
        ({"alpha": 1}, "--alpha 1 (the adapter has 6)"),
        ({"scale": 9}, "--scale 9 (the adapter has 3)"),
        ({"dora": False}, "--dora False (the adapter has True)"),
        ({"adapter_layers": "last:2"}, "--adapter-layers last:2 (the adapter has 2)"),
    ],
)
def test_options_that_contradict_the_adapter_are_refused_by_name(
    said: dict[str, Any], problem: str, earlier: tuple[Path, float]
) -> None:
    with pytest.raises(ConfigError) as refused:
        started(earlier[0], **said)
    assert problem in str(refused.value)
    assert "leave these options out" in str(refused.value)


def test_an_adapter_of_another_base_is_refused(earlier: tuple[Path, float], tmp_path: Path) -> None:
    wide = make_tiny_model(tmp_path / "wide", num_layers=NUM_LAYERS, head_dim=24)
    config = started(earlier[0] / "adapters" / "peft")
    with pytest.raises(ConfigError) as refused:
        check_adapter_options(config, manifest_of(wide).spec)
    assert "q_proj" in str(refused.value)
    assert "was made for tiny" in str(refused.value)
    shallow = make_tiny_model(tmp_path / "shallow", num_layers=2)
    with pytest.raises(ConfigError, match="layers are 0 to 1"):
        check_adapter_options(config, manifest_of(shallow).spec)


def test_exports_compute_what_was_trained(earlier: tuple[Path, float]) -> None:
    """Invariant 11: either folder, read again, has the products that the run has."""
    run_dir, _ = earlier
    live = adapter_of(run_dir)
    for form in ("peft", "mlx"):
        found = read_adapter(run_dir / "adapters" / form, num_layers=NUM_LAYERS)
        theirs = {p.prefix: p.scale for p in placements(found.lora, NUM_LAYERS)}
        for place in placements(ONE_LAYER.lora, NUM_LAYERS):
            a, b, m = (f"{place.prefix}.{part}" for part in ("lora_a", "lora_b", "dora_m"))
            np.testing.assert_allclose(
                theirs[place.prefix] * found.arrays[a] @ found.arrays[b],
                place.scale * live[a] @ live[b],
                atol=1e-7,
            )
            assert np.array_equal(found.arrays[m], live[m])
