"""One tiny model, its one-device runs, and a household of real agents, for the ring tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from exo_train.config import TrainConfig
from tests.ring.household import Household
from tests.ring.household_runs import STEPS, run_training
from tests.ring.rings import Trained, train_ring
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("ring") / "tiny", num_layers=5)


@pytest.fixture(scope="session")
def one_device(tiny_model: Path) -> dict[str, Trained]:
    """The oracle: ten steps with the whole model on one device, by backend."""
    return {backend: train_ring(tiny_model, [backend]) for backend in ("torch", "mlx")}


@pytest.fixture(scope="session")
def household(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Household]:
    """Three members, one of them MLX."""
    household = Household(tmp_path_factory.mktemp("household"))
    try:
        for name, backend in (("attic", "torch"), ("desk", "mlx"), ("hall", "torch")):
            household.add(name, backend)
        household.wait_met(["attic", "desk", "hall"])
        yield household
    finally:
        household.close()


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rows = [
        {
            "messages": [
                {"role": "user", "content": "what is " + "x " * (number % 5) + str(number)},
                {"role": "assistant", "content": "it is " + "the " * (number % 7) + str(number)},
            ]
        }
        for number in range(16)
    ]
    for name, part in (("train", rows[:12]), ("valid", rows[12:])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def config(tiny_model: Path, chats: Path) -> TrainConfig:
    return TrainConfig(
        model=str(tiny_model),
        data=str(chats),
        steps=STEPS,
        batch_size=6,
        microbatch_size=2,
        max_seq_length=96,
        learning_rate=1e-3,
        save_every=2,
        profile_s=0,  # measured runs are in test_runs_measured.py, after the others: caches fill
    )


@pytest.fixture(scope="session")
def one_device_run(
    household: Household, config: TrainConfig, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The oracle: the same run on one device."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    run_training(household.homes["attic"], config, run_dir, devices=("attic",))
    return run_dir
