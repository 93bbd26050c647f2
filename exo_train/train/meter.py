"""Clock and memory of a backend's device, for measurements.

Owns waiting for a device to finish, and its live and peak bytes: the framework's own count where
it keeps one, else the process' resident size. Imports a framework only when asked for its meter.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import psutil

from exo_train.backends.fast_blas import import_mlx_core

SAMPLE_S = 0.001


@dataclass(slots=True)
class Peak:
    num_bytes: int = 0


class Meter(Protocol):
    def synchronise(self) -> None:
        """Wait until everything that was asked of the device is done."""
        ...

    def live_bytes(self) -> int: ...

    @contextmanager
    def peak(self) -> Iterator[Peak]:
        """Find the most bytes that are live inside; told at the end."""
        ...

    def release(self) -> None:
        """Give back what the framework keeps for later."""
        ...

    def process_bytes(self) -> int:
        """Give what this process takes of the device's memory beside tensors; 0: cannot tell."""
        ...


def open_meter(backend: str, device: str) -> Meter:
    if backend == "mlx":
        return _MlxMeter()
    return _CudaMeter(device) if device.startswith("cuda") else _ProcessMeter()


class _ProcessMeter:
    """A CPU computes before the call returns; its memory is this process'.

    Freed memory that the C library keeps would hide what is taken next, so it is given back
    before a look. Where the library has no such call (it is glibc's) counts may come out low.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._trim = _heap_trim()

    def synchronise(self) -> None:
        pass

    def live_bytes(self) -> int:
        self._trim(0)
        return self._resident_bytes()

    @contextmanager
    def peak(self) -> Iterator[Peak]:
        peak, ended = Peak(self.live_bytes()), threading.Event()

        def sample() -> None:
            while not ended.wait(SAMPLE_S):
                peak.num_bytes = max(peak.num_bytes, self._resident_bytes())

        sampler = threading.Thread(target=sample, name="memory-sampler", daemon=True)
        sampler.start()
        try:
            yield peak
        finally:
            ended.set()
            sampler.join()

    def release(self) -> None:
        gc.collect()
        self._trim(0)

    def process_bytes(self) -> int:
        return self.live_bytes()

    def _resident_bytes(self) -> int:
        return int(self._process.memory_info().rss)


def _heap_trim() -> Callable[[int], object]:
    """Give the C library's function that returns free heap to the system, else one that rests."""
    if sys.platform == "linux":
        try:
            return ctypes.CDLL(None).malloc_trim
        except AttributeError:
            pass  # musl
    return lambda keep_bytes: None


class _CudaMeter:
    def __init__(self, device: str) -> None:
        import torch

        self._cuda = torch.cuda
        self._device = torch.device(device)

    def synchronise(self) -> None:
        self._cuda.synchronize(self._device)

    def live_bytes(self) -> int:
        return int(self._cuda.memory_allocated(self._device))

    @contextmanager
    def peak(self) -> Iterator[Peak]:
        self._cuda.reset_peak_memory_stats(self._device)
        peak = Peak()
        try:
            yield peak
        finally:
            peak.num_bytes = int(self._cuda.max_memory_allocated(self._device))

    def release(self) -> None:
        gc.collect()
        self._cuda.empty_cache()

    def process_bytes(self) -> int:
        return 0  # the context is the driver's, which counts it for no process inside a container


class _MlxMeter:
    """MLX counts its own allocations, on the CPU too."""

    def __init__(self) -> None:
        self._mx = import_mlx_core()

    def synchronise(self) -> None:
        self._mx.synchronize()

    def live_bytes(self) -> int:
        return int(self._mx.get_active_memory())

    @contextmanager
    def peak(self) -> Iterator[Peak]:
        self._mx.reset_peak_memory()
        peak = Peak()
        try:
            yield peak
        finally:
            peak.num_bytes = max(int(self._mx.get_peak_memory()), self.live_bytes())

    def release(self) -> None:
        gc.collect()
        self._mx.clear_cache()

    def process_bytes(self) -> int:
        return _ProcessMeter().live_bytes() - self.live_bytes()
