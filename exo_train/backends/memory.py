"""Memory of this process: its peak, and running out of it. Must not import a framework."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from exo_train.errors import DoesNotFitError
from exo_train.plan.stages import StageSpec

# How CUDA and its libraries, PyTorch's CPU allocator, MLX and Metal say it; none has an error type
# of its own.
_OUT_OF_MEMORY = (
    "out of memory", "allocate memory", "not enough memory", "unable to allocate",
    "insufficient memory", "alloc_failed", "maximum allowed buffer size", "bad_alloc",
)  # fmt: skip


def peak_process_bytes() -> int:
    """Give the largest resident size so far."""
    if sys.platform == "linux":
        # Not ru_maxrss: that of a started program begins with the size of the one that started it.
        try:
            for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        except (OSError, UnicodeDecodeError):
            pass  # no /proc in this container
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024  # Linux counts KiB


@contextmanager
def memory_errors_named(
    stage: StageSpec, device: str, *, doing: str = "computing", checkpointed: bool = False
) -> Iterator[None]:
    """Turn a framework's out-of-memory error into DoesNotFitError: which layers, `doing` what.

    `checkpointed` leaves out the advice to checkpoint activations.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error)
        told = any(phrase in text.lower() for phrase in _OUT_OF_MEMORY)
        if not told and not isinstance(error, MemoryError):
            raise
        # The frames below hold the tensors of what failed: let them go now, not with the error.
        traceback.clear_frames(error.__traceback__)
        advice = "" if checkpointed else "--checkpoint-activations, "
        raise DoesNotFitError(
            f"layers {stage.start}..{stage.end - 1} ran out of memory on {device} while {doing} "
            f"({text.splitlines()[0] if text else 'no detail'}); use a smaller --microbatch-size "
            f"or --max-seq-length, {advice}or one more device"
        ) from error
