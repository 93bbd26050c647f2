"""mlx-lm and PEFT load the folders and compute W x + scale (B A)ᵀ x with them.

The expected logits come from a model whose base weights were changed by hand.
"""

from __future__ import annotations

import shutil
import warnings

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from exo_train.export.adapters import AdapterPaths, write_adapters
from exo_train.lora_config import LoraConfig, placements
from tests.tiny_models import make_tiny_model

TOKENS = [[5, 17, 88, 40, 9, 250, 3]]
NUM_LAYERS = 3


def make_adapter(weights, lora: LoraConfig):
    """Draw an adapter that moves the logits visibly, shaped after the model's own matrices."""
    rng = np.random.default_rng(3)
    arrays = {}
    for place in placements(lora, NUM_LAYERS):
        outputs, inputs = weights[f"{place.prefix}.weight"].shape
        for name, value in (
            ("lora_a", rng.normal(0, 0.2, (inputs, place.rank))),
            ("lora_b", rng.normal(0, 0.2, (place.rank, outputs))),
        ):
            arrays[f"{place.prefix}.{name}"] = value.astype(np.float32)
        if lora.dora:
            magnitudes = rng.uniform(0.1, 0.3, outputs)
            arrays[f"{place.prefix}.dora_m"] = magnitudes.astype(np.float32)
    return arrays


def merge(model, merged, arrays, lora: LoraConfig) -> None:
    """Copy the model with W + scale (A B)ᵀ, in NumPy; the strength is written out once more."""
    shutil.copytree(model, merged)
    weights = load_file(model / "model.safetensors")
    for place in placements(lora, NUM_LAYERS):
        key = f"{place.prefix}.weight"
        scale = place.alpha / (place.rank**0.5 if lora.rslora else place.rank)
        delta = arrays[f"{place.prefix}.lora_a"] @ arrays[f"{place.prefix}.lora_b"]
        weights[key] = weights[key] + np.float32(scale) * delta.T
        if lora.dora:
            lengths = np.linalg.norm(weights[key], axis=1)
            weights[key] *= (arrays[f"{place.prefix}.dora_m"] / lengths)[:, None]
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})


CASES = {
    "square attention, all targets": ({"num_kv_heads": 4}, LoraConfig(rank=4, alpha=32.0)),
    "wide heads, two targets": (
        {"head_dim": 24, "tied": False},
        LoraConfig(rank=3, alpha=5.0, dropout=0.2, targets=("k_proj", "down_proj")),
    ),
    "rank-stabilised, lower layers": (
        {"tied": False},
        LoraConfig(rank=4, alpha=6.0, rslora=True, layers=("0-1",)),
    ),
    "dora in the last layer, with biases": (
        {"extra_config": {"attention_bias": True, "mlp_bias": True}},
        LoraConfig(rank=4, alpha=6.0, dora=True, layers=("last:1",)),
    ),
    "each projection its own": (
        {},
        LoraConfig(
            rank=4,
            alpha=10.0,
            rslora=True,
            dora=True,
            targets=("model.layers.0.self_attn.q_proj", "down_proj"),
            layers=("0", "2"),
            rank_pattern=(("q_proj", 6), ("model.layers.2.mlp.down_proj", 2)),
            alpha_pattern=(("down_proj", 16.0),),
        ),
    ),
}


@pytest.fixture(scope="module", params=CASES, ids=CASES)
def case(request, tmp_path_factory):
    shape, lora = CASES[request.param]
    folder = tmp_path_factory.mktemp("case")
    model = make_tiny_model(folder / "model", num_layers=NUM_LAYERS, **shape)
    arrays = make_adapter(load_file(model / "model.safetensors"), lora)
    merge(model, folder / "merged", arrays, lora)
    paths = write_adapters(
        folder / "adapters",
        arrays,
        lora=lora,
        base_model=str(model),
        num_layers=NUM_LAYERS,
        steps=1,
    )
    return model, folder / "merged", paths


def torch_logits(model) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS)).logits.numpy()


def load_torch(path):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def test_peft_computes_the_adapter(case):
    peft = pytest.importorskip("peft")
    model, merged, paths = case
    expected = torch_logits(load_torch(merged))
    base = load_torch(model)
    without = torch_logits(base)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PEFT warns of missing keys and goes on
        warnings.filterwarnings("ignore", category=FutureWarning)  # PEFT's use of transformers
        adapted = peft.PeftModel.from_pretrained(base, paths.peft)
    np.testing.assert_allclose(torch_logits(adapted), expected, atol=1e-4)
    assert np.abs(expected - without).max() > 0.05


def test_mlx_lm_computes_the_adapter(case):
    mx = pytest.importorskip("mlx.core")
    mlx_lm = pytest.importorskip("mlx_lm")
    model, merged, paths = case
    assert isinstance(paths, AdapterPaths)

    def logits(path, adapter=None) -> np.ndarray:
        adapter_path = None if adapter is None else str(adapter)
        loaded, _ = mlx_lm.load(str(path), adapter_path=adapter_path)
        loaded.eval()
        return np.array(loaded(mx.array(TOKENS)))

    expected = logits(merged)
    np.testing.assert_allclose(logits(model, paths.mlx), expected, atol=1e-4)
    assert np.abs(expected - logits(model)).max() > 0.05
