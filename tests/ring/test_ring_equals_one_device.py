"""Invariants 1, 2, 6 and 10: a ring computes what one device computes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from exo_train.errors import ProtocolError
from exo_train.plan.stages import StageSpec
from tests.ring.rings import CONFIG, Trained, largest_difference, train_ring
from tests.tiny_models import make_tiny_model

LOSS_TOLERANCE = 1e-5  # relative
NORM_TOLERANCE = 1e-4  # relative
ADAPTER_TOLERANCE = 1e-4  # after 10 steps

T, M = "torch", "mlx"
RINGS = {
    "torch 2": ([T, T], None),
    "torch 3 uneven": ([T, T, T], [1, 5, 2]),
    "torch 5": ([T] * 5, None),
    "mlx 2": ([M, M], None),
    "mlx 3 uneven": ([M, M, M], [4, 1, 1]),
    "mixed 2": ([T, M], None),
    "mixed 2 other way": ([M, T], [3, 1]),
    "mixed 3": ([T, M, T], [2, 1, 3]),
    "mixed 5": ([M, T, M, T, M], None),
}


def assert_equal_runs(ring: Trained, one: Trained) -> None:
    """The comparison of this file; the negative controls show that it can fail."""
    for step, (ours, oracle) in enumerate(zip(ring.losses, one.losses, strict=True), start=1):
        assert ours == pytest.approx(oracle, rel=LOSS_TOLERANCE), f"loss of step {step}"
    # AdamW hardly sees a gradient's scale, so the adapter alone would not show a wrong one.
    assert ring.grad_norms == pytest.approx(one.grad_norms, rel=NORM_TOLERANCE)
    assert largest_difference(ring.adapter, one.adapter) < ADAPTER_TOLERANCE


@pytest.mark.parametrize("name", RINGS)
def test_ring_equals_one_device(
    name: str, tiny_model: Path, one_device: dict[str, Trained]
) -> None:
    backends, weights = RINGS[name]
    ring = train_ring(tiny_model, backends, weights=weights)
    for oracle in one_device.values():
        assert_equal_runs(ring, oracle)
    assert ring.losses[-1] < ring.losses[0], "nothing was learnt"


@pytest.mark.parametrize("fault", ["forward:1.001", "backward:1.01"])
def test_negative_control_a_wrong_stage_is_caught(
    fault: str, tiny_model: Path, one_device: dict[str, Trained]
) -> None:
    ring = train_ring(tiny_model, [T, T, T], faults={1: fault})
    with pytest.raises(AssertionError):
        assert_equal_runs(ring, one_device["torch"])


@pytest.mark.parametrize(
    "changes",
    [
        {"pipeline_schedule": "gpipe"},
        {"microbatch_size": 1},
        {"microbatch_size": 3},
        {"checkpoint_activations": True},
    ],
    ids=str,
)
def test_how_a_step_is_cut_does_not_change_it(
    changes: dict[str, object], tiny_model: Path, one_device: dict[str, Trained]
) -> None:
    """Invariant 2 too: microbatches differ in supervised tokens, and nothing depends on that."""
    ring = train_ring(tiny_model, [T, M, T], config=replace(CONFIG, **changes))
    assert_equal_runs(ring, one_device["torch"])


def test_dropout_is_the_same_on_any_ring(tiny_model: Path) -> None:
    config = replace(CONFIG, dropout=0.2)
    one = train_ring(tiny_model, [T], config=config, num_steps=4)
    ring = train_ring(tiny_model, [M, T], config=replace(config, microbatch_size=3), num_steps=4)
    assert_equal_runs(ring, one)
    without = train_ring(tiny_model, [T], num_steps=4)
    assert abs(one.losses[-1] - without.losses[-1]) > 1e-4, "dropout did nothing"


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "adafactor"},
        {"optimizer": "sgd", "learning_rate": 0.3},
        {"adam_beta1": 0.5, "adam_beta2": 0.9, "adam_epsilon": 1e-4, "lora_plus_ratio": 8.0},
        {"label_smoothing": 0.3},
        {"neftune_alpha": 0.3},
        {"neftune_alpha": 0.3, "packing": True},
    ],
    ids=str,
)
def test_what_an_update_does_is_the_same_on_any_ring(
    changes: dict[str, object], tiny_model: Path, one_device: dict[str, Trained]
) -> None:
    config = replace(CONFIG, weight_decay=0.1, **changes)
    one = train_ring(tiny_model, [T], config=config, num_steps=5)
    assert_equal_runs(train_ring(tiny_model, [M, T, M], config=config, num_steps=5), one)
    assert min(one.losses[1:]) < one.losses[0], "nothing was learnt"
    assert abs(one.losses[-1] - one_device["torch"].losses[4]) > 1e-4, "the options did nothing"


def test_clipping_uses_the_norm_over_all_stages(
    tiny_model: Path, one_device: dict[str, Trained]
) -> None:
    config = replace(CONFIG, max_grad_norm=0.05)
    one = train_ring(tiny_model, [T], config=config, num_steps=4)
    ring = train_ring(tiny_model, [T, T, T], config=config, num_steps=4)
    assert min(one.grad_norms) > 0.05, "the limit must bind for this to test anything"
    assert ring.grad_norms == pytest.approx(one.grad_norms, rel=1e-5)
    assert_equal_runs(ring, one)


@pytest.mark.parametrize("wire_dtype", ["bf16", "fp16"])
def test_sixteen_bit_boundaries_come_close_and_halve_the_bytes(
    wire_dtype: str, tiny_model: Path, one_device: dict[str, Trained]
) -> None:
    full = train_ring(tiny_model, [T, M], num_steps=4)
    half = train_ring(
        tiny_model, [T, M], config=replace(CONFIG, wire_dtype=wire_dtype), num_steps=4
    )
    assert half.losses == pytest.approx(full.losses, rel=2e-3)
    assert half.sent_bytes == [size // 2 for size in full.sent_bytes]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("architecture", ["mistral", "qwen2", "qwen3"])
def test_other_architectures(architecture: str, tied: bool, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "m", architecture=architecture, num_layers=3, tied=tied)
    one = train_ring(model, [T], num_steps=3)
    assert_equal_runs(train_ring(model, [M, T], num_steps=3), one)


def test_llama3_rope_scaling_beyond_the_original_context(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    }
    scaled = make_tiny_model(tmp_path / "scaled", num_layers=3, rope_scaling=scaling)
    plain = make_tiny_model(tmp_path / "plain", num_layers=3)
    one = train_ring(scaled, [T], num_steps=3)
    assert_equal_runs(train_ring(scaled, [T, M], num_steps=3), one)
    difference = abs(one.losses[0] - train_ring(plain, [T], num_steps=1).losses[0])
    assert difference > 1e-5, "the scaling did nothing"


def test_every_device_refuses_a_plan_with_a_gap(tiny_model: Path) -> None:
    """Invariant 3, on receipt."""
    gap = [
        StageSpec(start=0, end=2, embedding=True, head=False),
        StageSpec(start=3, end=5, embedding=False, head=True),
    ]
    with pytest.raises(ProtocolError, match="layer 2 has no owner"):
        train_ring(tiny_model, [T, T], stages=gap)


def test_adapter_names_are_global(tiny_model: Path) -> None:
    """Invariant 10: the arrays of any ring carry the model's own layer numbers."""
    ring = train_ring(tiny_model, [T, T, T], num_steps=1)
    layers = {int(name.split(".")[2]) for name in ring.adapter}
    assert layers == set(range(5))
    assert len(ring.adapter) == 5 * 7 * 2


def test_a_row_without_anything_to_learn_is_no_nan(tiny_model: Path) -> None:
    one = train_ring(tiny_model, [T], config=replace(CONFIG, microbatch_size=1), num_steps=2)
    assert all(math.isfinite(loss) for loss in one.losses)
    assert all(np.isfinite(array).all() for array in one.adapter.values())
