"""Tiny models as mlx_lm, and transformers with bitsandbytes, write quantised ones. For tests only.

Owns `make_packed_model`, `make_nf4_model` and `dense_model`, the twin of the very numbers that
either stands for. NumPy only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from exo_train.models.decode import decode
from exo_train.models.open import open_model
from exo_train.models.packed import NF4_VALUES, Packing, quantised
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


def make_nf4_model(
    path: Path,
    *,
    double: bool = True,
    skipped: tuple[str, ...] = (),
    changes: dict[str, np.ndarray | None] | None = None,
    **model_options: Any,
) -> Path:
    """Write projections in NF4 but those with a name of `skipped`; None in `changes`: left out.

    `double`: the scales are quantised as well.
    """
    make_tiny_model(path, **{**SIZES, **model_options})
    config = json.loads((path / "config.json").read_text("utf-8"))
    stored: dict[str, np.ndarray | None] = {}
    for name, weight in tiny_weights(config).items():
        is_kept = weight.ndim == 1 or name.split(".")[-2] in ("embed_tokens", "lm_head", *skipped)
        stored |= {name: weight} if is_kept else _nf4(name, weight, double=double)
    stored |= changes or {}
    kept = {name: array for name, array in stored.items() if array is not None}
    save_file(kept, path / "model.safetensors", {"format": "pt"})
    config["quantization_config"] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_use_double_quant": double,
        "llm_int8_skip_modules": list(skipped) or None,
    }
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def _nf4(name: str, weight: np.ndarray, *, double: bool) -> dict[str, np.ndarray]:
    """Give a matrix's parts: blocks of 64, the nearest of the 16 values, the first one's above."""
    blocks = weight.reshape(-1, 64)
    scales = np.abs(blocks).max(axis=1)
    codes = np.searchsorted((NF4_VALUES[1:] + NF4_VALUES[:-1]) / 2, blocks / scales[:, None])
    codes = codes.astype(np.uint8).reshape(-1, 2)
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "float32",
        "shape": list(weight.shape),
    }
    parts = {
        name: (codes[:, :1] << 4 | codes[:, 1:]),
        f"{name}.absmax": scales,
        f"{name}.quant_map": NF4_VALUES,
    }
    if double:
        offset = float(scales.mean())
        largest = np.abs(scales - np.float32(offset)).max()
        values = np.linspace(-1, 1, 256, dtype=np.float32)
        nested = np.searchsorted(values[1:-1], (scales - np.float32(offset)) / largest)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        parts |= {
            f"{name}.absmax": nested.astype(np.uint8),
            f"{name}.nested_absmax": np.full(-(-len(scales) // 256), largest, np.float32),
            f"{name}.nested_quant_map": values,
        }
    described = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return parts | {f"{name}.quant_state.bitsandbytes__nf4": described}


def dense_model(path: Path, packed: Path) -> Path:
    """Write the model whose float32 weights are the numbers that a packed one stands for."""
    spec, source = open_model(packed)
    config = json.loads((packed / "config.json").read_text("utf-8"))
    for key in ("quantization", "quantization_config"):
        config.pop(key, None)
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
