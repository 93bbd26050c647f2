"""Adapter folders: what is written is what was trained, and what is wrong is refused."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from exo_train.errors import ConfigError, NumericsError
from exo_train.export import adapters
from exo_train.export.adapter_formats import PEFT
from exo_train.export.adapters import read_adapter, write_adapters
from exo_train.lora_config import ALL_TARGETS, LoraConfig, placements

SIZES = {  # (in, out) of a layer whose attention is square, so that only the names tell
    "q_proj": (16, 16),
    "k_proj": (16, 8),
    "v_proj": (16, 8),
    "o_proj": (16, 16),
    "gate_proj": (16, 24),
    "up_proj": (16, 24),
    "down_proj": (24, 16),
}
LORA = LoraConfig(rank=3, alpha=7.0, dropout=0.1, targets=ALL_TARGETS)


def path_of(target: str) -> str:
    return f"self_attn.{target}" if target[0] in "qkvo" else f"mlp.{target}"


def make_arrays(lora: LoraConfig = LORA, num_layers: int = 12, seed: int = 0):
    rng = np.random.default_rng(seed)
    arrays = {}
    for place in placements(lora, num_layers):
        inputs, outputs = SIZES[place.target]
        prefix = f"model.layers.{place.layer}.{path_of(place.target)}"
        arrays[f"{prefix}.lora_a"] = rng.normal(size=(inputs, place.rank)).astype(np.float32)
        arrays[f"{prefix}.lora_b"] = rng.normal(size=(place.rank, outputs)).astype(np.float32)
        if lora.dora:
            arrays[f"{prefix}.dora_m"] = rng.uniform(1, 2, outputs).astype(np.float32)
    return arrays


def write(directory, arrays, *, lora=LORA, num_layers=12, steps=5):
    return write_adapters(
        directory, arrays, lora=lora, base_model="org/base", num_layers=num_layers, steps=steps
    )


@pytest.mark.parametrize("form", ["peft", "mlx"])
@pytest.mark.parametrize(
    "lora",
    [
        LORA,
        LoraConfig(rank=7, alpha=12.0, targets=("q_proj", "down_proj")),
        LoraConfig(rank=4, alpha=0.3, targets=("o_proj",)),
        LoraConfig(rank=4, dora=True, layers=("8-11",)),
        LoraConfig(rank=2, targets=("k_proj", "up_proj"), layers=("0-3", "7")),
    ],
)
def test_either_format_gives_back_the_adapter(tmp_path, form, lora):
    arrays = make_arrays(lora)
    paths = write(tmp_path / "dônnées é 数据", arrays, lora=lora)
    found = read_adapter(getattr(paths, form))
    assert found.lora == lora
    assert found.base_model == "org/base"
    assert found.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array)


KINDS = LoraConfig(
    rank=4,
    alpha=10.0,
    rslora=True,
    dora=True,
    targets=("model.layers.3.self_attn.q_proj", "down_proj"),
    layers=("2-5",),
    rank_pattern=(("model.layers.4.mlp.down_proj", 2), ("q_proj", 6)),
    alpha_pattern=(("down_proj", 3.0),),
)


def test_peft_says_ranks_strengths_and_places_as_they_are(tmp_path):
    arrays = make_arrays(KINDS)
    folder = write(tmp_path, arrays, lora=KINDS).peft
    found = read_adapter(folder)
    assert placements(found.lora, 12) == placements(KINDS, 12)
    assert found.arrays.keys() == arrays.keys()
    assert all(np.array_equal(found.arrays[name], array) for name, array in arrays.items())
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["rank_pattern"] == {"q_proj": 6, "model.layers.4.mlp.down_proj": 2}
    assert config["alpha_pattern"] == {"down_proj": 3}
    assert (config["use_rslora"], config["use_dora"]) == (True, True)
    assert "model.layers.3.self_attn.q_proj" in config["target_modules"]


def test_mlx_has_one_rank_and_one_scale_and_the_same_products(tmp_path):
    arrays = make_arrays(KINDS)
    found = read_adapter(write(tmp_path, arrays, lora=KINDS).mlx)
    assert {(p.layer, p.target) for p in placements(found.lora, 12)} == {
        (p.layer, p.target) for p in placements(KINDS, 12)
    }
    for place in placements(KINDS, 12):
        a, b = f"{place.prefix}.lora_a", f"{place.prefix}.lora_b"
        product = found.lora.scale * found.arrays[a] @ found.arrays[b]
        assert found.arrays[a].shape[1] == 6
        np.testing.assert_allclose(product, place.scale * arrays[a] @ arrays[b], atol=1e-4)


def test_a_known_model_tells_its_first_layers_from_all(tmp_path):
    lora = LoraConfig(rank=2, targets=("k_proj",))
    folder = write(tmp_path, make_arrays(lora, num_layers=4), lora=lora, num_layers=4).peft
    assert read_adapter(folder).lora.layers == ("all",)
    assert read_adapter(folder, num_layers=4).lora.layers == ("all",)
    assert read_adapter(folder, num_layers=12).lora.layers == ("0-3",)


def test_peft_files_are_transposed_and_complete(tmp_path):
    arrays = make_arrays()
    paths = write(tmp_path, arrays)
    stored = load_file(paths.peft / "adapter_model.safetensors")
    key = "base_model.model.model.layers.11.mlp.down_proj.lora_{}.weight"
    assert len(stored) == 12 * 7 * 2
    np.testing.assert_array_equal(
        stored[key.format("A")], arrays["model.layers.11.mlp.down_proj.lora_a"].T
    )
    np.testing.assert_array_equal(
        stored[key.format("B")], arrays["model.layers.11.mlp.down_proj.lora_b"].T
    )
    config = json.loads((paths.peft / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["lora_alpha"] == 7
    assert isinstance(config["lora_alpha"], int)
    assert config["target_modules"] == list(ALL_TARGETS)


def test_mlx_files_have_full_paths_and_the_scale(tmp_path):
    paths = write(tmp_path, make_arrays())
    config = json.loads((paths.mlx / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["num_layers"] == 12
    assert config["lora_parameters"]["scale"] == pytest.approx(7 / 3)
    assert config["lora_parameters"]["keys"][0] == "self_attn.q_proj"
    assert config["lora_parameters"]["keys"][-1] == "mlp.down_proj"
    stored = load_file(paths.mlx / "adapters.safetensors")
    assert stored["model.layers.3.self_attn.q_proj.lora_a"].shape == (16, 3)


def without_layer_4(arrays):
    return {name: array for name, array in arrays.items() if ".layers.4." not in name}


def with_zero_b(arrays):
    name = "model.layers.2.self_attn.v_proj.lora_b"
    return arrays | {name: np.zeros_like(arrays[name])}


def with_nan(arrays):
    name = "model.layers.0.mlp.up_proj.lora_a"
    return arrays | {name: np.full_like(arrays[name], np.nan)}


def with_other_rank(arrays):
    name = "model.layers.0.mlp.up_proj.lora_a"
    return arrays | {name: arrays[name][:, :2]}


def with_extra(arrays):
    return arrays | {"model.layers.12.mlp.up_proj.lora_a": np.ones((16, 3), np.float32)}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_layer_4, "misses model.layers.4.mlp.down_proj.lora_a"),
        (with_zero_b, "does nothing after 5 steps in model.layers.2.self_attn.v_proj.lora_b"),
        (with_nan, "is NaN in model.layers.0.mlp.up_proj.lora_a"),
        (with_other_rank, "is not of rank 3 in model.layers.0.mlp.up_proj.lora_a"),
        (with_extra, "did not train: model.layers.12.mlp.up_proj.lora_a"),
    ],
)
def test_an_adapter_that_is_not_whole_is_not_written(tmp_path, spoil, message):
    with pytest.raises(NumericsError) as caught:
        write(tmp_path, spoil(make_arrays()))
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_zero_adapter_before_any_step_is_allowed(tmp_path):
    arrays = {n: a * (0 if n.endswith("b") else 1) for n, a in make_arrays().items()}
    write(tmp_path, arrays, steps=0)


def test_a_format_that_loses_something_is_caught_and_the_old_folder_stays(tmp_path, monkeypatch):
    paths = write(tmp_path, make_arrays(seed=1))

    def forgets_to_transpose(arrays):
        return {
            f"base_model.model.{n[:-1]}{n[-1].upper()}.weight": (
                a.T if not n.endswith("q_proj.lora_a") else a.reshape(a.shape[::-1])
            ).copy()
            for n, a in arrays.items()
        }

    monkeypatch.setattr(
        adapters,
        "PEFT",
        replace(PEFT, to_arrays=forgets_to_transpose),
    )
    with pytest.raises(NumericsError, match=r"differs in .*layers\.0\.self_attn\.q_proj\.lora_a"):
        write(tmp_path, make_arrays(seed=2))
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mlx", "peft"]
    name = "model.layers.0.self_attn.q_proj.lora_a"
    np.testing.assert_array_equal(read_adapter(paths.peft).arrays[name], make_arrays(seed=1)[name])


def test_16_bit_adapters_of_others_are_read(tmp_path):
    paths = write(tmp_path, make_arrays())
    exact = {n: np.round(a * 8) / 8 for n, a in make_arrays().items()}  # exact in bf16
    header, body = {}, b""
    for name, array in PEFT.to_arrays(exact).items():
        upper = (array.view(np.uint32) >> 16).astype("<u2").tobytes()
        offsets = [len(body), len(body) + len(upper)]
        header[name] = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": offsets}
        body += upper
    text = json.dumps(header).encode()
    weights = struct.pack("<Q", len(text)) + text + body
    (paths.peft / "adapter_model.safetensors").write_bytes(weights)
    found = read_adapter(paths.peft)
    for name, array in exact.items():
        np.testing.assert_array_equal(found.arrays[name], array)


def edit_config(folder, **changes):
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(config | changes), encoding="utf-8")


def test_rank_stabilised_adapters_keep_their_strength(tmp_path):
    lora = LoraConfig(rank=4, alpha=8.0, targets=("q_proj",))
    paths = write(tmp_path, make_arrays(lora), lora=lora)
    edit_config(paths.peft, use_rslora=True)
    assert read_adapter(paths.peft).lora.scale == pytest.approx(8 / 4**0.5)


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        ("peft", {"use_dora": True}, "has no dora_m beside it"),
        ("peft", {"init_lora_weights": "pissa_niter_4"}, "belong to a changed base"),
        ("peft", {"rank_pattern": {"(a+)+$": 3}}, "only names of projections"),
        ("peft", {"rank_pattern": {"layers.3.self_attn.k_proj": 2}}, "config says rank 2"),
        ("peft", {"modules_to_save": ["lm_head"]}, "'modules_to_save' cannot be read"),
        ("peft", {"r": 4}, "its config says rank 4"),
        ("peft", {"lora_alpha": "16"}, "'lora_alpha' must be a number"),
        ("mlx", {"fine_tune_type": "dora"}, "has no dora_m beside it"),
        ("mlx", {"fine_tune_type": "full"}, "fine_tune_type 'full' cannot be read"),
        ("mlx", {"lora_parameters": {"rank": 3}}, "'scale' must be a number"),
    ],
)
def test_foreign_adapters_that_would_change_meaning_are_refused(tmp_path, form, changes, message):
    folder = getattr(write(tmp_path, make_arrays()), form)
    edit_config(folder, **changes)
    with pytest.raises(ConfigError) as caught:
        read_adapter(folder)
    assert message in str(caught.value)


def test_files_that_are_no_adapter(tmp_path):
    with pytest.raises(ConfigError, match="is not an adapter"):
        read_adapter(tmp_path / "bogus")
    folder = write(tmp_path, make_arrays()).peft
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors cannot be read"):
        read_adapter(folder)
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(ConfigError, match="is a pickle"):
        read_adapter(folder)
