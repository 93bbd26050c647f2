"""mlx-lm and PEFT load the folders and compute W x + scale (B A)ᵀ x with them.

The expected logits come from a model whose base weights were changed by hand.
"""

from __future__ import annotations

import shutil
import warnings

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from exo_train.config import ALL_TARGETS, LoraConfig
from exo_train.export.adapters import AdapterPaths, write_adapters
from tests.tiny_models import make_tiny_model

TOKENS = [[5, 17, 88, 40, 9, 250, 3]]
NUM_LAYERS = 3


def make_adapter(weights, lora: LoraConfig):
    """Draw an adapter that moves the logits visibly, shaped after the model's own matrices."""
    rng = np.random.default_rng(3)
    arrays = {}
    for name, weight in weights.items():
        target = name.split(".")[-2]
        if ".layers." in name and target in lora.targets:
            outputs, inputs = weight.shape
            prefix = name.removesuffix(".weight")
            arrays[f"{prefix}.lora_a"] = rng.normal(0, 0.2, (inputs, lora.rank)).astype(np.float32)
            arrays[f"{prefix}.lora_b"] = rng.normal(0, 0.2, (lora.rank, outputs)).astype(np.float32)
    return arrays


def merge(model, merged, arrays, scale: float) -> None:
    """Copy the model with W + scale (A B)ᵀ, in NumPy."""
    shutil.copytree(model, merged)
    weights = load_file(model / "model.safetensors")
    for name in list(arrays):
        if name.endswith(".lora_a"):
            key = name.replace(".lora_a", ".weight")
            delta = arrays[name] @ arrays[name.replace(".lora_a", ".lora_b")]
            weights[key] = weights[key] + np.float32(scale) * delta.T
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})


CASES = {
    "square attention, all targets": ({"num_kv_heads": 4}, LoraConfig(rank=4, alpha=32.0)),
    "wide heads, two targets": (
        {"head_dim": 24, "tied": False},
        LoraConfig(rank=3, alpha=5.0, dropout=0.2, targets=("k_proj", "down_proj")),
    ),
}


@pytest.fixture(scope="module", params=CASES, ids=CASES)
def case(request, tmp_path_factory):
    shape, lora = CASES[request.param]
    assert set(lora.targets) <= set(ALL_TARGETS)
    folder = tmp_path_factory.mktemp("case")
    model = make_tiny_model(folder / "model", num_layers=NUM_LAYERS, **shape)
    arrays = make_adapter(load_file(model / "model.safetensors"), lora)
    merge(model, folder / "merged", arrays, lora.alpha / lora.rank)
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
