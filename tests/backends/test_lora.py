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
    words_BT = np.array(hashes, np.uint32)[:, None] + np.arange(positions, dtype=np.uint32)
    expected = lora.keep_mask(words_BT, features=features, rate=rate)
    threshold = lora.keep_threshold(rate)
    in_mlx = mlx_lora.keep_mask(words_BT, features=features, threshold=threshold)
    in_torch = torch_lora.keep_mask(
        words_BT, features=features, threshold=threshold, device=torch.device("cpu")
    )
    np.testing.assert_array_equal(np.array(in_mlx), expected)
    np.testing.assert_array_equal(in_torch.numpy(), expected)
    assert in_mlx.dtype == mx.bool_


def test_masks_agree_where_only_the_hash_s_low_bits_decide() -> None:
    """A million draws: enough for values next to the threshold, which small cases never meet."""
    ends = np.array([0, 1, 2**31, 2**32 - 1], np.uint32)
    words_BT = ends[:, None] + np.arange(64, dtype=np.uint32) * np.uint32(4096 * 7)
    expected = lora.keep_mask(words_BT, features=4096, rate=0.37)
    threshold = lora.keep_threshold(0.37)
    in_torch = torch_lora.keep_mask(
        words_BT, features=4096, threshold=threshold, device=torch.device("cpu")
    )
    in_mlx = mlx_lora.keep_mask(words_BT, features=4096, threshold=threshold)
    assert np.array_equal(np.array(in_mlx), expected)
    assert np.array_equal(in_torch.numpy(), expected)


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.5, 0.9])
def test_the_share_kept_is_right_in_every_row_position_and_feature(rate: float) -> None:
    dropout = lora.Dropout(rate=rate, seed=1, step=2, row_keys=(10, 11, 12, 13))
    words_BT = dropout.position_words(3, "q_proj", shape=(4, 256), features=512)
    kept_BTF = lora.keep_mask(words_BT, features=512, rate=rate)
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
        place = {"shape": (1, 64), "features": 64}
        words_BT = dropout.position_words(now["layer"], now["target"], **place)
        masks.append(lora.keep_mask(words_BT, features=64, rate=0.5).ravel())
    for index, mask in enumerate(masks):
        for other in masks[:index]:
            # Independent halves agree in half of the places; 5 standard deviations of 4096 draws.
            assert abs((mask == other).mean() - 0.5) < 5 * 0.5 / 64


def kept(dropout: lora.Dropout, num_sequences: int, num_positions: int) -> np.ndarray:
    shape = (num_sequences, num_positions)
    words_BT = dropout.position_words(0, "v_proj", shape=shape, features=16)
    return lora.keep_mask(words_BT, features=16, rate=dropout.rate)


def test_a_mask_does_not_depend_on_padding_or_neighbours() -> None:
    dropout = lora.Dropout(rate=0.3, seed=1, step=2, row_keys=(7, 8))
    alone = dataclasses.replace(dropout, row_keys=(8,))
    wide, short = kept(dropout, 2, 20), kept(alone, 1, 12)
    np.testing.assert_array_equal(wide[1, :12], short[0])


def test_a_mask_is_as_it_was_before_rows_could_be_packed() -> None:
    """Written down once: a run must drop the same features after any upgrade."""
    mask = kept(lora.Dropout(rate=0.5, seed=1, step=2, row_keys=(7, 8)), 2, 3)
    assert ["".join(str(int(k)) for k in mask[row, 2]) for row in (0, 1)] == [
        "0001000010010011",
        "1001110111011011",
    ]


def test_a_packed_row_drops_what_it_drops_alone() -> None:
    dropout = lora.Dropout(rate=0.3, seed=1, step=2, row_keys=(7, 8, 9), row_starts=(0, 5, 12))
    packed = kept(dropout, 2, 12)
    for key, sequence, start, end in [(7, 0, 0, 5), (8, 0, 5, 12), (9, 1, 0, 12)]:
        alone = dataclasses.replace(dropout, row_keys=(key,), row_starts=())
        np.testing.assert_array_equal(
            packed[sequence, start:end], kept(alone, 1, 12)[0, : end - start]
        )
