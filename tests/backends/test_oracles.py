"""Against code that is not ours: transformers with PEFT, and mlx_lm's LoRA layers and loss."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn
import mlx.optimizers
import mlx_lm.utils
import numpy as np
import peft
import pytest
import torch
import transformers
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.trainer import default_loss

from exo_train.backends.lora import module_path
from exo_train.config import OptimizerConfig
from tests.backends.hand_ring import (
    LORA,
    MODELS,
    NUM_LAYERS,
    accumulate,
    load_ring,
    microbatches,
    relative_error,
    rows,
)
from tests.tiny_models import make_tiny_model
