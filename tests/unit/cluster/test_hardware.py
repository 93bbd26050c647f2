"""What a device says of itself, and how wrong wishes are refused."""

from __future__ import annotations

import sys

import psutil
import pytest

from exo_train.backends.registry import available_backends
from exo_train.cluster.hardware import (
    MAX_OVERRIDE_FACTOR,
    Processor,
    detect,
    offer,
    parse_size,
)
from exo_train.cluster.system_memory import Memory
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
        ("cuda:99", r"'cuda:99' is not here \(CUDA devices seen through NVML: .*needs the driver"),
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


def gpu(number: int, total_gb: int, free_gb: int) -> Processor:
    memory = Memory(total_bytes=total_gb * 10**9, free_bytes=free_gb * 10**9)
    return Processor(
        device=f"cuda:{number}", chip=f"card {number}", memory=memory, dtypes=("bf16", "fp32")
    )


def test_several_gpus_are_several_devices_with_memory_of_their_own() -> None:
    hardware = offer("torch", [gpu(0, 24, 20), gpu(1, 8, 5), gpu(2, 8, 8)], memory_bytes=None)
    assert (hardware.backend, hardware.device, hardware.chip) == ("torch", "cuda:0", "card 0")
    assert hardware.memory_bytes == 24 * 10**9
    assert hardware.usable_memory_bytes == int(20e9 * 0.88)
    more = [(d.device, d.memory_bytes, d.usable_memory_bytes) for d in hardware.more_devices]
    assert more == [("cuda:1", 8 * 10**9, int(5e9 * 0.88)), ("cuda:2", 8 * 10**9, int(8e9 * 0.88))]
    assert hardware.more_devices[0].free_memory_bytes == 5 * 10**9
    assert hardware.more_devices[0].dtypes == ("bf16", "fp32")


@pytest.mark.parametrize(
    ("offered_gb", "usable_gb"),
    [(22, [22, 4.4, 7.04]), (6, [6, 4.4, 6]), (2, [2, 2, 2])],
    ids=["more than others have", "between", "less than all have"],
)
def test_the_users_number_is_the_first_ones_word_and_the_others_bound(
    offered_gb: int, usable_gb: list[float]
) -> None:
    found = [gpu(0, 24, 20), gpu(1, 8, 5), gpu(2, 8, 8)]
    hardware = offer("torch", found, memory_bytes=offered_gb * 10**9)
    usable = [hardware.usable_memory_bytes, *(d.usable_memory_bytes for d in hardware.more_devices)]
    assert [u / 1e9 for u in usable] == pytest.approx(usable_gb)


def test_a_number_for_the_small_card_alone_is_believed() -> None:
    """`--device cuda:1` leaves one processor: the word counts for it, whatever is free."""
    assert offer("torch", [gpu(1, 8, 1)], memory_bytes=7 * 10**9).usable_memory_bytes == 7 * 10**9
