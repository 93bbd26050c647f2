"""Rotary position embedding: which kinds are known and what they are called in configs.

Owns the reading of old (`rope_scaling`, `rope_theta`) and new (`rope_parameters`) spellings.
Must not rotate anything: the backends' model classes do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exo_train.errors import ModelError
from exo_train.models.fields import number, whole

ROPE_KINDS = ("default", "linear", "llama3")
MAX_POSITIONS = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Fields beyond `theta` count only for the kinds that use them."""

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, place: str) -> RopeSpec:
        """Read either spelling; a kind that the backends do not share is refused by name."""
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if not isinstance(scaling, Mapping):
            raise ModelError(f"{place}: the rope settings must be an object, got {scaling!r}")
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind not in ROPE_KINDS:
            raise ModelError(
                f"{place}: rope type '{kind}' is not supported; supported: {', '.join(ROPE_KINDS)}"
            )
        nested = config.get("rope_parameters")
        newer = nested if isinstance(nested, Mapping) else {}
        theta_holder = next(
            (m for m in (scaling, newer, config) if m.get("rope_theta") is not None), {}
        )
        if any(m.get("partial_rotary_factor") not in (None, 1) for m in (scaling, newer, config)):
            raise ModelError(f"{place}: 'partial_rotary_factor' other than 1 is not supported")
        theta = number(theta_holder, "rope_theta", place=place, high=1e12, default=10000.0)
        if kind == "default":
            return cls(kind=kind, theta=theta)
        place = f"{place}: rope type '{kind}'"
        factor = number(scaling, "factor", place=place, high=1e6)
        if kind == "linear":
            return cls(kind=kind, theta=theta, factor=factor)
        spec = cls(
            kind=kind,
            theta=theta,
            factor=factor,
            low_freq_factor=number(scaling, "low_freq_factor", place=place, high=1e6),
            high_freq_factor=number(scaling, "high_freq_factor", place=place, high=1e6),
            original_max_position=whole(
                scaling, "original_max_position_embeddings", place=place, high=MAX_POSITIONS
            ),
        )
        if spec.high_freq_factor <= spec.low_freq_factor:
            raise ModelError(f"{place}: 'high_freq_factor' must be above 'low_freq_factor'")
        return spec

    def scaling(self) -> dict[str, Any] | None:
        """Give the value of `rope_scaling`; None for the default kind."""
        if self.kind == "default":
            return None
        values: dict[str, Any] = {"rope_type": self.kind, "factor": self.factor}
        if self.kind == "llama3":
            values["low_freq_factor"] = self.low_freq_factor
            values["high_freq_factor"] = self.high_freq_factor
            values["original_max_position_embeddings"] = self.original_max_position
        return values

    def parameters(self) -> dict[str, Any]:
        """Give the value of `rope_parameters`, the newer spelling."""
        return {"rope_type": self.kind, **(self.scaling() or {}), "rope_theta": self.theta}

    def llama3_divisors(self, head_dim: int) -> list[float]:
        """Give what each of head_dim/2 frequencies is divided by (GGUF's `rope_freqs.weight`).

        Source: Llama 3.1's `apply_scaling`, as llama.cpp's converter writes it.
        """
        low_wavelength = self.original_max_position / self.low_freq_factor
        high_wavelength = self.original_max_position / self.high_freq_factor
        divisors: list[float] = []
        for index in range(0, head_dim, 2):
            wavelength = 2 * math.pi * self.theta ** (index / head_dim)
            if wavelength < high_wavelength:
                divisors.append(1.0)
            elif wavelength > low_wavelength:
                divisors.append(self.factor)
            else:
                smooth = (self.original_max_position / wavelength - self.low_freq_factor) / (
                    self.high_freq_factor - self.low_freq_factor
                )
                divisors.append(1.0 / ((1.0 - smooth) / self.factor + smooth))
        return divisors
