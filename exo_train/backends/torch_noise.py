"""NEFTune's noise in PyTorch. Owns the arithmetic of `noise.Noise.values` there."""

from __future__ import annotations

import torch

from exo_train.backends.noise import UNIT, Noise
from exo_train.backends.torch_lora import feature_hashes


def with_noise(embedded_BTD: torch.Tensor, noise: Noise | None) -> torch.Tensor:
    """Add a microbatch's noise, in float32, and round to the dtype that came."""
    if noise is None:
        return embedded_BTD
    shape, features = tuple(embedded_BTD.shape[:2]), embedded_BTD.shape[2]
    device = embedded_BTD.device
    words_BT = noise.position_words(shape, features=features)
    scales_BT = torch.from_numpy(noise.scales(shape, features=features)).to(device)
    hashes_BTD = feature_hashes(words_BT, features=features, device=device).float()
    values_BTD = (hashes_BTD * UNIT - 1) * scales_BT[..., None]
    return (embedded_BTD.float() + values_BTD).to(embedded_BTD.dtype)
