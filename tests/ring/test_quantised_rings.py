"""Options of a run reach every rank: a quantised base in a ring computes what it does alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from exo_train.agent.planning import make_plan, model_shape, with_weights_held
from exo_train.models.packed import Packing
from exo_train.plan.plan import Plan
from exo_train.plan.workloads import held_shape
from tests.packed_models import make_nf4_model, make_packed_model
from tests.ring.rings import CONFIG, candidates, manifest_of, train_ring
from tests.tiny_models import make_tiny_gguf, make_tiny_model

FOUR = Packing(bits=4, group_size=64)
MODELS = {
    "an MLX model": (lambda path: make_packed_model(path, FOUR, num_layers=3), 0),
    "NF4 of bitsandbytes": (lambda path: make_nf4_model(path, num_layers=3), 0),
    "a GGUF": (lambda path: make_tiny_gguf(path.with_suffix(".gguf"), encoding="Q4_1"), 0),
    "quantised by the run": (lambda path: make_tiny_model(path, num_layers=3), 8),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_mixed_ring_is_one_device(name: str, tmp_path: Path) -> None:
    make, quantize = MODELS[name]
    model = make(tmp_path / "model")
    packed = replace(CONFIG, quantize=quantize, base_weights="packed")
    dense = replace(packed, base_weights="dense")
    ring = train_ring(model, ["mlx", "torch", "mlx"], config=packed, num_steps=4)
    alone = train_ring(model, ["torch"], config=dense, num_steps=4)
    assert ring.losses == pytest.approx(alone.losses, rel=1e-5)
    assert ring.grad_norms == pytest.approx(alone.grad_norms, rel=1e-4)
    # The mean: AdamW makes a step of a gradient that is nearly zero, either way.
    for array, value in alone.adapter.items():
        assert np.abs(ring.adapter[array] - value).mean() < 1e-6, array
    if quantize:
        in_full = train_ring(model, ["torch"], config=CONFIG, num_steps=4)
        assert ring.losses != pytest.approx(in_full.losses, rel=1e-5)


def test_the_plan_says_who_holds_weights_packed(tmp_path: Path) -> None:
    """By itself: a GPU, a CPU without much room, and whoever quantises to save memory."""
    model = make_packed_model(tmp_path / "model", FOUR, num_layers=2)
    manifest = manifest_of(model)
    spec = manifest.spec
    roomy, tight = candidates(["torch", "torch"])
    tight = replace(tight, usable_memory_bytes=2_000_000)
    gpu = replace(roomy, device="cuda:0")

    def held(candidate, **options) -> str:
        return with_weights_held(candidate, replace(CONFIG, **options), spec).base_weights

    assert [held(c) for c in (roomy, tight, gpu)] == ["dense", "packed", "packed"]
    assert [held(roomy, base_weights=told) for told in ("packed", "dense")] == ["packed", "dense"]
    plain = manifest_of(make_tiny_model(tmp_path / "plain", num_layers=2)).spec
    quantising = with_weights_held(roomy, replace(CONFIG, quantize=4), plain)
    assert quantising.base_weights == "packed"
    plan = make_plan([roomy, gpu], replace(CONFIG, quantize=0), manifest, cluster="test")
    assert [rank.base_weights for rank in plan.ranks] == ["dense", "packed"]
    assert Plan.from_json(plan.to_json()) == plan


def test_memory_is_reckoned_as_the_model_is_held(tmp_path: Path) -> None:
    overrides = {"model.layers.0.mlp.down_proj": Packing(bits=8, group_size=32)}
    packed = make_packed_model(tmp_path / "model", FOUR, num_layers=2, overrides=overrides)
    shape = model_shape(manifest_of(packed).spec)
    # The layer with the wider matrix decides: 32768 of its 147456 values have 8 bits.
    share = 32768 / 147456
    assert shape.layer_weights.code_bytes == pytest.approx(0.5 + share * 0.5)
    assert shape.layer_weights.floats == pytest.approx(2 / 64 + share * (2 / 32 - 2 / 64))
    assert shape.vocabulary_weights.code_bytes == 0.5
    dense = held_shape(shape, quantize=0, base_weights="dense")
    assert not dense.layer_weights.is_packed
    nf4 = model_shape(manifest_of(make_nf4_model(tmp_path / "nf4", num_layers=2)).spec)
    assert nf4.layer_weights.bytes_per_value(2) == pytest.approx(0.5 + 2 / 64)
    assert not nf4.vocabulary_weights.is_packed
    plain = model_shape(manifest_of(make_tiny_model(tmp_path / "plain")).spec)
    quantised = held_shape(plain, quantize=8, base_weights="packed")
    assert quantised.layer_weights.bytes_per_value(2) == 1 + 2 * 2 / 32  # rows of 96 values
    assert not quantised.vocabulary_weights.is_packed
