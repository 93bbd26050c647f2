"""What this device has: memory, chip, backend.

Owns the questions to the operating system. Must not import a tensor framework: the agent asks,
and a framework's abort must not take the agent down.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from exo_train.cluster.cgroup import read_memory_limit
from exo_train.errors import ConfigError

MAX_OVERRIDE_FACTOR = 4  # others take a device that claims more for a broken one
RESERVE_FRACTION = 0.12  # of what is free: for the system and the frameworks' own needs
# Metal's recommended working set is about this share of unified memory (measured by others on
# 16 to 192 GB Macs; the exact number needs Metal, which only the worker may load).
METAL_WORKING_SET_FRACTION = 0.70

_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?)B?\s*$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Hardware:
    backend: str
    device: str
    chip: str
    memory_bytes: int
    free_memory_bytes: int
    usable_memory_bytes: int
    dtypes: tuple[str, ...]


def parse_size(text: str) -> int:
    """Read '8GB', '512M', '1.5GiB' as bytes (1 GB = 10^9, 1 GiB = 2^30)."""
    match = _SIZE.match(text)
    if not match:
        raise ConfigError(f"'{text}' is not a size; write it like 8GB or 512MB")
    base = 1024 if match[3] else 1000
    power = " KMGT".index(match[2].upper() or " ")
    size_bytes = int(float(match[1]) * base**power)
    if size_bytes == 0:
        raise ConfigError(f"'{text}' is no memory at all; write a size like 8GB or 512MB")
    return size_bytes


def detect(
    *, backend: str = "auto", device: str = "auto", memory_bytes: int | None = None
) -> Hardware:
    """Find out what this device offers; `memory_bytes` overrides the usable memory.

    Raises ConfigError when the wanted backend or device is not there.
    """
    backend = _choose_backend(backend)
    cuda = _cuda_devices() if backend == "torch" else []
    device = _choose_device(backend, device, num_cuda=len(cuda))
    if device.startswith("cuda"):
        chip, total, free, capability = cuda[int(device.partition(":")[2] or 0)]
        dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32")
        if capability < (8, 0):  # bf16 is emulated there: slower than fp32
            dtypes = ("fp32", "fp16")
    else:
        chip = _cpu_name()
        total, free = _process_memory_bytes()
        # 16 bits work on CPUs, where asked for; few are faster with them.
        dtypes = ("fp32", "bf16", "fp16")
        if device == "gpu":
            free = min(free, int(total * METAL_WORKING_SET_FRACTION))
            dtypes = ("bf16", "fp16", "fp32")
    if memory_bytes is not None and memory_bytes > MAX_OVERRIDE_FACTOR * total:
        raise ConfigError(
            f"{memory_bytes / 1e9:.1f} GB to offer is more than {MAX_OVERRIDE_FACTOR} times what "
            f"{device} has ({total / 1e9:.1f} GB); give a smaller --memory"
        )
    usable = memory_bytes if memory_bytes is not None else int(free * (1 - RESERVE_FRACTION))
    return Hardware(backend, device, chip, total, free, usable, dtypes)


def _process_memory_bytes() -> tuple[int, int]:
    """Give all memory, and what can be taken now without swapping; container limits included."""
    memory = psutil.virtual_memory()
    limit = read_memory_limit() if sys.platform == "linux" else None
    if limit is None:
        return memory.total, memory.available
    return min(memory.total, limit.limit_bytes), min(memory.available, limit.free_bytes)


def _choose_backend(wanted: str) -> str:
    has = {
        "mlx": importlib.util.find_spec("mlx_lm") is not None,
        "torch": importlib.util.find_spec("torch") is not None,
    }
    if wanted == "auto":
        is_apple = sys.platform == "darwin" and platform.machine() == "arm64"
        for name in ("mlx", "torch") if is_apple else ("torch", "mlx"):
            if has[name]:
                return name
        raise ConfigError("no backend is installed; run: pip install 'exo-train[torch]'")
    if wanted not in has:
        raise ConfigError(f"unknown backend '{wanted}'; there are auto, mlx and torch")
    if not has[wanted]:
        extra = "exo-train[torch]" if wanted == "torch" else "mlx-lm"
        raise ConfigError(f"backend '{wanted}' is not installed; run: pip install '{extra}'")
    return wanted


def _choose_device(backend: str, wanted: str, *, num_cuda: int) -> str:
    if backend == "mlx":
        own = "gpu" if sys.platform == "darwin" else "cpu"
        if wanted not in ("auto", own):
            raise ConfigError(f"backend mlx has device '{own}' here, not '{wanted}'")
        return own
    if wanted == "auto":
        return "cuda:0" if num_cuda else "cpu"
    if wanted == "cpu":
        return wanted
    name, _, index = wanted.partition(":")
    if name != "cuda" or not (index or "0").isdecimal():
        raise ConfigError(f"unknown device '{wanted}'; there are auto, cpu and cuda:N")
    if int(index or 0) >= num_cuda:
        raise ConfigError(
            f"device '{wanted}' is not here ({num_cuda} CUDA devices seen through NVML; "
            f"it needs the driver and: pip install 'exo-train[cuda]')"
        )
    return f"cuda:{int(index or 0)}"


def _visible_cuda(count: int) -> list[int]:
    """Give the NVML indices in the order in which PyTorch numbers them.

    Workers set CUDA_DEVICE_ORDER=PCI_BUS_ID, NVML's order; UUIDs are not looked up.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(range(count))
    parts = [part.strip() for part in visible.split(",")]
    return [int(part) for part in parts if part.isdecimal() and int(part) < count]


def _cuda_devices() -> list[tuple[str, int, int, tuple[int, int]]]:
    """List (name, total bytes, free bytes, compute capability) through NVML; [] without it."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []  # no NVIDIA driver
    try:
        found = []
        for index in _visible_cuda(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            name = str(pynvml.nvmlDeviceGetName(handle))
            found.append((name, int(memory.total), int(memory.free), (major, minor)))
        return found
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


@functools.cache  # asked with every heartbeat, and never changes
def _cpu_name() -> str:
    if sys.platform == "linux":
        try:
            for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
                if line.startswith("model name"):
                    return f"{line.partition(':')[2].strip()} ({os.cpu_count()} cores)"
        except OSError:
            pass
    return f"{platform.processor() or platform.machine()} ({os.cpu_count()} cores)"
