"""Which projections get an adapter: words, what they come to, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from exo_train.config import TrainConfig
from exo_train.errors import ConfigError, ProtocolError
from exo_train.lora_config import (
    ALL_TARGETS,
    LoraConfig,
    densest_layer,
    in_every_layer,
    placements,
)
from exo_train.plan.lora_fields import placements_of


def _from(**values: Any) -> TrainConfig:
    return TrainConfig.from_mapping(values, source="ours.yaml")


def adapted(num_layers: int, **said: Any) -> list[tuple[int, str]]:
    return [(p.layer, p.target) for p in placements(_from(**said).lora, num_layers)]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"targets": "q_proj"}, [(0, "q_proj"), (1, "q_proj"), (2, "q_proj")]),
        ({"targets": "self_attn.q_proj", "adapter_layers": "last:1"}, [(2, "q_proj")]),
        ({"targets": "model.layers.1.mlp.up_proj"}, [(1, "up_proj")]),
        (
            {"targets": "layers.1.up_proj,k_proj", "adapter_layers": "1"},
            [(1, "k_proj"), (1, "up_proj")],
        ),
        ({"targets": "all-linear", "adapter_layers": "0"}, [(0, t) for t in ALL_TARGETS]),
        (
            {"targets": "v_proj", "adapter_layers": "-1"},
            [(0, "v_proj"), (1, "v_proj"), (2, "v_proj")],
        ),
    ],
)
def test_names_paths_and_layers_come_to_projections(said, expected) -> None:
    assert adapted(3, **said) == expected


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"adapter_layers": "99"}, "99 is beyond the model, whose layers are 0 to 2"),
        ({"adapter_layers": "1-3"}, "1-3 is beyond the model, whose layers are 0 to 2"),
        ({"adapter_layers": "last:16"}, "last:16 asks for 16 layers, the model has 3; use last:3"),
        ({"targets": "model.layers.3.mlp.up_proj"}, "whose layers are 0 to 2"),
        (
            {"targets": "q_proj,model.layers.2.mlp.up_proj", "adapter_layers": "0-1"},
            "is in layer 2, which 'adapter_layers' leaves out (0-1); add it there",
        ),
        ({"targets": "q_proj", "rank_pattern": "k_proj=4"}, "k_proj gets no adapter"),
        (
            {"adapter_layers": "0", "alpha_pattern": "layers.1.q_proj=4"},
            "'alpha_pattern': layers.1.q_proj gets no adapter; add it to 'targets'",
        ),
    ],
)
def test_what_the_whole_model_has_no_place_for_is_refused(said, problem) -> None:
    lora = _from(**said).lora
    with pytest.raises(ConfigError) as refused:
        placements(lora, 3)
    assert problem in str(refused.value)
    with pytest.raises(ProtocolError, match=r"plan\.lora: "):  # and by each device again
        placements_of(lora, 3, "plan.lora")


def test_a_pattern_with_its_layer_counts_before_one_without() -> None:
    said = {
        "rank": 8, "alpha": 16, "targets": "q_proj,v_proj",
        "rank_pattern": "model.layers.1.self_attn.q_proj=2,q_proj=4", "alpha_pattern": "v_proj=3",
    }  # fmt: skip
    found = {(p.layer, p.target): (p.rank, p.scale) for p in placements(_from(**said).lora, 2)}
    assert found == {
        (0, "q_proj"): (4, 4.0),
        (0, "v_proj"): (8, 0.375),
        (1, "q_proj"): (2, 8.0),
        (1, "v_proj"): (8, 0.375),
    }
    stable = {p.rank: p.scale for p in placements(_from(rslora=True, **said).lora, 2)[2:]}
    assert stable == pytest.approx({2: 16 / 2**0.5, 8: 3 / 8**0.5})


def test_plans_and_profiles_reckon_with_the_fullest_layer() -> None:
    lora = _from(targets="q_proj,layers.1.up_proj", rank_pattern="layers.0.q_proj=16").lora
    assert densest_layer(lora, 2) == {"q_proj": 16, "up_proj": 8}
    everywhere = in_every_layer(lora, 2)
    assert densest_layer(everywhere, 9) == {"q_proj": 16, "up_proj": 8}
    assert len(placements(everywhere, 9)) == 18
    assert in_every_layer(LoraConfig(), 2) == LoraConfig()


def test_lora_scale_is_alpha_over_rank() -> None:
    lora = _from(rank=4, alpha=6, dropout=0.25, targets="q_proj").lora
    assert (lora.scale, lora.dropout, lora.targets) == (1.5, 0.25, ("q_proj",))
    assert TrainConfig().lora.targets == ALL_TARGETS


@pytest.mark.parametrize(
    ("said", "alpha"),
    [({"scale": 3}, 24.0), ({"scale": "3", "rank": 9, "rslora": True}, 9.0), ({"alpha": 5}, 5.0)],
)
def test_a_scale_is_said_instead_of_alpha(said: dict[str, Any], alpha: float) -> None:
    config = _from(**said)
    assert config.lora.alpha == alpha
    assert config.lora.scale == pytest.approx(float(said.get("scale", 5 / 8)))
    assert _from(**config.to_dict()) == config


def test_scale_and_alpha_that_disagree_are_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        _from(scale=3, alpha=16, rank=4)
    assert str(refused.value) == (
        "ours.yaml: 'scale' 3 and 'alpha' 16 disagree: with rank 4 that alpha makes a scale of 4; "
        "leave one of them out"
    )


@pytest.mark.parametrize("value", [[0, 1, 2, 7], "0-2,7", ["0-2", "7"], ["0-2", 7]])
def test_layers_are_said_as_numbers_or_words(value: Any) -> None:
    lora = _from(adapter_layers=value, targets="q_proj").lora
    assert [p.layer for p in placements(lora, 8)] == [0, 1, 2, 7]


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"targets": "qkv_proj"}, "no projection is called 'qkv_proj'; did you mean"),
        ({"targets": "mlp.q_proj"}, "'mlp.q_proj' should be self_attn.q_proj"),
        ({"targets": "lm_head"}, "known: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj"),
        ({"adapter_layers": "last:0"}, "last:0 is no layer"),
        ({"adapter_layers": "upper"}, "must be all, last:8, or layers like 0-3,7"),
        ({"adapter_layers": "7-3"}, "must be all, last:8, or layers like 0-3,7"),
        ({"adapter_layers": []}, "'adapter_layers' is empty"),
        ({"rank_pattern": "q_proj"}, "'rank_pattern' must be like q_proj=16"),
        ({"rank_pattern": "q_proj=0"}, "'rank_pattern': q_proj must be above 0"),
        ({"rank_pattern": "q_proj=2.5"}, "'rank_pattern' must be like q_proj=16"),
        ({"rank_pattern": "q_proj=4,self_attn.q_proj=8"}, "names q_proj twice"),
        ({"alpha_pattern": "q_proj=nan"}, "'alpha_pattern': q_proj must be above 0"),
        ({"alpha_pattern": "qproj=3"}, "no projection is called 'qproj'; did you mean 'q_proj'"),
    ],
)
def test_adapters_that_no_model_has_are_refused(said: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        _from(**said)
    assert problem in str(refused.value)
