"""Tiny models as mlx_lm writes quantised ones. For tests only.

Owns `make_packed_model` and `dense_model`, its twin of the very numbers that it stands for. NumPy
only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from exo_train.models.decode import decode
from exo_train.models.open import open_model
from exo_train.models.packed import Packing, quantised
from tests.tiny_models import make_tiny_model, tiny_weights

# As many columns as the widest group has.
SIZES = {"hidden_size": 128, "intermediate_size": 256}


def make_packed_model(
    path: Path,
    packing: Packing,
    *,
    overrides: dict[str, Packing | None] | None = None,
    seed: int = 0,
    **model_options: Any,
) -> Path:
    """Write config.json, safetensors and a tokenizer; each matrix packed but those overridden."""
    overrides = overrides or {}
    make_tiny_model(path, seed=seed, **{**SIZES, **model_options})
    config = json.loads((path / "config.json").read_text("utf-8"))
    stored: dict[str, np.ndarray] = {}
    for name, weight in tiny_weights(config, seed=seed).items():
        module = name.removesuffix(".weight")
        chosen = overrides.get(module, packing)
        if weight.ndim == 1 or chosen is None:
            stored[name] = weight
            continue
        matrix = quantised(weight, chosen)
        stored |= {
            name: matrix.words_RW,
            f"{module}.scales": matrix.scales_RG,
            f"{module}.biases": matrix.biases_RG,
        }
    save_file(stored, path / "model.safetensors", {"format": "mlx"})
    quantisation: dict[str, Any] = _entry(packing) | {
        module: _entry(chosen) if chosen else False for module, chosen in overrides.items()
    }
    config |= {"quantization": quantisation, "quantization_config": quantisation}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def dense_model(path: Path, packed: Path) -> Path:
    """Write the model whose float32 weights are the numbers that a packed one stands for."""
    spec, source = open_model(packed)
    config = json.loads((packed / "config.json").read_text("utf-8"))
    for key in ("quantization", "quantization_config"):
        config.pop(key)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = {
        name: decode(source.infos[name], source.read(name)).to_numpy()
        for name in spec.all_tensor_shapes()
    }
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def _entry(packing: Packing) -> dict[str, int]:
    return {"group_size": packing.group_size, "bits": packing.bits}
