"""NEFTune's noise in MLX. Owns the arithmetic of `noise.Noise.values` there."""

from __future__ import annotations

import mlx.core as mx

from exo_train.backends.mlx_lora import feature_hashes
from exo_train.backends.noise import UNIT, Noise


def with_noise(embedded_BTD: mx.array, noise: Noise | None) -> mx.array:
    """Add a microbatch's noise, in float32, and round to the dtype that came."""
    if noise is None:
        return embedded_BTD
    shape, features = tuple(embedded_BTD.shape[:2]), embedded_BTD.shape[2]
    words_BT = noise.position_words(shape, features=features)
    scales_BT = mx.array(noise.scales(shape, features=features))
    hashes_BTD = feature_hashes(words_BT, features=features).astype(mx.float32)
    values_BTD = (hashes_BTD * UNIT - 1) * scales_BT[..., None]
    return (embedded_BTD.astype(mx.float32) + values_BTD).astype(embedded_BTD.dtype)
