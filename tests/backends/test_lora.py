"""Names, first values and dropout masks: the same numbers whoever draws them."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exo_train.backends import lora, mlx_lora, torch_lora
from exo_train.lora_config import ALL_TARGETS, LoraConfig
from exo_train.plan.stages import StageSpec
from tests.backends.hand_ring import tiny

LORA = LoraConfig(rank=4, alpha=8.0)


def draw(start: int, end: int, **changes: object) -> dict[str, np.ndarray]:
    spec, _ = tiny("llama")
    stage = StageSpec(start=start, end=end, embedding=False, head=False)
    settings = {"lora": LORA, "seed": 5, "init": "zero", **changes}
    return lora.initial_adapter(
        spec, stage, settings["lora"], seed=settings["seed"], init=settings["init"]
    )


def test_first_values_are_those_of_lora() -> None:
    whole = draw(0, 4)
    assert len(whole) == 4 * len(ALL_TARGETS) * 2
    down_a = whole["model.layers.2.mlp.down_proj.lora_a"]
    assert down_a.shape == (96, 4)
    assert down_a.dtype == np.float32
    assert np.abs(down_a).max() <= 1 / np.sqrt(96)
    assert np.abs(down_a).max() > 0.9 / np.sqrt(96)
    assert whole["model.layers.2.self_attn.k_proj.lora_b"].shape == (4, 32)
    assert not any(value.any() for name, value in whole.items() if name.endswith("lora_b"))
    names = {name for name in whole if name.endswith("lora_a")}
    assert len({whole[name].tobytes() for name in names}) == len(names)


def test_first_values_are_the_same_for_any_split_and_choice_of_targets() -> None:
    whole = draw(0, 4, init="random")
    parts = {**draw(0, 1, init="random"), **draw(1, 4, init="random")}
    some = draw(0, 4, init="random", lora=dataclasses.replace(LORA, targets=("o_proj",)))
    for chosen in (parts, some):
        assert all(np.array_equal(value, whole[name]) for name, value in chosen.items())
    assert len(parts) == len(whole)
    assert all(value.any() for value in whole.values())
    other = draw(0, 4, seed=6)
    assert not np.array_equal(*(d["model.layers.0.mlp.up_proj.lora_a"] for d in (whole, other)))


@settings(max_examples=30, deadline=None)
@given(
    hashes=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=3),
    positions=st.integers(1, 9),
    features=st.integers(1, 70),
    rate=st.floats(0, 0.99),
)
def test_both_backends_give_the_reference_mask(
    hashes: list[int], positions: int, features: int, rate: float
) -> None:
    keys_B = np.array(hashes, np.uint32)
    shape = {"positions": positions, "features": features}
    expected = lora.keep_mask(keys_B, **shape, rate=rate)
    threshold = lora.keep_threshold(rate)
    in_mlx = mlx_lora.keep_mask(keys_B, **shape, threshold=threshold)
    in_torch = torch_lora.keep_mask(
        keys_B, **shape, threshold=threshold, device=torch.device("cpu")
    )
    np.testing.assert_array_equal(np.array(in_mlx), expected)
    np.testing.assert_array_equal(in_torch.numpy(), expected)
    assert in_mlx.dtype == mx.bool_


def test_masks_agree_where_only_the_hash_s_low_bits_decide() -> None:
    """A million draws: enough for values next to the threshold, which small cases never meet."""
    keys_B = np.array([0, 1, 2**31, 2**32 - 1], np.uint32)
    shape = {"positions": 64, "features": 4096}
    expected = lora.keep_mask(keys_B, **shape, rate=0.37)
    threshold = lora.keep_threshold(0.37)
    in_torch = torch_lora.keep_mask(
        keys_B, **shape, threshold=threshold, device=torch.device("cpu")
    )
    assert np.array_equal(
        np.array(mlx_lora.keep_mask(keys_B, **shape, threshold=threshold)), expected
    )
    assert np.array_equal(in_torch.numpy(), expected)


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.5, 0.9])
def test_the_share_kept_is_right_in_every_row_position_and_feature(rate: float) -> None:
    dropout = lora.Dropout(rate=rate, seed=1, step=2, row_keys=(10, 11, 12, 13))
    kept_BTF = lora.keep_mask(
        dropout.row_hashes(3, "q_proj"), positions=256, features=512, rate=rate
    )
    deviation = np.sqrt(rate * (1 - rate))
    assert abs(kept_BTF.mean() - (1 - rate)) < 5 * deviation / np.sqrt(kept_BTF.size)
    for axes in [(1, 2), (0, 2), (0, 1)]:
        share = kept_BTF.mean(axis=axes)
        num_draws = kept_BTF.size / share.size
        assert np.abs(share - (1 - rate)).max() < 5 * deviation / np.sqrt(num_draws)


def test_masks_differ_by_seed_step_row_layer_and_target() -> None:
    base = {"seed": 1, "step": 2, "row": 10, "layer": 3, "target": "q_proj"}
    changes = [{}, {"seed": 2}, {"step": 3}, {"row": 11}, {"layer": 4}, {"target": "k_proj"}]
    changes += [{"row": 10 + 2**32}, {"seed": 2, "step": 1}]
    masks = []
    for change in changes:
        now = {**base, **change}
        dropout = lora.Dropout(rate=0.5, seed=now["seed"], step=now["step"], row_keys=(now["row"],))
        hashes = dropout.row_hashes(now["layer"], now["target"])
        masks.append(lora.keep_mask(hashes, positions=64, features=64, rate=0.5).ravel())
    for index, mask in enumerate(masks):
        for other in masks[:index]:
            # Independent halves agree in half of the places; 5 standard deviations of 4096 draws.
            assert abs((mask == other).mean() - 0.5) < 5 * 0.5 / 64


def test_a_mask_does_not_depend_on_padding_or_neighbours() -> None:
    dropout = lora.Dropout(rate=0.3, seed=1, step=2, row_keys=(7, 8))
    alone = dataclasses.replace(dropout, row_keys=(8,))
    wide = lora.keep_mask(dropout.row_hashes(0, "v_proj"), positions=20, features=16, rate=0.3)
    short = lora.keep_mask(alone.row_hashes(0, "v_proj"), positions=12, features=16, rate=0.3)
    np.testing.assert_array_equal(wide[1, :12], short[0])
