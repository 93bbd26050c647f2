"""Devices one may think of buying: memory and speed, for dry runs only. Pure data.

Speeds are the makers' published peaks for 16-bit matrix products with 32-bit sums (Apple: the
GPU's fp32 rate, which its 16-bit rate does not exceed), times `SUSTAINED`. None of them was
measured by this project; expect errors of half or double.
"""

from __future__ import annotations

from dataclasses import dataclass

from exo_train.plan.device_memory import Processor

SUSTAINED = 0.5
# What a Mac lets its GPU use of unified memory, and what the system needs.
MAC_SHARE = 0.70
RESERVE = 0.12
GB = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    memory_gb: float
    peak_tflops: float
    is_mac: bool

    @property
    def usable_bytes(self) -> int:
        share = MAC_SHARE if self.is_mac else 1.0
        return int(self.memory_gb * GB * share * (1 - RESERVE))

    @property
    def processor(self) -> Processor:
        return Processor(
            backend="mlx" if self.is_mac else "torch", device="gpu" if self.is_mac else "cuda:0"
        )

    @property
    def flops_per_s(self) -> float:
        return self.peak_tflops * 1e12 * SUSTAINED


def _mac(memory_gb: float, peak_tflops: float) -> Preset:
    return Preset(memory_gb=memory_gb, peak_tflops=peak_tflops, is_mac=True)


def _gpu(memory_gb: float, peak_tflops: float) -> Preset:
    return Preset(memory_gb=memory_gb, peak_tflops=peak_tflops, is_mac=False)


PRESETS = {
    "m1-8": _mac(8, 2.6),
    "m1-16": _mac(16, 2.6),
    "m1-pro-16": _mac(16, 5.2),
    "m1-max-32": _mac(32, 10.4),
    "m2-8": _mac(8, 3.6),
    "m2-16": _mac(16, 3.6),
    "m2-pro-16": _mac(16, 6.8),
    "m2-max-32": _mac(32, 13.6),
    "m2-ultra-64": _mac(64, 27.2),
    "m3-pro-18": _mac(18, 7.4),
    "m3-max-36": _mac(36, 14.2),
    "m4-16": _mac(16, 4.6),
    "m4-pro-24": _mac(24, 9.2),
    "m4-max-36": _mac(36, 18.4),
    "rtx-3060": _gpu(12, 25.6),
    "rtx-3090": _gpu(24, 71),
    "rtx-4060-ti-16": _gpu(16, 44),
    "rtx-4070": _gpu(12, 58),
    "rtx-4090": _gpu(24, 165),
    "rtx-5090": _gpu(32, 209),
}


def layer_flops(
    *,
    decoder_params: int,
    attention_size: int,
    num_sequences: int,
    num_positions: int,
    checkpoint_activations: bool,
) -> float:
    """Count forward and backward of one decoder layer and microbatch.

    2 per parameter and token, and 2 for each of the two causal products of attention (half of
    T² pairs). Under LoRA the backward costs as much as the forward (no weight gradients of the
    frozen base); checkpointing adds a forward.
    """
    tokens = num_sequences * num_positions
    forward = 2.0 * decoder_params * tokens + 2.0 * attention_size * num_positions * tokens
    return forward * (3 if checkpoint_activations else 2)


def head_flops(*, vocab_size: int, hidden_size: int, tokens: int) -> float:
    """Count forward and backward of the head over all tokens (at most: only supervised ones)."""
    return 2 * 2.0 * vocab_size * hidden_size * tokens
