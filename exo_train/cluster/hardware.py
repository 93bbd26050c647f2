"""What this computer offers: backend, processors, their memory and dtypes.

Owns the choice of backend and devices, and what `--memory` means. Must not import a tensor
framework: the agent asks, and a framework's abort must not take the agent down.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil

from exo_train.cluster import apple, nvidia
from exo_train.cluster.cpu import this_cpu
from exo_train.cluster.nvidia import Gpus, this_computers_gpus
from exo_train.cluster.system_memory import Memory, less_reserve, system_memory
from exo_train.errors import ConfigError
from exo_train.peer import ComputeDevice

MAX_OVERRIDE_FACTOR = 4  # others take a device that claims more for a broken one

_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?)B?\s*$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Hardware:
    """The first device, and further ones that each may take a rank of their own."""

    backend: str
    device: str
    chip: str
    memory_bytes: int
    free_memory_bytes: int
    usable_memory_bytes: int
    dtypes: tuple[str, ...]
    more_devices: tuple[ComputeDevice, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """One that computes, as it was found."""

    device: str
    chip: str
    memory: Memory
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
    """Find out what this computer offers; `memory_bytes` is what the user would give.

    Without a named device that is all GPUs. Raises ConfigError when the wanted backend or device
    is not there.
    """
    backend = _choose_backend(backend)
    gpus = this_computers_gpus() if backend == "torch" else Gpus()
    name = _choose_device(backend, device, gpus)
    if name.startswith("cuda"):
        found = cuda_processors(gpus, system_memory())
        if device != "auto":
            found = [processor for processor in found if processor.device == name]
    elif name == "gpu":
        found = [_this_macs_gpu(system_memory())]
    else:
        chip, dtypes = this_cpu()
        found = [Processor(device=name, chip=chip, memory=system_memory(), dtypes=dtypes)]
    return offer(backend, found, memory_bytes=memory_bytes)


def offer(backend: str, found: Sequence[Processor], *, memory_bytes: int | None) -> Hardware:
    """Say what is offered of each processor: what is free less the reserve, or what the user said.

    Of several, the user's number is the word for the first, as it is without the others. For
    those it is a bound: one number is rarely right for cards of different sizes, but who holds
    memory back does not mean the first card alone. `--device` names one to give it a number.
    """
    first = _offered(found[0], memory_bytes)
    rest = [_offered(processor, None) for processor in found[1:]]
    return Hardware(
        backend=backend,
        device=first.device,
        chip=first.chip,
        memory_bytes=first.memory_bytes,
        free_memory_bytes=first.free_memory_bytes,
        usable_memory_bytes=first.usable_memory_bytes,
        dtypes=first.dtypes,
        more_devices=tuple(_at_most(device, memory_bytes) for device in rest),
    )


def free_now_bytes(device: str) -> int | None:
    """Read anew what a stage of this process on `device` may take; None when nobody knows.

    Without a reserve. What this process holds already counts as free: stages' needs include it.
    """
    if device.startswith("cuda"):
        gpu = next((g for g in this_computers_gpus().found if g.device == device), None)
        if gpu is None or gpu.memory is not None:
            return gpu.memory.free_bytes if gpu and gpu.memory else None
    system = system_memory()
    held_bytes = int(psutil.Process().memory_info().rss)
    system = replace(system, free_bytes=system.free_bytes + held_bytes)
    return (_this_macs_gpu(system).memory if device == "gpu" else system).free_bytes


def cuda_processors(gpus: Gpus, system: Memory) -> list[Processor]:
    """Give the GPUs; one without memory of its own takes the system's."""
    return [
        Processor(
            device=gpu.device,
            chip=gpu.name,
            memory=gpu.memory or system,
            dtypes=nvidia.gpu_dtypes(gpu.capability),
        )
        for gpu in gpus.found
    ]


def metal_processor(system: Memory, *, chip: str, limit_bytes: int) -> Processor:
    """Give a Mac's GPU: it shares all memory, but may hold only so much."""
    free_bytes = min(system.free_bytes, limit_bytes)
    memory = Memory(total_bytes=system.total_bytes, free_bytes=free_bytes)
    return Processor(device="gpu", chip=chip, memory=memory, dtypes=apple.gpu_dtypes(chip))


def _this_macs_gpu(system: Memory) -> Processor:
    chip, _ = this_cpu()
    limit_bytes = apple.gpu_limit_bytes(system.total_bytes)
    return metal_processor(system, chip=chip, limit_bytes=limit_bytes)


def _offered(processor: Processor, memory_bytes: int | None) -> ComputeDevice:
    total_bytes, free_bytes = processor.memory.total_bytes, processor.memory.free_bytes
    if memory_bytes is not None and memory_bytes > MAX_OVERRIDE_FACTOR * total_bytes:
        raise ConfigError(
            f"{memory_bytes / 1e9:.1f} GB to offer is more than {MAX_OVERRIDE_FACTOR} times what "
            f"{processor.device} has ({total_bytes / 1e9:.1f} GB); give a smaller --memory"
        )
    return ComputeDevice(
        device=processor.device,
        chip=processor.chip,
        memory_bytes=total_bytes,
        free_memory_bytes=free_bytes,
        usable_memory_bytes=less_reserve(free_bytes) if memory_bytes is None else memory_bytes,
        dtypes=processor.dtypes,
    )


def _at_most(device: ComputeDevice, memory_bytes: int | None) -> ComputeDevice:
    if memory_bytes is None:
        return device
    return replace(device, usable_memory_bytes=min(device.usable_memory_bytes, memory_bytes))


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


def _choose_device(backend: str, wanted: str, gpus: Gpus) -> str:
    if backend == "mlx":
        own = "gpu" if sys.platform == "darwin" else "cpu"
        if wanted not in ("auto", own):
            raise ConfigError(f"backend mlx has device '{own}' here, not '{wanted}'")
        return own
    here = [gpu.device for gpu in gpus.found]
    if wanted == "auto":
        return here[0] if here else "cpu"
    if wanted == "cpu":
        return wanted
    name, _, index = wanted.partition(":")
    if name != "cuda" or not (index or "0").isdecimal():
        raise ConfigError(f"unknown device '{wanted}'; there are auto, cpu and cuda:N")
    device = f"cuda:{int(index or 0)}"
    if device not in here:
        why = gpus.trouble or (
            f"CUDA devices seen through NVML: {', '.join(here) or 'none'}; it needs the driver "
            f"and: pip install 'exo-train[cuda]'"
        )
        raise ConfigError(f"device '{wanted}' is not here ({why})")
    return device
