"""A small question about a layer's time. For tests only."""

from __future__ import annotations

import json
from typing import Any

from exo_train.lora_config import LoraConfig
from exo_train.plan.block_times import ProfileRequest
from tests.tiny_models import tiny_config


def request(**changed: Any) -> ProfileRequest:
    values: dict[str, Any] = {
        "config_json": json.dumps(tiny_config()),
        "backend": "torch",
        "device": "cpu",
        "compute_dtype": "fp32",
        "lora": LoraConfig(rank=2),
        "microbatch_size": 1,
        "sequence": 16,
        "checkpoint_activations": False,
        "with_ends": False,
        "budget_s": 0.1,
    }
    return ProfileRequest(**{**values, **changed})
