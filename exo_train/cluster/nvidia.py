"""NVIDIA's GPUs of this computer, as PyTorch will number them.

Owns the questions to NVML. Must not initialise CUDA: that takes memory and a context per process.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from exo_train.cluster.system_memory import Memory

MAX_GPUS = 16
# NVML's error codes: nvml.h, nvmlReturn_t.
NOT_SUPPORTED = 3
DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12
VERSION_MISMATCH = 18
# bf16 since 8.0; older ones emulate it, and their matrix products partly refuse it. fp16
# arithmetic since 5.3 (CUDA programming guide, "Arithmetic Instructions").
BF16_CAPABILITY = (8, 0)
FP16_CAPABILITY = (5, 3)

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """`memory` is None when it has none of its own: it takes the system's (GB10, Jetson)."""

    device: str  # "cuda:1", PyTorch's number
    name: str
    memory: Memory | None
    capability: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Gpus:
    """What was found; `trouble` is a sentence when there is a driver that cannot be asked."""

    found: tuple[Gpu, ...] = ()
    trouble: str = ""


def this_computers_gpus() -> Gpus:
    """Ask NVML; none without its Python package or a driver."""
    try:
        import pynvml
    except ImportError:
        return Gpus()
    gpus = read_gpus(pynvml, visible=os.environ.get("CUDA_VISIBLE_DEVICES"))
    if gpus.trouble:
        _warn_once(gpus.trouble)
    return gpus


def read_gpus(nvml: Any, *, visible: str | None) -> Gpus:
    """List the GPUs that a CUDA process sees; `nvml` is the module pynvml, or its like.

    A GPU that is lost or may not be used is left out; the others keep their numbers.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Gpus(trouble=_init_trouble(error))
    try:
        count = nvml.nvmlDeviceGetCount()
        handles = [_or_none(nvml, nvml.nvmlDeviceGetHandleByIndex, i) for i in range(count)]
        uuids = [_or_none(nvml, nvml.nvmlDeviceGetUUID, h) if h else None for h in handles]
        chosen = visible_gpus(visible, [uuid or "" for uuid in uuids])
        found = []
        for number, place in enumerate(chosen[:MAX_GPUS]):
            is_part = isinstance(place, str)
            handle = (
                _or_none(nvml, nvml.nvmlDeviceGetHandleByUUID, place)
                if isinstance(place, str)
                else handles[place]
            )
            gpu = _read(nvml, handle, f"cuda:{number}", is_part=is_part) if handle else None
            found += [gpu] if gpu else []
        return Gpus(tuple(found))
    except nvml.NVMLError as error:
        return Gpus(trouble=f"the NVIDIA driver does not list its GPUs ({error})")
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def visible_gpus(visible: str | None, uuids: Sequence[str]) -> list[int | str]:
    """Give NVML's indices in the order in which PyTorch numbers the GPUs; "MIG-…" stays text.

    As the CUDA programming guide has it ("CUDA Environment Variables"): indices, or UUIDs whose
    end may be left out; the first that names no GPU ends the list. A GPU named twice hides all.
    Workers set CUDA_DEVICE_ORDER=PCI_BUS_ID, NVML's order.
    """
    if visible is None:
        return list(range(len(uuids)))
    places: list[int | str] = []
    for entry in (part.strip() for part in visible.split(",")):
        place = _place(entry, uuids)
        if place is None:
            break
        places.append(place)
    return places if len(set(places)) == len(places) else []


def gpu_dtypes(capability: tuple[int, int] | None) -> tuple[str, ...]:
    """Give what a GPU computes without emulation, best first; fp32 alone when that is unknown."""
    if capability is None or capability < FP16_CAPABILITY:
        return ("fp32",)
    if capability < BF16_CAPABILITY:
        return ("fp32", "fp16")  # gradients are not scaled for fp16's small range: not the default
    return ("bf16", "fp16", "fp32")


def _place(entry: str, uuids: Sequence[str]) -> int | str | None:
    if entry.isdecimal():
        return int(entry) if int(entry) < len(uuids) else None
    if entry.startswith("MIG-"):
        return entry
    matching = [i for i, uuid in enumerate(uuids) if uuid.startswith(entry)]
    return matching[0] if entry.startswith("GPU-") and len(matching) == 1 else None


def _read(nvml: Any, handle: Any, device: str, *, is_part: bool) -> Gpu | None:
    name = _or_none(nvml, nvml.nvmlDeviceGetName, handle)
    capability = _or_none(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    if not is_part and (_or_none(nvml, nvml.nvmlDeviceGetMigMode, handle) or [0])[0]:
        # Divided: a CUDA process that names no part gets the first (NVIDIA's MIG user guide).
        ask = functools.partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle)
        handle, is_part = _or_none(nvml, ask, 0), True
        if not handle:
            return None
    if is_part:
        capability = capability or BF16_CAPABILITY  # older GPUs cannot be divided
    try:
        memory = _memory(nvml, handle)
    except nvml.NVMLError as error:
        log.debug("%s is left out: %s", device, error)
        return None
    return Gpu(
        device=device,
        name=str(name or "NVIDIA GPU"),
        memory=memory,
        capability=(int(capability[0]), int(capability[1])) if capability else None,
    )


def _memory(nvml: Any, handle: Any) -> Memory | None:
    """Give a GPU's own memory; None on boards that share the system's.

    Those answer "Not Supported" (GB10: github.com/ollama/ollama, pull request 12619), or with
    zeros (github.com/Syllo/nvtop, pull request 411).
    """
    try:
        info = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:
        if getattr(error, "value", None) == NOT_SUPPORTED:
            return None
        raise
    if not info.total:
        return None
    return Memory(total_bytes=int(info.total), free_bytes=int(info.free))


def _or_none(nvml: Any, ask: Callable[[Any], T], about: Any) -> T | None:
    """Ask what a GPU may not be able to answer."""
    try:
        return ask(about)
    except nvml.NVMLError:
        return None


def _init_trouble(error: Exception) -> str:
    code = getattr(error, "value", None)
    if code in (LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED):
        return ""  # no NVIDIA driver here
    if code == VERSION_MISMATCH:
        return (
            "the NVIDIA driver was updated and its old version still runs: restart this computer, "
            "or no GPU can be used"
        )
    return f"the NVIDIA driver does not answer ({error})"


@functools.cache  # asked with every heartbeat
def _warn_once(trouble: str) -> None:
    log.warning("%s", trouble)
