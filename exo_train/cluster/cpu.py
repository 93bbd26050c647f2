"""The CPU: its name, and the dtypes it computes.

Owns the reading of /proc/cpuinfo and macOS' feature flags.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
from collections.abc import Collection
from pathlib import Path

from exo_train.cluster import apple

# As Linux names them: x86 `flags` and Arm `Features` (the kernel's cpufeatures.h and hwcap.c);
# macOS: developer.apple.com, "Determining Instruction Set Characteristics".
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16", "hw.optional.arm.FEAT_BF16"})
FP16_FLAGS = frozenset({"avx512_fp16", "amx_fp16", "asimdhp", "hw.optional.arm.FEAT_FP16"})
MAX_NAME_CHARS = 100


def cpu_dtypes(flags: Collection[str]) -> tuple[str, ...]:
    """Give fp32, then the 16-bit dtypes, those first that the CPU has instructions for.

    All are there, since PyTorch and MLX compute all: who needs the memory may ask by name. fp32
    is always first, also where bf16 is native: it is what makes a ring comparable to the last
    digits, and MLX's Linux build is far slower in 16 bits whatever the CPU has.
    """
    has_only_fp16 = FP16_FLAGS.intersection(flags) and not BF16_FLAGS.intersection(flags)
    return ("fp32", "fp16", "bf16") if has_only_fp16 else ("fp32", "bf16", "fp16")


def read_cpuinfo(text: str) -> tuple[str, frozenset[str]]:
    """Give the name and the flags that Linux tells; Arm boards often tell no name but their own."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        values.setdefault(key.strip(), value.strip())
    name = values.get("model name") or values.get("Model") or ""
    return name, frozenset((values.get("flags") or values.get("Features") or "").split())


@functools.cache  # asked with every heartbeat, and never changes
def this_cpu() -> tuple[str, tuple[str, ...]]:
    """Give this CPU's name for people, and its dtypes."""
    name, flags = "", frozenset[str]()
    if sys.platform == "linux":
        try:
            text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
        except OSError:
            text = ""
        name, flags = read_cpuinfo(text)
    elif sys.platform == "darwin":
        values = apple.sysctl()
        name = values.get(apple.CHIP, "")
        flags = frozenset(f for f in apple.CPU_FEATURES if values.get(f) == "1")
    name = name or platform.processor() or platform.machine()
    return f"{name[:MAX_NAME_CHARS]} ({os.cpu_count()} cores)", cpu_dtypes(flags)
