"""Settings of the backend tests."""

from __future__ import annotations

import torch

# The models are tiny: more threads only wait for each other when tests run side by side.
torch.set_num_threads(1)
