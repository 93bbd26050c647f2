"""What a device says of itself, and how wrong wishes are refused."""

from __future__ import annotations

import sys

import psutil
import pytest

from exo_train.backends.registry import available_backends
from exo_train.cluster.hardware import MAX_OVERRIDE_FACTOR, detect, parse_size
from exo_train.errors import ConfigError

BACKEND = available_backends()[0]
needs_torch = pytest.mark.skipif(
    "torch" not in available_backends(), reason="PyTorch is not installed here"
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8GB", 8 * 10**9),
        ("8g", 8 * 10**9),
        (" 512 M ", 512 * 10**6),
        ("1.5GiB", 3 * 2**29),
        ("330MB", 330 * 10**6),
        ("2Ti", 2 * 2**40),
        ("123", 123),
    ],
)
def test_sizes_are_read(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GB", "eight", "8 GB free", "-1GB", "8PB", "1e9", "0", "0GB"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="like 8GB"):
        parse_size(text)


def test_usable_memory_keeps_a_reserve() -> None:
    found = detect(backend=BACKEND, device="auto")
    assert 0 < found.usable_memory_bytes < found.memory_bytes <= psutil.virtual_memory().total * 2
    assert "fp32" in found.dtypes
    assert found.chip.isprintable()


def test_the_user_decides_how_much_to_offer() -> None:
    assert detect(backend=BACKEND, memory_bytes=10**9).usable_memory_bytes == 10**9


def test_an_offer_that_others_would_not_believe_is_refused_here() -> None:
    total = detect(backend=BACKEND).memory_bytes
    with pytest.raises(ConfigError, match="smaller --memory"):
        detect(backend=BACKEND, memory_bytes=MAX_OVERRIDE_FACTOR * total + 1)


def test_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'jax'; there are auto, mlx and torch"):
        detect(backend="jax")


@needs_torch
@pytest.mark.parametrize(
    ("device", "sentence"),
    [
        ("cuda:99", "'cuda:99' is not here"),
        ("cuda:x", "unknown device 'cuda:x'; there are auto, cpu and cuda:N"),
        ("tpu", "unknown device 'tpu'"),
    ],
)
def test_a_wrong_torch_device_is_refused(device: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        detect(backend="torch", device=device)


@pytest.mark.skipif("mlx" not in available_backends(), reason="MLX is not installed here")
def test_a_wrong_mlx_device_is_refused() -> None:
    own = "gpu" if sys.platform == "darwin" else "cpu"
    with pytest.raises(ConfigError, match=f"mlx has device '{own}' here, not 'cuda:0'"):
        detect(backend="mlx", device="cuda:0")
