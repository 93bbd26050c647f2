"""A stand-in for the module pynvml, as far as `cluster/nvidia.py` asks it. For tests only."""

# ruff: noqa: N802 - the names are NVML's

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

GIB = 1 << 30
# nvmlReturn_t in nvml.h.
NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, DRIVER_NOT_LOADED = 3, 4, 6, 9
LIBRARY_NOT_FOUND, GPU_IS_LOST, VERSION_MISMATCH = 12, 15, 18
TEXTS = {
    NOT_SUPPORTED: "Not Supported",
    NO_PERMISSION: "Insufficient Permissions",
    NOT_FOUND: "Not Found",
    DRIVER_NOT_LOADED: "Driver Not Loaded",
    LIBRARY_NOT_FOUND: "NVML Shared Library Not Found",
    GPU_IS_LOST: "GPU is lost",
    VERSION_MISMATCH: "RM has detected an NVML/RM version mismatch.",
}


class NVMLError(Exception):
    """Raised for a GPU's field whose value is one of these."""

    def __init__(self, value: int) -> None:
        super().__init__(TEXTS[value])
        self.value = value


@dataclass(frozen=True)
class FakeGpu:
    """A value that is an NVMLError is raised when it is asked for. `parts`: MIG instances."""

    name: Any
    total_bytes: Any
    free_bytes: int = 0
    capability: Any = (8, 9)
    uuid: Any = ""
    mig: Any = field(default_factory=lambda: NVMLError(NOT_SUPPORTED))  # GeForce has no MIG
    parts: tuple[FakeGpu, ...] = ()


def value(field_value: Any) -> Any:
    if isinstance(field_value, NVMLError):
        raise field_value
    return field_value


class FakeNvml:
    NVMLError = NVMLError

    def __init__(self, gpus: Sequence[FakeGpu | NVMLError] = (), *, init: int = 0) -> None:
        self._gpus = gpus
        self._init = init
        self.opened = 0

    def nvmlInit(self) -> None:
        if self._init:
            raise NVMLError(self._init)
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return value(self._gpus[index])

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        for gpu in self._gpus:
            for part in gpu.parts if isinstance(gpu, FakeGpu) else ():
                if part.uuid == uuid:
                    return part
        raise NVMLError(NOT_FOUND)

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return value(gpu.uuid)

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        return value(gpu.name)

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:
        return value(gpu.mig)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, index: int) -> FakeGpu:
        if index >= len(gpu.parts):
            raise NVMLError(NOT_FOUND)
        return gpu.parts[index]

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> SimpleNamespace:
        total = value(gpu.total_bytes)
        return SimpleNamespace(total=total, free=gpu.free_bytes, used=total - gpu.free_bytes)

    def nvmlDeviceGetCudaComputeCapability(self, gpu: FakeGpu) -> tuple[int, int]:
        return value(gpu.capability)
