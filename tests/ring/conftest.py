"""One tiny model and its one-device runs, shared by the ring tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ring.rings import Trained, train_ring
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("ring") / "tiny", num_layers=5)


@pytest.fixture(scope="session")
def one_device(tiny_model: Path) -> dict[str, Trained]:
    """The oracle: ten steps with the whole model on one device, by backend."""
    return {backend: train_ring(tiny_model, [backend]) for backend in ("torch", "mlx")}
