"""What macOS says of its chip: name, what its GPU may hold, which dtypes it computes.

Owns the questions to `sysctl` and to Metal. Must not load Metal or MLX into this process: a
framework's abort must not take the agent down.
"""

from __future__ import annotations

import functools
import re
import sys
import time
from collections.abc import Mapping

from exo_train.cluster.checks.tools import ask_tool

WIRED_LIMIT = "iogpu.wired_limit_mb"  # MiB that the GPU may hold; 0: macOS decides
CHIP = "machdep.cpu.brand_string"
CPU_FEATURES = ("hw.optional.arm.FEAT_BF16", "hw.optional.arm.FEAT_FP16")
SYSCTL_AGE_S = 30.0  # asked with every heartbeat; the limit changes when a user types it
METAL_TIMEOUT_S = 30.0  # importing MLX from a cold disk
GIB = 1 << 30
# Where Metal cannot be asked: reports give 10.7 of 16 and 21.3 of 32 GiB, but 48 of 64, 72 of 96
# (github.com/ggml-org/llama.cpp, issues 1870, 2048, 3213 and pull request 2011).
SMALL_MAC_BYTES, SMALL_MAC_FRACTION, LARGE_MAC_FRACTION = 36 * GIB, 2 / 3, 3 / 4
# GPUs compute bf16 from M3 and A17 on. M1 and M2 convert each value to fp32 and back
# (github.com/huggingface/transformers, pull request 40458). MLX's author measured bf16 at 58 to
# 64 % of fp16's speed on an M2 Ultra (github.com/ml-explore/mlx-examples, pull request 186),
# others on later versions at 75 to 80 % (github.com/jundot/omlx, issue 604).
BF16_FROM = {"M": 3, "A": 17}

# Newer macOS gives more than the fractions above (107.5 of 128 GiB on macOS 26: github.com/
# antirez/ds4, issue 890), so Metal is asked, in a process of its own.
_ASK_METAL = (
    "import mlx.core as mx\n"
    "info = getattr(mx, 'device_info', None) or mx.metal.device_info\n"
    "print('working set', info()['max_recommended_working_set_size'])\n"
)
_WORKING_SET = re.compile(r"^working set (\d+)$", re.MULTILINE)
_CHIP_NAME = re.compile(r"\bApple ([MA])(\d+)\b")


def read_sysctl(text: str) -> dict[str, str]:
    """Read the lines `name: value` of `sysctl NAME…`; names that it does not know are missing."""
    lines = (line.partition(": ") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in lines if colon}


def wired_limit_bytes(values: Mapping[str, str]) -> int | None:
    """Give the limit that the user has set for the GPU; None while macOS decides."""
    text = values.get(WIRED_LIMIT, "")
    return (int(text) << 20 or None) if text.isdecimal() else None


def working_set_bytes(total_bytes: int, *, wired_limit_bytes: int | None, metal_answer: str) -> int:
    """Give what the GPU may hold: the user's limit, else Metal's word, else what is usual."""
    if wired_limit_bytes is not None:
        return min(wired_limit_bytes, total_bytes)
    answer = _WORKING_SET.search(metal_answer)
    if answer and 0 < int(answer[1]) <= total_bytes:
        return int(answer[1])
    is_small = total_bytes <= SMALL_MAC_BYTES
    return int(total_bytes * (SMALL_MAC_FRACTION if is_small else LARGE_MAC_FRACTION))


def gpu_dtypes(chip: str) -> tuple[str, ...]:
    """Give the GPU's dtypes, best first; fp32 where bf16 is emulated, and where nobody knows.

    bf16 stays among them there, unlike on an old NVIDIA GPU: MLX computes it everywhere, and who
    asks for it by name gets twice the layers into the same memory. fp16 would be native, but
    gradients are not scaled for its small range.
    """
    named = _CHIP_NAME.search(chip)
    if named and int(named[2]) >= BF16_FROM[named[1]]:
        return ("bf16", "fp16", "fp32")
    return ("fp32", "bf16", "fp16")


def gpu_limit_bytes(total_bytes: int) -> int:
    """Ask this Mac what its GPU may hold now."""
    limit_bytes = wired_limit_bytes(sysctl())
    answer = _ask_metal() if limit_bytes is None else ""
    return working_set_bytes(total_bytes, wired_limit_bytes=limit_bytes, metal_answer=answer)


def sysctl() -> Mapping[str, str]:
    """Give what this Mac answers, at most SYSCTL_AGE_S old; empty when it does not."""
    return _sysctl(int(time.monotonic() / SYSCTL_AGE_S))


@functools.lru_cache(maxsize=1)
def _sysctl(age: int) -> Mapping[str, str]:
    # It answers for the names that it knows, also when it fails for others.
    return read_sysctl(ask_tool(("sysctl", WIRED_LIMIT, CHIP, *CPU_FEATURES)).text)


@functools.cache  # Metal's own choice does not change; a limit that is set is asked for anew
def _ask_metal() -> str:
    return ask_tool((sys.executable, "-c", _ASK_METAL), timeout_s=METAL_TIMEOUT_S).text
